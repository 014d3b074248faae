"""Vertices of a linear graph: values with the edges that make them, and what leaving one out saves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from repaconv.folds.maps import Dense, Map, Mask, Pick, Shape, Vector, same, shape_after, shape_of, shape_plus

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
