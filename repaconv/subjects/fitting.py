"""A graph of any origin as an export wants it: its opset, its batch, the size of its images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from repaconv.artefacts import GraphFold
from repaconv.errors import UsageProblem
from repaconv.exporters.lower import lower
from repaconv.onnxfile import opset_of
from repaconv.subjects.given import inputs_of

if TYPE_CHECKING:
    import onnx

    from repaconv.subjects.subject import GraphSpec


def fitted(model: onnx.ModelProto, folded: GraphFold, spec: GraphSpec) -> tuple[onnx.ModelProto, str]:
    """The same graph as wanted, and what of that was not possible.

    Free sizes of images are called ``batch``, ``height`` and ``width``, as in all our exports; those of other inputs
    keep their names.

    Args:
        model: It is left as it is.
        folded: What was found of it.
        spec: How it is written.

    Raises:
        UsageProblem: If it takes another batch.
        Refused: If an operator has no older form.
    """
    if spec.batch is not None and folded.batch not in ("dynamic", spec.batch):
        raise UsageProblem(
            f"this graph has a fixed batch size of {folded.batch}; {spec.batch} was requested.",
            hint="Remove --batch: the model file has a fixed batch size.",
            code="export.batch",
        )
    raised, note = _in_opset(model, spec)
    return _sized(raised, _wanted(folded, spec)), note


def _in_opset(model: onnx.ModelProto, spec: GraphSpec) -> tuple[onnx.ModelProto, str]:
    """By onnx's own converter upwards; as it is where that does not know the way."""
    import onnx

    has = opset_of(model)
    if has < spec.opset:
        try:
            model = onnx.version_converter.convert_version(model, spec.opset)
        except Exception as error:  # native code over a foreign graph
            return model, f"stays in opset {has}: {str(error).strip().splitlines()[0]}"
    if has > (spec.newest or spec.opset) or {node.op_type for node in model.graph.node} & set(spec.lacks):
        model = lower(model, min(opset_of(model), spec.newest or spec.opset), spec.lacks)
    return model, ""


def _wanted(folded: GraphFold, spec: GraphSpec) -> dict[str, int | str]:
    """Free sizes by their present name, and what they become."""
    found: dict[str, int | str] = {}
    if folded.sizes.batch:
        found[folded.sizes.batch] = spec.batch or ("batch" if folded.image_size else folded.sizes.batch)
    for name, side, number in zip(folded.sizes.sides, ("height", "width"), spec.size or (0, 0), strict=False):
        found[name] = side if spec.free_size or not number else number
    return found


def _sized(model: onnx.ModelProto, wanted: Mapping[str, int | str]) -> onnx.ModelProto:
    """The graph with these free sizes; inner shapes are inferred anew."""
    import onnx

    if not wanted:
        return model
    other = onnx.ModelProto()
    other.CopyFrom(model)
    del other.graph.value_info[:]
    names, fixed = {port.name for port in inputs_of(model)}, any(isinstance(size, int) for size in wanted.values())
    for value in (*other.graph.input, *other.graph.output):
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            known = dim.dim_param or (f"{value.name}[{axis}]" if value.name in names and not dim.dim_value else "")
            new = wanted.get(known)
            if isinstance(new, int):
                dim.dim_value = new
            elif new is not None:
                dim.dim_param = new
            elif value.name not in names and dim.dim_param and fixed:
                dim.Clear()  # what it is follows from the inputs
    return onnx.shape_inference.infer_shapes(other)
