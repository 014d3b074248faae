"""read-tokens: behind the last attention only the tokens that are read are computed.

A classifier reads the class token alone. With x' the rows of x [B, N, d] that are read, and f that acts on every
token by itself (norms, linear layers, activations, sums, softmax rows, queries), f(x)' = f(x'); keys and values still
see all tokens:

    (softmax(Q K^T) V)' = softmax(Q' K^T) V

What is read is followed from the outputs back to where all tokens are needed; there they are picked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from repaconv.graph.axis_tracking import axis_before
from repaconv.graph.canonical_form import NORMAL, normalise
from repaconv.graph.index_selections import selection_of
from repaconv.graph.linear_layers import linear_of
from repaconv.graph.model_rewriting import let_go
from repaconv.graph.nodes_and_constants import Writer, attribute, constant, is_constant
from repaconv.graph.operator_facts import PRODUCTS, SELECTIONS, VIEWS
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import rank_of, set_shape, sizes
from repaconv.graph.tensor_views import View
from repaconv.graph.view_chains import view_of
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir


# --- One linear layer for queries, keys and values, taken apart where its parts are read for different tokens.


@dataclass(frozen=True)
class _Piece:
    """A selection of a linear layer's channels: which, and how it is seen."""

    value: ir.Value
    view: View
    factor: int
    channels: np.ndarray
    count: int | None

    @property
    def whole(self) -> View:
        """What a layer of these channels alone is seen as."""
        return self.view.narrowed(self.view.source, self.factor, self.count)


def separate(model: ir.Model, read: set[ir.Value]) -> bool:
    """Take apart one linear layer of which some channels are read for few tokens, in place; whether there was one.

    Args:
        model: In the form that `repaconv.graph.canonical_form` makes.
        read: The selections that are read for few tokens, of values that are read for all.
    """
    for node in model.graph:
        for value in node.outputs:
            piece = _piece(value) if value in read else None
            if piece is None or linear_of(piece.view.source) is None:
                continue
            pieces = _all_pieces(piece.view.source)
            if pieces is not None and all(one.whole.writable for one in pieces):
                for one in pieces:
                    _write_piece(model, one)
                return True
    return False


def _piece(value: ir.Value) -> _Piece | None:
    selected = selection_of(value)
    seen = view_of(selected.value) if selected is not None else None
    merged = seen.merged(selected.axis) if seen is not None and selected is not None else None
    if selected is None or merged is None or len(merged.axes[selected.axis]) != 1:
        return None
    factor = merged.axes[selected.axis][0]
    channels = merged.channels(factor, selected.places)
    if channels is None or merged.axis_of(factor) != len(merged.of) - 1:
        return None
    return _Piece(value, merged, factor, channels, len(selected.places) if selected.keeps else None)


def _all_pieces(source: ir.Value) -> list[_Piece] | None:
    """Every selection of its channels, if nothing else reads the value."""
    found, seen = [], [source]
    while seen:
        value = seen.pop()
        if value.is_graph_output():
            return None
        for user, place in value.uses():
            if place == 0 and user.domain == "" and user.op_type in SELECTIONS:
                pieces = [_piece(output) for output in user.outputs if output.uses() or output.is_graph_output()]
                if any(piece is None or piece.view.source is not source for piece in pieces):
                    return None
                found += [piece for piece in pieces if piece is not None]
            elif place == 0 and user.op_type in VIEWS:
                seen.append(user.outputs[0])
            else:
                return None
    return found


def _write_piece(model: ir.Model, piece: _Piece) -> None:
    """A linear layer of the piece's channels alone."""
    found, node, shape = linear_of(piece.view.source), piece.value.producer(), sizes(piece.view.source)
    assert found is not None
    assert node is not None
    assert shape is not None
    write = Writer(model, node)
    new = write("MatMul", found.x, write.constant(found.weight[:, piece.channels]))
    set_shape(new, (*shape[:-1], len(piece.channels)), found.x)
    if found.bias is not None:
        new = write("Add", new, write.constant(found.bias[piece.channels]))
        set_shape(new, (*shape[:-1], len(piece.channels)), found.x)
    seen = replace(piece.whole, source=new).write(write)
    assert seen is not None
    write.replace(piece.value, seen)


# --- read-tokens: behind the last attention only the tokens that are read are computed.

LARGEST_SHARE = 0.5
"""Of the tokens. Where more are read, the copies cost what the rest saves."""


