"""Read Slice, Gather and Split selections, axes of Squeeze and reductions, and the order of a Transpose.

All operators are read as from opset 13 on. A result is None if indices are computed or the graph is invalid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from repaconv.graph.nodes_and_constants import attribute, constant, input_at, made_by
from repaconv.graph.onnx_files import split_evenly
from repaconv.graph.operator_facts import SELECTIONS
from repaconv.graph.symbolic_shapes import Size, Sizes, rank_of, sizes

if TYPE_CHECKING:
    import onnx_ir as ir

EVERYTHING = 2**31 - 1
"""An end from here on means "to the end": exporters write INT32_MAX and INT64_MAX."""

Places = NDArray[np.int64]


@dataclass(frozen=True)
class Selection:
    """The positions along one axis of a value that a Slice, Gather or Split selects.

    Attributes:
        value: The value selected from.
        axis: The axis, from 0.
        places: The selected positions, in order.
        keeps: Whether the axis remains (a Gather by a scalar removes it).
    """

    value: ir.Value
    axis: int
    places: Places
    keeps: bool = True


def selection_of(value: ir.Value | None) -> Selection | None:
    """Return the selection that a value is, if its positions are constant, nonempty and along one axis."""
    node = made_by(value, *SELECTIONS)
    found = selected_positions(node, value) if node is not None and value is not None else None
    if node is None or node.inputs[0] is None or found is None or len(found) != 1:
        return None
    ((axis, places),) = found.items()
    if not places.size:  # rotary embedding may split off an empty rest
        return None
    return Selection(node.inputs[0], axis, np.atleast_1d(places), places.ndim == 1)


def selected_positions(node: ir.Node, value: ir.Value) -> dict[int, Places] | None:
    """Return, by axis, the positions that an output of Slice, Gather or Split holds.

    Positions are an array [n], or a scalar if the axis is removed. A dynamic axis taken in full is not listed.
    """
    shape = sizes(node.inputs[0])
    if shape is None:
        return None
    if node.op_type == "Split":
        return _split(node, value, shape)
    return _gather(node, shape) if node.op_type == "Gather" else _slice(node, shape)


def _gather(node: ir.Node, shape: Sizes) -> dict[int, Places] | None:
    indices, axis = constant(node.inputs[1]), int(attribute(node, "axis", 0)) % len(shape)
    length = shape[axis]
    if indices is None or indices.ndim > 1 or not isinstance(length, int) or not length:
        return None
    return {axis: indices.astype(np.int64) % length}


def _slice(node: ir.Node, shape: Sizes) -> dict[int, Places] | None:
    given = [constant(entry) for entry in node.inputs[1:]]
    computed = any(entry is not None and numbers is None for entry, numbers in zip(node.inputs[1:], given, strict=True))
    if computed or len(given) < 2:
        return None
    parts = [None if numbers is None else [int(n) for n in numbers.reshape(-1)] for numbers in given]
    found: dict[int, Places] = {}
    for axis, part in slices(parts, len(shape)):
        length = shape[axis]
        places = slice_positions(part, length) if isinstance(length, int) else None
        if places is not None:
            found[axis] = np.array(places, np.int64)
        elif isinstance(length, int) or (part.start, part.step) != (0, 1) or part.stop < EVERYTHING:
            return None
    return found


def slices(parts: Sequence[Sequence[int] | None], rank: int) -> list[tuple[int, slice]]:
    """Return pairs of axis and slice from a Slice's starts, ends, axes and steps; the last two are optional."""
    starts, ends, axes, steps = (*parts, None, None)[:4]
    assert starts is not None
    assert ends is not None
    axes = range(len(starts)) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    return [(axis % rank, slice(*part)) for axis, *part in zip(axes, starts, ends, steps, strict=True)]


