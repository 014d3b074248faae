"""Read slices of every r-th position along several axes, which together hold every position once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from repaconv.graph.index_selections import EVERYTHING, slice_positions, slices
from repaconv.graph.nodes_and_constants import constant, made_by
from repaconv.graph.symbolic_shapes import Size, rank_of, sizes

if TYPE_CHECKING:
    import onnx_ir as ir


class PixelsOfBlocks(NamedTuple):
    """Values of which each has the pixels at one place of all blocks of an image.

    Attributes:
        source: The image.
        lengths: The length of a block along each of the axes.
        places: For each value: the place of its pixels in their blocks.
    """

    source: ir.Value
    lengths: tuple[int, ...]
    places: list[tuple[int, ...]]


def pixels_of_blocks(values: Sequence[ir.Value | None], axes: range) -> PixelsOfBlocks | None:
    """Read values that are slices of every r-th pixel, and together have every pixel of an image once.

    Args:
        values: The values, in order.
        axes: The axes of the image.

    Returns:
        None for other values.
    """
    parts = [_strided(value, axes) for value in values if value is not None]
    source, _, lengths = next(iter(parts), None) or (None, (), ())
    places = [part[1] for part in parts if part is not None and (part[0], part[2]) == (source, lengths)]
    if source is None or prod(lengths) < 2 or len(places) < len(values):
        return None
    return PixelsOfBlocks(source, lengths, places) if sorted(places) == [*product(*map(range, lengths))] else None


def _strided(value: ir.Value, axes: range) -> tuple[ir.Value, tuple[int, ...], tuple[int, ...]] | None:
    """The source of a chain of Slices, and first pixel and stride along each of the axes; None for others."""
    along: dict[int, tuple[int, int]] = {}
    while (node := made_by(value, "Slice")) is not None and (x := node.inputs[0]) is not None:
        shape = sizes(x)
        parts = [constant(each) for each in node.inputs[1:]]
        if shape is None or any(part is None for part in parts):
            return None
        for axis, part in slices([part.reshape(-1).tolist() for part in parts if part is not None], rank_of(x)):
            first = _first_place(part, shape[axis])
            if first is None or axis not in axes or axis in along:
                return None
            along[axis] = first, part.step
        value = x
    pairs = [along.get(axis, (0, 1)) for axis in axes]
    return value, tuple(first for first, _ in pairs), tuple(stride for _, stride in pairs)


def _first_place(part: slice, length: Size) -> int | None:
    """The first place of a slice to the end of an axis; None if it ends or begins elsewhere, or goes backwards."""
    known = isinstance(length, int)
    places = slice_positions(part, length if isinstance(length, int) else EVERYTHING)
    if not places or part.step < 1 or places.start >= part.step or not (known or part.stop >= EVERYTHING):
        return None
    return None if known and places[-1] + part.step < length else places.start