@dataclass(frozen=True)
class Reads:
    """Places of one axis that are read; all of the value where there is no such thing."""

    axis: int
    places: tuple[int, ...]


Demand = Reads | None
"""None: all of it."""


def apply(model: ir.Model) -> Iterator[Change]:
    """See `repaconv.graph.rewrite_contract.Apply`; a graph in which there is nothing to do stays as it is written."""
    if NORMAL in model.meta or _narrows(model):
        yield from _narrowed(model)


def _narrows(model: ir.Model) -> bool:
    """Whether there is something to do, found on a copy that is brought into the normal form."""
    copied = model.clone()
    found = any(_narrowed(copied))
    let_go(copied)
    return found


def _narrowed(model: ir.Model) -> Iterator[Change]:
    normalise(model)
    demands = _demands(model)
    for _ in range(len(model.graph)):
        if not separate(model, {value for value in demands if _of_all(value, demands)}):
            break
        demands = _demands(model)
    for node in model.graph:
        if len({demands[value] for value in node.outputs if value.uses()}) > 1:
            demands |= dict.fromkeys(node.outputs)
    narrowed = [node for node in model.graph if isinstance(demands.get(node.outputs[0]), Reads)]
    saved = [node for node in narrowed if node.op_type in PRODUCTS]
    if not saved:
        return
    read = demands[saved[-1].outputs[0]]
    _narrow(model, demands, narrowed)
    assert read is not None
    yield Change(
        rewrite=READ_TOKENS.name,
        place=(saved[-1].name or "").rpartition("/")[0],
        description=f"{len(saved)} products for {len(read.places)} of the tokens, the ones that are read, not for all",
    )


def _demands(model: ir.Model) -> dict[ir.Value, Demand]:
    """What is read of every value, from the outputs back."""
    wanted: dict[ir.Value, list[Demand]] = {value: [None] for value in model.graph.outputs}
    found: dict[ir.Value, Demand] = {}
    for node in reversed(list(model.graph)):
        for value in node.outputs:
            outside = any(user.graph is not model.graph for user, _ in value.uses())
            found[value] = None if outside else _united(value, wanted.get(value, []))
        selected, demand = _selects(node), found[node.outputs[0]]
        if demand is not None and any(
            value is not None and _input_axis(node, place, demand.axis) is None
            for place, value in enumerate(node.inputs)
        ):
            found |= dict.fromkeys(node.outputs)  # what is read is picked behind this node
            demand = None
        for place, value in enumerate(node.inputs):
            if value is None or is_constant(value):
                continue
            first = selected is not None and place == 0
            reads = (selected if demand is None else None) if first else _of_input(node, place, found)
            wanted.setdefault(value, []).append(reads)
    for value in model.graph.inputs:
        found[value] = None
    return found


def _united(value: ir.Value, reads: list[Demand]) -> Demand:
    """What several readers want together."""
    shape = sizes(value)
    axes = {demand.axis for demand in reads if demand is not None}
    if any(demand is None for demand in reads) or len(axes) != 1 or shape is None:
        return None
    axis = axes.pop()
    places = tuple(sorted({place for demand in reads if demand is not None for place in demand.places}))
    length = shape[axis]
    return Reads(axis, places) if isinstance(length, int) and len(places) <= LARGEST_SHARE * length else None


def _selects(node: ir.Node) -> Reads | None:
    """What a Slice or Gather reads, if that is few of the rows of [.., N, d]."""
    found = selection_of(node.outputs[0]) if node.op_type in ("Slice", "Gather") else None
    if found is None or found.axis == 0 or found.axis == rank_of(found.value) - 1:
        return None
    return Reads(found.axis, tuple(int(place) for place in found.places))


def _of_all(value: ir.Value, demands: dict[ir.Value, Demand]) -> bool:
    """Whether a selection is read for few tokens, and what it is of for all."""
    selected = selection_of(value) if demands[value] is not None else None
    return selected is not None and demands.get(selected.value) is None


def _of_input(node: ir.Node, place: int, found: dict[ir.Value, Demand]) -> Demand:
    """What a node reads of an input, given what is read of its outputs."""
    if node.op_type == "Split" and node.domain == "":
        reads = [found[value] for value in node.outputs if value.uses()]
        same = reads[0] if reads and all(demand == reads[0] for demand in reads) else None
        along = int(attribute(node, "axis", 0)) % len(sizes(node.inputs[0]) or (1,))
        return same if same is not None and same.axis != along else None
    if any(value.uses() for value in node.outputs[1:]) or node.domain != "":
        return None
    demand = found[node.outputs[0]]
    if demand is None:
        return None
    axis = _input_axis(node, place, demand.axis)
    return None if axis is None or axis < 0 else Reads(axis, demand.places)


