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

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from repaconv.folds.maps import (
    Map,
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


@dataclass(eq=False)
class Vertex:
    """A value with its channels.

    Attributes:
        width: Channels.
        value: In the graph; None for one that is new.
        sink: Whether something that is no edge reads it.
        inputs: The edges that make it; none for one that something else computes.
        shift: The constant; None where there never was one.
        outputs: Who reads it by an edge.
        through: For an activation: the node and the vertex it acts on, channel by channel.
        activations: Those that act on this vertex.
        changed: Whether the graph's own nodes no longer say what the edges say.
        took: Operators of what was left out for it.
    """

    width: int
    value: ir.Value | None
    sink: bool = False
    inputs: dict[Vertex, Map] = field(default_factory=dict)
    shift: Vector | None = None
    outputs: set[Vertex] = field(default_factory=set)
    through: tuple[ir.Node, Vertex] | None = None
    activations: list[Vertex] = field(default_factory=list)
    changed: bool = False
    took: list[str] = field(default_factory=list)

    @property
    def stays(self) -> bool:
        """Whether it cannot be left out."""
        return self.sink or not self.inputs or bool(self.activations)


class LinearGraph:
    """All vertices along one axis; built by `repaconv.folds.edges`."""

    def __init__(self) -> None:
        self.vertices: dict[Vertex, None] = {}  # in the order of the graph

    def add(self, vertex: Vertex) -> Vertex:
        """Take a vertex in, and its edges."""
        self.vertices[vertex] = None
        for source in vertex.inputs:
            source.outputs.add(vertex)
        return vertex

    def fold(self) -> None:
        """Leave out all that pays, until nothing does."""
        while True:
            self._leave_out()
            again = [self._merge_equals(), self._drop_channels()]
            if not any(again):
                return

    # --- leaving out ---------------------------------------------------------------------------------

    def _leave_out(self) -> None:
        gains = {vertex: gain for vertex in self.vertices if (gain := _gain(vertex)) is not None}
        while gains:
            vertex = max(gains, key=lambda v: gains[v])  # the first of equals
            if gains[vertex] < 0:
                return
            near = {*vertex.inputs, *vertex.outputs}
            near |= {other for one in (*vertex.inputs, *vertex.outputs) for other in (*one.outputs, *one.inputs)}
            self._remove(vertex)
            del gains[vertex]
            for one in near - {vertex}:
                if one not in self.vertices:
                    continue
                gain = _gain(one)
                if gain is None:
                    gains.pop(one, None)
                else:
                    gains[one] = gain

    def _remove(self, vertex: Vertex) -> None:
        told = _operator(vertex)
        for user in tuple(vertex.outputs):
            outer = user.inputs.pop(vertex)
            trivial = isinstance(outer, Pick) and outer.is_identity
            kept = not user.changed and not vertex.changed and _plain(vertex, outer, trivial)
            nothing = next(iter(vertex.inputs)), outer
            for source, inner in vertex.inputs.items():
                new = after(outer, inner)
                if source in user.inputs:
                    new, kept = plus(user.inputs[source], new), False
                if new.rows.any():
                    user.inputs[source] = new
                    source.outputs.add(user)
                else:
                    user.inputs.pop(source, None)
                    source.outputs.discard(user)
                    kept, nothing = False, (source, new)
            if not user.inputs:  # all cancelled: one edge of zeros says over what
                user.inputs[nothing[0]] = nothing[1]
                nothing[0].outputs.add(user)
            if vertex.shift is not None:
                moved = applied(outer, vertex.shift)
                kept = kept and user.shift is None
                had = user.shift is not None and bool(user.shift.any())
                user.shift = moved if user.shift is None else user.shift + moved
                if had and not user.shift.any():
                    user.shift = None  # they cancel
            if not kept:
                user.changed = True
            user.took += [*vertex.took, told]
        for source in vertex.inputs:
            source.outputs.discard(vertex)
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
            twin = next((v for v in found.setdefault(key, []) if _equal(v, vertex)), None)
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
            kept.outputs.add(user)
            user.changed = True
        for activation in gone.activations:
            assert activation.through is not None
            activation.through = (activation.through[0], kept)
        kept.activations += gone.activations
        kept.sink, kept.took = kept.sink or gone.sink, [*kept.took, *gone.took, "equal"]
        for source in gone.inputs:
            source.outputs.discard(gone)
        del self.vertices[gone]
        self._merge_activations(kept)

    def _merge_activations(self, vertex: Vertex) -> None:
        """The same activation of the same vertex is one."""
        kinds: dict[Any, Vertex] = {}
        for activation in tuple(vertex.activations):
            assert activation.through is not None
            twin = kinds.setdefault(_kind(activation.through[0]), activation)
            if twin is activation or activation.value is None or activation.value.is_graph_output():
                continue
            vertex.activations.remove(activation)
            assert twin.value is not None
            activation.value.replace_all_uses_with(twin.value)
            for user in tuple(activation.outputs):
                moved = user.inputs.pop(activation)
                user.inputs[twin] = plus(user.inputs[twin], moved) if twin in user.inputs else moved
                twin.outputs.add(user)
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
                    self._forget(vertex)
                continue
            read = np.logical_or.reduce([user.inputs[vertex].cols for user in vertex.outputs])
            if read.all() or not read.any() or not (vertex.inputs or vertex.through):
                continue
            self._narrow(vertex, np.flatnonzero(read))
            dropped = True
        return dropped

    def _forget(self, vertex: Vertex) -> None:
        for source in vertex.inputs:
            source.outputs.discard(vertex)
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
            new.outputs.add(user)
        self._forget(vertex)


def _plain(vertex: Vertex, outer: Map, trivial: bool) -> bool:
    """Whether leaving it out only says in one sum what the graph says in two nodes."""
    moves = (outer, *vertex.inputs.values())  # channels that only change their places: the same in other words
    if trivial or all(isinstance(edge, Pick) and bool((edge.scale[edge.rows] == 1).all()) for edge in moves):
        return True
    inner = next(iter(vertex.inputs.values()))
    return len(vertex.inputs) == 1 and isinstance(inner, Pick) and inner.is_identity and vertex.shift is None


def _gain(vertex: Vertex) -> int | None:
    """What leaving it out saves, in multiply-accumulates a token; None where it stays."""
    if vertex.stays or not vertex.outputs:
        return None
    before = _cost(vertex, {source: shape_of(edge) for source, edge in vertex.inputs.items()}, vertex.shift is not None)
    if len(vertex.outputs) > 1 and any(edge.pick is None for edge in map(shape_of, vertex.inputs.values())):
        before -= 1  # one product that several read is better than several, if they cost the same
    saved = before
    for user in vertex.outputs:
        now = {source: shape_of(edge) for source, edge in user.inputs.items()}
        then = {source: edge for source, edge in now.items() if source is not vertex}
        for source, inner in vertex.inputs.items():
            new = shape_after(user.inputs[vertex], inner)
            then[source] = shape_plus(then[source], new) if source in then else new
        if not any(edge.rows.any() for edge in then.values()):
            return None  # all would cancel, and a value of nothing is none
        shifted = user.shift is not None
        saved += _cost(user, now, shifted) - _cost(user, then, shifted or vertex.shift is not None)
    return saved


def _cost(vertex: Vertex, edges: dict[Vertex, Shape], shifted: bool) -> int:
    live = [edge for edge in edges.values() if edge.rows.any()]
    free = any(edge.pick is None for edge in live)  # a matrix product's bias costs nothing
    return sum(edge.cost for edge in live) + vertex.width * (max(len(live) - 1, 0) + int(shifted and not free))


def _equal(a: Vertex, b: Vertex) -> bool:
    shifts = (a.shift, b.shift)
    if any(s is None for s in shifts) and any(s is not None and s.any() for s in shifts):
        return False
    if a.shift is not None and b.shift is not None and not np.allclose(a.shift, b.shift, rtol=1e-13, atol=0):
        return False
    return all(same(edge, b.inputs[source]) for source, edge in a.inputs.items())


def _kind(node: ir.Node) -> Any:
    """What tells two activations apart."""
    return (
        node.domain,
        node.op_type,
        tuple(sorted((name, str(entry.value)) for name, entry in node.attributes.items())),
    )


def _operator(vertex: Vertex) -> str:
    node = vertex.value.producer() if vertex.value is not None else None
    return node.op_type if node is not None else "channels"


def changed(graph: LinearGraph) -> Iterator[Vertex]:
    """What must be written anew."""
    yield from (vertex for vertex in graph.vertices if vertex.changed)
