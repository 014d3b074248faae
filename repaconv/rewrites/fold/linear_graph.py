"""The linear graph of a network: values as vertices, linear maps over channels as edges, and its simplification.

Along one axis (the last of tokens, or axis 1 of an image) a value is

    v = sum_p M_pv p + c_v

over other values p. BatchNorm, LayerScale, a norm's affine, splits, concats, masks, shortcuts, linear layers and 1x1
convolutions are edges. A vertex v that only edges read can be removed: for every pair of edges p -> v -> s

    M_ps += M_vs M_pv,    c_s += M_vs c_v

This composes affine maps in series, adds affine maps in parallel and absorbs shortcuts. A vertex is removed only if the
graph then needs no more multiply-accumulates than before. Channels that no edge reads are dropped, also in front of an
activation. docs/design/linear-graph.md explains the method.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from repaconv.algebra.channel_maps import (
    Costed,
    Dense,
    Map,
    Mask,
    Pick,
    Vector,
    are_equal,
    composition,
    composition_to_cost,
    map_sum,
    product_with_vector,
    selection,
    sum_to_cost,
)
from repaconv.graph.nodes_and_constants import attributes_key, made_by

if TYPE_CHECKING:
    import onnx_ir as ir


# --- Vertices, and the multiply-accumulates that removing one saves.


@dataclass(eq=False)
class Vertex:
    """A value of the graph with its channels, and the affine maps that compute it.

    Attributes:
        width: Number of channels.
        value: The value in the ONNX graph; None for a vertex that a fold made.
        sink: Whether something other than an edge reads it, such as a nonlinear node or a graph output.
        inputs: The edges that compute it, by source; empty if something nonlinear computes it.
        shift: The constant c_v; None if there is none.
        outputs: The vertices that read it by an edge; a dict, so that the order is the same in every run.
        through: For the result of an activation: the node, and the vertex that the node acts on channel by channel.
        activations: The results of the activations that act on this vertex.
        shared: Whether other products use the same weight matrix.
        of_norm: Whether it is the scale or shift of a norm, which costs nothing as long as it stays in the norm.
        changed: Whether the edges no longer match the ONNX nodes, so that the vertex has to be written again.
        absorbed: Operators of the vertices that were removed into this one, for the report.
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
    absorbed: list[str] = field(default_factory=list)

    @property
    def is_fixed(self) -> bool:
        """Whether the vertex is fixed, so that it cannot be removed."""
        return self.sink or not self.inputs or bool(self.activations)

    def read(self, source: Vertex, edge: Map) -> None:
        """Add an edge from a source to what the vertex reads of it."""
        self.inputs[source] = map_sum(self.inputs[source], edge) if source in self.inputs else edge
        source.outputs[self], self.changed = None, True


def is_plain(vertex: Vertex, outer: Map) -> bool:
    """Whether removing a vertex only renames or reorders channels, so that its reader need not be written again.

    Args:
        vertex: The vertex to remove.
        outer: The edge by which a reader reads it.
    """
    if (isinstance(outer, Pick) and outer.is_identity) or all(map(_has_no_factors, (outer, *vertex.inputs.values()))):
        return True
    inner = next(iter(vertex.inputs.values()))
    if len(vertex.inputs) > 1 or not isinstance(inner, Pick) or vertex.shift is not None:
        return False
    if isinstance(outer, Pick):
        return inner.is_identity or (outer.keeps_places and _has_no_factors(inner) and bool(inner.rows.all()))
    return inner.is_identity or inner.is_range  # a product of a slice


def _has_no_factors(edge: Map) -> bool:
    return isinstance(edge, Pick) and bool((edge.scale[edge.rows] == 1).all())


