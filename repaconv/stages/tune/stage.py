"""`tune`: search for the fastest configuration of a network on a target, by measurements on the target itself."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv.core import plugins, run_folder
from repaconv.core.errors import EnvironmentProblem, Refused, UsageProblem, did_you_mean
from repaconv.core.file_replacement import replace_artifact, require_replaceable
from repaconv.core.files import cache_folder, canonical_json, lock_folder, sha256_of, sha256_of_bytes, write_artefact
from repaconv.core.progress import Progress, silent
from repaconv.core.sharded_checkpoint import sha256_of_checkpoint
from repaconv.core.temporary_folders import scratch_folder
from repaconv.results import Candidate, FoldArtefact, ImageSize, TuneArtefact
from repaconv.rewrites.presets import chosen
from repaconv.sources.source_model import SourceModel
from repaconv.sources.source_of_run import source_model_of
from repaconv.stages.bench.options import OBJECTIVES, THROUGHPUT
from repaconv.stages.fold.stage import fold
from repaconv.stages.shared.common_options import require_threads
from repaconv.stages.shared.engine_files import runtime_lowers
from repaconv.stages.shared.input_selection import Split, require_same_size
from repaconv.stages.shared.option_dataclasses import as_image_size, by_name
from repaconv.stages.shared.preset_choice import TUNED, cached_result, shapes_sha256
from repaconv.stages.shared.result_provenance import made_by, with_files
from repaconv.stages.shared.target_lookup import load_target
from repaconv.stages.tune.accuracy_loss import (
    FEW_OTHERS,
    Loss,
    LossEvaluation,
    chosen_images,
    final_rows,
    require_evaluation_images,
    task_of_losses,
)
from repaconv.stages.tune.candidate_graphs import Candidates
from repaconv.stages.tune.options import TuneOptions
from repaconv.stages.tune.output_check import OutputCheck
from repaconv.stages.tune.runtimes_and_initial_trials import (
    MachineRuntimes,
    Workload,
    available_runtimes,
    initial_trials,
    threads_of,
)
from repaconv.stages.tune.speed_measurements import (
    LocalMeasurement,
    MeasurementLog,
    Measurer,
    WorkerMeasurement,
)
from repaconv.stages.tune.speed_prediction import own_history, shipped_records
from repaconv.verification.accuracy_budget import Budget
from repaconv.verification.tolerances import POLICY_VERSION

if TYPE_CHECKING:
    from repaconv.engines.targets import Target
    from repaconv.results import Deployment
    from repaconv.sources.source_model import SourceModel
    from repaconv.stages.tune.search import Trial
    from repaconv.stages.tune.speed_prediction import Observation
    from repaconv.tasks.task_of_network import Choice
    from repaconv.verification.input_batches import Inputs


MOST_EARLIER_SEARCHES = 12
"""Most earlier searches whose measurements are used."""


# Cached results: a path by everything that they depend on


def cache_path(folded: FoldArtefact, machine: MachineRuntimes, asked: Mapping[str, Any]) -> Path:
    """Path of the cached result: a hash of shapes, machine, targets, versions and options.

    ``asked`` also names the cluster. The time budget is not part of the hash: the result records it, and the stage
    decides whether it was enough.
    """
    from repaconv.benchmark.machine_fingerprint import fingerprint, machine_key

    question = {
        "machine": machine_key(fingerprint(())),
        "targets": [device.model_dump(mode="json") for device in machine.devices],
        "runtimes": machine.versions,
        "made_by": made_by("torch", "onnx", "onnxscript", "onnxruntime"),
        **asked,
    }
    shapes = shapes_sha256(folded.shapes)
    digest = sha256_of_bytes(canonical_json(question).encode())
    return cache_folder(TUNED) / f"{shapes[:16]}-{digest[:16]}.json"


def rewrite_packages(names: Sequence[str]) -> dict[str, str]:
    """Rewrites, each with the package that provides it and its version."""
    points = plugins.registered(plugins.REWRITES)
    packages = {name: points[name].dist for name in names if name in points}
    return {name: f"{dist.name} {dist.version}" if (dist := packages.get(name)) else "" for name in names}


def image_dependencies(options: TuneOptions, source_model: SourceModel) -> dict[str, Any]:
    """The further dependencies of a result if images are given: the weights, and the images by their hashes."""
    from repaconv.verification.image_files import image_files

    folded, images = source_model.folded, Path(options.images or "")
    files = [Path(options.inputs)] if options.inputs else image_files(images, None)
    return {
        "weights": folded.payload.sha256,
        "images": {str(file.relative_to(images) if options.images else file.name): sha256_of(file) for file in files},
        "preprocessing": folded.preprocessing.model_dump(mode="json") if folded.preprocessing else None,
    }


def loss_dependencies(options: TuneOptions, source_model: SourceModel) -> dict[str, Any]:
    """The further dependencies of a result with lower precision, in addition to its images."""
    from repaconv.benchmark.machine_fingerprint import version_of

    return {
        "policy": POLICY_VERSION,
        "few_others": FEW_OTHERS,
        "nncf": version_of("nncf"),
        **({"task": task} if (task := options.task or source_model.folded.task) else {}),
        **({"labels": _labels_sha256(Path(options.labels))} if options.labels else {}),
        **({"classes": sha256_of(Path(options.classes))} if options.classes else {}),
    }


def _labels_sha256(labels: Path) -> dict[str, str]:
    """The hash of a file of labels, or of each in a folder of masks, by its path in the folder."""
    if labels.is_dir():
        return {str(file.relative_to(labels)): sha256_of(file) for file in sorted(labels.rglob("*.png"))}
    return {labels.name: sha256_of(labels)}


# The stage


def tune_by(
    options: TuneOptions,
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
        options: The options.
        measurer: Measures on other machines, as `repaconv.distributed.tune_measurements_on_cluster` does; this machine
            when None.
        where: Identifies these machines for the cache, e.g. by the cluster's address. If it is empty, the cache is not
            used with a measurer.
        progress: A function that is called with each step's name, the units done and their total.

    Raises:
        GateFailed: If an earlier check failed and ``allow_unverified`` is false.
        UsageProblem: If a loss is allowed without images, or with too few; if there is no such runtime.
        Refused: If the network is too large, its export is not sound, or the checkpoint's run has another fold.
        EnvironmentProblem: If the target's runtime is not installed.
    """
    plan = _plan(options, source, measurer, where, progress)
    answer = plan.answer()
    if answer is not None:
        update = {"note": "known from an earlier search", "options": plan.options.words()}
        return _put(plan, answer.model_copy(update=update), plan.known)
    with lock_folder(plan.run.folder), scratch_folder(plan.run.folder) as scratch:
        found = _search(plan, scratch, progress)
    write_artefact(plan.known, found)
    return _put(plan, found, plan.run.payload_of_fold(plan.folded))