def slice_positions(part: slice, length: int) -> range | None:
    """Return the positions that a slice selects along an axis of this length.

    Forwards this is Python's rule. Backwards, ONNX moves a start before the axis to its first position, which
    Python does not. None for a backwards slice "to the end", on which runtimes differ.
    """
    start, stop, step = part.start, part.stop, part.step
    if step < 0 and stop >= EVERYTHING:
        return None
    least, most = (0, length) if step > 0 else (-1, length - 1)
    start, stop = (n + length if n < 0 else n for n in (start, stop))
    return range(min(max(start, 0), most), min(max(stop, least), most), step)


def _split(node: ir.Node, value: ir.Value, shape: Sizes) -> dict[int, Places] | None:
    axis, place = int(attribute(node, "axis", 0)) % len(shape), value.index() or 0
    parts = split_sizes(node, shape[axis])
    if parts is None:
        return None
    start = sum(parts[:place])
    return {axis: np.arange(start, start + parts[place])}


def split_sizes(node: ir.Node, length: Size) -> list[int] | None:
    """Return the lengths of a Split's outputs along an axis of this length, or None if they are unknown."""
    count, entry = len(node.outputs), input_at(node, 1)
    said: Any = attribute(node, "split", None) if entry is None else constant(entry)
    if said is not None:
        return [int(size) for size in said]
    if entry is not None or not isinstance(length, int):
        return None
    by_count = attribute(node, "num_outputs", None) is not None
    return split_evenly(length, count) if by_count or length % count == 0 else None


def are_consecutive(places: Places) -> bool:
    """Return whether positions are consecutive."""
    return bool((np.diff(places) == 1).all())


def runs_of(places: Places) -> list[Places]:
    """Split positions into runs of consecutive ones."""
    return np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)


def axes_of(node: ir.Node, rank: int) -> list[int] | None:
    """Return the axes of a Squeeze, Unsqueeze or reduction, from 0; None if computed, or absent in a Squeeze.

    Args:
        node: A node with axes as attribute or input. A reduction without axes reduces all, unless it is a no-op.
        rank: Rank of the input; for Unsqueeze, rank of the output.
    """
    entry = input_at(node, 1)
    given: Any = attribute(node, "axes", None) if entry is None else constant(entry)
    if given is None and (entry is not None or not node.op_type.startswith("Reduce")):
        return None
    axes = [] if given is None else [int(axis) % rank for axis in np.reshape(given, -1)]
    if not axes and node.op_type.startswith("Reduce") and not attribute(node, "noop_with_empty_axes", 0):
        return list(range(rank))
    return axes


def perm_of(node: ir.Node, rank: int) -> list[int]:
    """Return the axis order of a Transpose; reversed by default."""
    return [int(axis) for axis in attribute(node, "perm", None) or range(rank)[::-1]]


MIN_ELEMENTS = 4096
"""Elements from which a tensor is transposed in two fast steps; for fewer, two nodes take as long as a slow one."""


def is_fast_transpose(perm: Sequence[int]) -> bool:
    """Whether ONNX Runtime has a fast kernel: rows are moved, or one axis is, after neighbors are joined."""
    _, order = joined_axes(perm)
    others = ([axis for axis in order if axis != moved] for moved in order)
    return not perm or perm[-1] == len(perm) - 1 or any(rest == sorted(rest) for rest in others)


def joined_axes(perm: Sequence[int]) -> tuple[list[list[int]], list[int]]:
    """Join axes that stay neighbors; return the groups in their order before, and their order afterwards."""
    places = {axis: place for place, axis in enumerate(sorted(perm))}
    groups: list[list[int]] = []
    for axis in perm:
        if groups and places[axis] == places[groups[-1][-1]] + 1:
            groups[-1].append(axis)
        else:
            groups.append([axis])
    before = sorted(groups)
    return before, [before.index(group) for group in groups]


def swaps_last(node: ir.Node) -> bool:
    """Return whether a Transpose swaps only the last two axes."""
    rank = rank_of(node.outputs[0])
    return rank > 1 and perm_of(node, rank) == [*range(rank - 2), rank - 1, rank - 2]
