"""Find which input axis an output axis corresponds to, and whether an operator mixes entries along it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from repaconv.graph.index_selections import axes_of, perm_of
from repaconv.graph.nodes_and_constants import attribute, constant
from repaconv.graph.operator_facts import POINTWISE, REDUCTIONS, ROW_NORMS
from repaconv.graph.symbolic_shapes import as_numbers, rank_of, reshape_groups, sizes

if TYPE_CHECKING:
    import onnx_ir as ir

FULL = -1
"""The input has no such axis: every entry of the output depends on all of it."""


def axis_before(node: ir.Node, place: int, axis: int) -> int | None:
    """Return the axis of an input that an axis of the outputs corresponds to, entry by entry.

    Args:
        node: Any node. An operator without a rule here counts as mixing.
        place: Index of the input.
        axis: Axis of the outputs, from 0.

    Returns:
        The axis of the input, `FULL`, or None if the operator mixes entries along the axis.
    """
    if node.domain or sizes(node.outputs[0]) is None or sizes(node.inputs[place]) is None:
        return None
    rule = _RULES.get(node.op_type, _pointwise if node.op_type in POINTWISE else None)
    return rule(node, place, axis) if rule is not None else None


def axis_after(node: ir.Node, place: int, axis: int, output: int = 0) -> int | None:
    """Return the output axis that an input axis corresponds to, or None if it is mixed or removed."""
    rank = rank_of(node.outputs[output])
    return next((other for other in range(rank) if axis_before(node, place, other) == axis), None)


def _pointwise(node: ir.Node, place: int, axis: int) -> int | None:
    shape, out = sizes(node.inputs[place]) or (), sizes(node.outputs[0]) or ()
    mine = axis - (len(out) - len(shape))
    if mine < 0 or shape[mine] == 1:
        return FULL
    return mine if shape[mine] == out[axis] else None


def _expand(node: ir.Node, place: int, axis: int) -> int | None:
    return FULL if place else _pointwise(node, place, axis)


def _matmul(node: ir.Node, place: int, axis: int) -> int | None:
    left, right, out = sizes(node.inputs[0]), sizes(node.inputs[1]), sizes(node.outputs[0])
    if left is None or right is None or out is None or len(left) < 2 or len(right) < 2 or axis == len(out) - 1:
        return None
    if axis == len(out) - 2:
        return len(left) - 2 if place == 0 else FULL
    return _pointwise(node, place, axis)


def _gemm(node: ir.Node, place: int, axis: int) -> int | None:
    if axis or attribute(node, "transA", 0):
        return None
    return (0, FULL)[place] if place < 2 else _pointwise(node, place, axis)


def _norm(node: ir.Node, place: int, axis: int) -> int | None:
    first = int(attribute(node, "axis", -1)) % rank_of(node.outputs[0])
    return (axis if place == 0 else _pointwise(node, place, axis)) if axis < first else None


def _softmax(node: ir.Node, place: int, axis: int) -> int | None:
    return axis if int(attribute(node, "axis", -1)) % rank_of(node.outputs[0]) != axis else None


def _batchnorm(node: ir.Node, place: int, axis: int) -> int | None:
    return (axis if place == 0 else FULL) if axis != 1 else None


def _transpose(node: ir.Node, place: int, axis: int) -> int | None:
    return perm_of(node, rank_of(node.outputs[0]))[axis]


def _reshape(node: ir.Node, place: int, axis: int) -> int | None:
    if place:
        return FULL
    before, after = sizes(node.inputs[0]) or (), sizes(node.outputs[0]) or ()
    for ours, theirs in reshape_groups(before, after) or ():
        inner = [i for i in ours if before[i] != 1]
        if [i for i in theirs if after[i] != 1] == [axis] and len(inner) == 1:
            return inner[0]
    return None


def _squeeze(node: ir.Node, place: int, axis: int) -> int | None:
    gone = axes_of(node, rank_of(node.inputs[0]))
    if place:
        return FULL
    return None if gone is None else _others(gone, rank_of(node.inputs[0]))[axis]


def _unsqueeze(node: ir.Node, place: int, axis: int) -> int | None:
    added = axes_of(node, rank_of(node.outputs[0]))
    if place:
        return FULL
    return None if added is None or axis in added else _others(added, rank_of(node.outputs[0])).index(axis)


def _concat(node: ir.Node, place: int, axis: int) -> int | None:
    return axis if int(attribute(node, "axis", 0)) % rank_of(node.outputs[0]) != axis else None


def _split(node: ir.Node, place: int, axis: int) -> int | None:
    return FULL if place else _concat(node, place, axis)


def _gather(node: ir.Node, place: int, axis: int) -> int | None:
    """The axes of the indices replace the gathered axis in the output."""
    along, indices = int(attribute(node, "axis", 0)) % rank_of(node.inputs[0]), sizes(node.inputs[1])
    if indices is None or along <= axis < along + len(indices):
        return None
    if place:
        return FULL
    return axis if axis < along else axis - len(indices) + 1


def _slice(node: ir.Node, place: int, axis: int) -> int | None:
    starts = as_numbers(sizes(node.inputs[1]) or ())
    axes = constant(node.inputs[3]) if len(node.inputs) > 3 else np.arange(starts[0]) if starts else None
    if place:
        return FULL
    return None if axes is None or axis in axes % rank_of(node.inputs[0]) else axis


def _reduce(node: ir.Node, place: int, axis: int) -> int | None:
    gone = axes_of(node, rank_of(node.inputs[0]))
    if place:
        return FULL
    if gone is None:
        return None
    if attribute(node, "keepdims", 1):
        return None if axis in gone else axis
    return _others(gone, rank_of(node.inputs[0]))[axis]


def _attention(node: ir.Node, place: int, axis: int) -> int | None:
    """Follow the rows of an opset-23 Attention: queries [B, H, N, d] or [B, N, H d], and rows of the mask."""
    rank, shape = rank_of(node.inputs[0]), sizes(node.inputs[place]) or ()
    if attribute(node, "is_causal", 0) or axis != rank - 2:
        return None
    if place == 0:
        return axis
    if place != 3:
        return FULL if place < 3 else None
    return FULL if shape[-2] == 1 else len(shape) - 2


def _others(axes: list[int], rank: int) -> list[int]:
    return [axis for axis in range(rank) if axis not in axes]


_RULES: dict[str, Callable[[ir.Node, int, int], int | None]] = {
    "MatMul": _matmul,
    "Gemm": _gemm,
    **dict.fromkeys(ROW_NORMS, _norm),
    "Softmax": _softmax,
    "LogSoftmax": _softmax,
    "BatchNormalization": _batchnorm,
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Flatten": _reshape,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Expand": _expand,
    "Concat": _concat,
    "Slice": _slice,
    "Gather": _gather,
    "Split": _split,
    **dict.fromkeys(REDUCTIONS, _reduce),
    "Attention": _attention,
}
