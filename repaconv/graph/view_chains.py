"""Follow chains of views, selections and scalings up and down a graph, and combine each into one `View`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from repaconv.graph.index_selections import Places, axes_of, perm_of, selected_positions
from repaconv.graph.nodes_and_constants import made_by, scalar
from repaconv.graph.operator_facts import MOVES, VIEWS
from repaconv.graph.symbolic_shapes import Size, Sizes, floor_divided, is_dynamic, rank_of, sizes
from repaconv.graph.tensor_views import View

if TYPE_CHECKING:
    import onnx_ir as ir


class Read(NamedTuple):
    """A use of a moved value: the chain from that value up to its source, and the node that reads it.

    ``node`` is None for a graph output. ``place`` is the index of the node's input.
    """

    chain: list[ir.Value]
    node: ir.Node | None
    place: int = 0


def reads(source: ir.Value) -> list[Read]:
    """Return all uses of a tensor, looking through nodes that move or scale it."""
    found: list[Read] = []
    todo = [[source]]
    while todo:
        chain = todo.pop()
        if chain[0].is_graph_output():
            found.append(Read(chain, None))
        for node, place in chain[0].uses():
            if _moved_input(node) == place:
                todo += [[output, *chain] for output in node.outputs]
            else:
                found.append(Read(chain, node, place))
    return found


def chain_up_from(value: ir.Value) -> list[ir.Value]:
    """Return the value, what it was moved or scaled from, and so on, up to a value that is computed."""
    chain = [value]
    while (node := chain[-1].producer()) is not None and (place := _moved_input(node)) is not None:
        before = node.inputs[place]
        if before is None:
            break
        chain.append(before)
    return chain


def columns_of(chain: list[ir.Value]) -> set[int] | None:
    """Return the columns of the source (along the last axis) that the first value of a chain holds."""
    view = view_of_chain(chain)
    held = view.held(len(view.of) - 1) if view is not None and view.of else None
    return None if held is None else {int(column) for column in held}


def _moved_input(node: ir.Node) -> int | None:
    """Return the index of the input that a node only moves or scales by a number; None for other nodes."""
    if node.domain != "":
        return None
    if node.op_type in ("Mul", "Div"):
        first, second = (scalar(entry) is not None for entry in node.inputs)
        kind = node.outputs[0].dtype
        if first == second or (kind is not None and not kind.is_floating_point()):
            return None
        return 0 if second else 1 if node.op_type == "Mul" else None
    return 0 if node.op_type in MOVES else None


# The view that a chain amounts to.


def view_of(value: ir.Value) -> View | None:
    """Return the view of the longest chain of `VIEWS` that ends in a value; None if a shape is unknown."""
    chain = [value]
    while (node := made_by(chain[-1], *VIEWS)) and node.inputs[0] is not None and sizes(node.inputs[0]) is not None:
        chain.append(node.inputs[0])
    return view_of_chain(chain)


def view_of_chain(chain: list[ir.Value]) -> View | None:
    """Return the first value of a chain as a view of the last; None if that is not possible at every dynamic size.

    Args:
        chain: Values, each computed from the next by one of `VIEWS`, a selection, or multiplication by a number.
    """
    found = identity_view(chain[-1])
    for place in range(len(chain) - 2, -1, -1):
        found = _view_through(found, chain[place], chain[place + 1]) if found is not None else None
    return found


def identity_view(source: ir.Value) -> View | None:
    """Return a value as a view of itself."""
    shape = sizes(source)
    if shape is None or 0 in shape:
        return None
    axes = tuple((axis,) if size != 1 else () for axis, size in enumerate(shape))
    return View(source, axes, axes, {axis: size for axis, size in enumerate(shape) if size != 1})


def _view_through(view: View, value: ir.Value, before: ir.Value) -> View | None:
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
        axes = ((),) * (len(shape) - len(view.axes)) + view.axes  # a scalar may have more axes than the value it scales
        return replace(view, axes=axes, scale=view.scale / by if node.op_type == "Div" else view.scale * by)
    return _selected(view, selected_positions(node, value))


def _selected(view: View, parts: dict[int, Places] | None) -> View | None:
    if parts is None:
        return None
    found: View | None = view
    for axis, places in sorted(parts.items(), reverse=True):  # removing an axis renumbers later axes
        whole_axis = places.shape == (view.shape[axis],) and (places == np.arange(places.size)).all()
        if found is not None and not whole_axis:
            found = found.taking(axis, places)
    return found


def _squeezed(view: View, node: ir.Node) -> View | None:
    rank = len(view.axes)
    if node.op_type == "Unsqueeze":
        added = axes_of(node, rank_of(node.outputs[0]))
        left = iter(view.axes)
        return (
            None
            if added is None
            else replace(view, axes=tuple(() if i in added else next(left) for i in range(rank + len(added))))
        )
    given = axes_of(node, rank)
    gone = {i for i, axis in enumerate(view.axes) if not axis} if given is None else set(given)
    if any(view.axes[axis] for axis in gone) or rank - len(gone) != rank_of(node.outputs[0]):
        return None
    return replace(view, axes=tuple(axis for i, axis in enumerate(view.axes) if i not in gone))


class _Factors:
    """The factors of a view in the order of its axes, from which the axes of another shape are taken."""

    def __init__(self, view: View) -> None:
        self.size, self.of = dict(view.size), [list(axis) for axis in view.of]
        self.rest = [factor for axis in view.axes for factor in axis]

    def taken(self, wanted: Size, end: int) -> list[int] | None:
        """Remove the factors that make up a size from one end (0: the front, -1: the back); None if they do not."""
        found: list[int] = []
        need = wanted
        while need != 1:
            if not self.rest:
                return None
            have = self.size[self.rest[end]]
            if have == need:
                found.append(self.rest.pop(end))
                need = 1
            elif not isinstance(need, int):
                return None
            elif not isinstance(have, int):
                if have.number % need:
                    return None
                self._split(end, floor_divided(have, need), need)
            elif need % have == 0:
                found.append(self.rest.pop(end))
                need //= have
            elif have % need == 0:
                self._split(end, have // need, need)
            else:
                return None
        return found[:: 1 if end == 0 else -1]

    def _split(self, end: int, inside: Size, outside: int) -> None:
        """Split the factor at one end into two; ``outside`` is the size of the one that is there then."""
        factor, new = self.rest[end], max(self.size) + 1
        self.size[factor], self.size[new] = (outside, inside) if end == 0 else (inside, outside)
        home = next(axis for axis in self.of if factor in axis)
        home.insert(home.index(factor) + 1, new)
        self.rest.insert(1 if end == 0 else len(self.rest), new)


def _regrouped(view: View, shape: Sizes) -> View | None:
    """Regroup the factors into axes of these sizes, splitting a factor where necessary."""
    factors = _Factors(view)
    known = {size for size in view.size.values() if is_dynamic(size)}
    odd = [axis for axis, size in enumerate(shape) if is_dynamic(size) and size not in known]
    if len(odd) > 1:
        return None
    front = list(shape[: odd[0]]) if odd else list(shape)
    back = list(shape[odd[0] + 1 :]) if odd else []
    axes = [factors.taken(size, 0) for size in front]
    tail = [factors.taken(size, -1) for size in reversed(back)][::-1]
    if any(axis is None for axis in (*axes, *tail)) or (factors.rest and not odd):
        return None
    every = [*axes, *([list(factors.rest)] if odd else []), *tail]
    seen_as = tuple(tuple(axis or ()) for axis in every)
    return replace(view, of=tuple(map(tuple, factors.of)), axes=seen_as, size=factors.size).refitted()
