"""read-tokens: after the last attention, compute only the tokens that the network's head reads.

A classifier reads only the class token. Let x' be the rows of x [B, N, d] that are read. If f acts on every token
separately (norms, linear layers, activations, sums, softmax rows, queries), then f(x)' = f(x'). Keys and values still
need all tokens:

    (softmax(Q K^T) V)' = softmax(Q' K^T) V

The tokens that are read are traced from the outputs back to the operator that needs all tokens, and the selection of
tokens is moved there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from repaconv.graph.axis_tracking import axis_before
from repaconv.graph.canonical_form import NORMALIZED_KEY, normalize
from repaconv.graph.index_selections import selection_of
from repaconv.graph.linear_layers import linear_of
from repaconv.graph.models_in_onnx_ir import release_weights
from repaconv.graph.nodes_and_constants import Writer, attribute, constant, is_constant, is_read
from repaconv.graph.operator_facts import PRODUCTS, SELECTIONS, VIEWS
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import rank_of, set_shape, sizes
from repaconv.graph.tensor_views import View
from repaconv.graph.view_chains import view_of
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir


# --- Splitting a linear layer for queries, keys and values, if its parts are read for different tokens.


@dataclass(frozen=True)
class _Piece:
    """A selection of a linear layer's output channels.

    Attributes:
        value: The selected value.
        view: The view of the layer's output that the selection acts on.
        factor: The factor of the view along which it selects.
        channels: The selected output channels of the layer.
        count: The length of the selected axis; None if the axis is dropped.
    """

    value: ir.Value
    view: View
    factor: int
    channels: np.ndarray
    count: int | None

    @property
    def whole(self) -> View:
        """The view of a layer with only these channels."""
        return self.view.narrowed(self.view.source, self.factor, self.count)


def separate(model: ir.Model, read: set[ir.Value]) -> bool:
    """Split one linear layer if some of its channels are read for few tokens only; in place.

    Args:
        model: In the form that `repaconv.graph.canonical_form` makes.
        read: Selections that are read for few tokens, from values that are read for all tokens.

    Returns:
        Whether a layer was split.
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
    """All selections of a value's channels; None if anything else reads the value."""
    found, seen = [], [source]
    while seen:
        value = seen.pop()
        if value.is_graph_output():
            return None
        for user, place in value.uses():
            if place == 0 and user.domain == "" and user.op_type in SELECTIONS:
                pieces = [_piece(output) for output in user.outputs if is_read(output)]
                if any(piece is None or piece.view.source is not source for piece in pieces):
                    return None
                found += [piece for piece in pieces if piece is not None]
            elif place == 0 and user.op_type in VIEWS:
                seen.append(user.outputs[0])
            else:
                return None
    return found


def _write_piece(model: ir.Model, piece: _Piece) -> None:
    """Write a linear layer with the piece's channels only."""
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


# --- Tracing back which tokens are read, and computing only these.

LARGEST_SHARE = 0.5
"""The largest share of tokens to select. With more, the selection costs what the smaller operators save."""


@dataclass(frozen=True)
class Reads:
    """The positions of one axis of a value that are read."""

    axis: int
    places: tuple[int, ...]


Demand = Reads | None
"""The positions of a value that are read; None if all of it is."""


def apply(model: ir.Model) -> Iterator[Change]:
    """Compute only the tokens that are read; in place. If that saves nothing, the graph is not changed."""
    if NORMALIZED_KEY in model.meta or _can_narrow(model):
        yield from _narrowed(model)


def _can_narrow(model: ir.Model) -> bool:
    """Whether the rewrite applies; this is tested on a normalized copy of the model."""
    copied = model.clone()
    found = any(_narrowed(copied))
    release_weights(copied)
    return found


