"""Upgrade old graphs with ONNX's version converter to the opset that rewrites support."""

from __future__ import annotations

from typing import TYPE_CHECKING

from repaconv.graph.onnx_files import opset_of

if TYPE_CHECKING:
    import onnx

OLDEST = 13
"""The oldest opset that the rewrites read and write."""
CONSTANTS_NOT_INPUTS_IR_VERSION = 4
"""The first IR version in which constants need not also be graph inputs."""
IR_VERSION = 7
"""The IR version that belongs to `OLDEST`."""

RESIZE_MODE_OPSET = 11
"""The first opset in which Resize has a coordinate transformation mode."""

WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul", "BatchNormalization", "PRelu", "LSTM", "GRU")
"""Operators whose inputs after the first are weights, never runtime inputs."""


def upgraded(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Upgrade a graph to `OLDEST`, and remove weights from its inputs; return the graph itself if nothing changes.

    An input with a default value is taken as a constant if the IR version requires constants to be inputs, or if it
    is the weight of a layer, since exporters listed these for years. Any other input with a default is optional,
    and stays.

    Raises:
        RuntimeError: If the converter does not support an operator, with its message.
    """
    import onnx
    from onnx import version_converter

    constants = _constants(proto)
    if opset_of(proto) >= OLDEST and not constants:
        return proto
    found = onnx.ModelProto()
    if opset_of(proto) < OLDEST:
        found.CopyFrom(version_converter.convert_version(proto, OLDEST))
        if opset_of(proto) < RESIZE_MODE_OPSET:
            _set_resize_modes(found.graph)
        del found.metadata_props[:]
        found.metadata_props.extend(proto.metadata_props)
    else:
        found.CopyFrom(proto)
    inputs = [value for value in found.graph.input if value.name not in constants]
    del found.graph.input[:]
    found.graph.input.extend(inputs)
    found.ir_version = max(proto.ir_version, IR_VERSION)
    return onnx.shape_inference.infer_shapes(found)


def _set_resize_modes(graph: onnx.GraphProto) -> None:
    """Set the coordinate mode of every Resize, since the defaults changed and the converter does not set it.

    Before, the nearest pixel was rounded down, or up when an image is made smaller, as in ONNX Runtime.
    """
    from onnx import helper, numpy_helper

    known = {weight.name: weight for weight in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            known[node.output[0]] = node.attribute[0].t
        for entry in node.attribute:
            if entry.HasField("g"):
                _set_resize_modes(entry.g)
        if node.op_type == "Resize":
            scales = known.get(node.input[-1])
            smaller = scales is not None and bool((numpy_helper.to_array(scales) < 1).any())
            node.attribute.append(helper.make_attribute("coordinate_transformation_mode", "asymmetric"))
            node.attribute.append(helper.make_attribute("nearest_mode", "ceil" if smaller else "floor"))


def _constants(proto: onnx.ModelProto) -> set[str]:
    """Return the names of inputs that are constants."""
    held = {weight.name for weight in proto.graph.initializer}
    given = {value.name for value in proto.graph.input if value.name in held}
    if proto.ir_version < CONSTANTS_NOT_INPUTS_IR_VERSION:
        return given
    weights = {name for node in proto.graph.node if node.op_type in WEIGHTED for name in node.input[1:]}
    others = {name for node in proto.graph.node if node.op_type not in WEIGHTED for name in node.input}
    return (given & weights) - others - {node.input[0] for node in proto.graph.node if node.input}