def gain_of(vertex: Vertex) -> int | None:
    """Multiply-accumulates per token that removing the vertex saves; None if it cannot be removed."""
    if vertex.is_fixed or not vertex.outputs:
        return None
    if vertex.of_norm and any(user.shared for user in vertex.outputs):
        return None  # every reader would need its own copy of the shared matrix
    if vertex.of_norm and _is_alone(vertex) and any(_is_bare(user, vertex) for user in vertex.outputs):
        return None  # the reader would need a separate shift, which costs nothing inside the norm
    if vertex.of_norm and any(_is_sum(user, vertex) for user in vertex.outputs):
        return None  # the sum would be scaled or shifted, which costs nothing inside the norm
    if _adds(vertex) and any(_joins(user) for user in vertex.outputs):
        return None  # the Concat would add some channels, which takes a Pad for each value and their sum
    saved = 0 if _is_in_norm(vertex) else _cost(vertex, vertex.inputs, vertex.shift is not None)
    if len(vertex.outputs) > 1 and any(isinstance(edge, Dense) for edge in vertex.inputs.values()):
        saved -= 1  # at equal cost, one product that several vertices read is better than several products
    arranged = arrangement(vertex) if len(vertex.outputs) > 1 else None
    for user in vertex.outputs:
        now: dict[Vertex, Costed] = {**user.inputs}
        shifted = user.shift is not None
        if arranged is not None:  # the product's channels could be arranged so that this reader only slices
            now[vertex] = _as_slice(user.inputs[vertex])
        then = {source: edge for source, edge in now.items() if source is not vertex}
        for source, inner in vertex.inputs.items():
            new = composition_to_cost(user.inputs[vertex], inner)
            then[source] = sum_to_cost(then[source], new) if source in then else new
        if all(edge.is_zero for edge in then.values()):
            return None  # all edges would cancel, and a vertex without edges cannot be written
        kept = shifted and (arranged is None or user not in arranged.shifted)
        saved += _cost(user, now, kept) - _cost(user, then, shifted or vertex.shift is not None)
    return saved


def _is_in_norm(vertex: Vertex) -> bool:
    """Whether the vertex costs nothing, as the scale and shift of a norm, and would be one for each of its readers."""
    alone = all(len(source.outputs) == 1 for source in vertex.inputs)
    return vertex.of_norm and alone and len(vertex.outputs) > 1


def _is_alone(vertex: Vertex) -> bool:
    """Whether the vertex has a shift and is the only reader of its sources, so that removing it makes no two vertices
    equal."""
    return vertex.shift is not None and all(len(source.outputs) == 1 for source in vertex.inputs)


def _is_bare(user: Vertex, source: Vertex) -> bool:
    """Whether the reader is a matrix product without a bias."""
    return user.shift is None and isinstance(user.inputs[source], Dense)


def _is_diagonal(vertex: Vertex) -> bool:
    """Whether the vertex scales and shifts the channels of values, each by itself."""
    return all(isinstance(edge, Pick) and edge.is_diagonal for edge in vertex.inputs.values())


def _is_sum(user: Vertex, source: Vertex) -> bool:
    """Whether the reader adds the channels themselves to those of others."""
    return len(user.inputs) > 1 and isinstance(user.inputs[source], Pick)


def _adds(vertex: Vertex) -> bool:
    """Whether the vertex adds channels of several values."""
    return len(vertex.inputs) > 1 and not _joins(vertex)


def _joins(vertex: Vertex) -> bool:
    """Whether the vertex concatenates channels of several values, and adds none."""
    return len(vertex.inputs) > 1 and cover_each_channel_once([edge.rows for edge in vertex.inputs.values()])


class Arrangement(NamedTuple):
    """The selection, factors and shift of a product's channels after which every reader takes a plain slice.

    Attributes:
        order: The selection with factors.
        shift: Added to the selected channels, [len(order.index)]; None if nothing is added.
        shifted: The readers whose own shift is contained in ``shift``.
    """

    order: Pick
    shift: Vector | None
    shifted: frozenset[Vertex]


