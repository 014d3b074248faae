"""`throughput` (`bench --objective throughput`): images/s of a model with several inferences at once."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from repaconv.core import run_folder
from repaconv.core.errors import UsageProblem
from repaconv.core.file_replacement import replace_artifact, require_replaceable
from repaconv.core.files import lock_folder, sha256_of
from repaconv.core.progress import Progress, silent
from repaconv.core.thread_pool import usable_cpus
from repaconv.results import Throughput, ThroughputArtefact
from repaconv.stages.bench.latency_measurement import MeasuredOutputs, Plan
from repaconv.stages.bench.options import BenchOptions, ThroughputOptions
from repaconv.stages.bench.stage import is_single_file, plan_bench, resolve_bench_preset
from repaconv.stages.shared.option_dataclasses import by_name
from repaconv.stages.shared.result_provenance import made_by, with_files

if TYPE_CHECKING:
    from repaconv.benchmark.interleaved_protocol import Measurement


def throughput_by(
    options: ThroughputOptions, model: str | Path | None = None, *, progress: Progress = silent
) -> ThroughputArtefact:
    """Measure the throughput in images/s with several streams, with one stream, and of the reference, in turn.

    Args:
        model: A run folder, an .onnx file or an engine that `build` made; the newest run when None.
        options: The options.
        progress: A function that is called with each step's name, the units done and their total.

    Raises:
        GateFailed: If an earlier check failed and ``allow_unverified`` is false.
        EnvironmentProblem: If the target is not this machine, or its runtime runs one inference at a time.
        Refused: If the run or a file is missing, or the model was changed since its export.
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


def _plan(options: ThroughputOptions, model: str | Path | None, progress: Progress) -> tuple[Plan, _Concurrency]:
    """Resolve the options; streams and threads are those of a tuned preset, else one stream per core."""
    bench = BenchOptions(**{name: value for name, value in vars(options).items() if name not in ("streams", "out")})
    tuned = resolve_bench_preset(bench, model).deployment
    cores = usable_cpus()
    threads = options.threads or (tuned.threads if tuned else 1)
    streams = options.streams or (tuned.streams if tuned and tuned.streams > 1 else max(1, cores // threads))
    if streams * threads > cores:
        raise UsageProblem(
            f"{streams} streams of {threads} threads are more than the {cores} CPUs that this process may use.",
            hint="Reduce --streams or --threads.",
            code="throughput.cores",
        )
    return plan_bench(bench, model, None, progress), _Concurrency(streams, threads)


def _measure(plan: Plan, ways: _Concurrency, progress: Progress) -> ThroughputArtefact:
    """Measure in rounds: the model with all streams, the model with one stream, and the reference with all streams."""
    from repaconv.benchmark.interleaved_protocol import Entrant, Protocol, measure

    first, *others = plan.subjects
    listed = [(first.name, first, ways.streams), (f"{first.name}, one stream", first, 1)]
    listed += [(other.name, other, ways.streams) for other in others]
    batch, threads = plan.batch(), ways.threads
    dims = plan.dims(batch)
    found = measure(
        {
            name: Entrant(
                partial(plan.opened, each, dims, threads=threads, streams=streams),
                lambda model, on: on.call(model),
                streams=streams,
                images=batch,
            )
            for name, each, streams in listed
        },
        Protocol(
            rounds=plan.rounds,
            warmup_rounds=plan.warmup_rounds,
            seed=plan.options.seed,
            cores=ways.streams * threads,
            more=plan.options.rounds is None,
        ),
        inputs=partial(MeasuredOutputs.of, plan, batch),
        tick=lambda done, total: progress("bench", done, total),
    )
    rows = [_row(name, each.path, found, ways._replace(streams=streams)) for name, each, streams in listed]
    scaling, *compared = (found.ratio(first.name, row.name) for row in rows[1:])
    shape = found.inputs.calls.shape
    return ThroughputArtefact(
        made_by=made_by(),
        verdict="passed",
        unverified=plan.known.overridden,
        variant=plan.variant,
        target=plan.device.name,
        batch=batch,
        image_size=(shape[1], shape[2]) if shape else None,
        rounds=found.rounds,
        session_loads=found.session_loads,
        seed=found.seed,
        session=found.loaded[first.name].session.options,
        machine=found.machine,
        rows=tuple(rows),
        scaling=scaling,
        ratio=compared[0] if compared else None,
        quality=found.quality((compared or [scaling])[0]),
        note=plan.known.note,
    )


def _row(name: str, path: Path, found: Measurement, ways: _Concurrency) -> Throughput:
    import numpy as np

    model, image_ms = found.loaded[name], found.samples_ms[name]
    p50, p95 = np.percentile(found.inference_ms[name], [50, 95])
    return Throughput(
        name=name,
        model=path.name,
        sha256=sha256_of(path),
        engine=model.engine,
        precision=model.precision,
        streams=ways.streams,
        threads=ways.threads,
        images_per_second=round(1000 / float(np.median(image_ms)), 3),
        p50_ms=round(float(p50), 6),
        p95_ms=round(float(p95), 6),
    )
