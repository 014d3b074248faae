"""Whether two values are computed alike from the same values, so that one need not replace the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from repaconv.graph.index_selections import selection_of
from repaconv.graph.nodes_and_constants import constant, has_subgraphs, is_constant
from repaconv.graph.operator_facts import RANDOM, SELECTIONS
from repaconv.graph.symbolic_shapes import rank_of

if TYPE_CHECKING:
    import onnx_ir as ir

ROUNDING = 4
"""Numbers in FP32 or float64 that differ by so many units in the last place are those of one map, composed twice."""
NEUTRAL = {"strides": 1, "dilations": 1, "pads": 0, "group": 1}
"""Attributes of a convolution that change nothing with these numbers, which is also what they are if left out."""


def are_computed_alike(one: ir.Value | None, other: ir.Value | None) -> bool:
    """Return whether the same operators compute two values, of the same values and the same constants up to rounding.

    Slices, Gathers and outputs of a Split are alike if they select the same.
    """
    if one is other:
        return True
    if one is None or other is None:
        return False
    if is_constant(one) and is_constant(other):
        return _are_close(one, other)
    node, second = one.producer(), other.producer()
    if node is None or second is None or has_subgraphs(node) or node.op_type in RANDOM:
        return False
    if not node.domain and node.op_type in SELECTIONS:
        chosen, twin = selection_of(one), selection_of(other)
        if chosen is None or twin is None or (chosen.axis, chosen.keeps) != (twin.axis, twin.keeps):
            return False
        return np.array_equal(chosen.places, twin.places) and are_computed_alike(chosen.value, twin.value)
    if (node.domain, node.op_type, one.index(), _attributes(node)) != (
        *(second.domain, second.op_type, other.index(), _attributes(second)),
    ):
        return False
    pairs = zip(node.inputs, second.inputs, strict=False)
    return len(node.inputs) == len(second.inputs) and all(are_computed_alike(*pair) for pair in pairs)


def _attributes(node: ir.Node) -> dict[str, Any]:
    found = {name: entry.value for name, entry in node.attributes.items()}
    if node.op_type == "Conv":
        found.pop("kernel_shape", None)  # the weight's
        found = {name: value for name, value in found.items() if not _is_neutral(name, value)}
    if "axis" in found and node.op_type == "Concat":
        found["axis"] %= max(rank_of(node.outputs[0]), 1)
    return {name: str(value) for name, value in found.items()}


def _is_neutral(name: str, value: Any) -> bool:
    return name in NEUTRAL and bool((np.asarray(value) == NEUTRAL[name]).all())


def _are_close(one: ir.Value, other: ir.Value) -> bool:
    """Whether two constants have the same type and shape, and numbers that differ by rounding at most."""
    if one.dtype != other.dtype or one.dtype is None:
        return False
    numbers, others = constant(one), constant(other)
    if numbers is None or others is None or numbers.shape != others.shape:
        return False
    kind = np.dtype(one.dtype.numpy())
    unit = np.finfo(kind).eps if kind.kind == "f" and kind.itemsize >= 4 else 0.0
    return bool(np.allclose(numbers, others, rtol=ROUNDING * float(unit), atol=0))