tune = by_name(tune_by, TuneOptions)


class _Plan(NamedTuple):
    """The resolved options for one network.

    Attributes:
        given: The images for lower precision.
        checked: The user's images or inputs, on some of which outputs are compared.
        fixed_size: The requested image size; None if the graph's own, or none, was requested.
        known: File of the cached result.
        measured: File of the log of measurements.
        again: Whether cached results are ignored.
    """

    options: TuneOptions
    run: run_folder.Run
    source_model: SourceModel
    overridden: tuple[str, ...]
    device: Target
    machine: MachineRuntimes
    called: Workload
    rounds: int
    names: list[str]
    given: Split | None
    checked: Inputs | None
    fixed_size: ImageSize | None
    choice: Choice | None
    measurer: Measurer | None
    path: Path
    known: Path
    measured: Path
    again: bool

    @property
    def folded(self) -> FoldArtefact:
        """The result of `fold`."""
        return self.source_model.folded

    @property
    def images(self) -> str:
        """The images and what they are for, in words; empty if there are none."""
        if self.given or self.checked is None:
            return self.given.description if self.given else ""
        return f"{self.checked.name}: outputs of FP32 configurations are compared on some of them"

    def answer(self) -> TuneArtefact | None:
        """The cached result, unless its search was cut short with less time than there is now."""
        found = None if self.again else cached_result(self.known)
        slices = self.options.exhaustive  # each run resumes, for another --budget
        enough = found is not None and (found.complete or (not slices and self.options.budget_s <= found.budget_s))
        return found if enough else None


