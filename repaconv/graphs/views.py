"""Views: which numbers of another tensor a value holds, as factors of the axes of both.

A source [B, N, 3 H d] seen as [3, B, H, N, d] has the factors B, N, 3, H, d; an axis of the view is a product of some.
Chains that do the same are the same view, and a selection on a factor is a selection on the source's own axis. A free
size is a factor of its own: it is never counted through, so what holds of a view holds at every size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from repaconv.graphs.graph import Writer, made_by, scalar
from repaconv.graphs.operators import VIEWS
from repaconv.graphs.selections import Places, axes_of, perm_of, taken
from repaconv.graphs.shapes import Size, Sizes, sizes

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
        return replace(self, of=of, axes=(*self.axes[:axis], (new,), *self.axes[axis + 1 :]), size=size)._refitted()

    def taking(self, axis: int, places: Places) -> View | None:
        """The view with these places of an axis alone; a single number, and the axis goes."""
        merged = self.merged(axis)
        if merged is None or not places.size:
            return None
        if not merged.axes[axis]:  # of length 1
            return _without(merged, axis) if not places.ndim else merged if places.size == 1 else None
        ((factor,), home) = merged.axes[axis], merged.axis_of(merged.axes[axis][0])
        held, at = merged.held(home), merged.of[home].index(factor)
        if held is None:
            return None
        found = np.take(held.reshape([int(merged.size[f]) for f in merged.of[home]]), places, at)
        if places.size == 1:
            of = tuple(tuple(f for f in factors if f != factor) for factors in merged.of)
            single = replace(merged, of=of, axes=(*merged.axes[:axis], (), *merged.axes[axis + 1 :]))
            merged = single if places.ndim else _without(single, axis)
        size = {**merged.size, factor: places.size}
        return replace(merged, size=size, places={**merged.places, home: found})._refitted()

    def _refitted(self) -> View:
        """Places in the shape of their factors; none for what is held whole and in order."""
        places = {}
        for axis, held in self.places.items():
            length = (sizes(self.source) or ())[axis]
            if held.size != length or (held.reshape(-1) != np.arange(length)).any():
                places[axis] = held.reshape([int(self.size[f]) for f in self.of[axis]])
        return replace(self, places=places)

    def channels(self, factor: int, chosen: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Which entries of the source's axis have one of the chosen places in a factor; None if sizes are free."""
        home = self.axis_of(factor)
        lengths = [self.size[f] for f in self.of[home]]
        if not all(isinstance(length, int) for length in lengths):
            return None
        grid = np.arange(math.prod(int(n) for n in lengths)).reshape([int(n) for n in lengths])
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
        elif _target(sizes(self.source) or (), before) is None:
            return False
        return _target(after, self.shape) is not None

    def turned(self) -> tuple[Sizes, Sizes, list[int]]:
        """Shapes before and behind the one Transpose that makes it, and its perm; axes of the source stay whole."""
        order = [f for axis in self.of for f in axis]
        wanted = [f for axis in self.axes for f in axis]
        runs = _runs(order, wanted, self.of)
        inner = sorted(range(len(runs)), key=lambda i: order.index(runs[i][0]))
        middle = [product([self.size[f] for f in run]) for run in runs]
        return tuple(middle[i] for i in inner), tuple(middle), [inner.index(i) for i in range(len(runs))]


def view_of(value: ir.Value) -> View | None:
    """The longest chain of `VIEWS` behind a value, itself if there is none; None where a shape is not known."""
    chain = [value]
    while (node := made_by(chain[-1], *VIEWS)) and node.inputs[0] is not None and sizes(node.inputs[0]) is not None:
        chain.append(node.inputs[0])
    return seen(chain)


def seen(chain: list[ir.Value]) -> View | None:
    """The first value of a chain as a view of its last; None where that cannot be told for every free size.

    Args:
        chain: Each made of the next by one of `VIEWS`, by a selection, or by a number that it is multiplied with.
    """
    found = whole(chain[-1])
    for place in range(len(chain) - 2, -1, -1):
        found = _through(found, chain[place], chain[place + 1]) if found is not None else None
    return found


def whole(source: ir.Value) -> View | None:
    """A value as a view of itself."""
    shape = sizes(source)
    if shape is None or 0 in shape:
        return None
    axes = tuple((axis,) if size != 1 else () for axis, size in enumerate(shape))
    return View(source, axes, axes, {axis: size for axis, size in enumerate(shape) if size != 1})


def _through(view: View, value: ir.Value, before: ir.Value) -> View | None:
    node, shape = value.producer(), sizes(value)
    if node is None or shape is None:
        return None
    if node.op_type == "Identity":
        return view
    if node.op_type == "Transpose":
        return replace(view, axes=tuple(view.axes[axis] for axis in perm_of(node, len(view.axes))))
    if node.op_type in ("Squeeze", "Unsqueeze"):
        return _squeezed(view, node)
    if node.op_type in ("Reshape", "Flatten"):
        return _regrouped(view, shape)
    if node.op_type in ("Mul", "Div"):
        by = scalar(node.inputs[1] if node.inputs[0] is before else node.inputs[0])
        assert by is not None
        axes = ((),) * (len(shape) - len(view.axes)) + view.axes  # a number may have more axes than what it scales
        return replace(view, axes=axes, scale=view.scale / by if node.op_type == "Div" else view.scale * by)
    return _selected(view, taken(node, value))