def arrangement(vertex: Vertex) -> Arrangement | None:
    """The order, factors and shifts that let every reader of a product take a plain slice of it.

        s_i (W x + b)_i + t_i = (s W x + s b + t)_i

    Returns:
        None if the vertex is no product, if its readers need different factors, or if they only slice it already.
        Shifts stay with the readers if these need different ones.
    """
    edges = [user.inputs[vertex] for user in vertex.outputs]
    picks = [edge for edge in edges if isinstance(edge, Pick)]
    dense = all(isinstance(edge, Dense) for edge in vertex.inputs.values())
    if vertex.is_fixed or not dense or not picks or len(picks) < len(edges):
        return None
    factor, read = np.ones(vertex.width), np.zeros(vertex.width, bool)
    for edge in picks:
        places, scale = edge.index[edge.rows], edge.scale[edge.rows]
        others = read[places] & (factor[places] != scale)
        factor[places], read[places] = scale, True
        if others.any() or (factor[places] != scale).any():
            return None
    added, shifted = _shift_of_readers(vertex)
    sliced = all(map(_is_slice, picks))
    if sliced and not shifted:
        return None
    order = np.concatenate([edge.index[edge.rows] for edge in picks])
    if sliced or len(np.unique(order)) < len(order):
        order = np.arange(vertex.width)
    found = Arrangement(Pick(order, factor[order], vertex.width), added[order] if shifted else None, shifted)
    return None if found.order.is_identity and not shifted else found


def _shift_of_readers(vertex: Vertex) -> tuple[Vector, frozenset[Vertex]]:
    """The numbers that readers add to the channels which they select from a product, and these readers.

    Returns:
        One number per channel of the product, [width]; no readers if a channel would need two numbers.
    """
    added, read = np.zeros(vertex.width), np.zeros(vertex.width, bool)
    shifted = set()
    for user in vertex.outputs:
        edge = user.inputs[vertex]
        assert isinstance(edge, Pick)
        places, own = edge.index[edge.rows], np.zeros(int(edge.rows.sum()))
        if user.shift is not None and len(user.inputs) == 1 and edge.rows.all():
            own = user.shift
            shifted.add(user)
        if (read[places] & (added[places] != own)).any():
            return np.zeros(vertex.width), frozenset()
        added[places], read[places] = own, True
        if (added[places] != own).any():
            return np.zeros(vertex.width), frozenset()
    return added, frozenset(shifted)


def _is_slice(edge: Pick) -> bool:
    """Whether an edge takes consecutive channels with a factor of 1 or -1."""
    index, scale = edge.index[edge.rows], edge.scale[edge.rows]
    return bool((np.diff(index) == 1).all()) and bool((np.abs(scale) == 1).all())


def _as_slice(edge: Map) -> Map:
    """The edge as a slice of the rearranged product."""
    assert isinstance(edge, Pick)
    index = np.where(edge.rows, np.cumsum(edge.rows) - 1, -1)
    return Pick(index, edge.rows.astype(np.float64), edge.width)


def product_of(vertex: Vertex) -> int:
    """Multiply-accumulates per token of the vertex's own edges."""
    return _cost(vertex, vertex.inputs, False)


def _cost(vertex: Vertex, edges: Mapping[Vertex, Costed], shifted: bool) -> int:
    """Multiply-accumulates and additions per token of a vertex with these edges, and a constant if ``shifted``."""
    live = [edge for edge in edges.values() if not edge.is_zero]
    free = any(not isinstance(edge, Pick) for edge in live)  # a matrix product's bias costs nothing
    sums = vertex.width * (max(len(live) - 1, 0) + int(shifted and not free))
    return sum(edge.cost for edge in live) + _cost_of_zeros(live) + sums


def _cost_of_zeros(live: list[Costed]) -> int:
    """Multiply-accumulates per token by rows of zeros, with which products are written that overlap with others."""
    padded = [edge for edge in live if not isinstance(edge, Pick) and not edge.rows.all()]
    if not padded or np.sum([edge.rows for edge in live], 0).max() < 2:
        return 0  # a concatenation multiplies by none
    return sum(int((~edge.rows).sum()) * int(edge.cols.sum()) for edge in padded)


def cover_each_channel_once(rows: list[Mask]) -> bool:
    """Whether the row masks are disjoint and together cover every channel."""
    return bool((np.sum(rows, 0) == 1).all())


