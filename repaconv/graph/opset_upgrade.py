"""Old graphs as newer ones: ONNX's own converter brings them to the opset that rewrites read and write."""

from __future__ import annotations

from typing import TYPE_CHECKING

from repaconv.graph.onnx_files import opset_of

if TYPE_CHECKING:
    import onnx

OLDEST = 13
"""Opset that the rewrites read and write."""
CONSTANTS_APART = 4
"""The first version of the file format whose constants need not be inputs as well."""
FORMAT = 7
"""The version of the file format that belongs to `OLDEST`."""

PLACED = 11
"""The first opset whose Resize says where pixels lie."""

WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul", "BatchNormalization", "PRelu", "LSTM", "GRU")
"""What nobody gives at a call: the further inputs of these."""


def raised(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The same function at `OLDEST`, its weights no inputs; the graph itself where that changes nothing.

    An input that has a value is a constant where the file's format has no other way to write one, and where it is the
    weight of a layer: exporters listed those for years. Any other is what a caller may leave out, and stays one.

    Raises:
        RuntimeError: If the converter does not know an operator, with its words.
    """
    import onnx
    from onnx import version_converter

    constants = _constants(proto)
    if opset_of(proto) >= OLDEST and not constants:
        return proto
    found = onnx.ModelProto()
    if opset_of(proto) < OLDEST:
        found.CopyFrom(version_converter.convert_version(proto, OLDEST))
        if opset_of(proto) < PLACED:
            _place_as_before(found.graph)
        del found.metadata_props[:]
        found.metadata_props.extend(proto.metadata_props)
    else:
        found.CopyFrom(proto)
    inputs = [value for value in found.graph.input if value.name not in constants]
    del found.graph.input[:]
    found.graph.input.extend(inputs)
    found.ir_version = max(proto.ir_version, FORMAT)
    return onnx.shape_inference.infer_shapes(found)


def _place_as_before(graph: onnx.GraphProto) -> None:
    """Say of every Resize where pixels lay, which the converter leaves to defaults that are others now.

    The nearest one was that before, or behind where an image becomes smaller: so ONNX Runtime has it.
    """
    from onnx import helper, numpy_helper

    known = {weight.name: weight for weight in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            known[node.output[0]] = node.attribute[0].t
        for entry in node.attribute:
            if entry.HasField("g"):
                _place_as_before(entry.g)
        if node.op_type == "Resize":
            scales = known.get(node.input[-1])
            smaller = scales is not None and bool((numpy_helper.to_array(scales) < 1).any())
            node.attribute.append(helper.make_attribute("coordinate_transformation_mode", "asymmetric"))
            node.attribute.append(helper.make_attribute("nearest_mode", "ceil" if smaller else "floor"))


def _constants(proto: onnx.ModelProto) -> set[str]:
    """The names of inputs that are constants."""
    held = {weight.name for weight in proto.graph.initializer}
    given = {value.name for value in proto.graph.input if value.name in held}
    if proto.ir_version < CONSTANTS_APART:
        return given
    weights = {name for node in proto.graph.node if node.op_type in WEIGHTED for name in node.input[1:]}
    others = {name for node in proto.graph.node if node.op_type not in WEIGHTED for name in node.input}
    return (given & weights) - others - {node.input[0] for node in proto.graph.node if node.input}
