"""`estimate` (`bench --estimate`): a graph's latency on a target, calculated from the target's peak figures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from repaconv.core import plugins, run_folder
from repaconv.core.errors import Refused, UsageProblem, first_line, root_cause
from repaconv.core.file_replacement import replace_artifact, require_replaceable
from repaconv.core.files import read_artefact, sha256_of
from repaconv.core.progress import Progress, silent
from repaconv.graph.onnx_files import dims_of, is_graph, read_graph, require_inside
from repaconv.results import BenchArtefact, BundleArtefact, CollectArtefact, EstimateArtefact, ImageSize, Limits
from repaconv.stages.bench.benchmark_inputs import image_shape
from repaconv.stages.bench.benchmark_subjects import choose_subjects, fixed_batch_of
from repaconv.stages.bench.options import EstimateOptions
from repaconv.stages.shared.engine_files import require_own_precision, runtime_lowers, takes_networks
from repaconv.stages.shared.exports_of_run import export_for
from repaconv.stages.shared.model_opening import precision_of
from repaconv.stages.shared.option_dataclasses import as_image_size, by_name
from repaconv.stages.shared.result_provenance import made_by, with_files
from repaconv.stages.shared.target_lookup import load_target
from repaconv.stages.shared.unavailable_targets import why_not_here
from repaconv.verification.onnx_model_loading import require_input_shapes

if TYPE_CHECKING:
    import onnx

    from repaconv.engines.contract import Engine
    from repaconv.engines.targets import Target
    from repaconv.graph.compute_costs import Work


# Peak figures of the target


def limits_of(device: Target, precision: str, threads: int, *, lowered: bool) -> Limits:
    """Peak figures of a target: those that it states, else those measured on this machine if it is the target.

    Args:
        device: The target.
        precision: Precision of the matrix products.
        threads: Threads per inference.
        lowered: Whether the runtime itself computes a float32 graph in that precision.

    Raises:
        UsageProblem: If the target states none and is not this machine.
    """
    from repaconv.benchmark.interleaved_protocol import pinned_to_cores
    from repaconv.benchmark.latency_estimate import measured_limits

    if device.limits is not None:
        return device.limits
    engine: Engine = plugins.load(plugins.ENGINES, device.runtime)
    if engine.device != "cpu" or why_not_here(device):
        raise UsageProblem(
            f"{device.name} ({device.about}) covers many devices, so the peak throughput of yours is unknown.",
            hint="\n  ".join(
                [
                    "Describe yours in a file, with the figures of its data sheet (dense), and give --target "
                    "./mine.toml:",
                    *_target_file_lines(device),
                ]
            ),
            code="estimate.limits",
        )
    in_memory = takes_networks(device)  # the peak is measured with a graph: ONNX Runtime measures it, in float32
    engine = plugins.load(plugins.ENGINES, "onnxruntime") if in_memory else engine
    with pinned_to_cores(threads):
        return measured_limits(engine, "fp32" if in_memory else precision, threads, typed_here=not lowered)


def _target_file_lines(device: Target) -> list[str]:
    """Lines of a target file for the user's own device, whose figures the user fills in."""
    peaks = ", ".join(f"{precision} = ..." for precision in device.precisions)
    return [
        f'extends = "{device.name}"',
        "[limits]",
        'device = "which one, at which clock"',
        f"peak_tflops = {{ {peaks} }}",
        "bandwidth_gb_s = ...",
        "launch_us = ...",
        'source = ["its data sheet"]',
    ]


# The estimate


def estimate_by(
    options: EstimateOptions, model: str | Path | None = None, *, progress: Progress = silent
) -> EstimateArtefact:
    """Estimate the latency of a graph on a target from the target's peak figures; nothing of the graph is run.

    The figures come from the target's file. If it has none and the target is this machine, they are measured here.

    Args:
        model: A run folder or an .onnx file; the newest run when None.
        options: The options.
        progress: A function that is called with each step's name, the units done and their total.

    Raises:
        GateFailed: If an earlier check failed and ``allow_unverified`` is false.
        Refused: If there is no such file, or it is no ONNX graph.
        UsageProblem: If there is no such graph, or the target's peak figures are unknown.
    """
    plan = _plan(options, model)
    progress("estimate", 0, 0)
    every = _node_work(plan)
    progress("limits", 0, 0)
    limits = limits_of(plan.device, plan.precision, plan.threads, lowered=plan.lowered is not None)
    artefact = _artefact(plan, options, limits, every)
    if plan.place:
        replace_artifact(plan.place, artefact)
    return with_files(artefact, [plan.path], [plan.place] if plan.place else [])