def is_row(vertex: Vertex) -> bool:
    """Whether the vertex is a concatenation of several values, without factors or a shift."""
    edges = list(vertex.inputs.values())
    plain = vertex.shift is None and all(map(_has_no_factors, edges))
    return len(edges) > 1 and plain and cover_each_channel_once([edge.rows for edge in edges])


def is_part(vertex: Vertex) -> bool:
    """Whether the vertex is a plain slice of one value."""
    edges = list(vertex.inputs.values())
    return len(edges) == 1 and isinstance(edges[0], Pick) and edges[0].is_range and vertex.shift is None


def _spreads(user: Vertex, vertex: Vertex) -> bool:
    """Whether a reader takes some channels of a value and has nothing in place of the others."""
    edge = user.inputs[vertex]
    if isinstance(edge, Dense) or edge.rows.all():
        return False
    return not cover_each_channel_once([other.rows for other in user.inputs.values()])


def are_same_sum(a: Vertex, b: Vertex) -> bool:
    """Whether two vertices with the same inputs compute the same sum, up to float64 rounding."""
    shifts = (a.shift, b.shift)
    if any(s is None for s in shifts) and any(s is not None and s.any() for s in shifts):
        return False
    if a.shift is not None and b.shift is not None and not np.allclose(a.shift, b.shift, rtol=1e-13, atol=0):
        return False
    return all(are_equal(edge, b.inputs[source]) for source, edge in a.inputs.items())


def kind_of(node: ir.Node) -> Any:
    """A key that is equal for activation nodes with the same operator and attributes."""
    return node.domain, node.op_type, attributes_key(node)


def operator_of(vertex: Vertex) -> str:
    """The ONNX operator that computes the vertex; ``channels`` for a vertex that a fold made."""
    node = vertex.value.producer() if vertex.value is not None else None
    return node.op_type if node is not None else "channels"


# --- Restore shared products whose inlining saved nothing.
#
# Removing a vertex can be the first step of a larger fold, in which its readers absorb further operators. If in the end
# all readers are unchanged since the removal, there are several products instead of one shared product (or instead of
# one concatenation), and they save next to nothing. Such a removal is reverted.

EQUAL = "equal"
"""What a vertex lists as absorbed for each vertex that computed the same sum."""
LEAST_SAVING = 8
"""Inlining a shared product is kept if it saves at least 1/8 of the product's multiply-accumulates."""


@dataclass(frozen=True)
class Reader:
    """One reader of a removed vertex, before and after the removal.

    Attributes:
        edge: The edge from the removed vertex, before.
        shift: The reader's shift, before.
        changed: The reader's `Vertex.changed`, before.
        now: The reader's edges from the sources of the removed vertex, after; None for an edge that cancelled.
        shift_now: The reader's shift, after.
    """

    edge: Map
    shift: Vector | None
    changed: bool
    now: dict[Vertex, Map | None]
    shift_now: Vector | None


class Removal(NamedTuple):
    """A removed vertex, and what its readers were before and after."""

    vertex: Vertex
    readers: dict[Vertex, Reader]


def readers_to_restore(
    vertex: Vertex, gain: int, *, biased: bool = True
) -> dict[Vertex, tuple[Map, Vector | None, bool]] | None:
    """The state of a vertex's readers before it is removed; None if the removal need not be reverted later.

    Args:
        vertex: The vertex that will be removed.
        gain: Its `gain_of`.
        biased: Whether a product adds its own bias.
    """
    if any(user.inputs.keys() & vertex.inputs.keys() for user in vertex.outputs):
        return None
    dense = all(isinstance(edge, Dense) for edge in vertex.inputs.values())
    shared = len(vertex.outputs) > 1 and dense and LEAST_SAVING * gain <= product_of(vertex)
    if not shared and not is_row(vertex) and not is_part(vertex) and (biased or not _is_shift_of_products(vertex)):
        return None
    return {user: (user.inputs[vertex], user.shift, user.changed) for user in vertex.outputs}


