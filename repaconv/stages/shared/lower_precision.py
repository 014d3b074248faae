"""Convert a graph to FP16, BF16 or INT8: calibrate it on some images, and evaluate it on the others."""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from repaconv.benchmark.cpu_isa_level import int8_saturates
from repaconv.core.errors import Refused, RepaconvError, UsageProblem, did_you_mean, first_line
from repaconv.core.progress import Progress
from repaconv.engines.contract import Array, Feeds, Session
from repaconv.results import Link
from repaconv.sources.verified_onnx_export import BF16_NOTE, runnable
from repaconv.stages.shared.input_selection import Split, fill_batch, scores_output
from repaconv.stages.shared.task_choice import evaluation_of
from repaconv.verification.model_runners import FixedBatch, OnnxValues, load_onnx, named, with_outputs

if TYPE_CHECKING:
    import onnx
    import onnx as onnx_package

    from repaconv.engines.contract import Feeds, Session
    from repaconv.engines.targets import Target
    from repaconv.onnx_export.fp16_and_int8 import Int8
    from repaconv.sources.source_model import SourceModel
    from repaconv.stages.shared.preset_choice import GraphPreset


def require_supported(device: Target, precision: str, quantizer: str) -> None:
    """Refuse precisions that the target does not support, or to which its runtime converts an FP32 graph itself.

    Raises:
        EnvironmentProblem: If the quantizer is not installed.
        UsageProblem: If the precision is not supported.
    """
    if precision not in device.precisions:
        raise UsageProblem(
            f"the target {device.name} does not compute in {precision}.",
            hint=f"It takes {', '.join(device.precisions)}.",
            code="precision",
        )
    if precision == "tf32":
        raise UsageProblem(
            "a file cannot be exported in tf32: the runtime computes a float32 model in it.",
            hint=(
                f"Export in fp32 with repaconv export --target {device.name}, then bench --target {device.name} "
                "--precision tf32."
            ),
            code="precision",
        )
    if precision == "bf16" and device.typed_by == "runtime":
        raise UsageProblem(
            f"{device.runtime} converts a float32 model to bf16 itself.",
            hint=(
                f"Export in fp32 with repaconv export --target {device.name}, then build --target {device.name} "
                "--precision bf16."
            ),
            code="precision",
        )
    if precision == "int8":
        int8_for(device, quantizer)


def int8_for(device: Target, quantizer: str = "") -> Int8:
    """Settings of INT8 for a target, with that quantizer; the default is that of ONNX Runtime.

    Raises:
        EnvironmentProblem: If the quantizer is not installed.
        UsageProblem: If the quantizer is unknown, or not for this target.
    """
    from repaconv.onnx_export.fp16_and_int8 import QUANTIZERS, Int8
    from repaconv.onnx_export.nncf_quantization import require_nncf

    by, symmetric = quantizer or QUANTIZERS[0], "zero-points" in device.forbids
    if by not in QUANTIZERS:
        raise UsageProblem(
            f"there is no quantizer {by!r}.",
            hint=f"{did_you_mean(by, QUANTIZERS)}Known: {', '.join(QUANTIZERS)}.",
            code="quantiser",
        )
    if by != QUANTIZERS[0] and symmetric:
        raise UsageProblem(
            f"{device.name} takes INT8 without zero points, for which onnxruntime is the only quantizer; {by} is for "
            "CPUs.",
            hint="Remove --quantizer.",
            code="quantiser",
        )
    if by.startswith("nncf"):
        require_nncf()
    return Int8(symmetric, int8_saturates(device.architecture), by, activations=device.runtime == "onnxruntime")


def loader_for(architecture: str, precision: str) -> Callable[..., Session]:
    """How a graph for a CPU architecture is run here by ONNX Runtime.

    INT8 graphs for another architecture run as they are written, since this CPU's kernels may saturate where others do
    not.
    """
    elsewhere = precision == "int8" and architecture != platform.machine()
    return partial(load_onnx, as_written=True) if elsewhere else load_onnx


