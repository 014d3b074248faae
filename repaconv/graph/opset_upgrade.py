"""Upgrade graphs: old ones with ONNX's version converter to the opset that rewrites support, others in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from repaconv.graph.onnx_files import constants_of, opset_of, subgraphs_of
from repaconv.graph.operator_facts import OLDEST_OPSET, REDUCTIONS_OF_OPSET_18

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

CONSTANTS_NOT_INPUTS_IR_VERSION = 4
"""The first IR version in which constants need not also be graph inputs."""
IR_VERSION = 7
"""The IR version that belongs to `OLDEST_OPSET`."""

RESIZE_MODE_OPSET = 11
"""The first opset in which Resize has a coordinate transformation mode."""

WEIGHTS = {
    **dict.fromkeys(("Conv", "ConvTranspose", "Gemm"), (1, 2)),
    **dict.fromkeys(("MatMul", "PRelu"), (1,)),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), (1, 2, 3, 7)),  # between them are lengths and states
    "BatchNormalization": (1, 2, 3, 4),
}
"""Positions of inputs that are weights, never runtime inputs, by operator."""

AXES_AS_INPUT_OPSET = 18
"""The first opset in which reductions have axes as an input, and a Split into equal parts names their number."""
MEANING_CHANGED = {"RoiAlign": 16, "GridSample": 20, "GroupNormalization": 21}
"""The opset in which an operator got other defaults, names or shapes than before, by operator."""


def upgraded(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Upgrade a graph to `OLDEST_OPSET`, and remove weights from its inputs; return it itself if nothing changes.

    An input with a default value is taken as a constant if the IR version requires constants to be inputs, or if it
    is the weight of a layer, since exporters listed these for years. Any other input with a default is optional,
    and stays.

    Raises:
        RuntimeError: If the converter does not support an operator, with its message.
    """
    import onnx
    from onnx import version_converter

    constants = _constants(proto)
    if opset_of(proto) >= OLDEST_OPSET and not constants:
        return proto
    found = onnx.ModelProto()
    if opset_of(proto) < OLDEST_OPSET:
        found.CopyFrom(version_converter.convert_version(proto, OLDEST_OPSET))
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

    known = constants_of(graph)
    for node in graph.node:
        for inner in subgraphs_of(node):
            _set_resize_modes(inner)
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
    weights: set[str] = set()
    others: set[str] = set()
    for node in proto.graph.node:
        for place, name in enumerate(node.input):
            (weights if place in WEIGHTS.get(node.op_type, ()) else others).add(name)
    return (given & weights) - others


def can_be_raised(model: ir.Model, opset: int) -> bool:
    """Return whether every operator of a graph is the same in a newer opset, or `raise_opset` makes it so."""
    now = model.graph.opset_imports.get("", OLDEST_OPSET)
    return all(node.domain or _can_be_raised(node, now, opset) for node in model.graph.all_nodes())


def raise_opset(model: ir.Model, opset: int) -> None:
    """Raise the opset of a graph, for which `can_be_raised` is true; in place."""
    import onnx_ir as ir

    from repaconv.graph.nodes_and_constants import Writer

    for node in tuple(model.graph.all_nodes()):
        if node.domain or opset < AXES_AS_INPUT_OPSET:
            continue
        if node.op_type in REDUCTIONS_OF_OPSET_18 and "axes" in node.attributes:
            axes = Writer(model, node).constant([int(axis) for axis in node.attributes.pop("axes").value])
            node.resize_inputs(2)
            node.replace_input_with(1, axes)
        elif node.op_type == "Split" and len(node.inputs) < 2 and "num_outputs" not in node.attributes:
            node.attributes["num_outputs"] = ir.AttrInt64("num_outputs", len(node.outputs))
    model.graph.opset_imports[""] = opset


def _can_be_raised(node: ir.Node, now: int, opset: int) -> bool:
    from onnx import defs

    if now < MEANING_CHANGED.get(node.op_type, 0) <= opset:
        return False
    if not defs.has(node.op_type, now) or not defs.has(node.op_type, opset):
        return False
    schema = defs.get_schema(node.op_type, opset)
    moved = {"axes"} if node.op_type in REDUCTIONS_OF_OPSET_18 else set()
    return not schema.deprecated and set(node.attributes) - moved <= set(schema.attributes)