def _is_shift_of_products(vertex: Vertex) -> bool:
    """Whether the vertex adds to one value what several products without a bias would have to add otherwise."""
    edges = list(vertex.inputs.values())
    alone = len(edges) == 1 and isinstance(edges[0], Pick) and edges[0].is_identity and vertex.shift is not None
    return alone and len(vertex.outputs) > 1 and all(_is_bare(user, vertex) for user in vertex.outputs)


def removal(vertex: Vertex, readers: dict[Vertex, tuple[Map, Vector | None, bool]]) -> Removal:
    """The record of a removal that was made.

    Args:
        vertex: The removed vertex.
        readers: What `readers_to_restore` returned for it.
    """
    return Removal(
        vertex,
        {u: Reader(*was, {s: u.inputs.get(s) for s in vertex.inputs}, u.shift) for u, was in readers.items()},
    )


def handed_on(one: Removal, reader: Vertex) -> tuple[Vertex, Map, dict[Vertex, Reader]] | None:
    """What a removal becomes once one of its readers is removed itself, such as a product before its bias.

    Args:
        one: A removal of a vertex without a shift.
        reader: One of its readers, which is removed next and has one reader of its own.

    Returns:
        The reader's own reader, the edge from the removed vertex to it, and the other readers; None if the removal can
        not be reverted there.
    """
    if one.vertex.shift is not None or len(reader.outputs) > 1 or not _is_unchanged(reader, one.readers[reader]):
        return None
    ((last, outer),) = ((user, user.inputs[reader]) for user in reader.outputs)
    if last in one.readers or last.inputs.keys() & one.vertex.inputs.keys():
        return None
    if any(source.value is not None and made_by(source.value, "Expand") for source in one.vertex.inputs):
        return None  # each of its repeated tokens is multiplied once if the product reads it alone
    others = {user: was for user, was in one.readers.items() if user is not reader}
    return last, composition(outer, one.readers[reader].edge), others


def revert_useless_removals(graph: LinearGraph, removals: list[Removal]) -> None:
    """Revert the removals whose readers have not changed since, last removal first; in place."""
    for one in reversed(removals):
        vertex = one.vertex
        if not graph.vertices.keys() >= vertex.inputs.keys() | one.readers.keys():
            continue
        if not all(_is_unchanged(user, was) for user, was in one.readers.items()):
            continue
        vertex.outputs.clear()
        graph.add(vertex)
        for user, was in one.readers.items():
            for source in vertex.inputs:
                del user.inputs[source]
                source.outputs.pop(user, None)
            user.inputs[vertex], user.shift, user.changed = was.edge, was.shift, was.changed
            vertex.outputs[user] = None


def _is_unchanged(user: Vertex, was: Reader) -> bool:
    return user.shift is was.shift_now and all(
        edge is not None and user.inputs.get(source) is edge for source, edge in was.now.items()
    )


# --- Move a shift to readers that add a constant anyway.
#
# A vertex that several products would have to read instead stays, such as the sum  x * n * g + b + x  of a global
# response norm (ConvNeXt V2) in front of a linear layer. Its shift need not: the layer has a bias, which takes it.


def move_shifts(graph: LinearGraph) -> None:
    """Move the shifts of vertices to readers that have shifts, directly or by way of other vertices; in place."""
    for vertex in tuple(graph.vertices):
        summed = all(isinstance(edge, Pick) for edge in vertex.inputs.values())  # a product's bias costs nothing
        if vertex.shift is None or vertex.is_fixed or vertex.of_norm or not summed:
            continue
        moved = _shifts_after(vertex, vertex.shift)
        if not moved:
            continue
        for user, shift in moved:
            assert user.shift is not None
            user.shift, user.changed = user.shift + shift, True
            user.absorbed = [*user.absorbed, operator_of(vertex)]
        for user, _ in moved:
            if user.shift is not None and not user.shift.any():
                user.shift = None  # the shifts cancel
        vertex.shift, vertex.changed = None, True


MOST_READERS = 64
"""Readers to which a shift is followed, some several times: in sums of sums, paths to a reader are many."""


