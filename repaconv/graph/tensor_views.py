"""Views: the one way to say which numbers of another tensor a value holds, as factors of the axes of both.

A source [B, N, 3 H d] seen as [3, B, H, N, d] has the factors B, N, 3, H, d; an axis of the view is a product of some.
Chains that do the same are the same view, and a selection on a factor is a selection on the source's own axis. A free
size is a factor of its own: it is never counted through, so what holds of a view holds at every size.

`repaconv.graph.index_selections` reads one node of a graph, `repaconv.graph.view_chains` finds the view that many in a
row are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from repaconv.graph.index_selections import Places, perm_of
from repaconv.graph.nodes_and_constants import Writer
from repaconv.graph.symbolic_shapes import Size, Sizes, as_numbers, product, rank_of, set_shape, sizes, target_of

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True)
class View:
    """A value as a view of another.

    Attributes:
        source: The value that is seen.
        of: For every axis of the source, the factors of it, outermost first; factors are numbered.
        axes: For every axis of the view, the factors that it is the product of.
        size: Of every factor.
        places: By axis of the source, of which not everything is held in order: the places of it, in the shape of its
            factors.
        scale: What the numbers are multiplied by.
    """

    source: ir.Value
    of: tuple[tuple[int, ...], ...]
    axes: tuple[tuple[int, ...], ...]
    size: Mapping[int, Size]
    places: Mapping[int, Places] = field(default_factory=dict)
    scale: float = 1.0

    @property
    def shape(self) -> Sizes:
        """Of the view."""
        return tuple(product([self.size[f] for f in axis]) for axis in self.axes)

    @property
    def in_order(self) -> bool:
        """Whether it holds the source's numbers as they lie: nothing, or a Reshape, makes it."""
        ours, theirs = ([f for axis in axes for f in axis] for axes in (self.axes, self.of))
        return ours == theirs and not self.places and self.scale == 1

    def columns(self, *axes: int) -> Places | None:
        """The places of the source's last axis that these axes hold together, in order; None if they hold others."""
        last = len(self.of) - 1
        if tuple(f for axis in axes for f in self.axes[axis]) != self.of[last]:
            return None
        return self.held(last)

    def held(self, axis: int) -> Places | None:
        """The places of an axis of the source, in the order of its factors; None if it is free."""
        found = self.places.get(axis)
        if found is None:
            length = product([self.size[f] for f in self.of[axis]])
            return np.arange(length) if isinstance(length, int) else None
        return found.reshape(-1)

    def lengths(self, axis: int) -> list[int] | None:
        """Of an axis of the source's factors; None if one is free."""
        return as_numbers(self.size[factor] for factor in self.of[axis])

    def axis_of(self, factor: int) -> int:
        """Which axis of the source a factor is part of."""
        return next(axis for axis, factors in enumerate(self.of) if factor in factors)

    def alike(self, other: View) -> bool:
        """Whether another source is seen in the same way."""
        if sizes(self.source) != sizes(other.source) or self.shape != other.shape:
            return False
        ours, theirs = ([f for axis in view.of for f in axis] for view in (self, other))
        if [self.size[f] for f in ours] != [other.size[f] for f in theirs]:
            return False
        names = dict(zip(theirs, ours, strict=True))
        return self.axes == tuple(tuple(names[f] for f in axis) for axis in other.axes)

    def merged(self, axis: int) -> View | None:
        """The same view with an axis of one factor; None where its factors do not lie together in the source."""
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
        """The view with these places of an axis alone; a single number, and the axis goes."""
        merged = self.merged(axis)
        if merged is None or not places.size:
            return None
        if not merged.axes[axis]:  # of length 1
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
        """The view without an axis of length 1."""
        return replace(self, axes=self.axes[:axis] + self.axes[axis + 1 :])

    def refitted(self) -> View:
        """Places in the shape of their factors; none for what is held whole and in order."""
        places = {}
        for axis, held in self.places.items():
            if held.size != (sizes(self.source) or ())[axis] or (held.reshape(-1) != np.arange(held.size)).any():
                places[axis] = held.reshape(self.lengths(axis) or ())
        return replace(self, places=places)

    def channels(self, factor: int, chosen: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Which entries of the source's axis have one of the chosen places in a factor; None if sizes are free."""
        home = self.axis_of(factor)
        lengths = self.lengths(home)
        if lengths is None:
            return None
        grid = np.arange(math.prod(lengths)).reshape(lengths)
        found: NDArray[np.int64] = np.take(grid, chosen, self.of[home].index(factor)).reshape(-1)
        return found

    def narrowed(self, source: ir.Value, factor: int, count: int | None) -> View:
        """The view of another source in which that factor has so many places; None: it and its axis are gone."""
        of = tuple(tuple(f for f in axis if f != factor or count is not None) for axis in self.of)
        axes = tuple(axis for axis in self.axes if count is not None or axis != (factor,))
        return View(source, of, axes, {**self.size, factor: count if count is not None else 1})

    def write(self, write: Writer) -> ir.Value | None:
        """Nodes that make it: at most Reshape, Transpose, Reshape. None where too many sizes are free."""
        before, after, perm = self.turned()
        if perm == list(range(len(perm))):
            return reshaped(write, self.source, self.shape)
        first = reshaped(write, self.source, before)
        if first is None:
            return None
        turned = write("Transpose", first, perm=perm)
        set_shape(turned, after, first)
        return reshaped(write, turned, self.shape)

    @property
    def writable(self) -> bool:
        """Whether `write` can make it."""
        before, after, perm = self.turned()
        if perm == list(range(len(perm))):
            after = sizes(self.source) or ()
        elif target_of(sizes(self.source) or (), before) is None:
            return False
        return target_of(after, self.shape) is not None

    def turned(self) -> tuple[Sizes, Sizes, list[int]]:
        """Shapes before and behind the one Transpose that makes it, and its perm: the way of the fewest nodes."""
        ways = [way for way in (self._by_source(), self._by_axes()) if way is not None]
        return min([*ways, self._by_runs()], key=self._length)

    def _length(self, way: tuple[Sizes, Sizes, list[int]]) -> int:
        """How many nodes write it so; more than any where too many sizes are free."""
        before, after, perm = way
        first, last = before != sizes(self.source), after != self.shape
        no = (first and target_of(sizes(self.source) or (), before) is None) or (
            last and target_of(after, self.shape) is None
        )
        return first + last + (perm != sorted(perm)) + 4 * no

    def _by_source(self) -> tuple[Sizes, Sizes, list[int]] | None:
        """By the axes of the source as they are; None where the view has not all of one together."""
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
        """By the view's own axes; None where the factors of one lie apart in the source."""
        order = [f for axis in self.of for f in axis]
        starts = {axis: order.index(factors[0]) if factors else -1 for axis, factors in enumerate(self.axes)}
        if any(tuple(order[starts[axis] :][: len(f)]) != f for axis, f in enumerate(self.axes) if f):
            return None
        first = sorted(starts, key=lambda axis: starts[axis])
        return tuple(self.shape[axis] for axis in first), self.shape, [first.index(axis) for axis in starts]

    def _by_runs(self) -> tuple[Sizes, Sizes, list[int]]:
        """By what lies together in both; what fits in one axis of the source is moved as one."""
        order = [f for axis in self.of for f in axis]
        wanted = [f for axis in self.axes for f in axis]
        runs = _runs(order, wanted, self.of)
        inner = sorted(range(len(runs)), key=lambda i: order.index(runs[i][0]))
        middle = [product([self.size[f] for f in run]) for run in runs]
        return tuple(middle[i] for i in inner), tuple(middle), [inner.index(i) for i in range(len(runs))]


def _runs(order: list[int], wanted: list[int], of: tuple[tuple[int, ...], ...]) -> list[list[int]]:
    """The wanted order in pieces that lie together in one axis of the source."""
    runs: list[list[int]] = []
    first = {axis[0] for axis in of if axis}
    for factor in wanted:
        if runs and order.index(factor) == order.index(runs[-1][-1]) + 1 and factor not in first:
            runs[-1].append(factor)
        else:
            runs.append([factor])
    return runs


def reshaped(write: Writer, value: ir.Value, shape: Sizes) -> ir.Value | None:
    """The value in another shape; None where the sizes of that cannot be said."""
    before = sizes(value) or ()
    target = target_of(before, shape)
    if before == shape or target is None:
        return None if target is None else value
    new = write("Reshape", value, write.constant(target))
    set_shape(new, shape, value)
    return new


# --- Transposes of the last two axes, which products do as they read: written, and taken out of Transposes of more.


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
