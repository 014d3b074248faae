"""Views: what a chain of Reshape, Transpose, Squeeze and Unsqueeze does to a value, as factors of its axes.

A source [B, N, 3 H d] seen as [3, B, H, N, d] has the factors B, N, 3, H, d; an axis of the view is a product of some.
Chains that do the same are the same view, and a selection on a factor is a selection on the source's own axis.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from repaconv.forms.graph import Writer, attribute, constant, made_by
from repaconv.forms.shapes import Size, Sizes, sizes

if TYPE_CHECKING:
    import onnx_ir as ir

OPERATORS = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Identity", "Flatten")


@dataclass(frozen=True)
class View:
    """A value as a view of another.

    Attributes:
        source: The value that is seen.
        of: For every axis of the source, the factors of it, outermost first; factors are numbered.
        axes: For every axis of the view, the factors that it is the product of.
        size: Of every factor.
    """

    source: ir.Value
    of: tuple[tuple[int, ...], ...]
    axes: tuple[tuple[int, ...], ...]
    size: dict[int, Size]

    @property
    def shape(self) -> Sizes:
        """Of the view."""
        return tuple(_product([self.size[f] for f in axis]) for axis in self.axes)

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
        size = {**self.size, new: _product([self.size[f] for f in factors])}
        of = (*self.of[:home], inside, *self.of[home + 1 :])
        return View(self.source, of, (*self.axes[:axis], (new,), *self.axes[axis + 1 :]), size)

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
            return _reshaped(write, self.source, self.shape)
        first = _reshaped(write, self.source, before)
        if first is None:
            return None
        turned = write("Transpose", first, perm=perm)
        set_shape(turned, after, first)
        return _reshaped(write, turned, self.shape)

    def turned(self) -> tuple[Sizes, Sizes, list[int]]:
        """Shapes before and behind the one Transpose that makes it, and its perm; axes of the source stay whole."""
        order = [f for axis in self.of for f in axis]
        wanted = [f for axis in self.axes for f in axis]
        runs = _runs(order, wanted, self.of)
        inner = sorted(range(len(runs)), key=lambda i: order.index(runs[i][0]))
        middle = [_product([self.size[f] for f in run]) for run in runs]
        return tuple(middle[i] for i in inner), tuple(middle), [inner.index(i) for i in range(len(runs))]


def view_of(value: ir.Value) -> View | None:
    """The longest chain behind a value, itself if there is none; None where a shape is not known."""
    chain = []
    source = value
    while (node := made_by(source, *OPERATORS)) and node.inputs[0] is not None and sizes(node.inputs[0]) is not None:
        chain.append(node)
        source = node.inputs[0]
    found = whole(source)
    for node in reversed(chain):
        if found is None:
            return None
        found = _through(found, node)
    return found


def whole(source: ir.Value) -> View | None:
    """A value as a view of itself."""
    shape = sizes(source)
    if shape is None:
        return None
    axes = tuple((axis,) if size != 1 else () for axis, size in enumerate(shape))
    return View(source, axes, axes, {axis: size for axis, size in enumerate(shape) if size != 1})


def _through(view: View, node: ir.Node) -> View | None:
    if node.op_type == "Identity":
        return view
    if node.op_type == "Transpose":
        perm = attribute(node, "perm", None) or range(len(view.axes))[::-1]
        return replace(view, axes=tuple(view.axes[axis] for axis in perm))
    if node.op_type in ("Squeeze", "Unsqueeze"):
        return _squeezed(view, node)
    shape = sizes(node.outputs[0])
    return None if shape is None else _regrouped(view, shape)


def axes_of(node: ir.Node) -> list[int] | None:
    """The axes of a Squeeze, Unsqueeze or reduction, by attribute or input; None if they are computed or left out."""
    given = attribute(node, "axes", None)
    if given is not None:
        return [int(axis) for axis in given]
    found = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    return None if found is None else [int(axis) for axis in found.reshape(-1)]


def _squeezed(view: View, node: ir.Node) -> View | None:
    given, rank = axes_of(node), len(view.axes)
    if node.op_type == "Squeeze":
        gone = {axis % rank for axis in given} if given is not None else {i for i, a in enumerate(view.axes) if not a}
        if any(view.axes[axis] for axis in gone):
            return None
        return replace(view, axes=tuple(axis for i, axis in enumerate(view.axes) if i not in gone))
    if given is None:
        return None
    added = {axis % (rank + len(given)) for axis in given}
    left = iter(view.axes)
    return replace(view, axes=tuple(() if i in added else next(left) for i in range(rank + len(given))))


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
    return View(view.source, tuple(map(tuple, of)), tuple(tuple(axis or ()) for axis in every), size)


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


def _product(parts: list[Size]) -> Size:
    names = [part for part in parts if isinstance(part, str)]
    number = math.prod(part for part in parts if isinstance(part, int))
    return "*".join([*names, *([str(number)] if number != 1 else [])]) if names else number


def _reshaped(write: Writer, value: ir.Value, shape: Sizes) -> ir.Value | None:
    if sizes(value) == shape:
        return value
    free = [axis for axis, size in enumerate(shape) if isinstance(size, str)]
    if len(free) > 1:
        return None
    new = write("Reshape", value, write.constant([-1 if isinstance(size, str) else size for size in shape]))
    set_shape(new, shape, value)
    return new


def set_shape(value: ir.Value, shape: Sizes | None, like: ir.Value) -> None:
    """Write down a new value's shape, and the type of another."""
    import onnx_ir as ir

    if shape is not None:
        value.shape = ir.Shape([size if isinstance(size, int) else ir.SymbolicDim(size) for size in shape])
    value.dtype = like.dtype


