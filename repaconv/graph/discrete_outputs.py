"""Whether a graph decides something discrete by what it computes: a class, a place, what is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

_CHOOSING = ("ArgMax", "ArgMin", "TopK", "NonMaxSuppression", "NonZero", "Unique", "Hardmax")
_STEPS = ("Round", "Floor", "Ceil", "Sign", "QuantizeLinear", "DynamicQuantizeLinear")
DECIDING = frozenset((*_CHOOSING, *_STEPS, "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal"))
"""Operators whose output jumps where their input moves by a rounding."""

_WHOLE = frozenset((2, 3, 4, 5, 6, 7, 9, 12, 13))
"""ONNX's numbers of integers and truth values."""


def decides(model: onnx.ModelProto) -> bool:
    """Whether such an operator, or a cast to whole numbers, reads real numbers that hang on an input's values.

    Integers that come in, and are looked up or masked by, are no decision of the graph's; nor are shapes.
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
        inner = any(entry.HasField("g") for entry in node.attribute)  # reads what is around it
        if node.op_type in ("Shape", "Size"):
            continue
        looked_up = node.op_type in ("Gather", "Cast", "Where") and integers & set(node.input)
        if inner or real & set(node.input) or looked_up:
            real |= set(node.output)
        elif integers & set(node.input):
            integers |= set(node.output)
    return False
