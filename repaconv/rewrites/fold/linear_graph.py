"""The linear graph: values as vertices, linear maps over channels as edges, and what can be left out of it.

Along one axis (the last of tokens, or axis 1 of an image) a value is

    v = sum_p M_pv p + c_v

over other values p. BatchNorm, LayerScale, a norm's affine, splits, concats, masks, shortcuts, linear layers and 1x1
convolutions are edges. A vertex v that nothing but edges reads can be left out: for every pair of edges p -> v -> s

    M_ps += M_vs M_pv,    c_s += M_vs c_v

which composes affine maps in a row, adds those in parallel and takes shortcuts in. It is done where the whole costs no
more multiply-accumulates than before. Channels that no edge reads are dropped, also in front of an activation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from repaconv.algebra.channel_maps import (
    Dense,
    Map,
    Mask,
    Pick,
    Shape,
    Vector,
    after,
    applied,
    plus,
    same,
    selection,
    shape_after,
    shape_of,
    shape_plus,
)

if TYPE_CHECKING:
    import onnx_ir as ir


# --- Vertices of a linear graph: values with the edges that make them, and what leaving one out saves.


@dataclass(eq=False)
class Vertex:
    """A value with its channels.

    Attributes:
        width: Channels.
        value: In the graph; None for one that is new.
        sink: Whether something that is no edge reads it.
        inputs: The edges that make it; none for one that something else computes.
        shift: The constant; None where there never was one.
        outputs: Who reads it by an edge, in order: what is made of them is the same every time.
        through: For an activation: the node and the vertex it acts on, channel by channel.
        activations: Those that act on this vertex.
        shared: Whether a matrix that makes it is read by others, too.
        of_norm: Whether it is a norm's own scale and shift, which cost nothing where they are.
        changed: Whether the graph's own nodes no longer say what the edges say.
        took: Operators of what was left out for it.
    """

    width: int
    value: ir.Value | None
    sink: bool = False
    inputs: dict[Vertex, Map] = field(default_factory=dict)
    shift: Vector | None = None
    outputs: dict[Vertex, None] = field(default_factory=dict)
    through: tuple[ir.Node, Vertex] | None = None
    activations: list[Vertex] = field(default_factory=list)
    shared: bool = False
    of_norm: bool = False
    changed: bool = False
    took: list[str] = field(default_factory=list)

    @property
    def stays(self) -> bool:
        """Whether it cannot be left out."""
        return self.sink or not self.inputs or bool(self.activations)


def is_plain(vertex: Vertex, outer: Map, trivial: bool) -> bool:
    """Whether leaving it out only says in one sum what the graph says in two nodes."""
    moves = (outer, *vertex.inputs.values())  # channels that only change their places: the same in other words
    if trivial or all(isinstance(edge, Pick) and bool((edge.scale[edge.rows] == 1).all()) for edge in moves):
        return True
    inner = next(iter(vertex.inputs.values()))
    if len(vertex.inputs) > 1 or not isinstance(inner, Pick) or vertex.shift is not None:
        return False
    return inner.is_identity or (inner.is_range and isinstance(outer, Dense))  # a product of a slice


def gain_of(vertex: Vertex) -> int | None:
    """What leaving it out saves, in multiply-accumulates a token; None where it stays."""
    if vertex.stays or not vertex.outputs:
        return None
    if vertex.of_norm and any(user.shared for user in vertex.outputs):
        return None  # every reader would need a matrix of its own
    if vertex.of_norm and _is_alone(vertex) and any(_is_bare(user, vertex) for user in vertex.outputs):
        return None  # it would need a shift of its own, which costs nothing where it is
    before = _cost(vertex, {source: shape_of(edge) for source, edge in vertex.inputs.items()}, vertex.shift is not None)
    if len(vertex.outputs) > 1 and any(edge.pick is None for edge in map(shape_of, vertex.inputs.values())):
        before -= 1  # one product that several read is better than several, if they cost the same
    saved, arranged = before, len(vertex.outputs) > 1 and arrangement(vertex) is not None
    for user in vertex.outputs:
        now = {source: shape_of(edge) for source, edge in user.inputs.items()}
        if arranged:  # the product could have its channels as they are wanted
            now[vertex] = shape_of(_sliced(user.inputs[vertex]))
        then = {source: edge for source, edge in now.items() if source is not vertex}
        for source, inner in vertex.inputs.items():
            new = shape_after(user.inputs[vertex], inner)
            then[source] = shape_plus(then[source], new) if source in then else new
        if not any(edge.rows.any() for edge in then.values()):
            return None  # all would cancel, and a value of nothing is none
        shifted = user.shift is not None
        saved += _cost(user, now, shifted) - _cost(user, then, shifted or vertex.shift is not None)
    return saved


def _is_alone(vertex: Vertex) -> bool:
    """Whether it shifts what nothing else reads, so that nothing becomes equal without that."""
    return vertex.shift is not None and all(len(source.outputs) == 1 for source in vertex.inputs)


def _is_bare(user: Vertex, source: Vertex) -> bool:
    """Whether it is a product to which nothing is added."""
    return user.shift is None and isinstance(user.inputs[source], Dense)


def arrangement(vertex: Vertex) -> Pick | None:
    """The order and factors of a product's channels with which all its readers would only slice it.

    None where readers differ, where it is no product, or where they only slice it now.
    """
    edges = [user.inputs[vertex] for user in vertex.outputs]
    picks = [edge for edge in edges if isinstance(edge, Pick)]
    dense = all(isinstance(edge, Dense) for edge in vertex.inputs.values())
    if vertex.stays or not dense or not picks or len(picks) < len(edges) or all(map(_is_slice, picks)):
        return None
    factor, read = np.ones(vertex.width), np.zeros(vertex.width, bool)
    for edge in picks:
        places, scale = edge.index[edge.rows], edge.scale[edge.rows]
        others = read[places] & (factor[places] != scale)
        factor[places], read[places] = scale, True
        if others.any() or (factor[places] != scale).any():
            return None
    order = np.concatenate([edge.index[edge.rows] for edge in picks])
    if len(np.unique(order)) < len(order):
        order = np.arange(vertex.width)
    found = Pick(order, factor[order], vertex.width)
    return None if found.is_identity else found


def _is_slice(edge: Pick) -> bool:
    """Whether it takes channels that lie together, as they are or negated."""
    index, scale = edge.index[edge.rows], edge.scale[edge.rows]
    return bool((np.diff(index) == 1).all()) and bool((np.abs(scale) == 1).all())


def _sliced(edge: Map) -> Map:
    """The same as a slice of what was arranged for it."""
    assert isinstance(edge, Pick)
    index = np.where(edge.rows, np.cumsum(edge.rows) - 1, -1)
    return Pick(index, edge.rows.astype(np.float64), edge.width)


def product_of(vertex: Vertex) -> int:
    """What its own edges cost, in multiply-accumulates a token."""
    return _cost(vertex, {source: shape_of(edge) for source, edge in vertex.inputs.items()}, False)


def _cost(vertex: Vertex, edges: dict[Vertex, Shape], shifted: bool) -> int:
    live = [edge for edge in edges.values() if edge.rows.any()]
    free = any(edge.pick is None for edge in live)  # a matrix product's bias costs nothing
    return sum(edge.cost for edge in live) + vertex.width * (max(len(live) - 1, 0) + int(shifted and not free))


def are_apart(rows: list[Mask]) -> bool:
    """Whether every channel is of one edge alone."""
    return bool((np.sum(rows, 0) == 1).all())


def is_row(vertex: Vertex) -> bool:
    """Whether it is some values beside each other, as they are."""
    edges = list(vertex.inputs.values())
    plain = all(isinstance(edge, Pick) and bool((edge.scale[edge.rows] == 1).all()) for edge in edges)
    return len(edges) > 1 and plain and vertex.shift is None and are_apart([edge.rows for edge in edges])


def are_equal(a: Vertex, b: Vertex) -> bool:
    """Whether two vertices of the same inputs are one sum, to the rounding of float64."""
    shifts = (a.shift, b.shift)
    if any(s is None for s in shifts) and any(s is not None and s.any() for s in shifts):
        return False
    if a.shift is not None and b.shift is not None and not np.allclose(a.shift, b.shift, rtol=1e-13, atol=0):
        return False
    return all(same(edge, b.inputs[source]) for source, edge in a.inputs.items())


def kind_of(node: ir.Node) -> Any:
    """What tells two activations apart."""
    return (
        node.domain,
        node.op_type,
        tuple(sorted((name, str(entry.value)) for name, entry in node.attributes.items())),
    )


def operator_of(vertex: Vertex) -> str:
    """What computes it, in a word."""
    node = vertex.value.producer() if vertex.value is not None else None
    return node.op_type if node is not None else "channels"


# --- What was composed into all its readers stands again for itself where that came to nothing.
#
# Leaving it out may be the first step to something: whoever reads a part of it takes in what comes next. Where in the
# end all its readers are what they were made then, several products stand in place of one, of which several read, or
# which reads several values in a row, and save next to nothing.

LEAST = 8
"""A product is worth several if they save this part of its multiplications."""


@dataclass(frozen=True)
class Reader:
    """One reader of a vertex that was left out: its edge, shift and state before, and its edges and shift since."""

    edge: Map
    shift: Vector | None
    changed: bool
    now: dict[Vertex, Map | None]
    shift_now: Vector | None


@dataclass(frozen=True)
class Removal:
    """A vertex that was left out."""

    vertex: Vertex
    readers: dict[Vertex, Reader]


def before(vertex: Vertex, gain: int) -> dict[Vertex, tuple[Map, Vector | None, bool]] | None:
    """What is kept of a vertex's readers before it is left out; None where it will not come back."""
    if any(user.inputs.keys() & vertex.inputs.keys() for user in vertex.outputs):
        return None
    dense = all(isinstance(edge, Dense) for edge in vertex.inputs.values())
    shared = len(vertex.outputs) > 1 and dense and LEAST * gain <= product_of(vertex)
    if not shared and not is_row(vertex):
        return None
    return {user: (user.inputs[vertex], user.shift, user.changed) for user in vertex.outputs}


