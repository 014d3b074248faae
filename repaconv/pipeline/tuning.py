"""tune: the fastest way to run a network on a target, searched on the target itself."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv import registry, runs
from repaconv.artefacts import Candidate, FoldArtefact, TuneArtefact
from repaconv.errors import EnvironmentProblem, Refused, UsageProblem
from repaconv.files import alone_in, sha256_of, write_artefact
from repaconv.orders.knobs import by_name
from repaconv.orders.stages import OBJECTIVES, THROUGHPUT, TuneOrder
from repaconv.pipeline.folding import fold
from repaconv.progress import Progress, silent
from repaconv.proof.budget import Budget
from repaconv.replacing import put, require_ours
from repaconv.scratch import scratch_folder
from repaconv.steps.answers import brought_by, judged_by, place_of
from repaconv.steps.arms import Called, Machine, machine_of, starts, threads_of
from repaconv.steps.candidates import Candidates
from repaconv.steps.common import at_least_one, load_target, made_by, with_files
from repaconv.steps.forms import TUNED, remembered, shapes_sha256
from repaconv.steps.inputs import Split
from repaconv.steps.journal import Journal
from repaconv.steps.judging import Judge, Loss, reported, require_judges
from repaconv.steps.rounds import Elsewhere, Here, Measurer, Sound
from repaconv.subjects.of_run import subject_of
from repaconv.subjects.subject import Subject

if TYPE_CHECKING:
    from repaconv.artefacts import Deployment
    from repaconv.forms.search import Arm
    from repaconv.targets import Target


def tune_by(
    order: TuneOrder,
    source: str | Path | None = None,
    *,
    measurer: Measurer | None = None,
    where: str = "",
    progress: Progress = silent,
) -> TuneArtefact:
    """Search for the fastest deployment: runtime, rewrites, precision and settings. The result lists what was measured.

    The search is exact unless a loss is allowed. Cached measurements of the same shapes on this machine are used if
    nothing changed on which they depend, which includes weights and images if a loss is allowed. The search resumes if
    it was interrupted or had less time than now.

    Args:
        source: A checkpoint or an ONNX file, which is folded first if necessary, or a run folder; the newest run when
            None.
        order: The options.
        measurer: Measures on other machines, as `repaconv.farm.tuning` does; this machine when None.
        where: Identifies these machines for the cache, e.g. by the cluster's address. If it is empty, the cache is not
            used with a measurer.
        progress: A function that is called with each step's name, the units done and their total.

    Raises:
        UsageProblem: If a loss is allowed without images, or with too few; if there is no such runtime.
        Refused: If the network is too large, its export is not sound, or the checkpoint's run has another fold.
        EnvironmentProblem: If the target's runtime is not installed.
    """
    plan = _plan(order, source, measurer, where, progress)
    answer = plan.answer()
    if answer is not None:
        return _put(plan, answer.model_copy(update={"note": "known from an earlier search"}), plan.known)
    with alone_in(plan.run.folder), scratch_folder(plan.run.folder) as scratch:
        found = _searched(plan, scratch, progress)
    write_artefact(plan.known, found)
    return _put(plan, found, plan.run.payload_of_fold(plan.folded))


tune = by_name(tune_by, TuneOrder)


class _Plan(NamedTuple):
    """What an order comes to for a network; ``known`` is where the answer is kept, ``measured`` what was measured."""

    order: TuneOrder
    run: runs.Run
    subject: Subject
    overridden: tuple[str, ...]
    device: Target
    machine: Machine
    called: Called
    rounds: int
    names: list[str]
    given: Split | None
    measurer: Measurer | None
    path: Path
    known: Path
    measured: Path
    again: bool

    @property
    def folded(self) -> FoldArtefact:
        """What `fold` wrote of it."""
        return self.subject.folded

    def answer(self) -> TuneArtefact | None:
        """What is known, unless it is of a search that was cut short and had less time than there is now."""
        found = None if self.again else remembered(self.known)
        slices = self.order.exhaustive  # each goes on for its time
        enough = found is not None and (found.complete or (not slices and self.order.budget_s <= found.budget_s))
        return found if enough else None


def _plan(
    order: TuneOrder, source: str | Path | None, measurer: Measurer | None, where: str, progress: Progress
) -> _Plan:
    """Everything that may be refused before the search; a checkpoint is folded on the way."""
    _require_known(order)
    run = _run_of(source, order.settings, progress)
    subject = subject_of(run)
    folded = subject.folded
    given = require_judges(order, subject)
    overridden = runs.require_sound(run, folded, unverified=order.allow_unverified)
    device = load_target(order.target)
    machine = machine_of(order, device, here=measurer is None)
    names = sorted(registry.registered(registry.REWRITES) if order.rewrites is None else order.rewrites)
    free = folded.batch == "dynamic"
    batch = at_least_one("batch", order.batch, device.bench.batch if free else int(folded.batch))
    called = Called(order.objective, threads_of(order, device), batch, free and order.batch is None)
    rounds = at_least_one("rounds", order.rounds, device.bench.rounds)
    asked: dict[str, Any] = {
        "method": folded.called,
        "called": called,
        "rounds": rounds,
        "seed": order.seed,
        "elsewhere": None if measurer is None else where,
        "rewrites": brought_by(names),
        "exhaustive": order.exhaustive,
    }
    path = Path(order.out) if order.out else run.folder / TUNED / f"{device.name}.json"
    require_ours(path, "tune")
    measured = place_of(folded, machine, asked)
    lossy = {**asked, **judged_by(order, subject), "loss": Budget.of(order)} if given else asked
    return _Plan(
        order=order,
        run=run,
        subject=subject,
        overridden=overridden,
        device=device,
        machine=machine,
        called=called,
        rounds=rounds,
        names=names,
        given=given,
        measurer=measurer,
        path=path,
        known=place_of(folded, machine, lossy),
        measured=measured.with_suffix(".journal"),
        again=order.rerun or (measurer is not None and not where),
    )


def _require_known(order: TuneOrder) -> None:
    """Refuse what there is not, and a loss that nothing judges."""
    if order.objective not in OBJECTIVES:
        raise UsageProblem(
            f"unknown objective {order.objective!r}.",
            hint=f"Known objectives: {', '.join(OBJECTIVES)}.",
            code="objective",
        )
    if Budget.of(order).asked and not (order.inputs or order.images):
        raise UsageProblem(
            "lower precision is evaluated on images that the network is meant for, and none were given.",
            hint="Give --inputs FILE.npz or --images DIR.",
            code="tune.images",
        )


def _run_of(source: str | Path | None, settings: Mapping[str, str] | None, progress: Progress) -> runs.Run:
    """The run of a checkpoint, folded now unless it was; or the run that was named.

    Raises:
        Refused: If there is one of another file or other settings: its exports are not this stage's to remove.
    """
    if source is not None and not Path(source).exists():
        raise Refused(
            f"there is no file or folder {source}.", hint="Give a checkpoint or a run folder.", code="tune.none"
        )
    if source is None or Path(source).is_dir():
        return runs.find_run(Path(source) if source else None)
    run = runs.Run(runs.usual_folder(Path(source)))
    if not run.fold_json.is_file():
        fold(source, settings=settings, progress=progress)
        return run
    known = runs.fold_of(run)
    asked = {"checkpoint": sha256_of(Path(source)), **(settings or {})}
    has = {"checkpoint": known.origin.sha256, **known.settings}
    if asked == has:
        return run
    other = ", ".join(sorted(key for key in {*asked, *has} if asked.get(key) != has.get(key)))
    raise Refused(
        f"{run.folder} contains another fold than requested: it differs in {other}.",
        hint=(
            f"To tune that fold: repaconv tune {run.folder}. Otherwise fold with the options you want and another -o, "
            "and tune that folder."
        ),
        code="tune.other-fold",
    )


def _searched(plan: _Plan, scratch: Path, progress: Progress) -> TuneArtefact:
    """The fastest that is allowed, and all that was considered."""
    from repaconv.forms.search import every, search

    graphs = Candidates(plan.subject, plan.names, plan.given, scratch, progress)
    here = plan.measurer is None
    left: list[str] = []
    arms = _arms(plan, graphs, left, here=here)
    baseline = arms[0].start
    measuring = _measuring(plan, graphs, baseline)
    now = time.monotonic()
    journal = Journal(plan.measured, now, now + plan.order.budget_s, baseline, plan.rounds, measuring, graphs, progress)
    journal = journal.remembered()
    if plan.again:
        journal.forget()

    def milder(arm: Arm) -> list[Arm]:
        return graphs.mixed(arm) if journal.time_left() else []

    def work(way: Deployment) -> int:
        """Of a large network counting alone takes a while: what will not be measured is not counted."""
        return graphs.macs(way) if journal.time_left() else 1

    judge = Judge(graphs, baseline, Budget.of(plan.order), here, progress)
    if plan.order.exhaustive:
        rows = every(arms, journal.measure, judge.allows, plan.rounds, milder)
    else:
        rows = search(arms, work, journal.measure, judge.allows, plan.rounds, milder)
    rows = [row.model_copy(update={"memory_bytes": journal.memory(row.deployment)}) for row in rows]
    told, loss = reported([judge.said(row, journal.left) for row in rows], judge, baseline)
    return _artefact(plan, told, loss, journal, left)


def _arms(plan: _Plan, graphs: Candidates, left: list[str], *, here: bool) -> list[Arm]:
    """Every runtime in every precision; those that do not take the network are left, but for the target's own."""
    found: list[Arm] = []
    for start, tries in starts(plan.machine, plan.called, lossy=plan.given is not None, here=here):
        try:
            found.append(graphs.arm(start, tries))
        except (Refused, UsageProblem, EnvironmentProblem) as problem:
            if not found:
                raise
            left.append(f"{start.quantizer or start.runtime}: {problem.message} {problem.hint}")
    return found