def _shifts_after(vertex: Vertex, shift: Vector) -> list[tuple[Vertex, Vector]] | None:
    """What readers would have to add to their shifts if a vertex were without its own; None if one has no shift."""
    found: list[tuple[Vertex, Vector]] = []
    waiting = [(user, vertex, shift) for user in vertex.outputs]
    for _ in range(MOST_READERS):
        if not waiting:
            break
        user, source, given = waiting.pop()
        if user.shared or (user.shift is None and (user.is_fixed or user.of_norm)):
            return None  # a reader of a shared matrix would need its own copy of it
        moved = product_with_vector(user.inputs[source], given)
        if user.shift is not None:
            found.append((user, moved))
        else:
            waiting += [(each, user, moved) for each in user.outputs]
    return None if waiting else found


# --- Reorder, scale and shift the channels of a product so that its readers only slice it.
#
# Queries, keys and values are often one linear layer, sometimes interleaved head by head, and only the queries are
# scaled. Three layers would need as many multiplications, but three calls. The same holds if one layer computes scales
# and shifts of several norms from a condition (adaLN), where the norms multiply by 1 + s.


def arrange(graph: LinearGraph) -> bool:
    """Rearrange every product whose readers reorder or scale its channels; in place.

    Returns:
        Whether a product was rearranged.
    """
    found = [(vertex, order) for vertex in tuple(graph.vertices) if (order := arrangement(vertex)) is not None]
    for vertex, order in found:
        _arrange(graph, vertex, order)
    return bool(found)


def _arrange(graph: LinearGraph, vertex: Vertex, found: Arrangement) -> None:
    order = found.order
    new = Vertex(len(order.index), None, changed=True, absorbed=[*vertex.absorbed, "order"])
    new.inputs = {source: composition(order, edge) for source, edge in vertex.inputs.items()}
    new.shift = None if vertex.shift is None else product_with_vector(order, vertex.shift)
    if found.shift is not None:
        new.shift = found.shift if new.shift is None else new.shift + found.shift
    graph.add(new)
    back = np.full(vertex.width, -1)
    back[order.index] = np.arange(len(order.index))
    for user in tuple(vertex.outputs):
        edge = user.inputs.pop(vertex)
        assert isinstance(edge, Pick)
        places = np.where(edge.rows, back[edge.index], -1)
        user.read(new, Pick(places, edge.rows.astype(np.float64), new.width))
        if user in found.shifted:
            user.shift = None
    graph.forget(vertex)


# --- The linear graph and its folding.


