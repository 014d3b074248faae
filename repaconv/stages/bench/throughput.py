"""`throughput` (`bench --objective throughput`): images/s of a model with several inferences at once."""

from __future__ import annotations

import os
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv.core import run_folder
from repaconv.core.errors import UsageProblem
from repaconv.core.file_replacement import replace_artifact, require_replaceable
from repaconv.core.files import lock_folder, sha256_of
from repaconv.core.progress import Progress, silent
from repaconv.results import ImageSize, Throughput, ThroughputArtefact
from repaconv.stages.bench.benchmark_inputs import choose_benchmark_inputs
from repaconv.stages.bench.benchmark_subjects import BenchmarkSubject
from repaconv.stages.bench.latency_measurement import Plan
from repaconv.stages.bench.options import BenchOptions, ThroughputOptions
from repaconv.stages.bench.repeated_session_loads import Call, SessionLoads
from repaconv.stages.bench.stage import is_single_file, plan_bench, resolve_bench_preset
from repaconv.stages.shared.common_checks import made_by, with_files
from repaconv.stages.shared.model_opening import OpenedModel, open_model
from repaconv.stages.shared.option_definitions import by_name

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from repaconv.benchmark.interleaved_protocol import Measured
    from repaconv.results import Ratio


def throughput_by(
    options: ThroughputOptions, model: str | Path | None = None, *, progress: Progress = silent
) -> ThroughputArtefact:
    """Measure the throughput in images/s with several streams, with one stream, and of the reference, in turn.

    Args:
        model: A run folder, an .onnx file or an engine that `build` made; the newest run when None.
        options: The options.
        progress: A function that is called with each step's name, the units done and their total.

    Raises:
        EnvironmentProblem: If the target is not this machine, or its runtime runs one inference at a time.
        UsageProblem: If there is nothing to measure or the sizes do not fit the model; see `bench`.
    """
    with lock_folder(None if is_single_file(model) else run_folder.find_run(Path(model) if model else None).folder):
        plan, ways = _plan(options, model, progress)
        usual = plan.run.bench_json(f"{plan.variant}.throughput") if plan.run else None
        place = Path(options.out) if options.out else usual
        if place:
            require_replaceable(place, "throughput")
        asked = ("--objective", "throughput", *options.words())
        artefact = _measure(plan, ways, progress).model_copy(update={"options": asked})
        if place:
            replace_artifact(place, artefact)
    return with_files(artefact, [each.path for each in plan.subjects], [place] if place else [])


throughput = by_name(throughput_by, ThroughputOptions)


class _Concurrency(NamedTuple):
    """Number of streams, and threads per inference."""

    streams: int
    threads: int


class _Measurement(NamedTuple):
    """The measurement; ``image_ms`` are milliseconds per image by model, one value per round."""

    batch: int
    size: ImageSize | None
    image_ms: dict[str, NDArray[np.float64]]
    measured: Measured
    machine: dict[str, Any]
    session: dict[str, str]