class LowPrecisionGraph(NamedTuple):
    """A graph in a lower precision.

    Attributes:
        model: The graph.
        links: Its comparison with the FP32 graph.
        fp32_nodes: Names of its nodes that stay in FP32.
    """

    model: onnx_package.ModelProto
    links: tuple[Link, ...] = ()
    fp32_nodes: tuple[str, ...] = ()


def lower_and_compare(
    model: onnx_package.ModelProto,
    precision: str,
    given: Split,
    source_model: SourceModel,
    *,
    device: Target,
    form: GraphPreset,
    nodes: Collection[str] = (),
    task: str | None = None,
    progress: Progress,
) -> LowPrecisionGraph:
    """Convert a graph, and compare it with the FP32 graph on images that were not used for calibration.

    Args:
        model: The float32 graph.
        precision: The lower precision.
        given: The images.
        source_model: The source model.
        device: The target.
        form: The INT8 quantizer, and the modules that INT8 keeps in FP32.
        nodes: Names of nodes that stay in FP32 in any precision.
        task: What the network is for, as ``--task`` names it.
        progress: See `Progress`.
    """
    from repaconv.verification.comparison import Comparison
    from repaconv.verification.divergence_location import broken, locate
    from repaconv.verification.tolerances import tolerance

    progress(f"to {precision}", 0, 0)
    calibration = given.calibration_batches()
    typed, kept = to_precision(
        model, precision, calibration, device, quantizer=form.quantizer, modules=form.fp32_modules, nodes=nodes
    )
    scores = scores_output(source_model, given.given, task)
    allowed = tolerance(precision, logits=bool(scores), decides=source_model.decides)
    runs_here, load = runnable(typed, precision), loader_for(device.architecture, precision)
    batch = None if given.whole else given.batch
    before = FixedBatch(load_onnx(model), batch)
    after = FixedBatch(load(runs_here.SerializeToString()), batch)
    progress(f"{precision} against float32", 0, 0)
    evaluation = evaluation_of(source_model, precision, given.given.size, task)
    found = Comparison(f"ONNX, {precision}", allowed, scores, evaluation=evaluation)
    for images in given.test_batches():
        outputs = _outputs_of(after, images.given, precision), before.run(images.given)
        found.add(*outputs, labels=images.labels, whole=given.whole, truths=images.truths)
    links = found.links(precision, "ONNX, float32", BF16_NOTE if precision == "bf16" else "")
    right, wrong = (OnnxValues(*form, by_module=False) for form in ((model, load_onnx), (runs_here, load)))
    # a broken layer is already wrong on a calibration image; on others, values beyond the range would look like one
    first = calibration[0] if calibration else next(given.test_batches()).given
    if batch is None and not given.whole:  # image by image, which takes less memory
        count = len(next(iter(first.values())))
        inferences = [{name: array[place : place + 1] for name, array in first.items()} for place in range(count)]
    else:
        inferences = [{name: fill_batch(array, batch) for name, array in first.items()}]
    where = locate(right, wrong, inferences, allowed=None, decides=source_model.decides)
    return LowPrecisionGraph(typed, tuple(broken(link, where) for link in links), kept)


def _outputs_of(session: FixedBatch, feeds: Feeds, precision: str) -> dict[str, Array]:
    """Run a graph of lower precision.

    Raises:
        Refused: If it does not run.
    """
    try:
        return session.run(feeds)
    except RepaconvError:
        raise
    except Exception as error:  # ONNX Runtime raises anything
        raise Refused(
            f"the graph in {precision} does not run under ONNX Runtime: {first_line(error)}.",
            hint="Keep the node that fails in FP32, with --keep-fp32 NODE.",
            code="export.does-not-run",
        ) from error