def removal(vertex: Vertex, kept: dict[Vertex, tuple[Map, Vector | None, bool]]) -> Removal:
    """The same, once it was left out."""
    return Removal(
        vertex,
        {u: Reader(*was, {s: u.inputs.get(s) for s in vertex.inputs}, u.shift) for u, was in kept.items()},
    )


def give_back(graph: LinearGraph, removals: list[Removal]) -> None:
    """Those whose readers are what they were made then, in place; the last first."""
    for one in reversed(removals):
        vertex = one.vertex
        whole = all(source in graph.vertices for source in vertex.inputs)
        if not whole or not all(user in graph.vertices and _is(user, was) for user, was in one.readers.items()):
            continue
        vertex.outputs.clear()
        graph.add(vertex)
        for user, was in one.readers.items():
            for source in vertex.inputs:
                del user.inputs[source]
                source.outputs.pop(user, None)
            user.inputs[vertex], user.shift, user.changed = was.edge, was.shift, was.changed
            vertex.outputs[user] = None


def _is(user: Vertex, was: Reader) -> bool:
    return user.shift is was.shift_now and all(
        edge is not None and user.inputs.get(source) is edge for source, edge in was.now.items()
    )


# --- One product that several read: its channels are put into the order, and take in the factors, that its readers
# want.
#
# Queries, keys and values are one layer, head by head perhaps, and the queries alone are scaled. Three layers would be
# as many multiplications, but three calls.


