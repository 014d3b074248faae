"""Detect graphs whose outputs depend on a discrete decision: a class index, a position, a threshold."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

_CHOOSING = ("ArgMax", "ArgMin", "TopK", "NonMaxSuppression", "NonZero", "Unique", "Hardmax")
_STEPS = ("Round", "Floor", "Ceil", "Sign", "QuantizeLinear", "DynamicQuantizeLinear")
DECIDING = frozenset((*_CHOOSING, *_STEPS, "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal"))
"""Operators whose output can jump when an input changes by a rounding error."""

_WHOLE = frozenset((2, 3, 4, 5, 6, 7, 9, 12, 13))
"""ONNX type numbers of integers and booleans."""


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
        to = next((entry.i for entry in node.attribute if entry.name == "to"), 0)
        if (node.op_type in DECIDING or (node.op_type == "Cast" and to in _WHOLE)) and real & set(node.input):
            return True
        inner = any(entry.HasField("g") for entry in node.attribute)  # a subgraph reads values of the outer graph
        if node.op_type in ("Shape", "Size"):
            continue
        looked_up = node.op_type in ("Gather", "Cast", "Where") and integers & set(node.input)
        if inner or real & set(node.input) or looked_up:
            real |= set(node.output)
        elif integers & set(node.input):
            integers |= set(node.output)
    return False