def _plan(
    options: TuneOptions, source: str | Path | None, measurer: Measurer | None, where: str, progress: Progress
) -> _Plan:
    """Check everything that may be refused before the search; a checkpoint is folded first."""
    _require_valid(options)
    if measurer is None:
        require_threads(options.threads)
    run = _run_of(source, options.settings, progress)
    source_model = source_model_of(run)
    folded = source_model.folded
    fixed_size = as_image_size(options.image_size)
    if fixed_size:
        source_model.require_size(*fixed_size)
    if not folded.any_image_size:
        fixed_size = None
    given = require_evaluation_images(options, source_model)
    checked = given.given if given else _images_for_check(options, source_model)
    overridden = run_folder.require_passed_checks(run, folded, unverified=options.allow_unverified, exports=False)
    device = load_target(options.target)
    machine = available_runtimes(options, device, here=measurer is None)
    names = sorted(plugins.registered(plugins.REWRITES) if options.rewrites is None else options.rewrites)
    free = folded.batch == "dynamic"
    batch = options.batch or (device.bench.batch if free else int(folded.batch))
    called = Workload(options.objective, threads_of(options, device), batch, free and options.batch is None)
    rounds = options.rounds or device.bench.rounds
    asked: dict[str, Any] = {
        "method": folded.called,
        "called": called,
        "rounds": rounds,
        "seed": options.seed,
        "elsewhere": None if measurer is None else where,
        "rewrites": rewrite_packages(names),
        "exhaustive": options.exhaustive,
        **({"image_size": fixed_size} if fixed_size else {}),
        **({"checked_on": image_dependencies(options, source_model)} if checked else {}),
    }
    path = Path(options.out) if options.out else run.folder / TUNED / f"{device.name}.json"
    require_replaceable(path, "tune")
    measured = cache_path(folded, machine, asked)
    lossy = {**asked, **loss_dependencies(options, source_model), "loss": Budget.of(options)} if given else asked
    return _Plan(
        options=options,
        run=run,
        source_model=source_model,
        overridden=overridden,
        device=device,
        machine=machine,
        called=called,
        rounds=rounds,
        names=names,
        given=given,
        checked=checked,
        fixed_size=fixed_size,
        choice=task_of_losses(options, source_model) if given else None,
        measurer=measurer,
        path=path,
        known=cache_path(folded, machine, lossy),
        measured=measured.with_suffix(".journal"),
        again=options.rerun or (measurer is not None and not where),
    )


def _require_valid(options: TuneOptions) -> None:
    """Refuse unknown rewrites and objectives, and an allowed loss without images to evaluate it."""
    chosen(options.rewrites or (), 0)
    if options.objective not in OBJECTIVES:
        raise UsageProblem(
            f"unknown objective {options.objective!r}.",
            hint=f"{did_you_mean(options.objective, OBJECTIVES)}Known objectives: {', '.join(OBJECTIVES)}.",
            code="objective",
        )
    if Budget.of(options).is_limited and not (options.inputs or options.images):
        raise UsageProblem(
            "lower precision is evaluated on images that the network is meant for, and none were given.",
            hint="Give --inputs FILE.npz or --images DIR.",
            code="tune.images",
        )


def _images_for_check(options: TuneOptions, source_model: SourceModel) -> Inputs | None:
    """The images or inputs on which outputs are compared in a search that allows no loss; None if none are given.

    Raises:
        UsageProblem: If both kinds are given, their size is not the network's, or the network does not take them.
    """
    if not (options.inputs or options.images):
        return None
    given, size = (
        chosen_images(options, source_model),
        as_image_size(options.image_size) or source_model.folded.image_size,
    )
    if given.size is not None and size is not None:
        require_same_size(given, size)
    given.piece(0, 1).feeds(source_model.inputs)  # refuses normalized images for a network that takes pixels
    return given


