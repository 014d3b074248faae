"""`bench`: latency of a model and of a reference model, measured together on this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from repaconv.core import run_folder
from repaconv.core.errors import UsageProblem
from repaconv.core.file_replacement import replace_artifact, require_replaceable, write_payload
from repaconv.core.files import lock_folder, payload_of, require_writable, sha256_of
from repaconv.core.progress import Progress, silent
from repaconv.engines.contract import ENGINE_SUFFIXES
from repaconv.graph.onnx_files import read_graph
from repaconv.results import BenchArtefact, Link, MeasuredModel, MethodFold
from repaconv.stages.bench.benchmark_subjects import choose_subjects
from repaconv.stages.bench.compared_models import parameters_of
from repaconv.stages.bench.latency_baselines import check_baseline, name_in, read_baselines, remember_measurement
from repaconv.stages.bench.latency_measurement import (
    BenchMeasurement,
    Plan,
    TrainingRefused,
    measure_models,
)
from repaconv.stages.bench.options import BenchOptions
from repaconv.stages.shared.common_options import require_threads
from repaconv.stages.shared.engine_files import require_own_precision, runtime_lowers, takes_networks
from repaconv.stages.shared.evaluation_images import without_evidence
from repaconv.stages.shared.model_opening import compare_outputs
from repaconv.stages.shared.option_dataclasses import as_image_size, by_name
from repaconv.stages.shared.preset_choice import ResolvedOptions, resolve_preset
from repaconv.stages.shared.result_provenance import made_by, with_files
from repaconv.stages.shared.target_lookup import load_target
from repaconv.stages.shared.unavailable_targets import require_here
from repaconv.verification.tolerances import bounded

if TYPE_CHECKING:
    from repaconv.engines.targets import Target

LARGEST_REGRESSION = 10.0
"""Largest value of --max-regression: above it the value is surely a typing error."""


def bench_by(
    options: BenchOptions,
    model: str | Path | None = None,
    *,
    device: Target | None = None,
    progress: Progress = silent,
) -> BenchArtefact:
    """Measure the latency of a model and of its reference in turn, and the interval of their ratio.

    Options that are None come from the paper's protocol, otherwise from the target.

    Args:
        model: A run folder, an .onnx file or an engine that `build` made; the newest run when None.
        options: The options.
        device: The target as an object, if it has no registered name.
        progress: A function that is called with each step's name, the units done and their total.

    Raises:
        GateFailed: If an earlier check failed and ``allow_unverified`` is false.
        EnvironmentProblem: If the target is not this machine, or its runtime is not installed.
        Refused: If the run or a file is missing, or the model was changed since its export.
        UsageProblem: If there is nothing to measure or the sizes do not fit the model.
    """
    progress("open the model", 0, 0)
    with lock_folder(None if is_single_file(model) else run_folder.find_run(Path(model) if model else None).folder):
        plan = plan_bench(options, model, device, progress)
        if plan.run:
            require_writable(plan.run.history(plan.variant))
        try:
            found = measure_models(plan, progress)
        except TrainingRefused as error:
            plan = plan.without_training(error.message)
            found = measure_models(plan, progress)
        artefact, wrote = _apply_baseline(plan, _artefact(plan, found))
        if plan.run:
            remember_measurement(plan.run.history(plan.variant), artefact)
        return _put(plan, artefact, wrote)


bench = by_name(bench_by, BenchOptions)


def plan_bench(options: BenchOptions, model: str | Path | None, device: Target | None, progress: Progress) -> Plan:
    """Resolve the options, and check everything that may be refused before a model is opened."""
    from repaconv.benchmark.paper_protocols import protocol_named

    bounded("the share --max-regression", options.max_regression, LARGEST_REGRESSION, is_share=True)
    require_threads(options.threads)
    given = resolve_bench_preset(options, model)
    options = given.options
    device = device or load_target(options.target)
    named = protocol_named(options.protocol)
    if options.out:
        require_replaceable(Path(options.out), "bench")  # before the training form is exported
    if options.baseline:
        read_baselines(Path(options.baseline))
        if options.update_baseline:
            require_writable(Path(options.baseline))
    threads = options.threads or named.threads or given.threads(device)
    rounds = options.rounds or named.rounds or device.bench.rounds
    run = _run_of(options, model, device)
    lowering = options.precision if runtime_lowers(device, options.precision) else None
    asked = as_image_size(options.image_size)
    known = choose_subjects(
        run,
        model,
        options.against,
        options.allow_unverified,
        progress,
        target=device,
        precision="fp32" if lowering else options.precision,
        batch=options.batch,
        image_size=asked,
        form=given.preset,
        form_size=None if asked else given.image_size,
    )
    lowered = known.variant.model_copy(update={"precision": options.precision}) if known.variant else None
    variant = lowered.full if lowered else ""
    place = Path(options.out) if options.out else run.bench_json(variant) if run else None
    if place:
        require_replaceable(place, "bench", *([_profile_drawing(place)] if options.profile else []))
    return Plan(
        options=options,
        device=device,
        protocol=named,
        run=run,
        known=known,
        lowering=lowering,
        size=asked or known.size,
        threads=threads,
        rounds=rounds,
        warmup_rounds=device.bench.warmup_rounds if named.warmup_rounds is None else named.warmup_rounds,
        variant=variant,
        place=place,
        settings=given.settings,
    )


def resolve_bench_preset(options: BenchOptions, model: str | Path | None) -> ResolvedOptions[BenchOptions]:
    """The options, completed with the target and settings of a tuned preset.

    Raises:
        UsageProblem: If a preset is given for a single file, or there is no run.
    """
    if options.preset is None:
        return ResolvedOptions(options)
    if is_single_file(model):
        raise UsageProblem(
            f"{model} is a file, whose rewrite preset is fixed.",
            hint="--preset selects among the ONNX models of a run folder.",
            code="usage.idle",
        )
    given = resolve_preset(options, run_folder.fold_of(run_folder.find_run(Path(model) if model else None)))
    tuned = given.deployment
    usual = tuned is None or options.batch or tuned.batch == load_target(given.options.target).bench.batch
    return given if usual or not tuned else replace(given, options=replace(given.options, batch=tuned.batch))


def _run_of(options: BenchOptions, model: str | Path | None, device: Target) -> run_folder.Run | None:
    """The run that is measured; None for a single file.

    Raises:
        EnvironmentProblem: If the target is not this machine; for an engine file its runtime reports that.
        UsageProblem: If there is no run, a precision is given for a single file, or the runtime does not open it.
    """
    run = None if is_single_file(model) else run_folder.find_run(Path(model) if model else None)
    if model is not None and is_single_file(model):
        require_own_precision(model, options.precision)
        if Path(model).suffix == ".onnx" and takes_networks(device):
            raise UsageProblem(
                f"{device.name} runs PyTorch modules, and {model} is an ONNX model.",
                hint="Fold the checkpoint and measure the run folder, or give a target that runs ONNX models, e.g. "
                "--target x86-64.",
                code="bench.module",
            )
    if run or Path(model or "").suffix == ".onnx":
        require_here(device, options, model, run)
    return run


def is_single_file(model: str | Path | None) -> bool:
    """Whether the model is a single file instead of a run."""
    return model is not None and Path(model).suffix in ENGINE_SUFFIXES


def _artefact(plan: Plan, found: BenchMeasurement) -> BenchArtefact:
    from repaconv.benchmark.latency_statistics import latency

    options, measured, calls, models = plan.options, found.measured, found.on.calls, found.measured.loaded
    first, *others = (source_model.name for source_model in plan.subjects)
    compared = measured.ratio(first, others[0]) if others else None
    agreed = _compare_outputs(plan, found) if others else None
    priority = f"chrt -f 99: {measured.priority_note}" if measured.priority_note else ""
    return BenchArtefact(
        made_by=made_by(),
        verdict="failed" if agreed and agreed.verdict == "failed" and not options.against else "passed",
        unverified=plan.known.overridden,
        options=options.words(),
        network=_network(plan),
        variant=plan.variant,
        target=plan.device.name,
        runtime=models[first].engine,
        precision=models[first].precision,
        batch=found.batch,
        image_size=calls.shape[1:] if calls.shape else None,
        threads=plan.threads,
        rounds=measured.rounds,
        session_loads=measured.session_loads,
        warmup_rounds=measured.warmup_rounds,
        seed=options.seed,
        session=models[first].session.options,
        machine=measured.machine,
        protocol=plan.protocol.description(found.batch),
        latencies=tuple(
            latency(
                each.name,
                each.path.name,
                sha256_of(each.path),
                measured.samples_ms[each.name],
                engine=models[each.name].engine,
                precision=models[each.name].precision,
            )
            for each in plan.subjects
        ),
        ratio=compared,
        quality=measured.quality(compared),
        profile=found.profile,
        agreement=agreed,
        image_preprocessing=calls.preprocessing,
        note="; ".join(part for part in (plan.known.note, priority) if part),
    )


def _network(plan: Plan) -> MeasuredModel:
    """Identity of the measured model: hash and kind of the file that it was made from."""
    if plan.known.source_model is not None:
        folded = plan.known.source_model.folded
        kind = (
            folded.description if isinstance(folded, MethodFold) else folded.called
        )  # how an architecture is named may vary
        counts = {name: before for name, before, _ in folded.saved if name != "nodes"}
        return MeasuredModel(sha256=folded.origin.sha256, kind=kind, counts=counts)
    path = plan.subjects[0].path
    if path.suffix != ".onnx":
        return MeasuredModel(sha256=sha256_of(path))
    graph = read_graph(path)
    counts = {"parameters": parameters_of(graph), "nodes": len(graph.graph.node)}
    return MeasuredModel(sha256=sha256_of(path), kind="graph", counts=counts)


def _compare_outputs(plan: Plan, found: BenchMeasurement) -> Link | None:
    """Compare the outputs of both models; None if only one of two bare graphs takes pixels."""
    from repaconv.verification.comparison import not_verified

    calls, models = found.on.calls, found.measured.loaded
    alike = len({each.takes_pixels for each in models.values()}) == 1
    if plan.known.source_model is None and not alike:
        return None
    if calls.why_unusable:
        first, other = models
        return not_verified("agreement", other, first, calls.why_unusable)
    against = Path(plan.options.against) if plan.options.against and plan.run is None else None
    graph = against if against and against.suffix == ".onnx" else None
    agreed = compare_outputs(plan.run, models, calls.batches, found.on.outputs, graph, calls.scores)
    if agreed is None:
        return None
    agreed = agreed.model_copy(update={"inputs": calls.name})
    lossy = agreed.tolerance is not None and agreed.tolerance.kind == "lossy"
    return without_evidence(agreed, calls.no_evidence) if lossy and calls.no_evidence else agreed


def _apply_baseline(plan: Plan, artefact: BenchArtefact) -> tuple[BenchArtefact, list[Path]]:
    """Compare with the baseline, or write one, if asked to; returns the artifact and the files written."""
    options = plan.options
    if not options.baseline:
        return artefact, []
    baseline = Path(options.baseline)
    comparison = check_baseline(
        baseline,
        name_in(baseline, plan.run.folder if plan.run else plan.subjects[0].path),
        artefact,
        options.max_regression,
        update=options.update_baseline,
        accept_inconclusive=options.accept_inconclusive,
    )
    return artefact.model_copy(update=comparison.changes(artefact)), [baseline] if comparison.written else []


def _put(plan: Plan, artefact: BenchArtefact, wrote: list[Path]) -> BenchArtefact:
    """Write the result, and a drawing of the profile next to it."""
    from repaconv.benchmark.module_profile import bars_svg

    if plan.place and artefact.profile is not None:
        wrote = [*wrote, _profile_drawing(plan.place)]
        write_payload(wrote[-1], bars_svg(artefact.profile))
        artefact = artefact.model_copy(update={"other_files": (payload_of(wrote[-1], plan.place.parent),)})
    if plan.place:
        replace_artifact(plan.place, artefact)
        wrote = [*wrote, plan.place]
    return with_files(artefact, [source_model.path for source_model in plan.subjects], wrote)


def _profile_drawing(place: Path) -> Path:
    return place.with_suffix(".profile.svg")