def _plan(options: ThroughputOptions, model: str | Path | None, progress: Progress) -> tuple[Plan, _Concurrency]:
    """Resolve the options; streams and threads are those of a tuned preset, else one stream per core."""
    bench = BenchOptions(
        target=options.target,
        precision=options.precision,
        preset=options.preset,
        against=options.against,
        threads=options.threads,
        batch=options.batch,
        image_size=options.image_size,
        rounds=options.rounds,
        seed=options.seed,
        allow_unverified=options.allow_unverified,
    )
    tuned = resolve_bench_preset(bench, model).deployment
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = options.threads or (tuned.threads if tuned else 1)
    streams = options.streams or (tuned.streams if tuned and tuned.streams > 1 else max(1, cores // threads))
    if streams * threads > cores:
        raise UsageProblem(
            f"{streams} streams of {threads} threads are more than the {cores} cores of this machine.",
            hint="Reduce --streams or --threads.",
            code="throughput.cores",
        )
    return plan_bench(bench, model, None, progress), _Concurrency(streams, threads)


def _measure(plan: Plan, ways: _Concurrency, progress: Progress) -> ThroughputArtefact:
    """Measure in rounds: the model with all streams, the model with one stream, and the reference with all streams."""
    from repaconv.benchmark.interleaved_protocol import CALLS, Burst, measure_session_loads, pinned_to_cores
    from repaconv.benchmark.machine_fingerprint import fingerprint

    first, *others = plan.subjects
    one = BenchmarkSubject(f"{first.name}, one stream", first.path, first.network)
    listed = [(first, ways.streams), (one, 1), *((other, ways.streams) for other in others)]
    batch, calls_ms = plan.batch(), {each.name: list[float]() for each, _ in listed}
    streams = {each.name: count for each, count in listed}

    def burst(name: str, call: Call, stack: ExitStack) -> Burst:
        made = Burst(call, streams[name], calls_ms[name])
        stack.callback(made.close)
        return made

    openings = SessionLoads(
        {each.name: partial(_open, plan, each, ways.threads, count, batch) for each, count in listed},
        lambda models: choose_benchmark_inputs(plan.known, models, batch, plan.size, plan.options.seed),
        burst,
    )
    with pinned_to_cores(ways.streams * ways.threads) as cores, closing(openings):
        measured = measure_session_loads(
            openings,
            rounds=plan.rounds,
            warmup_rounds=plan.warmup_rounds,
            seed=plan.options.seed,
            cores=cores,
            more=plan.options.rounds is None,
            tick=lambda done, total: progress("bench", done, total),
        )
        machine = fingerprint(tuple(cores))
    image_ms = {name: measured.samples_ms[name] / (batch * count * CALLS) for name, count in streams.items()}
    shape = openings.calls.shape
    size, options = (shape[1], shape[2]) if shape else None, openings.models[first.name].session.options
    found = _Measurement(batch, size, image_ms, measured, machine, options)
    rows = [
        _row(each, openings.models[each.name], image_ms[each.name], calls_ms[each.name], ways._replace(streams=count))
        for each, count in listed
    ]
    return _artefact(plan, found, rows)


def _open(plan: Plan, each: BenchmarkSubject, threads: int, streams: int, batch: int) -> OpenedModel:
    """Open a model for concurrent inferences; precision and settings apply to the model under test alone."""
    own = each.path == plan.subjects[0].path
    return open_model(
        each.network or each.path,
        plan.device,
        plan.lowering if own else None,
        threads=threads,
        dims=plan.dims(batch),
        streams=streams,
        settings=plan.settings if own else (),
    )


def _row(
    each: BenchmarkSubject, model: OpenedModel, image_ms: NDArray[np.float64], calls_ms: list[float], ways: _Concurrency
) -> Throughput:
    import numpy as np

    p50, p95 = np.percentile(calls_ms, [50, 95])
    return Throughput(
        name=each.name,
        model=each.path.name,
        sha256=sha256_of(each.path),
        engine=model.engine,
        precision=model.precision,
        streams=ways.streams,
        threads=ways.threads,
        images_per_second=round(1000 / float(np.median(image_ms)), 3),
        p50_ms=round(float(p50), 6),
        p95_ms=round(float(p95), 6),
    )


def _artefact(plan: Plan, found: _Measurement, rows: list[Throughput]) -> ThroughputArtefact:
    from repaconv.benchmark.latency_statistics import ratio
    from repaconv.benchmark.measurement_quality import quality

    options, samples = plan.options, found.image_ms
    (first, one), others = rows[:2], rows[2:]
    measured = found.measured

    def times(other: Throughput) -> Ratio:
        both = (first.name, samples[first.name], other.name, samples[other.name])
        return ratio(*both, options.seed, measured.openings)

    scaling, compared = times(one), [times(each) for each in others]
    return ThroughputArtefact(
        made_by=made_by(),
        verdict="passed",
        unverified=plan.known.overridden,
        variant=plan.variant,
        target=plan.device.name,
        batch=found.batch,
        image_size=found.size,
        rounds=measured.rounds,
        session_loads=measured.openings,
        seed=options.seed,
        session=found.session,
        machine=found.machine,
        rows=tuple(rows),
        scaling=scaling,
        ratio=compared[0] if compared else None,
        quality=quality(
            samples,
            measured.watched,
            compared=(compared or [scaling])[0],
            stable=measured.stable,
            openings=measured.openings,
        ),
        note=plan.known.note,
    )
