"""Detect graphs whose outputs depend on a discrete decision: a class index, a position, a threshold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from repaconv.graph.onnx_files import subgraphs_of

if TYPE_CHECKING:
    import onnx

_CHOOSING = ("ArgMax", "ArgMin", "TopK", "NonMaxSuppression", "NonZero", "Unique", "Hardmax")
_STEPS = ("Round", "Floor", "Ceil", "Sign", "QuantizeLinear", "DynamicQuantizeLinear")
DECIDING = frozenset((*_CHOOSING, *_STEPS, "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal"))
"""Operators whose output can jump when an input changes by a rounding error."""

_WHOLE = frozenset((2, 3, 4, 5, 6, 7, 9, 12, 13))
"""ONNX type numbers of integers and booleans."""


_OF_CONSTANTS = DECIDING | {"Mod", "Range", "IsInf", "IsNaN"}
"""Operators that may give something else if constants are computed in float64."""


def has_constant_decision(model: onnx.ModelProto) -> bool:
    """Return whether a discrete operator, or a cast to integers, reads floating values of constants and sizes alone.

    An example is the size of an image times a scale, rounded down: 10 * 0.7 is 7 in float32, and less than 7 in float64
    if 0.7 was rounded to float32. Such a value is a constant once its inputs are known.
    """
    real = {weight.name: weight.data_type not in _WHOLE for weight in model.graph.initializer}  # constants, by name
    for node in model.graph.node:
        inputs = [name for name in node.input if name]
        if node.op_type in ("Shape", "Size"):
            real |= dict.fromkeys(node.output, False)
        elif node.op_type == "Constant":
            held = node.attribute[0] if node.attribute else None
            whole = held is None or held.name.startswith("value_int") or held.t.data_type in _WHOLE
            real |= dict.fromkeys(node.output, not whole)
        elif inputs and all(name in real for name in inputs):
            floats, to_whole = any(real[name] for name in inputs), _casts_to_whole(node)
            if floats and (node.op_type in _OF_CONSTANTS or to_whole):
                return True
            real |= dict.fromkeys(node.output, not to_whole if node.op_type == "Cast" else floats)
    return False


def has_discrete_decision(model: onnx.ModelProto) -> bool:
    """Return whether a discrete operator, or a cast to integers, reads floating values computed from an input.

    Integer inputs that are used for lookup or masking do not count, and neither do shapes.
    """
    stored = {weight.name for weight in model.graph.initializer}
    real = {
        value.name
        for value in model.graph.input
        if value.name not in stored and value.type.tensor_type.elem_type not in _WHOLE
    }
    integers = {value.name for value in model.graph.input if value.name not in stored} - real
    for node in model.graph.node:
        if (node.op_type in DECIDING or _casts_to_whole(node)) and real & set(node.input):
            return True
        inner = subgraphs_of(node)  # a subgraph reads values of the outer graph
        if node.op_type in ("Shape", "Size"):
            continue
        looked_up = node.op_type in ("Gather", "Cast", "Where") and integers & set(node.input)
        if inner or real & set(node.input) or looked_up:
            real |= set(node.output)
        elif integers & set(node.input):
            integers |= set(node.output)
    return False


def _casts_to_whole(node: onnx.NodeProto) -> bool:
    """Return whether a node is a Cast to integers or booleans."""
    return node.op_type == "Cast" and any(entry.name == "to" and entry.i in _WHOLE for entry in node.attribute)