class LinearGraph:
    """All vertices along one axis; `repaconv.rewrites.fold.linear_graph_from_onnx` builds it from an ONNX graph.

    Args:
        biased: Whether a product adds its own bias, as a Conv does. A MatMul needs an Add.
    """

    def __init__(self, *, biased: bool = True) -> None:
        self._biased = biased
        self.vertices: dict[Vertex, None] = {}  # in the order of the graph
        self._removals: list[Removal] = []
        self._places: dict[Vertex, dict[int, None]] = {}  # of the removals, by their readers

    def add(self, vertex: Vertex) -> Vertex:
        """Add a vertex, and register it as a reader of its sources."""
        self.vertices[vertex] = None
        for source in vertex.inputs:
            source.outputs[vertex] = None
        return vertex

    def fold(self) -> None:
        """Remove vertices, merge equal sums, drop unread channels and rearrange products, until nothing changes."""
        self._join_parts()
        self._merge_equals()  # a reader that is merged later could not read a restored concatenation
        while True:
            self._remove_vertices()
            again = [self._merge_equals(), self._drop_channels(), arrange(self)]
            if not any(again):
                break
        revert_useless_removals(self, self._removals)
        move_shifts(self)
        arrange(self)

    def clear(self) -> None:
        """Clear all maps.

        Vertices refer to each other, so their float64 matrices would stay in memory until garbage collection.
        """
        for vertex in self.vertices:
            for named in (vertex.inputs, vertex.outputs, vertex.activations):
                named.clear()
        self.vertices.clear()
        self._removals.clear()
        self._places.clear()

    # --- removal of vertices

    def _join_parts(self) -> None:
        """Let concatenations of several parts of one value read that value.

        Otherwise a removed concatenation (`revert_useless_removals`) could not stand again: its reader would have
        changed, since the parts are removed after it.
        """
        for vertex in tuple(self.vertices):
            parts: dict[Vertex, list[Vertex]] = {}
            for part in vertex.inputs if is_row(vertex) else ():
                if is_part(part):
                    parts.setdefault(next(iter(part.inputs)), []).append(part)
            for part in (part for several in parts.values() if len(several) > 1 for part in several):
                if part.is_fixed:
                    self._read_past(part, vertex)
                elif part in self.vertices:
                    self._remove(part)

    def _read_past(self, part: Vertex, vertex: Vertex) -> None:
        """Let a vertex read the source of a slice instead of the slice, which has other readers."""
        ((source, inner),) = part.inputs.items()
        vertex.read(source, composition(vertex.inputs.pop(part), inner))
        part.outputs.pop(vertex)
        vertex.absorbed = [*vertex.absorbed, operator_of(part)]

    def _remove_vertices(self) -> None:
        """Remove the vertex that saves most, and so on, until no removal is without cost."""
        gains = {vertex: gain for vertex in self.vertices if (gain := gain_of(vertex)) is not None}
        while gains:
            vertex = max(gains, key=lambda v: gains[v])  # the first of equal gains
            gain = gains.pop(vertex)
            if gain < 0:
                return
            adjacent = (*vertex.inputs, *vertex.outputs)
            near = dict.fromkeys((*adjacent, *(other for one in adjacent for other in (*one.outputs, *one.inputs))))
            readers = readers_to_restore(vertex, gain, biased=self._biased)
            places = [*self._places.pop(vertex, {})]
            handed = {place: handed_on(self._removals[place], vertex) for place in places}
            self._remove(vertex)
            for place, found in handed.items():
                if found is not None:
                    last, edge, others = found
                    now = removal(self._removals[place].vertex, {last: (edge, last.shift, True)})
                    self._record(now._replace(readers={**others, **now.readers}), place)
            if readers is not None:
                self._record(removal(vertex, readers))
            for one in (one for one in near if one in self.vertices):
                if (saved := gain_of(one)) is not None:
                    gains[one] = saved
                else:
                    gains.pop(one, None)

    def _record(self, one: Removal, place: int | None = None) -> None:
        """Keep the record of a removal, in place of that at ``place`` if this is given."""
        if place is None:
            place = len(self._removals)
            self._removals.append(one)
        self._removals[place] = one
        for user in one.readers:
            self._places.setdefault(user, {})[place] = None

    def _remove(self, vertex: Vertex) -> None:
        """Remove a vertex: every reader reads its sources instead, by composed maps, and adds its constant."""
        operator = operator_of(vertex)
        for user in tuple(vertex.outputs):
            outer = user.inputs.pop(vertex)
            as_written = not user.changed and not vertex.changed and is_plain(vertex, outer)
            zeros = next(iter(vertex.inputs)), outer  # an edge that keeps a source for the shape, if all cancel
            for source, inner in vertex.inputs.items():
                new = composition(outer, inner)
                if source in user.inputs:
                    new, as_written = map_sum(user.inputs[source], new), False
                if new.rows.any():
                    user.inputs[source] = new
                    source.outputs[user] = None
                else:
                    user.inputs.pop(source, None)
                    source.outputs.pop(user, None)
                    as_written, zeros = False, (source, new)
            if not user.inputs:
                user.inputs[zeros[0]] = zeros[1]
                zeros[0].outputs[user] = None
            if vertex.shift is not None:
                moved = product_with_vector(outer, vertex.shift)
                as_written = as_written and user.shift is None
                had = user.shift is not None and bool(user.shift.any())
                user.shift = moved if user.shift is None else user.shift + moved
                if had and not user.shift.any():
                    user.shift = None  # the shifts cancel
            if not as_written:
                user.changed = True
            user.of_norm = user.of_norm or (vertex.of_norm and len(user.inputs) == 1 and _is_diagonal(user))
            user.absorbed, user.shared = [*user.absorbed, *vertex.absorbed, operator], user.shared or vertex.shared
        self.forget(vertex)

    # --- equal vertices and unread channels

    def _merge_equals(self) -> bool:
        """Merge vertices that compute the same sum; whether there were any."""
        found: dict[Any, list[Vertex]] = {}
        merged = False
        for vertex in tuple(self.vertices):
            if not vertex.inputs or vertex.value is None:
                continue
            key = (vertex.width, frozenset(vertex.inputs))
            twin = next((v for v in found.setdefault(key, []) if are_same_sum(v, vertex)), None)
            if twin is None:
                found[key].append(vertex)
            elif not vertex.value.is_graph_output():
                twin.absorbed = [*twin.absorbed, *vertex.absorbed, EQUAL]
                self._merge(twin, vertex)
                merged = True
        return merged

    def _merge(self, kept: Vertex, gone: Vertex) -> None:
        """Let what reads a vertex read its equal."""
        assert kept.value is not None
        assert gone.value is not None
        gone.value.replace_all_uses_with(kept.value)
        for user in tuple(gone.outputs):
            user.read(kept, user.inputs.pop(gone))
        for activation in gone.activations:
            assert activation.through is not None
            activation.through = (activation.through[0], kept)
        kept.activations += gone.activations
        kept.sink = kept.sink or gone.sink
        self.forget(gone)
        self._merge_activations(kept)

    def _merge_activations(self, vertex: Vertex) -> None:
        """Merge equal activations of the same vertex."""
        kinds: dict[Any, Vertex] = {}
        for activation in tuple(vertex.activations):
            assert activation.through is not None
            twin = kinds.setdefault(kind_of(activation.through[0]), activation)
            if twin is activation or activation.value is None or activation.value.is_graph_output():
                continue
            vertex.activations.remove(activation)
            self._merge(twin, activation)

    def _drop_channels(self) -> bool:
        """Drop channels that no edge reads, also through an activation; whether there were any."""
        dropped = False
        for vertex in tuple(self.vertices):
            if vertex.sink or vertex.activations:
                continue
            if not vertex.outputs:
                if vertex.inputs:
                    self.forget(vertex)
                continue
            read = np.logical_or.reduce([user.inputs[vertex].cols for user in vertex.outputs])
            if read.all() or not read.any() or not (vertex.inputs or vertex.through):
                continue
            if any(_spreads(user, vertex) for user in vertex.outputs):
                continue  # writing zeros between the channels takes longer than computing these
            self._narrow(vertex, np.flatnonzero(read))
            dropped = True
        return dropped

    def forget(self, vertex: Vertex) -> None:
        """Remove a vertex that nothing reads."""
        for source in vertex.inputs:
            source.outputs.pop(vertex, None)
        del self.vertices[vertex]

    def _narrow(self, vertex: Vertex, places: Any) -> None:
        """Replace a vertex by one with these channels only."""
        chosen = selection(places, vertex.width)
        new = Vertex(
            len(places), None, changed=True, absorbed=[*vertex.absorbed, f"{vertex.width - len(places)} channels"]
        )
        new.through = vertex.through
        if vertex.through is not None:
            node, after = vertex.through
            front = self.add(Vertex(len(places), None, inputs={after: chosen}, changed=True, absorbed=["channels"]))
            after.activations.remove(vertex)
            front.activations.append(new)
            new.through = (node, front)
        else:
            new.inputs = {source: composition(chosen, edge) for source, edge in vertex.inputs.items()}
            new.shift = None if vertex.shift is None else vertex.shift[places]
        self.add(new)
        back = np.full(vertex.width, -1)
        back[places] = np.arange(len(places))
        embed = Pick(back, (back >= 0).astype(np.float64), len(places))
        for user in tuple(vertex.outputs):
            user.read(new, composition(user.inputs.pop(vertex), embed))
        self.forget(vertex)