def _measuring(plan: _Plan, graphs: Candidates, baseline: Deployment) -> Here | Elsewhere:
    """What measures deployments beside the baseline."""
    sound = Sound(graphs, baseline)
    if plan.measurer is not None:
        return Elsewhere(graphs, sound, baseline, plan.measurer, plan.folded.image_size)
    together = plan.order.objective == THROUGHPUT
    return Here(graphs, sound, baseline, plan.called.threads, plan.order.seed, together)


def _artefact(plan: _Plan, rows: list[Candidate], loss: Loss | None, journal: Journal, left: list[str]) -> TuneArtefact:
    from repaconv.measure.fingerprint import fingerprint

    winner = rows[0].deployment
    lossy = winner.precision != "fp32"
    return TuneArtefact(
        made_by=made_by("torch", "onnx", "onnxruntime"),
        verdict="passed",
        target=plan.device.name,
        runtimes=plan.machine.versions,
        objective=plan.order.objective,
        method=plan.folded.called,
        shapes_sha256=shapes_sha256(plan.folded.shapes),
        model_sha256=plan.folded.payload.sha256 if lossy else "",
        image_size=plan.folded.image_size,
        seed=plan.order.seed,
        baseline=journal.baseline,
        deployment=winner,
        ratio=rows[0].ratio,
        allowed_disagreement=plan.order.max_disagreement,
        allowed_accuracy_drop=plan.order.max_accuracy_drop,
        candidates=tuple(rows),
        images=plan.given.told if plan.given else "",
        image_preprocessing=plan.given.given.preprocessing if plan.given else "",
        scores=plan.given.given.labels if plan.given else "",
        disagreement=loss.disagreement if loss else None,
        link=loss.link if loss else None,
        sensitivities=journal.graphs.sensitive,
        skipped=(*plan.machine.left_out, *dict.fromkeys(left)),
        seconds=round(journal.seconds, 1),
        budget_s=plan.order.budget_s,
        complete=not journal.cut,
        machine=fingerprint(()) if plan.measurer is None else {"cpu": f"a worker of {plan.device.name}"},
    )


def _put(plan: _Plan, found: TuneArtefact, took: Path) -> TuneArtefact:
    found = found.model_copy(update={"unverified": plan.overridden})
    put(plan.path, found)
    return with_files(found, [took], [plan.path])