def to_precision(
    model: onnx_package.ModelProto,
    precision: str,
    calls: list[Feeds],
    device: Target,
    *,
    quantizer: str = "",
    modules: Collection[str] = (),
    nodes: Collection[str] = (),
) -> tuple[onnx_package.ModelProto, tuple[str, ...]]:
    """Convert a graph with the value ranges of these inputs; returns it and the names of its nodes in FP32.

    Args:
        model: The float32 graph.
        precision: The lower precision.
        calls: Inputs that calibrate it.
        device: The target, some of whose operators may be for FP32 only.
        quantizer: The INT8 quantizer; empty for the default.
        modules: Modules that INT8 keeps in FP32.
        nodes: Nodes that stay in FP32 in any precision.
    """
    from repaconv.onnx_export.bfloat16 import to_bf16
    from repaconv.onnx_export.fp16_and_int8 import nodes_beyond_fp16, nodes_without_fp16, to_fp16, to_int8
    from repaconv.onnx_export.fp32_layer_selection import nodes_of

    no_kernel = device.fp32_operators.get(precision, ())
    nodes = (*nodes, *(node.name for node in model.graph.node if node.op_type in no_kernel))
    if precision == "fp16":
        beyond = nodes_beyond_fp16(model, largest_values(model, load_onnx, calls))
        kept = tuple(dict.fromkeys((*beyond, *nodes_without_fp16(model), *nodes)))
        return to_fp16(model, kept), kept
    if precision == "bf16":
        return to_bf16(model, nodes), tuple(nodes)
    kept = tuple(dict.fromkeys((*nodes_of(model, modules), *nodes)))
    return to_int8(model, calls, kept, int8_for(device, quantizer)), kept


# Value ranges


def largest_values(
    model: onnx.ModelProto, load: Callable[[bytes], Session], calls: Iterable[Feeds]
) -> dict[str, float]:
    """max|value| of each float tensor by name over these inputs; NaN if it had a NaN.

    The graph computes the maxima itself: its values as outputs would need much memory, or many sessions.
    """
    stored = {weight.name for weight in model.graph.initializer}
    names = [value.name for value in model.graph.input if value.name not in stored]
    session = load(_with_largest_values(model).SerializeToString())
    found: dict[str, float] = {}
    for call in calls:
        feeds = named(names, call)
        for name, given in {**feeds, **session.run(feeds)}.items():
            if isinstance(given, list):  # a sequence
                continue
            value = np.asarray(given)
            if not np.issubdtype(value.dtype, np.floating):
                continue
            if name.startswith(LARGEST):
                largest = value  # -inf of no values
            elif name.startswith(SUM):
                largest = np.where(np.isnan(value), value, 0.0)
            else:
                largest = np.abs(value).max(initial=0.0)
            name = name.removeprefix(LARGEST).removeprefix(SUM)
            found[name] = float(np.maximum(found.get(name, 0.0), largest))
    return found


LARGEST, SUM = "repaconv.largest:", "repaconv.sum:"
"""Prefixes of the outputs of `_with_largest_values`."""


def _with_largest_values(model: onnx.ModelProto) -> onnx.ModelProto:
    """Copy a graph, with max|value| and sum|value| of its float32 values as outputs, and its other float values.

    ONNX Runtime's maxima skip NaN, its sums do not.
    """
    import onnx

    from repaconv.graph.graph_without_weights import inferred_element_types

    kinds, floats = inferred_element_types(model), onnx.TensorProto
    values = [name for node in model.graph.node for name in node.output if name]
    unknown = (None, floats.FLOAT16, floats.BFLOAT16, floats.DOUBLE)
    shown = with_outputs(model, [name for name in values if kinds.get(name) in unknown])
    outputs = [output for output in shown.graph.output if kinds.get(output.name) in unknown]
    for name in values:
        if kinds.get(name) == floats.FLOAT:
            absolute = f"repaconv.absolute:{name}"
            shown.graph.node.append(onnx.helper.make_node("Abs", [name], [absolute]))
            for kind, prefix in (("ReduceMax", LARGEST), ("ReduceSum", SUM)):
                shown.graph.node.append(onnx.helper.make_node(kind, [absolute], [f"{prefix}{name}"], keepdims=0))
                outputs.append(onnx.ValueInfoProto(name=f"{prefix}{name}"))
    del shown.graph.output[:]
    shown.graph.output.extend(outputs)
    return shown
