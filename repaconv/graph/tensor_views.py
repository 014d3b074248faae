"""Views: which numbers of a source tensor a value holds, described by factors of the axes of both.

A source [B, N, 3 H d] seen as [3, B, H, N, d] has the factors B, N, 3, H, d; an axis of the view is a product of some
of them. Different chains of nodes with the same effect are the same view. A selection on a factor is a selection on the
source's axis. A dynamic size is a single factor, and only a number that it is a multiple of is split off, so that a
view holds at every size.

`repaconv.graph.index_selections` reads single nodes, `repaconv.graph.view_chains` finds the view of a chain of nodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from repaconv.graph.index_selections import Places, perm_of
from repaconv.graph.nodes_and_constants import Array, Writer
from repaconv.graph.symbolic_shapes import Size, Sizes, as_numbers, product, rank_of, reshape_target, set_shape, sizes

if TYPE_CHECKING:
    import onnx_ir as ir


MOST_AXES = 8
"""Axes that TensorRT takes at most: between Reshape and Transpose there are more only if source or view have more."""


@dataclass(frozen=True)
class View:
    """A value as a view of another value.

    Attributes:
        source: The source.
        of: The factors of every axis of the source, outermost first; factors are numbered.
        axes: The factors of every axis of the view, outermost first.
        size: The size of every factor.
        places: The selected positions by axis of the source, in the shape of its factors; absent for an axis that is
            held completely and in order.
        scale: The number that all entries are multiplied by.
    """

    source: ir.Value
    of: tuple[tuple[int, ...], ...]
    axes: tuple[tuple[int, ...], ...]
    size: Mapping[int, Size]
    places: Mapping[int, Places] = field(default_factory=dict)
    scale: float = 1.0

    @cached_property
    def shape(self) -> Sizes:
        """The shape of the view."""
        return tuple(product([self.size[f] for f in axis]) for axis in self.axes)

    @property
    def in_order(self) -> bool:
        """Whether the view holds the source's numbers in memory order, so that a Reshape at most makes it."""
        ours, theirs = ([f for axis in axes for f in axis] for axes in (self.axes, self.of))
        return ours == theirs and not self.places and self.scale == 1

    def columns(self, *axes: int) -> Places | None:
        """Return the positions along the source's last axis that these axes hold, in order; None if they hold more."""
        last = len(self.of) - 1
        if tuple(f for axis in axes for f in self.axes[axis]) != self.of[last]:
            return None
        return self.held(last)

    def held(self, axis: int) -> Places | None:
        """Return the held positions along a source axis, in the order of its factors; None if it is dynamic."""
        found = self.places.get(axis)
        if found is None:
            length = product([self.size[f] for f in self.of[axis]])
            return np.arange(length) if isinstance(length, int) else None
        return found.reshape(-1)

    def lengths(self, axis: int) -> list[int] | None:
        """Return the sizes of the factors of a source axis; None if one is dynamic."""
        return as_numbers(self.size[factor] for factor in self.of[axis])

    def axis_of(self, factor: int) -> int:
        """Return the source axis that contains a factor."""
        return next(axis for axis, factors in enumerate(self.of) if factor in factors)

    def alike(self, other: View) -> bool:
        """Return whether another view has the same axes of its own source."""
        if sizes(self.source) != sizes(other.source) or self.shape != other.shape:
            return False
        ours, theirs = ([f for axis in view.of for f in axis] for view in (self, other))
        if [self.size[f] for f in ours] != [other.size[f] for f in theirs]:
            return False
        names = dict(zip(theirs, ours, strict=True))
        return self.axes == tuple(tuple(names[f] for f in axis) for axis in other.axes)

    def merged(self, axis: int) -> View | None:
        """Return the view with one factor for an axis; None if its factors are not adjacent in the source."""
        factors = self.axes[axis]
        if len(factors) < 2:
            return self
        home = self.axis_of(factors[0])
        place = self.of[home].index(factors[0])
        if self.of[home][place : place + len(factors)] != factors:
            return None
        new = max(self.size) + 1
        inside = (*self.of[home][:place], new, *self.of[home][place + len(factors) :])
        size = {**self.size, new: product([self.size[f] for f in factors])}
        of = (*self.of[:home], inside, *self.of[home + 1 :])
        return replace(self, of=of, axes=(*self.axes[:axis], (new,), *self.axes[axis + 1 :]), size=size).refitted()

    def taking(self, axis: int, places: Places) -> View | None:
        """Return the view with a selection of positions along an axis; a scalar position removes the axis."""
        merged = self.merged(axis)
        if merged is None or not places.size:
            return None
        if not merged.axes[axis]:  # an axis of length 1
            return merged.without(axis) if not places.ndim else merged if places.size == 1 else None
        ((factor,), home) = merged.axes[axis], merged.axis_of(merged.axes[axis][0])
        held, lengths = merged.held(home), merged.lengths(home)
        if held is None or lengths is None:
            return None
        found = np.take(held.reshape(lengths), places, merged.of[home].index(factor))
        if places.size == 1:
            of = tuple(tuple(f for f in factors if f != factor) for factors in merged.of)
            single = replace(merged, of=of, axes=(*merged.axes[:axis], (), *merged.axes[axis + 1 :]))
            merged = single if places.ndim else single.without(axis)
        size = {**merged.size, factor: places.size}
        return replace(merged, size=size, places={**merged.places, home: found}).refitted()

    def without(self, axis: int) -> View:
        """Return the view without an axis of length 1."""
        return replace(self, axes=self.axes[:axis] + self.axes[axis + 1 :])

    def refitted(self) -> View:
        """Return the view with positions in the shape of their factors, and without trivial selections."""
        places = {}
        for axis, held in self.places.items():
            if held.size != (sizes(self.source) or ())[axis] or (held.reshape(-1) != np.arange(held.size)).any():
                places[axis] = held.reshape(self.lengths(axis) or ())
        return replace(self, places=places)

    def channels(self, factor: int, chosen: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Return the positions along the source axis that have the chosen positions in a factor; None if dynamic."""
        home = self.axis_of(factor)
        lengths = self.lengths(home)
        if lengths is None:
            return None
        grid = np.arange(math.prod(lengths)).reshape(lengths)
        found: NDArray[np.int64] = np.take(grid, chosen, self.of[home].index(factor)).reshape(-1)
        return found

    def constant_before(self, numbers: Array) -> Array | None:
        """Return the constant that acts on the source as ``numbers`` does on the view.

        Args:
            numbers: One size per axis of the view: the axis's own, or 1 where the constant is the same along it.

        Returns:
            The constant, in the same way along the source's axes. None if the view selects or scales, or if a size
            along which the constant varies is dynamic.
        """
        return None if self.places or self.scale != 1 else self._regrouped(numbers, self.axes, self.of)

    def constant_after(self, numbers: Array) -> Array | None:
        """Return the constant that acts on the view as ``numbers`` does on the source; see `constant_before`."""
        return None if self.places or self.scale != 1 else self._regrouped(numbers, self.of, self.axes)

    def _regrouped(
        self, numbers: Array, old: tuple[tuple[int, ...], ...], new: tuple[tuple[int, ...], ...]
    ) -> Array | None:
        varying = {f for axis, length in zip(old, numbers.shape, strict=True) if length != 1 for f in axis}
        order = [f for axis in old for f in axis]
        groups = [[self.size[f] if varying & {*axis} else 1 for f in axis] for axis in new]
        lengths = [as_numbers(group) for group in groups]
        apart = as_numbers(self.size[f] if f in varying else 1 for f in order)
        if apart is None or any(length is None for length in lengths):
            return None
        whole = [length for group in lengths for length in group or ()]
        moved = numbers.reshape(apart).transpose([order.index(f) for axis in new for f in axis])
        return np.broadcast_to(moved, whole).reshape([math.prod(group or ()) for group in lengths])

    def narrowed(self, source: ir.Value, factor: int, count: int | None) -> View:
        """Return the view of another source whose factor has ``count`` entries; None removes factor and axis."""
        of = tuple(tuple(f for f in axis if f != factor or count is not None) for axis in self.of)
        axes = tuple(axis for axis in self.axes if count is not None or axis != (factor,))
        return View(source, of, axes, {**self.size, factor: count if count is not None else 1})

    def write(self, write: Writer) -> ir.Value | None:
        """Write the view as at most Reshape, Transpose, Reshape.

        None if too many sizes are dynamic, or if that takes more than `MOST_AXES` axes.
        """
        before, after, perm = self.turned
        if perm == list(range(len(perm))):
            return reshaped(write, self.source, self.shape)
        if self._has_too_many(before):
            return None
        first = reshaped(write, self.source, before)
        if first is None:
            return None
        turned = write("Transpose", first, perm=perm)
        set_shape(turned, after, first)
        return reshaped(write, turned, self.shape)

    @property
    def operators(self) -> list[str]:
        """The operators that `write` writes, in order."""
        before, after, perm = self.turned
        if perm == sorted(perm):
            return ["Reshape"] * (sizes(self.source) != self.shape)
        return [*["Reshape"] * (before != sizes(self.source)), "Transpose", *["Reshape"] * (after != self.shape)]

    @property
    def writable(self) -> bool:
        """Whether `write` can write the view."""
        before, after, perm = self.turned
        if perm == list(range(len(perm))):
            after = sizes(self.source) or ()
        elif self._has_too_many(before) or reshape_target(sizes(self.source) or (), before) is None:
            return False
        return reshape_target(after, self.shape) is not None

    def _has_too_many(self, turned: Sizes) -> bool:
        return len(turned) > max(MOST_AXES, len(self.of), len(self.axes))

    @cached_property
    def turned(self) -> tuple[Sizes, Sizes, list[int]]:
        """The shapes before and after the Transpose that makes the view, and its perm, with the fewest nodes."""
        ways = [way for way in (self._by_source(), self._by_axes()) if way is not None]
        return min([*ways, self._by_runs()], key=self._length)

    def _length(self, way: tuple[Sizes, Sizes, list[int]]) -> int:
        """Return how many nodes a configuration takes; large if `write` cannot write it."""
        before, after, perm = way
        first, last = before != sizes(self.source), after != self.shape
        no = (first and reshape_target(sizes(self.source) or (), before) is None) or (
            last and reshape_target(after, self.shape) is None
        )
        no = no or self._has_too_many(before)
        return first + last + (perm != sorted(perm)) + 4 * no

    def _by_source(self) -> tuple[Sizes, Sizes, list[int]] | None:
        """Transpose the source's own axes; None if a view axis holds part of a source axis."""
        shape, perm = sizes(self.source) or (), []
        single = [axis for axis, factors in enumerate(self.of) if not factors]
        for factors in self.axes:
            if not factors and single:
                perm.append(single.pop(0))
            rest = factors
            while rest:
                home = self.axis_of(rest[0])
                whole, rest = self.of[home], rest[len(self.of[home]) :]
                if factors[len(factors) - len(rest) - len(whole) :][: len(whole)] != whole:
                    return None
                perm.append(home)
        perm += single
        return shape, tuple(shape[axis] for axis in perm), perm

    def _by_axes(self) -> tuple[Sizes, Sizes, list[int]] | None:
        """Transpose the view's own axes; None if the factors of one are not adjacent in the source."""
        order = [f for axis in self.of for f in axis]
        starts = {axis: order.index(factors[0]) if factors else -1 for axis, factors in enumerate(self.axes)}
        if any(tuple(order[starts[axis] :][: len(f)]) != f for axis, f in enumerate(self.axes) if f):
            return None
        first = sorted(starts, key=lambda axis: starts[axis])
        return tuple(self.shape[axis] for axis in first), self.shape, [first.index(axis) for axis in starts]

    def _by_runs(self) -> tuple[Sizes, Sizes, list[int]]:
        """Transpose runs of factors that are adjacent in both source and view."""
        order = [f for axis in self.of for f in axis]
        wanted = [f for axis in self.axes for f in axis]
        runs = _runs(order, wanted, self.of)
        inner = sorted(range(len(runs)), key=lambda i: order.index(runs[i][0]))
        middle = [product([self.size[f] for f in run]) for run in runs]
        return tuple(middle[i] for i in inner), tuple(middle), [inner.index(i) for i in range(len(runs))]


def _runs(order: list[int], wanted: list[int], of: tuple[tuple[int, ...], ...]) -> list[list[int]]:
    """Split the wanted order into runs of factors that are adjacent within one source axis."""
    runs: list[list[int]] = []
    first = {axis[0] for axis in of if axis}
    for factor in wanted:
        if runs and order.index(factor) == order.index(runs[-1][-1]) + 1 and factor not in first:
            runs[-1].append(factor)
        else:
            runs.append([factor])
    return runs


def transposed(write: Writer, value: ir.Value, axes: Sequence[int]) -> ir.Value:
    """Return a value with its axes in this order; the value itself if they are."""
    if list(axes) == sorted(axes):
        return value
    new, shape = write("Transpose", value, perm=list(axes)), sizes(value)
    set_shape(new, None if shape is None else [shape[axis] for axis in axes], value)
    return new


def reshaped(write: Writer, value: ir.Value, shape: Sizes) -> ir.Value | None:
    """Write a value in another shape; None if the Reshape target cannot be written."""
    before = sizes(value) or ()
    target = reshape_target(before, shape)
    if before == shape or target is None:
        return None if target is None else value
    new = write("Reshape", value, write.constant(target))
    set_shape(new, shape, value)
    return new


# Transposes of the last two axes, which matrix products can absorb.


def last_axes_swapped(write: Writer, value: ir.Value | None, rank: int) -> ir.Value:
    """Write a value with its last two axes swapped."""
    return write("Transpose", value, perm=[*range(rank - 2), rank - 1, rank - 2])


def split_last_transpose(model: ir.Model, node: ir.Node) -> bool:
    """Split a Transpose that moves the last axis to second-last and also moves other axes.

    The result is two Transposes; the second swaps only the last two axes.

    Returns:
        Whether the node was such a Transpose.
    """
    value = node.outputs[0]
    rank, shape = rank_of(value), sizes(value)
    perm = perm_of(node, rank) if rank > 2 else []
    if shape is None or not perm or perm[-2] != rank - 1 or perm[:-2] == list(range(rank - 2)):
        return False
    write = Writer(model, node)
    first = write("Transpose", node.inputs[0], perm=[*perm[:-2], perm[-1], perm[-2]])
    set_shape(first, (*shape[:-2], shape[-1], shape[-2]), value)
    second = last_axes_swapped(write, first, rank)
    set_shape(second, shape, value)
    write.replace(value, second)
    return True