estimate = by_name(estimate_by, EstimateOptions)


class _Plan(NamedTuple):
    """The resolved options for one graph; ``images`` is [B, C, H, W], ``shape`` the same in the layout of the graph's
    input.
    """

    device: Target
    run: run_folder.Run | None
    path: Path
    sha256: str
    graph: onnx.ModelProto
    precision: str
    lowered: str | None
    variant: str
    overridden: tuple[str, ...]
    images: tuple[int, int, int, int]
    shape: tuple[int, ...]
    threads: int
    note: str
    place: Path | None


class _Graph(NamedTuple):
    """The graph that would run, and what is known about it."""

    path: Path
    precision: str
    size: ImageSize | None
    variant: str = ""
    overridden: tuple[str, ...] = ()
    note: str = ""


def _plan(options: EstimateOptions, model: str | Path | None) -> _Plan:
    """Check everything that may be refused, except for missing peak figures."""
    device = load_target(options.target)
    threads = options.threads or device.bench.threads
    run = None if model is not None and Path(model).is_file() else run_folder.find_run(Path(model) if model else None)
    taken = _graph_of_run(run, device, options) if run else _bare_graph(Path(model or ""), options)
    place = Path(options.out) if options.out else run.bench_json(f"{taken.variant}.estimate") if run else None
    if place:
        require_replaceable(place, "estimate")
    graph = read_graph(taken.path)
    require_input_shapes(taken.path, graph)
    batch = options.batch or fixed_batch_of(graph) or device.bench.batch
    images, shape = _image_shapes(graph, batch, as_image_size(options.image_size) or taken.size, taken.path)
    return _Plan(
        device=device,
        run=run,
        path=taken.path,
        sha256=sha256_of(taken.path),
        graph=graph,
        precision=taken.precision,
        lowered=options.precision if run and runtime_lowers(device, options.precision) else None,
        variant=taken.variant,
        overridden=taken.overridden,
        images=images,
        shape=shape,
        threads=threads,
        note=taken.note,
        place=place,
    )


def _graph_of_run(run: run_folder.Run, device: Target, options: EstimateOptions) -> _Graph:
    """The run's export for the target."""
    folded = run_folder.fold_of(run)
    typed = "fp32" if runtime_lowers(device, options.precision) else options.precision
    size = as_image_size(options.image_size)
    exported, path, variant = export_for(run, folded, options.target, typed, batch=options.batch, image_size=size)
    overridden = run_folder.require_passed_checks(run, folded, (exported, path), unverified=options.allow_unverified)
    usual = folded.image_size if exported.image_size == "dynamic" else exported.image_size
    name = variant.model_copy(update={"precision": options.precision}).full
    return _Graph(run_folder.onnx_model_of(run, exported), options.precision, usual, name, overridden)


def _bare_graph(path: Path, options: EstimateOptions) -> _Graph:
    """Open a graph that belongs to no run.

    Raises:
        GateFailed: If an earlier check failed and ``allow_unverified`` is false.
        Refused: If there is no such file, or it is no ONNX graph.
        UsageProblem: If a precision is asked for: that of a file is fixed.
    """
    if not is_graph(path):
        raise Refused(
            f"{path} is not an ONNX model.", hint="Give a run folder or an .onnx file.", code="estimate.graph"
        )
    require_own_precision(path, options.precision)
    require_inside(path)
    size = as_image_size(options.image_size)
    known = choose_subjects(None, path, None, options.allow_unverified, silent, target=options.target, image_size=size)
    return _Graph(path, precision_of(path), known.size, overridden=known.overridden, note=known.note)


