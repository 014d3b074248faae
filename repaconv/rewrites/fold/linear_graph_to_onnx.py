"""Write the changed vertices of a linear graph as ONNX nodes.

Maps of tokens become MatMul and Add, maps of images become 1x1 Conv and BatchNormalization.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from repaconv.algebra.channel_maps import Dense, Map, Pick, Vector
from repaconv.graph.channel_axes import IMAGE, LAST, write_batchnorm
from repaconv.graph.equal_computations import are_computed_alike
from repaconv.graph.index_selections import Places, are_consecutive, runs_of
from repaconv.graph.nodes_and_constants import Writer, made_by
from repaconv.graph.symbolic_shapes import Size, Sizes, set_shape, shaped_like, sizes
from repaconv.results import Change
from repaconv.rewrites.fold.linear_graph import EQUAL, LinearGraph, Vertex

if TYPE_CHECKING:
    import onnx_ir as ir

SHORTEST_SLICE, MOST_SLICES = 3, 4
"""How long slices of the last axis are on average, at least, and how many, at most, that Slice and Concat copy. A
Gather in their place takes 8 ns for each number, a slice 20 (ONNX Runtime)."""


def emit(model: ir.Model, graph: LinearGraph, axis: int, rewrite: str) -> Iterator[Change]:
    """Write the changed vertices of a linear graph into the model; in place, and without keeping the graph's maps.

    A vertex whose nodes are those that would be written keeps them, and is no change unless equal vertices, which read
    it now, were merged into it.

    Args:
        model: The model that the graph was read from.
        graph: The folded graph.
        axis: The axis of channels: `LAST` or `IMAGE`.
        rewrite: The name of the rewrite for the reported changes.
    """
    written = {vertex: vertex.value for vertex in graph.vertices if vertex.value is not None and not vertex.changed}
    for vertex in written:
        yield from _merged(vertex, rewrite)
        vertex.inputs.clear()  # in float64 they are twice as large as the weights
    pending = [vertex for vertex in graph.vertices if vertex.changed or vertex.value is None]
    while pending:
        ready = [v for v in pending if all(source in written for source in _sources(v))]
        assert ready, "a linear graph has no cycles"
        for vertex in ready:
            yield from _emit(model, vertex, written, axis, rewrite)
            vertex.inputs.clear()
        pending = [vertex for vertex in pending if vertex not in written]


def _sources(vertex: Vertex) -> list[Vertex]:
    return [*vertex.inputs, *([vertex.through[1]] if vertex.through else [])]


def _emit(
    model: ir.Model, vertex: Vertex, written: dict[Vertex, ir.Value], axis: int, rewrite: str
) -> Iterator[Change]:
    """Write one vertex whose sources are written, and add its value to ``written``."""
    place = _place(vertex)
    if vertex.through is not None:
        node, source = vertex.through
        written[vertex] = _narrow_activation(model, node, written[source])
        return
    if axis == LAST and vertex.value is not None and _is_row_of_slices(vertex):
        written[vertex] = vertex.value
        return
    shape = _shape(vertex, written, axis)
    write = Writer(model, place)
    write.dtype = next((written[s].dtype for s in vertex.inputs), write.dtype)
    emitter = _Emitter(write, axis, shape)
    value = emitter.total([(written[source], edge) for source, edge in vertex.inputs.items()], vertex.shift)
    if vertex.value is not None and are_computed_alike(value, vertex.value):
        written[vertex] = vertex.value
        yield from _merged(vertex, rewrite)
        return
    written[vertex] = value
    if vertex.value is not None:
        write.replace(vertex.value, value)
        description = ", ".join(
            f"{n} {name}" if n > 1 else name for name, n in sorted(Counter(vertex.absorbed).items())
        )
        yield Change(
            rewrite=rewrite,
            place=place.name or "",
            description=f"{description or 'changed inputs'} -> {emitter.description}",
        )


def _merged(vertex: Vertex, rewrite: str) -> Iterator[Change]:
    """Report the equal vertices that were merged into one whose nodes stay."""
    count = vertex.absorbed.count(EQUAL)
    if count:
        yield Change(
            rewrite=rewrite, place=_place(vertex).name or "", description=f"{count} {EQUAL} -> the one that stays"
        )


def _narrow_activation(model: ir.Model, node: ir.Node, source: ir.Value) -> ir.Value:
    """Write an activation again, of a value with fewer channels; not every graph names its nodes."""
    import onnx_ir as ir

    new = ir.node(node.op_type, [source], dict(node.attributes), domain=node.domain)
    new.outputs[0].name = f"{node.outputs[0].name}.narrow"
    new.name = f"{node.name}.narrow" if node.name else new.outputs[0].name
    set_shape(new.outputs[0], sizes(source), source)
    model.graph.insert_before(node, new)
    return new.outputs[0]


def _is_row_of_slices(vertex: Vertex) -> bool:
    """Whether a vertex is already a Concat of slices of one value, which would be written for it."""
    node = vertex.value.producer() if vertex.value is not None else None
    if node is None or node.op_type != "Concat" or vertex.shift is not None or len(vertex.inputs) > 1:
        return False
    ((source, edge),) = vertex.inputs.items()
    pieces = (made_by(value, "Slice", "Split") for value in node.inputs if value is not source.value)
    if source.value is None or any(piece is None or piece.inputs[0] is not source.value for piece in pieces):
        return False
    if not isinstance(edge, Pick) or not edge.rows.all() or not (edge.scale == 1).all():
        return False
    slices = runs_of(edge.index)
    return len(node.inputs) == len(slices) and _are_long(slices)


def _are_long(slices: Sequence[Places]) -> bool:
    """Whether several slices are copied faster by Slice and Concat than by one Gather of the last axis."""
    return 1 < len(slices) <= min(MOST_SLICES, sum(map(len, slices)) // SHORTEST_SLICE)


def _place(vertex: Vertex) -> ir.Node:
    """The node before which the vertex is written: at that point, all its inputs have been computed."""
    if vertex.value is not None:
        node = vertex.value.producer()
        assert node is not None
        return node
    if vertex.through is not None:
        return vertex.through[0]
    user = next(iter([*vertex.outputs, *vertex.activations]))
    return _place(user)


def _shape(vertex: Vertex, written: dict[Vertex, ir.Value], axis: int) -> Sizes:
    given = sizes(vertex.value) if vertex.value is not None else None
    if given is not None:
        return given
    like = list(sizes(written[next(iter(vertex.inputs))]) or ())
    like[len(like) - 1 if axis == LAST else 1] = vertex.width
    return tuple(like)


class _Piece(NamedTuple):
    """Channels of a concatenation that one part of a Concat holds: the value and map of them, and where they are."""

    value: ir.Value
    edge: Map
    rows: Places


class _Emitter:
    """Writes the sum of maps for one vertex as ONNX nodes."""

    def __init__(self, write: Writer, axis: int, shape: Sizes) -> None:
        self.write, self.axis, self.shape = write, axis, shape
        self.place = len(shape) - 1 if axis == LAST else 1
        self.words: list[str] = []

    @property
    def description(self) -> str:
        """A description of the written nodes."""
        return ", ".join(self.words) or "nothing"

    def total(self, terms: list[tuple[ir.Value, Map]], shift: Vector | None) -> ir.Value:
        """Write a sum of mapped values and a constant; the resulting value."""
        live = [(value, edge) for value, edge in terms if edge.rows.any()]
        if not live:
            return self._only(terms[0][0], shift)
        whole = self._as_concat(live, shift)
        if whole is not None:
            return whole
        added, subtracted, shift = self._terms(live, shift)
        if not added:
            added = [self._node("Neg", subtracted.pop())]
        found = added[0]
        for other in added[1:]:
            found = self._node("Add", found, other)
        for other in subtracted:
            found = self._node("Sub", found, other)
        if shift is not None:
            found = self._node("Add", found, self._vector(shift[:1] if _is_uniform(shift) else shift))
        if len(added) == 1 and all(found is value for value, _ in live):
            found = self._node("Identity", found)
        return found

    def _terms(
        self, terms: list[tuple[ir.Value, Map]], shift: Vector | None
    ) -> tuple[list[ir.Value], list[ir.Value], Vector | None]:
        """Write the terms of a sum: the values to add, those to subtract, and the constant if no term includes it."""
        picks = [(value, edge) for value, edge in terms if isinstance(edge, Pick)]
        joined = self._joined(picks)
        added = [] if joined is None else [joined]
        for value, edge in terms:
            if isinstance(edge, Dense):
                added.append(self._product(value, edge, shift))
                shift = None
        subtracted: list[ir.Value] = []
        for group in self._alike(picks) if joined is None else []:
            value, sign, edge = group[0]
            if len(group) == 1 and edge.is_free and sign < 0:
                subtracted.append(value)
                continue
            for other, other_sign, _ in group[1:]:
                value = self._node("Add" if other_sign == sign else "Sub", value, other)
            new, shift = self._picked(value, edge, shift)
            added.append(new)
        return added, subtracted, shift

    def _only(self, value: ir.Value, shift: Vector | None) -> ir.Value:
        """Write a vertex whose maps all cancelled: its constant, broadcast to the shape of a value."""
        nothing = self.write("Mul", self._chosen(value, np.zeros(1, np.int64)), self.write.constant(0.0))
        width = self.shape[self.place]
        assert isinstance(width, int)
        return self._node("Add", nothing, self._vector(np.zeros(width) if shift is None else shift))

    @staticmethod
    def _alike(picks: list[tuple[ir.Value, Pick]]) -> list[list[tuple[ir.Value, int, Pick]]]:
        """Group values that are multiplied by the same factors up to sign: value, sign relative to the first, edge."""
        groups: list[list[tuple[ir.Value, int, Pick]]] = []
        for value, edge in picks:
            for group in groups:
                other = group[0][2]
                if not (edge.is_diagonal and other.is_diagonal) or edge.is_identity or other.is_identity:
                    continue
                if np.allclose(edge.scale, other.scale, rtol=1e-14, atol=0):
                    group.append((value, group[0][1], edge))
                    break
                if np.allclose(edge.scale, -other.scale, rtol=1e-14, atol=0):
                    group.append((value, -group[0][1], edge))
                    break
            else:
                groups.append([(value, -1 if edge.is_diagonal and (edge.scale == -1).all() else 1, edge)])
        return groups

    def _node(self, operator: str, *inputs: ir.Value | None, **attributes: object) -> ir.Value:
        new = self.write(operator, *inputs, **attributes)
        first = inputs[0]
        assert first is not None
        set_shape(new, self.shape, first)
        return new

    def _vector(self, numbers: Vector) -> ir.Value:
        return self.write.constant(numbers if self.axis == LAST else numbers.reshape(-1, *[1] * (len(self.shape) - 2)))

    def _product(self, value: ir.Value, edge: Dense, shift: Vector | None) -> ir.Value:
        matrix = edge.matrix
        if not edge.cols.all():
            value, matrix = self._chosen(value, np.flatnonzero(edge.cols)), matrix[:, edge.cols]
        self.words.append(f"[{matrix.shape[1]}, {matrix.shape[0]}]")
        if self.axis == LAST:
            new = self._node("MatMul", value, self.write.constant(matrix.T))
            return new if shift is None else self._node("Add", new, self.write.constant(shift))
        weight = self.write.constant(matrix.reshape(*matrix.shape, *[1] * (len(self.shape) - 2)))
        return self._node("Conv", value, weight, *([] if shift is None else [self.write.constant(shift)]))

    def _chosen(self, value: ir.Value, places: np.ndarray) -> ir.Value:
        """Write a selection of channels as a Slice, a Concat of slices, or a Gather."""
        shape = sizes(value)
        assert shape is not None
        if _is_everything(places, shape[self.place]):
            return value
        slices = runs_of(places)
        if len(slices) == 1 or (self.axis == LAST and _are_long(slices)):
            parts = [self._slice(value, int(each[0]), int(each[-1]) + 1) for each in slices]
            new = parts[0] if len(parts) == 1 else self.write("Concat", *parts, axis=self.place)
        else:
            new = self.write("Gather", value, self.write.constant(places.astype(np.int64)), axis=self.place)
        set_shape(new, (*shape[: self.place], len(places), *shape[self.place + 1 :]), value)
        return new

    def _slice(self, value: ir.Value, begin: int, end: int) -> ir.Value:
        shape = sizes(value)
        assert shape is not None
        if (begin, end) == (0, shape[self.place]):
            return value
        new = self.write("Slice", value, *(self.write.constant(each) for each in ([begin], [end], [self.place])))
        set_shape(new, (*shape[: self.place], end - begin, *shape[self.place + 1 :]), value)
        return new

    def _as_concat(self, terms: list[tuple[ir.Value, Map]], shift: Vector | None) -> ir.Value | None:
        """Write products and selections of channels as one Concat; None if two of them add to the same channel.

        Channels to which nothing adds are rows of zeros of the product before or after them.
        """
        owner = _owners(terms)
        if owner is None:
            return None
        parts, whole = [], self.shape
        added = np.zeros(len(owner)) if shift is None else shift
        pieces = self._pieces([_Piece(*term, np.flatnonzero(owner == i)) for i, term in enumerate(terms)], added)
        for value, edge, rows in pieces:
            self.shape = (*whole[: self.place], len(rows), *whole[self.place + 1 :])
            own = added[rows] if added[rows].any() else None
            if isinstance(edge, Dense):
                parts.append(self._product(value, Dense(edge.matrix[rows]), own))
                continue
            part, scale = self._chosen(value, edge.index[rows]), edge.scale[rows]
            part = self._multiplied(part, scale) if (scale != 1).any() else part
            parts.append(part if own is None else self._node("Add", part, self._vector(own)))
        self.shape = whole
        return self._concatenated(pieces, parts)

    def _joined(self, picks: list[tuple[ir.Value, Pick]]) -> ir.Value | None:
        """Write selections from several values as one Concat, reordered and scaled if needed; None if they overlap.

        If only some of them have factors, only those are multiplied.
        """
        if not picks or np.sum([edge.rows for _, edge in picks], 0).max() > 1 or len(picks) == 1:
            return None
        if not np.logical_or.reduce([edge.rows for _, edge in picks]).all():
            return None
        at_once = all((edge.scale[edge.rows] != 1).any() for _, edge in picks)
        parts, scale = [], np.ones(len(picks[0][1].rows))
        pieces = [_Piece(value, edge, np.flatnonzero(edge.rows)) for value, edge in picks]
        pieces = self._pieces(pieces, np.zeros(len(scale)), at_once=at_once)
        for value, edge, rows in pieces:
            assert isinstance(edge, Pick)
            part, own = self._chosen(value, edge.index[rows]), edge.scale[rows]
            if at_once:
                scale[rows] = own
            elif (own != 1).any():
                part = self._multiplied(part, own)
            parts.append(part)
        self.words.append("Concat")
        joined = self._concatenated(pieces, parts)
        return self._multiplied(joined, scale) if at_once else joined

    def _pieces(self, whole: list[_Piece], added: Vector, *, at_once: bool = False) -> list[_Piece]:
        """The parts of a Concat in the order of their first channels: one for each term, or several if fewer nodes do.

        (a, b, a) takes two nodes as Gather((a, b)), and none but the Concat if ``a`` is a part twice.

        Args:
            whole: One part for each term.
            added: What is added to each channel; parts to which something is added are not divided.
            at_once: Whether factors are multiplied after the Concat.
        """
        several: list[_Piece] = []
        for value, edge, rows in whole:
            runs = _runs_of_rows(edge, rows) if isinstance(edge, Pick) and not added[rows].any() else [rows]
            several += [_Piece(value, edge, run) for run in runs]
        fewest = min((several, whole), key=lambda pieces: self._node_count(pieces, at_once=at_once))
        return sorted(fewest, key=lambda piece: int(piece.rows[0]))

    def _node_count(self, pieces: list[_Piece], *, at_once: bool) -> int:
        """How many nodes select and scale the parts of a Concat, and bring its channels into order."""
        selections: dict[tuple[ir.Value, bytes], int] = {}
        scales: set[tuple[ir.Value, bytes, bytes]] = set()
        for value, edge, rows in pieces:
            if isinstance(edge, Pick):
                places, scale = edge.index[rows], edge.scale[rows]
                runs = runs_of(places)
                several = len(runs) + 1 if self.axis == LAST and _are_long(runs) else 1
                selections[value, places.tobytes()] = 0 if _is_everything(places, edge.width) else several
                if not at_once and (scale != 1).any():
                    scales.add((value, places.tobytes(), scale.tobytes()))
        firsts = sorted(pieces, key=lambda piece: int(piece.rows[0]))
        return sum(selections.values()) + len(scales) + (not _are_in_order(firsts))

    def _concatenated(self, pieces: list[_Piece], parts: list[ir.Value]) -> ir.Value:
        """Write a Concat of the parts that were written for pieces, and their order."""
        joined = self._node("Concat", *parts, axis=self.place)
        if _are_in_order(pieces):
            return joined
        return self._chosen_order(joined, np.argsort(np.concatenate([piece.rows for piece in pieces])))

    def _chosen_order(self, value: ir.Value, places: np.ndarray) -> ir.Value:
        return self._node("Gather", value, self.write.constant(places.astype(np.int64)), axis=self.place)

    def _picked(self, value: ir.Value, edge: Pick, shift: Vector | None) -> tuple[ir.Value, Vector | None]:
        """Write a selection of channels with factors; also returns the shift if it was not included."""
        if edge.is_identity:
            return value, shift
        if edge.rows.all() or _takes_zeros(edge):
            chosen, scale = self._chosen(value, _filled(edge)), edge.scale
        else:
            chosen, scale = self._spread(value, edge), np.where(edge.rows, edge.scale, 1.0)
        if (scale == 1).all():
            self.words.append("Slice")
            return chosen, shift
        if shift is not None and self.axis == IMAGE:
            self.words.append("scale and shift")
            return write_batchnorm(self.write, chosen, scale, shift), None
        self.words.append("Mul")
        return self._multiplied(chosen, scale), shift

    def _multiplied(self, value: ir.Value, scale: Vector) -> ir.Value:
        numbers = self.write.constant(scale[0]) if _is_uniform(scale) else self._vector(scale)
        return shaped_like(self.write("Mul", value, numbers), value)

    def _spread(self, value: ir.Value, edge: Pick) -> ir.Value:
        """Write selected channels at their positions, with zeros in the other positions."""
        rows = np.flatnonzero(edge.rows)
        part = self._chosen(value, edge.index[rows])
        pads = [0] * (2 * len(self.shape))
        if are_consecutive(rows):
            pads[self.place], pads[self.place + len(self.shape)] = int(rows[0]), len(edge.index) - 1 - int(rows[-1])
            return self._node("Pad", part, self.write.constant(pads))
        pads[self.place] = 1
        padded = self.write("Pad", part, self.write.constant(pads))  # one channel of zeros in front
        places = np.zeros(len(edge.index), np.int64)
        places[rows] = np.arange(1, len(rows) + 1)
        shape = (*self.shape[: self.place], len(rows) + 1, *self.shape[self.place + 1 :])
        set_shape(padded, shape, part)
        return self._chosen_order(padded, places)


def _is_everything(places: Places, width: Size) -> bool:
    """Whether positions are those of all channels, in order."""
    return len(places) == width and are_consecutive(places)


def _owners(terms: list[tuple[ir.Value, Map]]) -> Places | None:
    """For each channel the term that computes it, [channels], if one is a product; None if two add to a channel.

    A product computes the channels next to its own to which no term adds, as zeros.
    """
    count = np.sum([edge.rows for _, edge in terms], 0)
    dense = [i for i, (_, edge) in enumerate(terms) if isinstance(edge, Dense)]
    if len(terms) < 2 or not dense or count.max() > 1:
        return None
    owner = np.full(len(count), -1)
    for i, (_, edge) in enumerate(terms):
        owner[edge.rows] = i
    for step in (1, -1):
        turned = owner[::step]  # a view
        for place in np.flatnonzero(turned[1:] < 0) + 1:
            if turned[place - 1] in dense:
                turned[place] = turned[place - 1]
    return None if (owner < 0).any() else owner


def _runs_of_rows(edge: Pick, own: Places) -> list[Places]:
    """The channels of a part as runs of consecutive ones, and copies of all that an edge reads each as one run."""
    found: list[Places] = []
    for rows in runs_of(own):
        copies = runs_of(edge.index[rows])
        apart = all(_is_everything(copy, edge.width) for copy in copies)
        found += np.split(rows, len(copies)) if apart else [rows]
    return found


def _are_in_order(pieces: list[_Piece]) -> bool:
    """Whether a Concat of the parts has all channels where they belong."""
    return are_consecutive(np.concatenate([piece.rows for piece in pieces]))


def _takes_zeros(edge: Pick) -> bool:
    """Whether the scale of an edge, where it has one, takes the zeros as well: not where a Pad writes them at less."""
    scaled, spread = (edge.scale[edge.rows] != 1).any(), not are_consecutive(np.flatnonzero(edge.rows))
    return bool(scaled and (spread or are_consecutive(_filled(edge))))


def _filled(edge: Pick) -> Places:
    """The channels that an edge selects; where the edge has zeros, channels that continue the adjacent ones."""
    rows, places = np.flatnonzero(edge.rows), np.arange(len(edge.index))
    near = rows[np.minimum(np.searchsorted(rows, places), len(rows) - 1)]
    found: Places = np.clip(edge.index[near] + places - near, 0, edge.width - 1)
    return found


def _is_uniform(numbers: Vector) -> bool:
    """Whether all channels have the same number; a runtime multiplies faster by one number than by a short vector."""
    return bool((numbers == numbers[0]).all())