def _narrowed(model: ir.Model) -> Iterator[Change]:
    normalize(model)
    demands = _demands(model)
    for _ in range(len(model.graph)):
        if not separate(model, {value for value in demands if _reads_few_of_all(value, demands)}):
            break
        demands = _demands(model)
    for node in model.graph:
        if len(node.outputs) > 1:  # a node computes all its outputs for the same tokens
            common = {demands[value] for value in node.outputs if is_read(value)}
            demands |= dict.fromkeys(node.outputs, common.pop() if len(common) == 1 else None)
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
        description=f"{len(saved)} products computed only for the tokens that are read ({len(read.places)})",
    )


def _demands(model: ir.Model) -> dict[ir.Value, Demand]:
    """The positions of every value that are read, traced from the graph's outputs to its inputs."""
    wanted: dict[ir.Value, list[Demand]] = {value: [None] for value in model.graph.outputs}
    found: dict[ir.Value, Demand] = {}
    for node in reversed(list(model.graph)):
        for value in node.outputs:
            outside = any(user.graph is not model.graph for user, _ in value.uses())
            found[value] = None if outside else _union(value, wanted.get(value, []))
        selected, demand = _selects(node), found[node.outputs[0]]
        if demand is not None and any(
            value is not None and _input_axis(node, place, demand.axis) is None
            for place, value in enumerate(node.inputs)
        ):
            found |= dict.fromkeys(node.outputs)  # the tokens are selected after this node
            demand = None
        for place, value in enumerate(node.inputs):
            if value is None or is_constant(value):
                continue
            first = selected is not None and place == 0
            reads = (selected if demand is None else None) if first else _read_of_input(node, place, found)
            wanted.setdefault(value, []).append(reads)
    for value in model.graph.inputs:
        found[value] = None
    return found


def _union(value: ir.Value, reads: list[Demand]) -> Demand:
    """The union of the positions that readers read; None if it is all or most of them, or along several axes."""
    shape = sizes(value)
    axes = {demand.axis for demand in reads if demand is not None}
    if any(demand is None for demand in reads) or len(axes) != 1 or shape is None:
        return None
    axis = axes.pop()
    places = tuple(sorted({place for demand in reads if demand is not None for place in demand.places}))
    length = shape[axis]
    return Reads(axis, places) if isinstance(length, int) and len(places) <= LARGEST_SHARE * length else None


def _selects(node: ir.Node) -> Reads | None:
    """The positions that a Slice or Gather selects, if its axis is neither the batch nor the channels."""
    found = selection_of(node.outputs[0]) if node.op_type in ("Slice", "Gather") else None
    if found is None or found.axis == 0 or found.axis == rank_of(found.value) - 1:
        return None
    return Reads(found.axis, tuple(int(place) for place in found.places))


def _reads_few_of_all(value: ir.Value, demands: dict[ir.Value, Demand]) -> bool:
    """Whether a selection is read for few tokens, and its source for all tokens."""
    selected = selection_of(value) if demands[value] is not None else None
    return selected is not None and demands.get(selected.value) is None


def _read_of_input(node: ir.Node, place: int, found: dict[ir.Value, Demand]) -> Demand:
    """The positions of an input that a node needs, given the positions of its outputs that are read."""
    if node.op_type == "Split" and node.domain == "":
        reads = [found[value] for value in node.outputs if is_read(value)]
        same = reads[0] if reads and all(demand == reads[0] for demand in reads) else None
        along = int(attribute(node, "axis", 0)) % len(sizes(node.inputs[0]) or (1,))
        return same if same is not None and same.axis != along else None
    if any(map(is_read, node.outputs[1:])) or node.domain != "":
        return None
    demand = found[node.outputs[0]]
    if demand is None:
        return None
    axis = _input_axis(node, place, demand.axis)
    return None if axis is None or axis < 0 else Reads(axis, demand.places)


def _input_axis(node: ir.Node, place: int, axis: int) -> int | None:
    """The result of `axis_before`; None as well if the node cannot be written with fewer positions."""
    target = constant(node.inputs[1]) if node.op_type == "Reshape" else np.ones(1)
    if node.op_type in ("Expand", "Flatten") or target is None or 0 in target:
        return None  # a 0 copies the length of an axis of the input
    return axis_before(node, place, axis)