def arrange(graph: LinearGraph) -> bool:
    """Do so wherever a reader would have to choose or to multiply, in place; whether there was one."""
    found = [(vertex, order) for vertex in tuple(graph.vertices) if (order := arrangement(vertex)) is not None]
    for vertex, order in found:
        _arrange(graph, vertex, order)
    return bool(found)


def _arrange(graph: LinearGraph, vertex: Vertex, order: Pick) -> None:
    new = Vertex(len(order.index), None, changed=True, took=[*vertex.took, "order"])
    new.inputs = {source: after(order, edge) for source, edge in vertex.inputs.items()}
    new.shift = None if vertex.shift is None else applied(order, vertex.shift)
    graph.add(new)
    back = np.full(vertex.width, -1)
    back[order.index] = np.arange(len(order.index))
    for user in tuple(vertex.outputs):
        edge = user.inputs.pop(vertex)
        assert isinstance(edge, Pick)
        places = np.where(edge.rows, back[edge.index], -1)
        user.inputs[new] = Pick(places, edge.rows.astype(np.float64), new.width)
        user.changed = True
        new.outputs[user] = None
    graph.forget(vertex)


# --- The linear graph: values as vertices, linear maps over channels as edges, and what can be left out of it.


class LinearGraph:
    """All vertices along one axis; built by `repaconv.rewrites.fold.linear_graph_from_onnx`."""

    def __init__(self) -> None:
        self.vertices: dict[Vertex, None] = {}  # in the order of the graph
        self._removals: list[Removal] = []

    def add(self, vertex: Vertex) -> Vertex:
        """Take a vertex in, and its edges."""
        self.vertices[vertex] = None
        for source in vertex.inputs:
            source.outputs[vertex] = None
        return vertex

    def fold(self) -> None:
        """Leave out all that pays, until nothing does."""
        while True:
            self._leave_out()
            again = [self._merge_equals(), self._drop_channels(), arrange(self)]
            if not any(again):
                break
        give_back(self, self._removals)
        arrange(self)

    def let_go(self) -> None:
        """Forget all maps: vertices name each other, so they would stay, in float64, until somebody collects."""
        for vertex in self.vertices:
            for named in (vertex.inputs, vertex.outputs, vertex.activations):
                named.clear()
        self.vertices.clear()
        self._removals.clear()

    # --- leaving out ---------------------------------------------------------------------------------

    def _leave_out(self) -> None:
        gains = {vertex: gain for vertex in self.vertices if (gain := gain_of(vertex)) is not None}
        while gains:
            vertex = max(gains, key=lambda v: gains[v])  # the first of equals
            gain = gains.pop(vertex)
            if gain < 0:
                return
            beside = (*vertex.inputs, *vertex.outputs)
            near = dict.fromkeys((*beside, *(other for one in beside for other in (*one.outputs, *one.inputs))))
            kept = before(vertex, gain)
            self._remove(vertex)
            self._removals += [removal(vertex, kept)] if kept is not None else []
            for one in near:
                if one not in self.vertices:
                    continue
                now = gain_of(one)
                if now is None:
                    gains.pop(one, None)
                else:
                    gains[one] = now

    def _remove(self, vertex: Vertex) -> None:
        told = operator_of(vertex)
        for user in tuple(vertex.outputs):
            outer = user.inputs.pop(vertex)
            trivial = isinstance(outer, Pick) and outer.is_identity
            kept = not user.changed and not vertex.changed and is_plain(vertex, outer, trivial)
            nothing = next(iter(vertex.inputs)), outer
            for source, inner in vertex.inputs.items():
                new = after(outer, inner)
                if source in user.inputs:
                    new, kept = plus(user.inputs[source], new), False
                if new.rows.any():
                    user.inputs[source] = new
                    source.outputs[user] = None
                else:
                    user.inputs.pop(source, None)
                    source.outputs.pop(user, None)
                    kept, nothing = False, (source, new)
            if not user.inputs:  # all cancelled: one edge of zeros says over what
                user.inputs[nothing[0]] = nothing[1]
                nothing[0].outputs[user] = None
            if vertex.shift is not None:
                moved = applied(outer, vertex.shift)
                kept = kept and user.shift is None
                had = user.shift is not None and bool(user.shift.any())
                user.shift = moved if user.shift is None else user.shift + moved
                if had and not user.shift.any():
                    user.shift = None  # they cancel
            if not kept:
                user.changed = True
            user.took, user.shared = [*user.took, *vertex.took, told], user.shared or vertex.shared
        for source in vertex.inputs:
            source.outputs.pop(vertex, None)
        del self.vertices[vertex]

    # --- equals and dead channels ----------------------------------------------------------------------

    def _merge_equals(self) -> bool:
        """Vertices that are the same sum become one."""
        found: dict[Any, list[Vertex]] = {}
        merged = False
        for vertex in tuple(self.vertices):
            if not vertex.inputs or vertex.value is None:
                continue
            key = (vertex.width, frozenset(vertex.inputs))
            twin = next((v for v in found.setdefault(key, []) if are_equal(v, vertex)), None)
            if twin is None:
                found[key].append(vertex)
            elif not vertex.value.is_graph_output():
                self._merge(twin, vertex)
                merged = True
        return merged

    def _merge(self, kept: Vertex, gone: Vertex) -> None:
        assert kept.value is not None
        assert gone.value is not None
        gone.value.replace_all_uses_with(kept.value)
        for user in tuple(gone.outputs):
            moved = user.inputs.pop(gone)
            user.inputs[kept] = plus(user.inputs[kept], moved) if kept in user.inputs else moved
            kept.outputs[user] = None
            user.changed = True
        for activation in gone.activations:
            assert activation.through is not None
            activation.through = (activation.through[0], kept)
        kept.activations += gone.activations
        kept.sink, kept.took = kept.sink or gone.sink, [*kept.took, *gone.took, "equal"]
        for source in gone.inputs:
            source.outputs.pop(gone, None)
        del self.vertices[gone]
        self._merge_activations(kept)

    def _merge_activations(self, vertex: Vertex) -> None:
        """The same activation of the same vertex is one."""
        kinds: dict[Any, Vertex] = {}
        for activation in tuple(vertex.activations):
            assert activation.through is not None
            twin = kinds.setdefault(kind_of(activation.through[0]), activation)
            if twin is activation or activation.value is None or activation.value.is_graph_output():
                continue
            vertex.activations.remove(activation)
            assert twin.value is not None
            activation.value.replace_all_uses_with(twin.value)
            for user in tuple(activation.outputs):
                moved = user.inputs.pop(activation)
                user.inputs[twin] = plus(user.inputs[twin], moved) if twin in user.inputs else moved
                twin.outputs[user] = None
                user.changed = True
            twin.sink = twin.sink or activation.sink
            twin.activations += activation.activations
            del self.vertices[activation]

    def _drop_channels(self) -> bool:
        """Channels that nobody reads; an activation's go, too, and those in front of it."""
        dropped = False
        for vertex in tuple(self.vertices):
            if vertex.sink or vertex.activations or not vertex.outputs:
                if not vertex.sink and not vertex.activations and not vertex.outputs and vertex.inputs:
                    self.forget(vertex)
                continue
            read = np.logical_or.reduce([user.inputs[vertex].cols for user in vertex.outputs])
            if read.all() or not read.any() or not (vertex.inputs or vertex.through):
                continue
            self._narrow(vertex, np.flatnonzero(read))
            dropped = True
        return dropped

    def forget(self, vertex: Vertex) -> None:
        """Take out what nothing reads any more."""
        for source in vertex.inputs:
            source.outputs.pop(vertex, None)
        del self.vertices[vertex]

    def _narrow(self, vertex: Vertex, places: Any) -> None:
        """A vertex of these channels alone in place of it."""
        chosen = selection(places, vertex.width)
        new = Vertex(len(places), None, changed=True, took=[*vertex.took, f"{vertex.width - len(places)} channels"])
        new.through = vertex.through
        if vertex.through is not None:
            node, behind = vertex.through
            front = self.add(Vertex(len(places), None, inputs={behind: chosen}, changed=True, took=["channels"]))
            behind.activations.remove(vertex)
            front.activations.append(new)
            new.through = (node, front)
        else:
            new.inputs = {source: after(chosen, edge) for source, edge in vertex.inputs.items()}
            new.shift = None if vertex.shift is None else vertex.shift[places]
        self.add(new)
        back = np.full(vertex.width, -1)
        back[places] = np.arange(len(places))
        embed = Pick(back, (back >= 0).astype(np.float64), len(places))
        for user in tuple(vertex.outputs):
            user.inputs[new] = after(user.inputs.pop(vertex), embed)
            user.changed = True
            new.outputs[user] = None
        self.forget(vertex)