def _image_shapes(
    graph: onnx.ModelProto, batch: int, size: ImageSize | None, path: Path
) -> tuple[tuple[int, int, int, int], tuple[int, ...]]:
    """[B, C, H, W] of the images, and the same in the layout of the graph's input.

    Raises:
        Refused: If the graph has more than one input.
        UsageProblem: If it takes no images, or images of another fixed size.
    """
    from onnx import TensorProto

    from repaconv.graph.compute_costs import runtime_inputs

    inputs = runtime_inputs(graph)
    if len(inputs) != 1:
        raise Refused(
            f"{path} takes {len(inputs)} inputs: {', '.join(entry.name for entry in inputs)}.",
            hint="The estimate is for models with one input, an image.",
            code="engine.inputs",
        )
    kind = inputs[0].type.tensor_type
    has = dims_of(inputs[0])
    pixels = kind.elem_type == TensorProto.UINT8 and len(has) == 4
    channels, height, width = image_shape((has[0], has[3], *has[1:3]) if pixels else has, batch, size, path)
    images = (batch, channels, height, width)
    return images, (batch, height, width, channels) if pixels else images


def _artefact(plan: _Plan, options: EstimateOptions, limits: Limits, every: list[Work]) -> EstimateArtefact:
    """Estimate each node by the peak figures, and sum up."""
    from repaconv.benchmark.latency_estimate import estimated, unknown

    nodes, measured = estimated(every, limits), _Measured.of(plan)
    return EstimateArtefact(
        made_by=made_by(),
        verdict="not verified",
        unverified=plan.overridden,
        options=("--estimate", *options.words()),
        variant=plan.variant,
        target=plan.device.name,
        runtime=f"{plan.device.runtime} {plan.device.runtime_version}".strip(),
        precision=plan.precision,
        batch=plan.images[0],
        image_size=plan.images[2:],
        threads=plan.threads,
        model=plan.path.name,
        sha256=plan.sha256,
        limits=limits,
        low_ms=sum(node.low_ms for node in nodes),
        high_ms=sum(node.high_ms for node in nodes),
        nodes=nodes,
        measured_ms=measured.ms,
        measurement=measured.description,
        note="; ".join(part for part in (plan.note, unknown(every)) if part),
    )


def _node_work(plan: _Plan) -> list[Work]:
    """The work of each node: operations and bytes.

    Raises:
        Refused: If the graph is not valid ONNX, or cannot run on images of this size.
    """
    from repaconv.graph.compute_costs import fix_shape, node_works
    from repaconv.graph.invalid_graphs import misfit, uncomputed_input
    from repaconv.graph.models_in_onnx_ir import read

    try:
        fix_shape(plan.graph, plan.shape)
        if why := uncomputed_input(plan.graph):
            raise ValueError(why)
        wrong = misfit(plan.graph)
        works = list(node_works(read(plan.graph), plan.lowered))
    except Exception as error:  # an arbitrary ONNX file raises all kinds of errors
        raise Refused(
            f"{plan.path} is not valid ONNX: {first_line(root_cause(error))}.",
            hint="Export it again. `repaconv inspect` shows its contents.",
            code="onnx.invalid",
        ) from error
    if wrong:
        raise Refused(
            f"{plan.path} cannot run on {'x'.join(map(str, plan.shape))}: {wrong}.",
            hint="Give the size that it takes with --image-size and --batch, or export it again.",
            code="estimate.size",
        )
    return works


class _Measured(NamedTuple):
    """A measured latency of the same graph, target, batch and image size, and a description of the measurement."""

    ms: float | None = None
    description: str = ""

    @classmethod
    def of(cls, plan: _Plan) -> _Measured:
        """Find such a measurement in the run: by `bench`, or from a board."""
        if plan.run is None:
            return cls()
        place, board = plan.run.bench_json(plan.variant), plan.run.collected_json(plan.variant)
        if place.is_file():
            done = read_artefact(place, BenchArtefact)
            first = done.latencies[0]
            alike = (first.sha256, done.batch, done.image_size, done.threads)
            if alike == (plan.sha256, plan.images[0], plan.images[2:], plan.threads):
                return cls(first.p50_ms, f"by bench on {done.machine.get('cpu')}, {done.quality.verdict}")
        if board.is_file():
            sent = read_artefact(plan.run.bundle_json(plan.variant), BundleArtefact)
            came = read_artefact(board, CollectArtefact)
            if (sent.onnx_sha256, sent.bundle_sha256, came.batch) == (plan.sha256, came.bundle_sha256, plan.images[0]):
                return cls(came.latency.p50_ms, f"on the board by {came.runtime}")
        return cls()