def _selected(view: View, parts: dict[int, Places] | None) -> View | None:
    if parts is None:
        return None
    found: View | None = view
    for axis, places in sorted(parts.items(), reverse=True):  # an axis that goes moves those behind it alone
        whole_axis = places.shape == (view.shape[axis],) and (places == np.arange(places.size)).all()
        if found is not None and not whole_axis:
            found = found.taking(axis, places)
    return found


def _without(view: View, axis: int) -> View:
    return replace(view, axes=view.axes[:axis] + view.axes[axis + 1 :])


def _squeezed(view: View, node: ir.Node) -> View | None:
    rank = len(view.axes)
    if node.op_type == "Unsqueeze":
        added = axes_of(node, len(sizes(node.outputs[0]) or ()))
        left = iter(view.axes)
        return (
            None
            if added is None
            else replace(view, axes=tuple(() if i in added else next(left) for i in range(rank + len(added))))
        )
    given = axes_of(node, rank)
    gone = {i for i, axis in enumerate(view.axes) if not axis} if given is None else set(given)
    if any(view.axes[axis] for axis in gone) or rank - len(gone) != len(sizes(node.outputs[0]) or ()):
        return None
    return replace(view, axes=tuple(axis for i, axis in enumerate(view.axes) if i not in gone))


def _regrouped(view: View, shape: Sizes) -> View | None:
    """The same factors, in order, as axes of these sizes; factors are split where a size asks for it."""
    size, of = dict(view.size), [list(axis) for axis in view.of]
    rest = [f for axis in view.axes for f in axis]

    def taken(wanted: Size, end: int) -> list[int] | None:
        """Factors off one end (0: the front) that make up a size."""
        found: list[int] = []
        need = wanted
        while need != 1:
            if not rest:
                return None
            factor = rest[end]
            have = size[factor]
            if have == need:
                found.append(rest.pop(end))
                need = 1
            elif isinstance(have, int) and isinstance(need, int) and need % have == 0:
                found.append(rest.pop(end))
                need //= have
            elif isinstance(have, int) and isinstance(need, int) and have % need == 0:
                new = max(size) + 1
                outer, inner = (need, have // need) if end == 0 else (have // need, need)
                size[factor], size[new] = outer, inner
                home = next(axis for axis in of if factor in axis)
                home.insert(home.index(factor) + 1, new)
                place = len(rest) - 1 if end else 0
                rest.insert(place + 1, new)
            else:
                return None
        return found[:: 1 if end == 0 else -1]

    known = {s for s in size.values() if isinstance(s, str)}
    odd = [axis for axis, s in enumerate(shape) if isinstance(s, str) and s not in known]
    if len(odd) > 1:
        return None
    front = list(shape[: odd[0]]) if odd else list(shape)
    back = list(shape[odd[0] + 1 :]) if odd else []
    axes: list[list[int] | None] = [taken(s, 0) for s in front]
    tail = [taken(s, -1) for s in reversed(back)][::-1]
    if any(axis is None for axis in (*axes, *tail)) or (rest and not odd):
        return None
    every = [*axes, *([list(rest)] if odd else []), *tail]
    seen_as = tuple(tuple(axis or ()) for axis in every)
    return replace(view, of=tuple(map(tuple, of)), axes=seen_as, size=size)._refitted()


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


def product(parts: list[Size]) -> Size:
    """Of sizes: a number, or the names and the number."""
    names = [part for part in parts if isinstance(part, str)]
    number = math.prod(part for part in parts if isinstance(part, int))
    return "*".join([*names, *([str(number)] if number != 1 else [])]) if names else number


def reshaped(write: Writer, value: ir.Value, shape: Sizes) -> ir.Value | None:
    """The value in another shape; None where the sizes of that cannot be said."""
    before = sizes(value) or ()
    target = _target(before, shape)
    if before == shape or target is None:
        return None if target is None else value
    new = write("Reshape", value, write.constant(target))
    set_shape(new, shape, value)
    return new


def _target(before: Sizes, shape: Sizes) -> list[int] | None:
    """A Reshape's target: one free size is -1, others are 0 where they are those of the input at the same place."""
    free = [axis for axis, size in enumerate(shape) if isinstance(size, str)]
    copied = [axis for axis in free if shape[axis : axis + 1] == before[axis : axis + 1]] if len(free) > 1 else []
    if len(free) - len(copied) > 1:
        return None
    return [size if isinstance(size, int) else 0 if axis in copied else -1 for axis, size in enumerate(shape)]


def set_shape(value: ir.Value, shape: Sizes | None, like: ir.Value) -> None:
    """Write down a new value's shape, and the type of another."""
    import onnx_ir as ir

    if shape is not None:
        value.shape = ir.Shape([size if isinstance(size, int) else ir.SymbolicDim(size) for size in shape])
    value.dtype = like.dtype
