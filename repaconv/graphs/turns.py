"""Transposes of the last two axes, which products do as they read: written, and taken out of Transposes of more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from repaconv.graphs.nodes import Writer
from repaconv.graphs.selections import perm_of
from repaconv.graphs.shapes import rank_of, set_shape, sizes

if TYPE_CHECKING:
    import onnx_ir as ir


def swapped(write: Writer, value: ir.Value | None, rank: int) -> ir.Value:
    """A value with its last two axes swapped."""
    return write("Transpose", value, perm=[*range(rank - 2), rank - 1, rank - 2])


def turned_last(model: ir.Model, node: ir.Node) -> bool:
    """A Transpose that brings the last axis before the last, and moves others, in two: that comes second.

    Returns:
        Whether it was one.
    """
    value = node.outputs[0]
    rank, shape = rank_of(value), sizes(value)
    perm = perm_of(node, rank) if rank > 2 else []
    if shape is None or not perm or perm[-2] != rank - 1 or perm[:-2] == list(range(rank - 2)):
        return False
    write = Writer(model, node)
    first = write("Transpose", node.inputs[0], perm=[*perm[:-2], perm[-1], perm[-2]])
    set_shape(first, (*shape[:-2], shape[-1], shape[-2]), value)
    second = swapped(write, first, rank)
    set_shape(second, shape, value)
    write.replace(value, second)
    return True