def _run_of(source: str | Path | None, settings: Mapping[str, str] | None, progress: Progress) -> run_folder.Run:
    """The given run, or the run of the given checkpoint, which is folded if it was not yet.

    Raises:
        Refused: If the run folder has a fold of another file or with other settings, which `tune` does not replace.
    """
    if source is not None and not Path(source).exists():
        raise Refused(
            f"there is no file or folder {source}.", hint="Give a checkpoint or a run folder.", code="tune.none"
        )
    if source is None or Path(source).is_dir():
        return run_folder.find_run(Path(source) if source else None)
    run = run_folder.Run(run_folder.default_folder(Path(source)))
    if not run.fold_json.is_file():
        fold(source, settings=settings, progress=progress)
        return run
    known = run_folder.fold_of(run)
    asked = {"checkpoint": sha256_of_checkpoint(Path(source)), **(settings or {})}
    has = {"checkpoint": known.origin.sha256, **known.settings}
    if asked == has:
        return run
    other = ", ".join(sorted(key for key in {*asked, *has} if asked.get(key) != has.get(key)))
    raise Refused(
        f"{run.folder} contains another fold than requested: it differs in {other}.",
        hint=(
            f"To tune that fold: repaconv tune {shlex.quote(str(run.folder))}. Otherwise fold with the options you "
            "want and another -o, and tune that folder."
        ),
        code="tune.other-fold",
    )


def _search(plan: _Plan, scratch: Path, progress: Progress) -> TuneArtefact:
    """Search for the fastest allowed configuration; the result lists all that were considered."""
    from repaconv.stages.tune.search import search, search_exhaustively

    graphs = Candidates(
        plan.source_model,
        plan.names,
        plan.given,
        scratch,
        progress,
        choice=plan.choice,
        fixed_size=plan.fixed_size,
        devices=plan.machine.devices,
    )
    here = plan.measurer is None
    left: list[str] = []
    trials = _trials(plan, graphs, left, here=here)
    baseline = trials[0].start
    measuring = _measurement(plan, graphs, baseline)
    now = time.monotonic()
    measurements = MeasurementLog(
        plan.measured, now, now + plan.options.budget_s, baseline, plan.rounds, measuring, graphs, progress
    )
    measurements.images = len(plan.given.validation) if plan.given else 0
    measurements = measurements.remembered()
    if plan.again:
        measurements.forget()

    def milder(trial: Trial) -> list[Trial]:
        return graphs.mixed(trial) if measurements.time_left() else []

    def work(way: Deployment) -> int:
        """MACs; 1 when the time is over, since counting takes a while for a large network."""
        return graphs.macs(way) if measurements.time_left() else 1

    evaluation = LossEvaluation(graphs, baseline, Budget.of(plan.options), here, progress)
    measurements.evaluations = evaluation.took
    if plan.given:
        too_slow = evaluation.too_slow(measurements.left_s())
        measurements.cut = bool(too_slow)
        if why := too_slow or evaluation.same_predictions() or evaluation.few_results():
            left.append(f"lower precision: {why}")
            trials = [trial for trial in trials if trial.start.precision == "fp32"]
    measurements.macs = float(work(baseline))
    if isinstance(measuring, LocalMeasurement) and measurements.time_left():
        measuring.time_baseline()
    if plan.options.exhaustive:
        rows = search_exhaustively(trials, measurements, evaluation.allows, plan.rounds, milder)
    else:
        rows = search(trials, work, measurements, evaluation.allows, plan.rounds, milder, _records(plan))
    rows = [row.model_copy(update={"memory_bytes": measurements.memory(row.deployment)}) for row in rows]
    final, loss = final_rows([evaluation.completed_row(row, measurements.left) for row in rows], evaluation, baseline)
    return _artefact(plan, final, loss, measurements, left)


