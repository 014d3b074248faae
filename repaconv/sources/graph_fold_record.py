"""Measure a folded ONNX graph for its record: batch, image size, tolerances, cost before and after, changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from repaconv.core.files import sha256_of_bytes
from repaconv.graph.shape_inference import WORD
from repaconv.onnx_export.torch_exporter import operators_of
from repaconv.results import Change, ImageSize, Link, Sizes
from repaconv.results.fold import Batch
from repaconv.sources.graph_fold import is_foldable
from repaconv.verification.comparison import shapes_of
from repaconv.verification.float64_evaluator_check import differing_operators, not_compared
from repaconv.verification.folded_graph_verification import depth_of, unrunnable, usual_rtols
from repaconv.verification.graph_with_cached_outputs import Evaluated
from repaconv.verification.onnx_model_loading import inputs_of
from repaconv.verification.tolerances import LARGEST_RTOL, depth_reason, verdict_of

if TYPE_CHECKING:
    import onnx

    from repaconv.engines.contract import Feeds, Port
    from repaconv.verification.probe_inputs import Probes


# Measured properties: input sizes, batch, float32 rounding error

ROUNDING_SAFETY = 4.0
"""Safety factor on the measured float32 rounding error: other inputs and summation orders may round more."""


LARGEST_RELIABLE_ROUNDING = 1e-2
"""Largest float32 rounding error (relative) that measures anything. Above it, inputs with other gains are tried. If the
error stays above it, no digit of the float32 outputs is right, and it is no ground for larger tolerances."""


COMPARED_CALLS = 4
"""Number of calls whose output shapes must agree where the graph itself does not fix them."""


IMAGE_CHANNELS = (1, 3, 4)
"""Channel counts of images, used to tell [B, C, H, W] from [B, H, W, C]."""


class GraphProperties(NamedTuple):
    """The measured properties of a graph, as fields of `repaconv.results.GraphFold`.

    ``widths`` is the number of columns of each output of shape [images, numbers], by name.
    """

    image_size: ImageSize | None
    any_image_size: bool
    batch: Batch
    whole: bool
    sizes: Sizes
    tolerances: dict[str, float]
    tolerance_reasons: dict[str, str]
    float64: str
    structure: str
    widths: dict[str, int]


def measured_properties(source: Path, given: Evaluated, folded: Evaluated) -> GraphProperties:
    """Measure a graph's properties by running it on seeded inputs, and in float64 to measure the rounding error.

    Args:
        source: The graph's file, for messages.
        given: The original graph.
        folded: The folded graph.

    Raises:
        Refused: The graph does not run.
    """
    from repaconv.verification.probe_inputs import Unrunnable

    given, folded = given.single, folded.single
    model = given.model
    try:
        found = given.probes
    except Unrunnable as error:
        raise unrunnable(source, model, error) from error
    call = found.call(model, 0)
    usual = next((probe for probe in found.plain if shapes_of(probe) == shapes_of(call)), call)
    calls = {found.gain: usual} | found.calls_of_other_gains(model)
    evaluator, rounded, gain, doubt = _float64_rounding_error(given, folded, calls)
    size, any_size, batch, names = _image_properties(model, found)
    if batch == "dynamic" and given.sample is None and found.usual[names["batch"]] == found.other[names["batch"]]:
        batch = found.usual[names["batch"]]  # no other runs, whatever the graph declares
    ran = [(call, given.run(call)) for call in (usual, found.plain[0])]
    rows = _has_rows_per_image(model, batch, ran)
    if rows and _has_value_dependent_shapes(given):
        others = (found.call(model, seed) for seed in range(1, COMPARED_CALLS))
        rows = len({shapes_of(given.run(call)) for call in (usual, *others)}) == 1
    size = None if not rows and batch not in ("dynamic", 1) else size
    if isinstance(batch, int) and batch > 1 and not any(_row_count(out) == batch for out in given.run(usual).values()):
        batch = 1  # no output has this first axis, so it is not a batch: e.g. the channels of one image [3, H, W]
    allowed, why = _tolerances(model, rounded, "" if evaluator else doubt or "the graph does not run in float64")
    return GraphProperties(
        image_size=size,
        any_image_size=any_size,
        batch=batch,
        whole=size is None or not rows,
        sizes=Sizes(
            usual=found.usual,
            other=found.other,
            gain=gain,
            below=found.below,
            held=dict(found.held),
            unit=found.unit,
            **names,
        ),
        tolerances=allowed,
        tolerance_reasons=why,
        float64=evaluator,
        structure=structure_of(folded.model),
        widths=_output_widths(ran) if rows and size is not None else {},
    )


def _float64_rounding_error(
    given: Evaluated, folded: Evaluated, calls: Mapping[float, Feeds]
) -> tuple[str, float, float, str]:
    """Compare float32 with float64: (float64 evaluator or "", relative rounding error, gain of the inputs, doubt).

    The first gain is used if its error is at most `LARGEST_RELIABLE_ROUNDING`, else the gain with the smallest error.
    The error is 0, and the usual tolerances apply, if it does not measure rounding: if it is above
    `LARGEST_RELIABLE_ROUNDING` for each gain, or if the graph makes discrete decisions, of which one may have changed.
    An error that would raise the tolerances must be rounding: where float64 is another function than ONNX Runtime's,
    which the doubt says, it is not used.
    """
    from repaconv.graph.discrete_outputs import has_discrete_decision

    usual, limit = next(iter(calls)), usual_rtols(given.model)["onnx"]
    errors: dict[float, float] = {}
    for gain, call in calls.items():
        if errors.get(usual, inf) <= LARGEST_RELIABLE_ROUNDING:
            break
        try:
            right = given.truth(call)
            if has_discrete_decision(given.model):
                return given.float64.evaluator, 0.0, usual, ""
            errors[gain] = _error_without_fusions(given, folded, call, right, limit)
        except Exception:  # raised by either runtime: an operator without float64, or values that it rejects
            continue
    best = min(errors, key=lambda gain: errors[gain], default=usual)
    for gain in dict.fromkeys((usual, best)):
        if ROUNDING_SAFETY * errors.get(gain, 0.0) > limit and (doubt := _doubt(given, calls[gain])):
            return "", 0.0, usual, doubt
    if errors.get(best, inf) == inf:
        return "", 0.0, usual, ""
    error, gain = (errors[best], best) if errors[best] <= LARGEST_RELIABLE_ROUNDING else (0.0, usual)
    return given.float64.evaluator, error, gain, ""


def _error_without_fusions(
    given: Evaluated, folded: Evaluated, call: Feeds, right: Mapping[str, Any], limit: float
) -> float:
    """The rounding error of both graphs; if it would raise the tolerance and the runtime's fusions are its cause, the
    error without them.

    Args:
        given: The original graph.
        folded: The folded graph; the same object if nothing was folded.
        call: The inputs.
        right: The original's outputs in float64.
        limit: The usual relative tolerance.
    """
    error = _rounding_error(right, given.run(call), folded.run(call))
    if ROUNDING_SAFETY * error <= limit:
        return error
    written = 0.0
    for graph in dict.fromkeys((given, folded)):
        if error > ROUNDING_SAFETY * written:
            written = max(written, _rounding_error(right, graph.as_written(call)))
    return written if error > ROUNDING_SAFETY * written else error


def _doubt(given: Evaluated, call: Feeds) -> str:
    try:
        return differing_operators(given.model, given.float64, call)
    except Exception as error:  # of either runtime, of many classes
        return not_compared(error)


def _rounding_error(right: Mapping[str, Any], *others: Mapping[str, Any]) -> float:
    """The largest difference, relative to the largest value of each output; infinite if no output is finite."""
    from repaconv.results import Tolerance
    from repaconv.verification.comparison import Comparison

    compared = Comparison("float32", Tolerance(kind="exact", rtol=0.0))
    for found in others:
        compared.add(found, right, whole=True)
    errors = [link.metrics.max_rel_error for link in compared.links("onnx", "float64") if link.metrics]
    return max(filter(isfinite, errors), default=inf if errors else 0.0)


def _tolerances(model: onnx.ModelProto, rounded: float, undoubled: str) -> tuple[dict[str, float], dict[str, str]]:
    """Return the tolerances by link and the reasons for those that differ from the usual ones.

    They are larger where rounding alone exceeds the usual ones. Where float64 is not used (``undoubled`` says why), a
    fold gets the tolerance of float32.
    """
    usual = usual_rtols(model)
    usual = {**usual, "fold": usual["onnx"]} if undoubled else usual
    worse = max(1.0, ROUNDING_SAFETY * rounded / usual["onnx"])
    reasons = [depth_reason(depth_of(model))]
    if worse > 1:
        reasons += [
            f"FP32 rounding alone changes the outputs of this network by {rounded:.0e}, so its limits are "
            f"{worse:.2g} times the usual ones"
        ]
    why = {link: [*reasons] for link in usual}
    if undoubled:
        why["fold"].insert(0, f"compared in FP32, since {undoubled}")
    sentences = {link: "; ".join(filter(None, reasons)) for link, reasons in why.items()}
    return {link: min(worse * value, LARGEST_RTOL) for link, value in usual.items()}, {
        link: reason for link, reason in sentences.items() if reason
    }


def _image_properties(model: onnx.ModelProto, found: Probes) -> tuple[ImageSize | None, bool, Batch, dict[str, Any]]:
    """Return (image size or None, whether the size is dynamic, batch, names of the dynamic dimensions).

    The image size is None unless the graph has one input, of images.
    """
    ports = inputs_of(model)
    first = ports[0]
    names = [dim if isinstance(dim, str) else f"{first.name}[{axis}]" for axis, dim in enumerate(first.shape)]
    free = bool(first.shape) and not isinstance(first.shape[0], int) and found.other.get(names[0], 1) > 1
    batch: Batch = "dynamic" if free else first.shape[0] if first.shape and isinstance(first.shape[0], int) else 1
    dimensions = {"batch": names[0] if first.shape and not isinstance(first.shape[0], int) else ""}
    if image_channels(ports) is None:
        return None, False, batch, dimensions
    sides = first.shape[2:]
    fixed = isinstance(sides[0], int)
    height, width = (
        side if isinstance(side, int) else found.usual[n] for side, n in zip(sides, names[2:], strict=True)
    )
    return (height, width), not fixed, batch, {**dimensions, "sides": () if fixed else tuple(names[2:])}


def image_channels(ports: Sequence[Port]) -> int | None:
    """Channels of the images that a graph with these inputs takes, None if it does not take images alone.

    Images have the layout [B, C, H, W], and both sides are fixed or neither is.
    """
    first = ports[0]
    if len(ports) > 1 or len(first.shape) != 4 or first.dtype not in ("float32", "float16", "float64"):
        return None
    _, channels, height, width = first.shape
    if not isinstance(channels, int) or isinstance(height, int) != isinstance(width, int):
        return None
    channels_last = channels not in IMAGE_CHANNELS and width in IMAGE_CHANNELS
    return None if channels_last else channels


def _has_rows_per_image(model: onnx.ModelProto, batch: Batch, calls: Sequence[tuple[Feeds, Feeds]]) -> bool:
    """Whether every output has one row per image: by its declared shape if the batch is fixed, else as measured."""
    if isinstance(batch, int):
        dims = [value.type.tensor_type.shape.dim for value in model.graph.output]
        return all(len(dim) > 1 and dim[0].dim_value == batch for dim in dims)
    rows = [(len(next(iter(given.values()))), found.values()) for given, found in calls]
    return all(isinstance(out, np.ndarray) and out.ndim > 1 and len(out) == n for n, outs in rows for out in outs)


def _row_count(out: Any) -> int | None:
    return len(out) if isinstance(out, np.ndarray) and out.ndim else None


def _has_value_dependent_shapes(given: Evaluated) -> bool:
    """Whether the shape of some output depends on input values, as with NonZero, and not on input shapes alone."""
    from repaconv.graph.symbolic_shapes import is_dynamic, sizes

    graph = given.settled.graph
    known = {name for value in graph.inputs for size in sizes(value) or () for name in WORD.findall(str(size))}
    shapes = [sizes(value) for value in graph.outputs]
    return any(
        shape is None or any(is_dynamic(size) and not known.issuperset(WORD.findall(str(size))) for size in shape)
        for shape in shapes
    )


def _output_widths(calls: Sequence[tuple[Feeds, Feeds]]) -> dict[str, int]:
    """The number of columns of each floating-point output [images, numbers], if it is the same in every call."""
    found = []
    for _, outputs in calls:
        arrays = {name: out for name, out in outputs.items() if isinstance(out, np.ndarray) and out.dtype.kind == "f"}
        found.append({name: out.shape[1] for name, out in arrays.items() if out.ndim == 2})
    return {name: width for name, width in found[0].items() if all(each.get(name) == width for each in found)}


def structure_of(model: onnx.ModelProto) -> str:
    """Hash the graph without the values of its weight tensors (vectors and scalars are included)."""
    import onnx

    from repaconv.graph.graph_without_weights import with_initializers

    kept = (
        onnx.TensorProto(name=weight.name, data_type=weight.data_type, dims=weight.dims)
        if len(weight.dims) > 1
        else weight
        for weight in model.graph.initializer
    )
    bare = with_initializers(model, kept)
    for node in bare.graph.node:
        node.ClearField("doc_string")
    return sha256_of_bytes(bare.SerializeToString(deterministic=True))


# The record


def recorded(
    before: Evaluated,
    after: Evaluated,
    changes: Sequence[Change],
    links: Sequence[Link],
    taken: GraphProperties,
    left: Sequence[str],
) -> dict[str, Any]:
    """Return the fields of `repaconv.results.GraphFold`, except the origin and the options.

    Args:
        before: The original graph.
        after: The folded graph.
        changes: What the rewrites changed.
        links: The comparisons of the two graphs.
        taken: The measured properties.
        left: Descriptions of what was not folded.
    """
    from repaconv.rewrites.fold.unfolded_linear_operators import unfolded_operators

    smaller = after.settled
    usual = taken.sizes.usual
    multiplied = before.macs(usual), after.macs(usual)
    return {
        "verdict": verdict_of(links),
        "applied": tuple(dict.fromkeys(change.rewrite for change in changes)),
        "image_channels": image_channels(inputs_of(before.model)) if taken.image_size else None,
        "any_image_size": taken.any_image_size,
        "batch": taken.batch,
        "whole": taken.whole,
        "tolerances": taken.tolerances,
        "tolerance_reasons": taken.tolerance_reasons,
        "structure": taken.structure,
        "float64": taken.float64,
        "sizes": taken.sizes,
        "parameters": (before.parameters, after.parameters),
        "macs": None if None in multiplied else multiplied,
        "nodes": (len(before.model.graph.node), len(after.model.graph.node)),
        "operators": operators_of(after.model),
        "changes": tuple(changes),
        "not_folded": (*left, *(unfolded_operators(smaller) if is_foldable(after.model) else ())),
        "links": tuple(links),
    }