def _input_axis(node: ir.Node, place: int, axis: int) -> int | None:
    """See `axis_before`; None as well where the node cannot be written with fewer places."""
    target = constant(node.inputs[1]) if node.op_type == "Reshape" else np.ones(1)
    if node.op_type in ("Expand", "Flatten") or target is None or 0 in target:
        return None  # a 0 says the same as an axis of the input
    return axis_before(node, place, axis)


# --- writing ----------------------------------------------------------------------------------------


def _narrow(model: ir.Model, demands: dict[ir.Value, Demand], nodes: list[ir.Node]) -> None:
    """Let these nodes compute what is read alone; in place."""
    picked: dict[tuple[ir.Value, Reads], ir.Value] = {}

    def needed(value: ir.Value, reads: Reads, node: ir.Node) -> ir.Value:
        """The places of a value, picked once."""
        held = demands.get(value)
        if held == reads:
            return value
        if (value, reads) not in picked:
            picked[value, reads] = _picked(model, node, value, reads, held)
        return picked[value, reads]

    for node in nodes:
        reads = demands[node.outputs[0]]
        assert isinstance(reads, Reads)
        for place, value in enumerate(node.inputs):
            axis = _input_axis(node, place, reads.axis) if value is not None else None
            if value is not None and axis is not None and axis >= 0:
                node.replace_input_with(place, needed(value, Reads(axis, reads.places), node))
    for node in tuple(model.graph):
        selected = _selects(node)
        demand = demands.get(node.inputs[0]) if selected is not None and node.inputs[0] is not None else None
        if selected is not None and demand is not None:
            _renumber(model, node, selected, demand)
    for node in nodes:
        reads = demands[node.outputs[0]]
        assert isinstance(reads, Reads)
        if node.op_type == "Reshape":
            _resize(model, node, reads)
        for value in node.outputs:
            own = demands.get(value) if value.uses() else reads
            shape = list(value.shape) if value.shape is not None else None
            if shape is not None and isinstance(own, Reads):
                import onnx_ir as ir

                shape[own.axis] = len(own.places)
                value.shape = ir.Shape(shape)


def _picked(model: ir.Model, node: ir.Node, value: ir.Value, reads: Reads, held: Demand) -> ir.Value:
    """Slice or Gather before the node; a constant is picked here."""
    write = Writer(model, node)
    numbers = constant(value)
    if numbers is not None:
        return write.constant(np.take(numbers, reads.places, reads.axis), like=value)
    assert held is None or held.axis == reads.axis
    places = [held.places.index(place) for place in reads.places] if held is not None else list(reads.places)
    return _written(write, value, reads.axis, places)


def _written(write: Writer, value: ir.Value, axis: int, places: list[int]) -> ir.Value:
    first, last = places[0], places[-1]
    if places == list(range(first, last + 1)):
        one = (write.constant([number]) for number in (first, last + 1, axis))
        new = write("Slice", value, *one)
    else:
        new = write("Gather", value, write.constant(places), axis=axis)
    new.dtype = value.dtype
    return new


def _renumber(model: ir.Model, node: ir.Node, selected: Reads, held: Reads) -> None:
    """The same selection from a value that has fewer places now."""
    places = [held.places.index(place) for place in selected.places]
    write = Writer(model, node)
    if node.op_type == "Gather":
        indices = constant(node.inputs[1])
        assert indices is not None
        node.replace_input_with(1, write.constant(np.asarray(places, np.int64).reshape(indices.shape)))
        return
    assert node.inputs[0] is not None
    new = node.inputs[0] if len(places) == len(held.places) else _written(write, node.inputs[0], selected.axis, places)
    write.replace(node.outputs[0], new)


def _resize(model: ir.Model, node: ir.Node, reads: Reads) -> None:
    target = constant(node.inputs[1])
    assert target is not None
    if target[reads.axis] != -1:
        target = target.copy()
        target[reads.axis] = len(reads.places)
        node.replace_input_with(1, Writer(model, node).constant(target))


READ_TOKENS = Rewrite(
    "read-tokens",
    "where constant places of the tokens are read and what lies before acts on every token by itself",
    apply,
    order=10,
    keeps=True,
)
