"""tune: the fastest exact form of a network on a target, searched on the target itself."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv import registry, runs
from repaconv.artefacts import Candidate, FoldArtefact, TuneArtefact
from repaconv.errors import Refused, UsageProblem
from repaconv.files import scratch_folder, sha256_of, write_artefact
from repaconv.orders.knobs import by_name
from repaconv.orders.stages import TuneOrder
from repaconv.pipeline.folding import fold
from repaconv.progress import Progress, silent
from repaconv.replacing import put, require_ours
from repaconv.steps.answers import brought_by, judged_by, place_of, runtime_of
from repaconv.steps.candidates import Candidates
from repaconv.steps.common import at_least_one, load_target, made_by, with_files
from repaconv.steps.forms import TUNED, remembered, shapes_sha256
from repaconv.steps.journal import Journal, Measurer, measured_here
from repaconv.steps.lowering import enough_images, lowered
from repaconv.subjects.subject import Subject, subject_of

if TYPE_CHECKING:
    from repaconv.targets import Target


def tune_by(
    order: TuneOrder,
    source: str | Path | None = None,
    *,
    measurer: Measurer | None = None,
    where: str = "",
    progress: Progress = silent,
) -> TuneArtefact:
    """Search the fastest exact form, and say what was measured on the way.

    What is known of these shapes on this machine is taken from before, where nothing has changed that it depends on;
    with lower precision that includes the weights and the images. A search that was broken off, or had less time than
    now, goes on where it was.

    Args:
        source: A checkpoint, which is folded if it was not yet, or a run's folder; the newest run when None.
        order: What is asked for.
        measurer: Measures elsewhere, as `repaconv.farm.tuning` does; here when None.
        where: What tells that place from others, such as the cluster's address. Without it nothing is known of a
            measurer's machines from before.
        progress: See `Progress`.

    Raises:
        UsageProblem: If lower precision is wanted and there are no images to judge it by, or too few.
        Refused: If the network is too large, its export is not sound, or the checkpoint's run is of another fold.
        EnvironmentProblem: If the target's runtime is not here.
    """
    plan = _plan(order, source, measurer, where, progress)
    answer = plan.answer(plan.lossy or plan.known)
    if answer is not None:
        answer = answer.model_copy(update={"note": "known from an earlier search"})
        return _put(plan, answer, plan.lossy or plan.known)
    with scratch_folder(".tune-", plan.run.folder) as scratch:
        forms = Candidates.of(plan.subject, plan.device, plan.names, scratch, progress)
        journal = Journal.begin(plan.known, order.budget_s, plan.rounds, _measuring(plan), forms, progress)
        if plan.again:
            journal.forget()
        found = plan.answer(plan.known) or _searched(plan, forms, journal)
        if plan.lossy is not None:
            found = _lowered(plan, forms, journal, found, scratch, progress)
    if found.complete:
        journal.forget()
    return _put(plan, found, plan.run.payload_of_fold(plan.folded))


tune = by_name(tune_by, TuneOrder)


class _Plan(NamedTuple):
    """What an order comes to for a network; ``known`` and ``lossy`` are where the answers are kept."""

    order: TuneOrder
    run: runs.Run
    subject: Subject
    overridden: tuple[str, ...]
    device: Target
    batch: int
    threads: int
    rounds: int
    names: list[str]
    measurer: Measurer | None
    path: Path
    known: Path
    lossy: Path | None
    again: bool

    @property
    def folded(self) -> FoldArtefact:
        """What `fold` wrote of it."""
        return self.subject.folded

    @property
    def shapes(self) -> str:
        """What all checkpoints of these shapes share."""
        return shapes_sha256(self.folded.shapes)

    def answer(self, path: Path) -> TuneArtefact | None:
        """What is known, unless it is of a search that was cut short and had less time than there is now."""
        found = None if self.again else remembered(path)
        enough = found is not None and (found.complete or self.order.budget_s <= found.budget_s)
        return found if enough else None


def _plan(
    order: TuneOrder, source: str | Path | None, measurer: Measurer | None, where: str, progress: Progress
) -> _Plan:
    """Everything that may be refused before the search; a checkpoint is folded on the way."""
    if order.max_disagreement is not None and not (order.inputs or order.images):
        raise UsageProblem(
            "lower precision is judged on images that the network is meant for, and none were given.",
            hint="Give --inputs FILE.npz or --images DIR.",
            code="tune.images",
        )
    run = _run_of(source, order.settings, progress)
    subject = subject_of(run)
    folded = subject.folded
    _require_judges(order, subject)
    overridden = runs.require_sound(run, folded, unverified=order.unverified)
    device = load_target(order.target)
    names = sorted(registry.registered(registry.REWRITES) if order.rewrites is None else order.rewrites)
    usual = device.bench
    asked: dict[str, Any] = {
        "method": folded.called,
        "batch": at_least_one("batch", order.batch, usual.batch if folded.batch == "dynamic" else folded.batch),
        "threads": at_least_one("threads", order.threads, usual.threads),
        "rounds": at_least_one("rounds", order.rounds, usual.rounds),
        "seed": order.seed,
        "elsewhere": None if measurer is None else where,
        "rewrites": brought_by(names),
        "exhaustive": order.exhaustive,
    }
    path = Path(order.out) if order.out else run.folder / TUNED / f"{device.name}.json"
    require_ours(path, "tune")
    lossy = None
    if order.max_disagreement is not None:
        lossy = place_of(folded, device, {**asked, **judged_by(order, subject), "loss": order.max_disagreement})
    return _Plan(
        order=order,
        run=run,
        subject=subject,
        overridden=overridden,
        device=device,
        batch=asked["batch"],
        threads=asked["threads"],
        rounds=asked["rounds"],
        names=names,
        measurer=measurer,
        path=path,
        known=place_of(folded, device, asked),
        lossy=lossy,
        again=order.again or (measurer is not None and not where),
    )


def _require_judges(order: TuneOrder, subject: Subject) -> None:
    """Refuse to judge a lower precision by what cannot tell."""
    if order.max_disagreement is None:
        return
    if subject.outputs != ("logits",):
        raise UsageProblem(
            f"lower precision is judged by first classes, and this network gives {', '.join(subject.outputs)}.",
            hint="Leave --max-disagreement out; `repaconv export --precision` judges features by cosine.",
            code="tune.features",
        )
    enough_images(order, subject)


def _run_of(source: str | Path | None, settings: Mapping[str, str] | None, progress: Progress) -> runs.Run:
    """The run of a checkpoint, folded now unless it was; or the run that was named.

    Raises:
        Refused: If there is one of another file or other settings: its exports are not this stage's to remove.
    """
    if source is not None and not Path(source).exists():
        raise UsageProblem(
            f"there is no file and no folder {source}.", hint="Give a checkpoint or a run's folder.", code="tune.none"
        )
    if source is None or Path(source).is_dir():
        return runs.find_run(Path(source) if source else None)
    run = runs.Run(runs.OUT / Path(source).stem)
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
        f"{run.folder} holds another fold than that was asked for: not of the same {other}.",
        hint=f"repaconv tune {run.folder} tunes that one. Else fold what is meant with -o, and tune its folder.",
        code="tune.other-fold",
    )


def _measuring(plan: _Plan) -> Measurer:
    """What measures forms beside the default one."""
    size, batch = plan.folded.image_size, plan.batch
    if plan.measurer is not None:
        return partial(plan.measurer, image_size=size)
    return partial(
        measured_here,
        engine=registry.load(registry.ENGINES, plan.device.runtime),
        threads=plan.threads,
        dims={"batch": batch, "height": size[0], "width": size[1]} if size else plan.subject.free_sizes(batch),
        call=plan.subject.drawn(batch, plan.order.seed, batch=batch).piece(0, batch),
        seed=plan.order.seed,
    )


def _searched(plan: _Plan, forms: Candidates, journal: Journal) -> TuneArtefact:
    """The fastest exact form, which is then known."""
    from repaconv.measure.fingerprint import fingerprint

    rows = _candidates(forms, journal, exhaustive=plan.order.exhaustive)
    here = plan.measurer is None
    found = TuneArtefact(
        made_by=made_by("torch", "onnx", "onnxruntime"),
        verdict="passed",
        target=plan.device.name,
        runtime=runtime_of(plan.device, here=here),
        method=plan.folded.called,
        shapes_sha256=plan.shapes,
        image_size=plan.folded.image_size,
        batch=plan.batch,
        threads=plan.threads,
        seed=plan.order.seed,
        default=forms.default,
        rewrites=rows[0].rewrites,
        ratio=rows[0].ratio,
        candidates=tuple(rows),
        seconds=round(journal.seconds, 1),
        budget_s=plan.order.budget_s,
        complete=not journal.cut,
        machine=fingerprint(()) if here else {"cpu": f"a worker of {plan.device.name}"},
    )
    write_artefact(plan.known, found)
    return found


def _candidates(forms: Candidates, journal: Journal, *, exhaustive: bool) -> list[Candidate]:
    from repaconv.forms.search import every, search

    if exhaustive:
        return every(forms.default, list(forms.rewrites), journal.measure, journal.rounds)
    return search(
        forms.default,
        list(forms.rewrites),
        work=forms.macs,
        measure=journal.measure,
        rounds=journal.rounds,
    )


def _lowered(
    plan: _Plan, forms: Candidates, journal: Journal, exact: TuneArtefact, scratch: Path, progress: Progress
) -> TuneArtefact:
    """The same with the fastest precision that is allowed, which is then known too."""
    device = plan.device
    low = lowered(
        plan.order,
        plan.subject,
        lambda precision, newest: forms.model(forms.fitting(device.kept(exact.rewrites, precision), newest)),
        [name for name in device.precisions if name not in ("fp32", "tf32")],
        device,
        measure=lambda reference, others: journal.measurer(reference, others, plan.rounds),
        scratch=scratch,
        progress=progress,
    )
    changed = {
        "precision": low.precision,
        "allowed_disagreement": plan.order.max_disagreement,
        "lowered": low.rows,
        "images": low.images,
    }
    found = exact.model_copy(update=changed)
    assert plan.lossy is not None
    write_artefact(plan.lossy, found)
    return found


def _put(plan: _Plan, found: TuneArtefact, took: Path) -> TuneArtefact:
    found = found.model_copy(update={"unverified": plan.overridden})
    put(plan.path, found)
    return with_files(found, [took], [plan.path])