@dataclass(frozen=True)
class Selection:
    """Places of one axis of a value, as Slice, Gather and Split take them.

    Attributes:
        value: What is taken from.
        axis: Which axis, from 0.
        places: Which places of it, in order.
        keeps: Whether the axis stays (a Gather by a scalar drops it).
    """

    value: ir.Value
    axis: int
    places: NDArray[np.int64]
    keeps: bool = True


def selection_of(value: ir.Value | None) -> Selection | None:
    """The selection that a value is, if its places are constant."""
    node = made_by(value, "Slice", "Gather", "Split")
    if node is None or node.inputs[0] is None or value is None:
        return None
    shape = sizes(node.inputs[0])
    if shape is None:
        return None
    found: Any = {"Slice": _slice, "Gather": _gather, "Split": _split}[node.op_type](node, value, shape)
    return found if found is None or isinstance(found, Selection) else None


def _slice(node: ir.Node, value: ir.Value, shape: Sizes) -> Selection | None:
    parts = [constant(part) if part is not None else None for part in node.inputs[1:]]
    starts, ends = parts[:2]
    if starts is None or ends is None or starts.size != 1:
        return None
    axis = int(parts[2].reshape(-1)[0]) if len(parts) > 2 and parts[2] is not None else 0
    step = int(parts[3].reshape(-1)[0]) if len(parts) > 3 and parts[3] is not None else 1
    axis %= len(shape)
    length = shape[axis]
    if not isinstance(length, int):
        return None
    start, end = int(starts.reshape(-1)[0]), int(ends.reshape(-1)[0])
    places = np.arange(length)[slice(start, None if step < 0 and end < -length else end, step)]
    assert node.inputs[0] is not None
    return Selection(node.inputs[0], axis, places)


def _gather(node: ir.Node, value: ir.Value, shape: Sizes) -> Selection | None:
    indices = constant(node.inputs[1])
    axis = int(attribute(node, "axis", 0)) % len(shape)
    length = shape[axis]
    if indices is None or indices.ndim > 1 or not isinstance(length, int):
        return None
    assert node.inputs[0] is not None
    return Selection(node.inputs[0], axis, np.atleast_1d(indices) % length, indices.ndim == 1)


def _split(node: ir.Node, value: ir.Value, shape: Sizes) -> Selection | None:
    axis = int(attribute(node, "axis", 0)) % len(shape)
    length, count = shape[axis], len(node.outputs)
    if not isinstance(length, int):
        return None
    given = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    said = attribute(node, "split", None)
    each = -(-length // count)
    parts = [
        int(n) for n in (given if given is not None else said or [min(each, length - i * each) for i in range(count)])
    ]
    if len(node.inputs) > 1 and node.inputs[1] is not None and given is None:
        return None
    start = sum(parts[: value.index() or 0])
    assert node.inputs[0] is not None
    return Selection(node.inputs[0], axis, np.arange(start, start + parts[value.index() or 0]))