# Writing the narrowed operators


def _narrow(model: ir.Model, demands: dict[ir.Value, Demand], nodes: list[ir.Node]) -> None:
    """Let these nodes compute only the positions that are read; in place."""
    picked: dict[tuple[ir.Value, Reads], ir.Value] = {}

    def needed(value: ir.Value, reads: Reads, node: ir.Node) -> ir.Value:
        """The selected positions of a value; each selection is written once."""
        held = demands.get(value)
        if held == reads:
            return value
        if (value, reads) not in picked:
            picked[value, reads] = _select_positions(model, node, value, reads, held)
        return picked[value, reads]

    for node in nodes:
        reads = demands[node.outputs[0]]
        assert isinstance(reads, Reads)
        inputs = [
            (place, value, _input_axis(node, place, reads.axis))
            for place, value in enumerate(node.inputs)
            if value is not None
        ]  # collected first, since an input's axis depends on the shapes of the others
        for place, value, axis in inputs:
            if axis is not None and axis >= 0:
                node.replace_input_with(place, needed(value, Reads(axis, reads.places), node))
    selections = []  # collected first, since renumbering may remove a selection that another one reads
    for node in model.graph:
        selected = _selects(node)
        demand = demands.get(node.inputs[0]) if selected is not None and node.inputs[0] is not None else None
        if selected is not None and demand is not None:
            selections.append((node, selected, demand))
    for node, selected, demand in selections:
        _renumber(model, node, selected, demand)
    for node in nodes:
        reads = demands[node.outputs[0]]
        assert isinstance(reads, Reads)
        if node.op_type == "Reshape":
            _resize(model, node, reads)
        for value in node.outputs:
            own = demands.get(value) if is_read(value) else reads
            shape = list(value.shape) if value.shape is not None else None
            if shape is not None and isinstance(own, Reads):
                import onnx_ir as ir

                shape[own.axis] = len(own.places)
                value.shape = ir.Shape(shape)


def _select_positions(model: ir.Model, node: ir.Node, value: ir.Value, reads: Reads, held: Demand) -> ir.Value:
    """Write a Slice or Gather before a node; a constant is selected at once."""
    write = Writer(model, node)
    numbers = constant(value)
    if numbers is not None:
        return write.constant(np.take(numbers, reads.places, reads.axis), like=value)
    assert held is None or held.axis == reads.axis
    places = [held.places.index(place) for place in reads.places] if held is not None else list(reads.places)
    return _write_selection(write, value, reads.axis, places)


def _write_selection(write: Writer, value: ir.Value, axis: int, places: list[int]) -> ir.Value:
    first, last = places[0], places[-1]
    if places == list(range(first, last + 1)):
        one = (write.constant([number]) for number in (first, last + 1, axis))
        new = write("Slice", value, *one)
    else:
        new = write("Gather", value, write.constant(places), axis=axis)
    new.dtype = value.dtype
    if (shape := sizes(value)) is not None:
        set_shape(new, (*shape[:axis], len(places), *shape[axis + 1 :]), value)
    return new


def _renumber(model: ir.Model, node: ir.Node, selected: Reads, held: Reads) -> None:
    """Renumber a selection after its source was narrowed to fewer positions."""
    places = [held.places.index(place) for place in selected.places]
    write = Writer(model, node)
    if node.op_type == "Gather":
        indices = constant(node.inputs[1])
        assert indices is not None
        node.replace_input_with(1, write.constant(np.asarray(places, np.int64).reshape(indices.shape)))
        return
    assert node.inputs[0] is not None
    new = (
        node.inputs[0]
        if places == list(range(len(held.places)))
        else _write_selection(write, node.inputs[0], selected.axis, places)
    )
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
    "layers that act on each token alone, if only some tokens are read after them, always the same, e.g. a class token",
    apply,
    order=10,
    keeps=True,
)