def _records(plan: _Plan) -> list[Observation]:
    """Return measurements of other networks: shipped records of this ISA level, and earlier searches here."""
    from repaconv.benchmark.cpu_isa_level import isa_level
    from repaconv.benchmark.machine_fingerprint import fingerprint

    if plan.measurer is not None:
        return []
    paths = sorted(cache_folder(TUNED).glob("*.json"), key=lambda path: (-path.stat().st_mtime, path.name))
    earlier = [found for path in paths[:MOST_EARLIER_SEARCHES] if (found := cached_result(path))]
    history = own_history(earlier, fingerprint(()), plan.options.objective)
    return [*shipped_records(isa_level(plan.device.architecture)), *history]


def _trials(plan: _Plan, graphs: Candidates, left: list[str], *, here: bool) -> list[Trial]:
    """A trial for every runtime in every precision; those that cannot take the network are skipped, except the
    baseline.
    """
    found: list[Trial] = []
    for start, tries in initial_trials(plan.machine, plan.called, lossy=plan.given is not None, here=here):
        if not here and runtime_lowers(plan.device, start.precision):
            left.append(f"{start.precision}: {start.runtime} makes it of an FP32 model, and workers run models as sent")
            continue
        try:
            found.append(graphs.trial(start, tries))
        except (Refused, UsageProblem, EnvironmentProblem) as problem:
            if not found:
                raise
            left.append(f"{start.quantizer or start.runtime}: {problem.message} {problem.hint}")
    return found


def _measurement(plan: _Plan, graphs: Candidates, baseline: Deployment) -> LocalMeasurement | WorkerMeasurement:
    """The source of measurements of configurations and the baseline: this machine or a cluster."""
    sound = OutputCheck(graphs, baseline, plan.checked)
    if plan.measurer is not None:
        return WorkerMeasurement(graphs, sound, baseline, plan.measurer, graphs.image_size)
    together = plan.options.objective == THROUGHPUT
    return LocalMeasurement(graphs, sound, baseline, plan.called.threads, plan.options.seed, together)


def _artefact(
    plan: _Plan, rows: list[Candidate], loss: Loss | None, measurements: MeasurementLog, left: list[str]
) -> TuneArtefact:
    from repaconv.benchmark.machine_fingerprint import fingerprint

    winner = rows[0].deployment
    lossy = winner.precision != "fp32"
    return TuneArtefact(
        made_by=made_by("torch", "onnx", "onnxruntime"),
        verdict="passed",
        options=plan.options.words(),
        target=plan.device.name,
        runtimes=plan.machine.versions,
        objective=plan.options.objective,
        method=plan.folded.called,
        shapes_sha256=shapes_sha256(plan.folded.shapes),
        model_sha256=plan.folded.payload.sha256 if lossy else "",
        image_size=measurements.graphs.image_size,
        graph_size="own" if not plan.folded.any_image_size else "fixed" if plan.fixed_size else "dynamic",
        seed=plan.options.seed,
        baseline=measurements.baseline,
        macs=int(measurements.macs) if measurements.macs > 1 else 0,
        deployment=winner,
        ratio=rows[0].ratio,
        allowed_disagreement=plan.options.max_disagreement,
        allowed_accuracy_drop=plan.options.max_accuracy_drop,
        candidates=tuple(rows),
        images=plan.images,
        image_preprocessing=plan.checked.preprocessing if plan.checked else "",
        scores=plan.given.given.labels if plan.given else "",
        disagreement=loss.disagreement if loss else None,
        link=loss.link if loss else None,
        sensitivities=measurements.graphs.sensitive,
        skipped=(*plan.machine.left_out, *dict.fromkeys(left)),
        seconds=round(measurements.seconds, 1),
        budget_s=plan.options.budget_s,
        complete=not measurements.cut,
        machine=fingerprint(()) if plan.measurer is None else {"cpu": f"a worker of {plan.device.name}"},
    )


def _put(plan: _Plan, found: TuneArtefact, took: Path) -> TuneArtefact:
    found = found.model_copy(update={"unverified": plan.overridden})
    replace_artifact(plan.path, found)
    return with_files(found, [took], [plan.path])
