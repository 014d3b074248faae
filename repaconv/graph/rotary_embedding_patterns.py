"""Find rotary position embeddings in a graph, however they are written.

A rotary embedding rotates pairs (a, b) of a head's channels by angles t that depend on the token and the pair:

    y_a = c (x_a cos t - x_b sin t)
    y_b = c (x_a sin t + x_b cos t)

Exporters write it as slices, negations, concatenations, products with constants, and sums, or as products of pairs with
the 2x2 matrices (cos t, -sin t; sin t, cos t). All of these move numbers, multiply them by constants, or add them, so
that every entry of y is a sum of few entries of x with constant factors. `terms_of` computes these sums, and the pairs,
cosines and sines are read from them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from repaconv.graph.attention_patterns import heads_of
from repaconv.graph.index_selections import axes_of, perm_of, selected_positions
from repaconv.graph.nodes_and_constants import (
    Array,
    attribute,
    attributes_key,
    constant,
    nodes_of,
    scalar,
)
from repaconv.graph.operator_facts import MOVES, SELECTIONS, VIEWS
from repaconv.graph.symbolic_shapes import as_numbers, rank_of, sizes
from repaconv.graph.view_chains import view_of

if TYPE_CHECKING:
    import onnx_ir as ir

SUMS = ("Add", "Sub", "ReduceSum")
"""Operators that add numbers."""
MOST_NODES = 64
"""The most nodes between x and y."""
MOST_TERMS = 4
"""The most terms in the sum of one entry of y."""
MOST_ENTRIES = 2**23
"""The most entries of x for which sums are computed."""
TRIED_BATCH_SIZES = (2, 3, 5, 7, 11, 13)
"""Batch sizes for which sums are computed if it is dynamic: the first one that divides no other size of x. Otherwise
images and heads could be exchanged unseen."""


@dataclass(frozen=True)
class RotaryEmbedding:
    """One rotary embedding.

    Attributes:
        x: The tokens [B, N, C], or heads [B, N, H, d] or [B, H, N, d]; without the axis B if y is of one image.
        y: The embedded heads, [B, N, H, d], [B, H, N, d], or [B, H, d, N] (keys that a product takes transposed).
        x_axes: The axes of x: "bnc", "bnhd" or "bhnd", or one of these without the b.
        y_axes: The axes of y: "bnhd", "bhnd" or "bhdn".
        offset: The first channel of x that y is computed from, with heads side by side.
        interleaved: Whether the channels 2i and 2i + 1 are a pair; otherwise i and i + r/2 of a block are.
        blocks: The number of blocks of a head that are rotated like heads: one for each axis of a position.
        cos: c cos t, [N, H, r/2], or [N, 1, r/2] if it is the same for all heads, block by block; in float64. The
            channels of a head from r on stay as they are; several blocks have none.
        sin: c sin t, in the same shape.
    """

    x: ir.Value
    y: ir.Value
    x_axes: str
    y_axes: str
    offset: int
    interleaved: bool
    blocks: int
    cos: Array
    sin: Array

    @property
    def heads(self) -> int:
        """The number of heads H."""
        return self._size("h")

    @property
    def width(self) -> int:
        """The number of channels d of a head."""
        return self._size("d")

    def _size(self, axis: str) -> int:
        found = (sizes(self.y) or ())[self.y_axes.index(axis)]
        assert isinstance(found, int)
        return found


def rotary_embeddings(model: ir.Model) -> Iterator[RotaryEmbedding]:
    """Find the rotary embeddings whose result is a factor of a matrix product, directly or through views and scales."""
    for found in _of_heads(model):
        yield _of_tokens(found)


def embedding_nodes(model: ir.Model) -> set[ir.Node]:
    """Return the nodes that compute rotary embeddings of heads."""
    nodes: set[ir.Node] = set()
    for found in _of_heads(model):
        todo = [found.y]
        while todo:
            value = todo.pop()
            node = value.producer()
            if value is not found.x and node is not None and node not in nodes:
                nodes.add(node)
                todo += _operands(node)
    return nodes


def _of_heads(model: ir.Model) -> Iterator[RotaryEmbedding]:
    """Find rotary embeddings of the nearest value that each is computed from alone."""
    ends: dict[ir.Value, None] = {}
    for product in nodes_of(model, "MatMul", "Attention"):
        for value in product.inputs[:3]:
            end = _end(value)
            if end is not None:
                ends[end] = None
    known: dict[object, RotaryEmbedding | None] = {}
    for end in ends:
        for x in _sources(end):
            key = _computation(x, end)
            if key not in known:
                known[key] = _rotary_embedding_between(x, end)
            found = known[key]
            if found is not None:
                yield replace(found, x=x, y=end)
                break


def _of_tokens(found: RotaryEmbedding) -> RotaryEmbedding:
    """The same embedding, as one of the tokens that its heads are a view of."""
    if found.x_axes != "bhnd":
        return found
    heads = heads_of(found.x)
    whole = 2 * found.cos.shape[-1] == found.width  # else a factor of x is one of the channels that stay, too
    if heads is not None and (heads.count, heads.width) == (found.heads, found.width) and (whole or heads.factor == 1):
        cos, sin = heads.factor * found.cos, heads.factor * found.sin
        return replace(found, x=heads.source, x_axes="bnc", offset=heads.offset, cos=cos, sin=sin)
    view = view_of(found.x)
    if view is None or len(view.of) != 4 or view.places or view.scale != 1:
        return found
    batch, tokens, count, width = view.of
    return replace(found, x=view.source, x_axes="bnhd") if view.axes == (batch, count, tokens, width) else found


def _end(value: ir.Value | None) -> ir.Value | None:
    """The first value of four axes after the sum or concatenation that a value is, up to views and factors.

    Pairs are stacked as [.., d/2, 2] before they are [.., d], and a fold moves scales and transposes in between.
    """
    end = None
    while value is not None and (node := value.producer()) is not None and node.domain == "":
        end = value if rank_of(value) == 4 else end
        if node.op_type in (*SUMS, "Concat"):
            return end
        numbers = [scalar(entry) for entry in node.inputs] if node.op_type in ("Mul", "Div") else [None, None]
        if node.op_type not in (*VIEWS, "Expand") and numbers == [None, None]:  # Expand: keys of several queries' heads
            return None
        value = node.inputs[0 if numbers[0] is None else 1]
    return None


# --- What y is computed from.


def _sources(y: ir.Value) -> Iterator[ir.Value]:
    """The values of which each alone determines y, by moves, products with constants and sums; the nearest first."""
    operands: dict[ir.Node, list[ir.Value]] = {}
    todo = [y]
    while todo:
        node = todo.pop().producer()
        if node is None or node in operands or not _is_linear(node):
            continue
        operands[node] = _operands(node)
        if len(operands) > MOST_NODES:
            return
        todo += operands[node]
    if any(node.op_type in SUMS for node in operands):
        for value in dict.fromkeys(value for values in operands.values() for value in values):
            if value is not y and rank_of(value) in (2, 3, 4) and _is_only_source(value, y, operands):
                yield value


def _is_only_source(x: ir.Value, y: ir.Value, operands: dict[ir.Node, list[ir.Value]]) -> bool:
    """Whether every way up from y leads to x, through these nodes."""
    todo, seen = [y], {y}
    while todo:
        value = todo.pop()
        if value is x:
            continue
        node = value.producer()
        if node is None or node not in operands:
            return False
        new = [one for one in operands[node] if one not in seen]
        seen.update(new)
        todo += new
    return True


def _computation(x: ir.Value, y: ir.Value) -> object:
    """What is computed of x to give y: equal for queries and keys of all layers that are rotated by the same angles."""
    order = {x: 0}
    steps: list[object] = [sizes(x), sizes(y)]

    def number(value: ir.Value) -> int:
        if value not in order:
            node = value.producer()
            assert node is not None
            operands = _operands(node)
            inputs = tuple(number(one) if one in operands else _digest(one) for one in node.inputs)
            steps.append((node.op_type, node.outputs.index(value), len(node.outputs), attributes_key(node), inputs))
            order[value] = len(order)
        return order[value]

    number(y)
    return tuple(steps)


def _digest(value: ir.Value | None) -> object:
    """A key of a constant input's numbers; None for an input that is left out."""
    numbers = _numbers(value)
    return None if numbers is None else (numbers.shape, sha256(numbers.tobytes()).digest())


def _is_linear(node: ir.Node) -> bool:
    """Whether a node only moves numbers, multiplies them by constants, or adds them."""
    if node.domain or any(sizes(value) is None for value in node.outputs):
        return False
    if node.op_type in MOVES:
        return _is_plain(node)
    if node.op_type == "ReduceSum":
        return axes_of(node, rank_of(node.inputs[0])) is not None
    if node.op_type == "Cast":
        given, to = _cast_types(node)
        return given is not None and given == to
    if node.op_type in ("Mul", "Div"):
        fixed = [_numbers(value) is not None for value in node.inputs]
        return fixed == [False, True] or (node.op_type == "Mul" and fixed == [True, False])
    return node.op_type in ("Neg", "Add", "Sub", "Concat") and all(_numbers(value) is None for value in node.inputs)


def _operands(node: ir.Node) -> list[ir.Value]:
    """The inputs of a linear node that are not constant."""
    given = node.inputs[:1] if node.op_type in (*MOVES, "Cast", "ReduceSum") else node.inputs
    return [value for value in given if value is not None and _numbers(value) is None]


def _numbers(value: ir.Value | None) -> Array | None:
    """A constant's numbers, also of a constant that was moved or converted; None if it is computed otherwise."""
    found = constant(value)
    node = None if value is None else value.producer()
    if found is not None or value is None or node is None or node.domain:
        return found
    if node.op_type == "Concat":
        parts = [numbers for entry in node.inputs if (numbers := _numbers(entry)) is not None]
        joined = len(parts) == len(node.inputs)
        return np.concatenate(parts, int(attribute(node, "axis", 0))) if joined else None
    if not _is_plain(node):
        return None
    whole = _numbers(node.inputs[0])
    return None if whole is None else _moved(node, value, whole)


def _is_plain(node: ir.Node) -> bool:
    """Whether a node moves numbers of its first input by constants, or converts them without rounding."""
    if node.op_type == "Cast":
        given, to = _cast_types(node)
        if given is None or to is None or not given.is_floating_point():
            return False
        return bool(to == given or to.bitwidth > given.bitwidth)
    if any(sizes(value) is None for value in node.outputs):
        return False
    if node.op_type in SELECTIONS and any(selected_positions(node, value) is None for value in node.outputs):
        return False
    fixed = all(constant(entry) is not None for entry in node.inputs[1:] if entry is not None)
    return node.op_type in (*MOVES, "Expand") and fixed


def _cast_types(node: ir.Node) -> tuple[ir.DataType | None, ir.DataType | None]:
    """The element types before and after a Cast."""
    x = node.inputs[0]
    return None if x is None else x.dtype, node.outputs[0].dtype


# --- Sums of entries of x.


@dataclass(frozen=True)
class Terms:
    """A tensor whose every entry is sum_k factor[k] x.flat[place[k]]; both arrays are [K, *shape]."""

    place: NDArray[np.int32]
    factor: NDArray[np.float64]


def terms_of(y: ir.Value, x: ir.Value) -> Terms | None:
    """Compute what y is of x, which alone determines it; None if the sums are too long or a shape is not known."""
    shape = sizes(x)
    rest = None if shape is None else as_numbers(shape[1:])
    if shape is None or rest is None:
        return None
    other = next((size for size in TRIED_BATCH_SIZES if all(length % size for length in rest)), TRIED_BATCH_SIZES[-1])
    whole = (shape[0] if isinstance(shape[0], int) else other, *rest)
    if math.prod(whole) > MOST_ENTRIES:
        return None
    places = np.arange(math.prod(whole), dtype=np.int32).reshape(1, *whole)
    known: dict[ir.Value, Terms | None] = {x: Terms(places, np.ones(places.shape))}

    def terms(value: ir.Value) -> Terms | None:
        if value not in known:
            node = value.producer()
            assert node is not None
            parts = [terms(one) for one in _operands(node)]
            known[value] = None if any(one is None for one in parts) else _applied(node, value, parts)  # type: ignore[arg-type]
        return known[value]

    try:
        return terms(y)
    except ValueError:  # a Reshape or Squeeze that fits another batch size only
        return None


def _applied(node: ir.Node, value: ir.Value, parts: list[Terms]) -> Terms | None:
    """The terms of a node's output, from those of its operands."""
    first = parts[0]
    if node.op_type in (*MOVES, "Cast"):
        return Terms(_each_moved(node, value, first.place), _each_moved(node, value, first.factor))
    if node.op_type == "Neg":
        return replace(first, factor=-first.factor)
    if node.op_type in ("Mul", "Div"):
        by = next(numbers for entry in node.inputs if (numbers := _numbers(entry)) is not None)
        shape = np.broadcast_shapes(by.shape, first.place.shape[1:])
        if len(shape) != first.place.ndim - 1 or math.prod(shape) > MOST_ENTRIES:
            return None
        place = np.broadcast_to(first.place, (len(first.place), *shape))
        return Terms(place, first.factor / by if node.op_type == "Div" else first.factor * by)
    if node.op_type == "ReduceSum":
        return _summed(node, first)
    if node.op_type == "Concat":
        axis, most = int(attribute(node, "axis", 0)) % (first.place.ndim - 1), max(len(one.place) for one in parts)
        same = [_with_length(one, most) for one in parts]
        return Terms(
            np.concatenate([one.place for one in same], axis + 1),
            np.concatenate([one.factor for one in same], axis + 1),
        )
    second = parts[-1]  # x + x has one operand twice
    if first.place.shape[1:] != second.place.shape[1:] or len(first.place) + len(second.place) > MOST_TERMS:
        return None
    sign = -1.0 if node.op_type == "Sub" else 1.0
    return Terms(np.concatenate([first.place, second.place]), np.concatenate([first.factor, sign * second.factor]))


def _summed(node: ir.Node, terms: Terms) -> Terms | None:
    """The terms of a ReduceSum's output; None if they are too many."""
    shape = terms.place.shape[1:]
    axes = axes_of(node, len(shape)) or []
    count = len(terms.place) * math.prod(shape[axis] for axis in axes)
    if count > MOST_TERMS:
        return None
    order = (0, *(1 + axis for axis in axes), *(1 + axis for axis in range(len(shape)) if axis not in axes))
    kept = attribute(node, "keepdims", 1)
    rest = [1 if axis in axes else length for axis, length in enumerate(shape) if kept or axis not in axes]
    return Terms(
        terms.place.transpose(order).reshape(count, *rest), terms.factor.transpose(order).reshape(count, *rest)
    )


def _with_length(terms: Terms, length: int) -> Terms:
    """The same sums with terms of factor 0."""
    more = [(0, length - len(terms.place)), *[(0, 0)] * (terms.place.ndim - 1)]
    return Terms(np.pad(terms.place, more), np.pad(terms.factor, more))


def _each_moved(node: ir.Node, value: ir.Value, arrays: Array) -> Array:
    """The output of a view or selection for each of these arrays; a single one is not copied."""
    moved = [_moved(node, value, array) for array in arrays]
    return moved[0][None] if len(moved) == 1 else np.stack(moved)


def _moved(node: ir.Node, value: ir.Value, array: Array) -> Array:
    """The output ``value`` of a view or selection of this array."""
    if node.op_type in SELECTIONS:
        taken: Array = array
        held = selected_positions(node, value)
        assert held is not None
        for axis, places in sorted(held.items(), reverse=True):
            taken = np.take(taken, places, axis)
        return taken
    if node.op_type == "Transpose":
        transposed: Array = array.transpose(perm_of(node, array.ndim))
        return transposed
    if node.op_type == "Reshape":
        target = constant(node.inputs[1])
        assert target is not None
        shape = [array.shape[i] if size == 0 else int(size) for i, size in enumerate(target)]
        reshaped: Array = array.reshape(shape)
        return reshaped
    if node.op_type == "Expand":
        target = constant(node.inputs[1])
        assert target is not None
        return np.broadcast_to(array, np.broadcast_shapes(array.shape, tuple(int(size) for size in target)))
    if node.op_type == "Flatten":
        axis = int(attribute(node, "axis", 1))
        axis += array.ndim if axis < 0 else 0
        flat: Array = array.reshape(math.prod(array.shape[:axis]), -1)
        return flat
    if node.op_type == "Squeeze":
        given = axes_of(node, array.ndim)
        return array.squeeze(None if given is None else tuple(given))
    if node.op_type == "Unsqueeze":
        return np.expand_dims(array, tuple(axes_of(node, rank_of(value)) or ()))
    return array


# --- Pairs, cosines and sines from the sums.


def _rotary_embedding_between(x: ir.Value, y: ir.Value) -> RotaryEmbedding | None:
    """The rotary embedding that makes y of x, or None."""
    start, end = sizes(x), sizes(y)
    if start is None or end is None or as_numbers(end[1:]) is None:
        return None
    orders = [axes for axes in ("bnc", "bhnd", "bnhd") if len(axes) == len(start) and start[0] == end[0]]
    if end[0] == 1 and as_numbers(start) is not None:
        orders += [axes for axes in ("nc", "hnd", "nhd") if len(axes) == len(start)]
    terms = None if not orders or 0 in (*start, *end) else terms_of(y, x)
    if terms is None or len(terms.place) < 2 or [*terms.place.shape[2:]] != [*end[1:]]:
        return None
    found: RotaryEmbedding | None = None
    # with the axes of heads and tokens exchanged, it is an embedding with another angle for every head
    for x_axes in orders:
        for y_axes in ("bhnd", "bnhd", "bhdn"):
            one = _from_terms(x, y, x_axes, y_axes, terms)
            if one is not None and one.cos.shape[1] == 1:
                return one
            found = found or one
    return found


def _from_terms(x: ir.Value, y: ir.Value, x_axes: str, y_axes: str, terms: Terms) -> RotaryEmbedding | None:
    order = (0, *(1 + y_axes.index(axis) for axis in "bnhd"))
    _, batch, tokens, heads, width = (terms.place.shape[axis] for axis in order)
    start = [size if isinstance(size, int) else batch for size in sizes(x) or ()]
    length = dict(zip(x_axes, start, strict=True))
    if length["n"] != tokens or length.get("d", width) != width:
        return None
    place, factor = terms.place.transpose(order), terms.factor.transpose(order)
    read = factor != 0
    offset = int(place[:, 0, 0][read[:, 0, 0]].min(initial=place.size)) if "hn" not in x_axes else 0
    own = np.arange(width)
    if offset + heads * width > math.prod(start) // (batch * tokens):
        return None  # the next token's channels
    # the channel, counted from the first one of the same head of the same token
    source = place - (_places(x_axes, length, (batch, tokens, heads, width)) + (offset - own))
    if (factor != factor[:, :1]).any() or ((source != source[:, :1]) & read).any():
        return None  # images differ
    source, factor, read = source[:, 0], factor[:, 0], read[:, 0]
    if ((source < 0) | (source >= width))[read].any():
        return None  # another token or another head
    stays, moves = read & (source == own), read & (source != own)
    pair = np.where(moves, source, -1).max((0, 1, 2))
    first, second, interleaved, blocks = _pairs(pair)
    if not len(first) or (moves & (source != pair)).any():
        return None  # a channel is mixed with several others
    cos, sin = (np.where(which, factor, 0.0).sum(0) for which in (stays, moves))
    if (cos == cos[:, :1]).all() and (sin == sin[:, :1]).all():
        cos, sin = cos[:, :1], sin[:, :1]
    rest = np.setdiff1d(own, [*first, *second])
    rotates = (cos[..., first] == cos[..., second]).all() and (sin[..., first] == -sin[..., second]).all()
    if not rotates or (cos[..., rest] != 1).any() or (sin[..., rest] != 0).any():
        return None
    return RotaryEmbedding(x, y, x_axes, y_axes, offset, interleaved, blocks, cos[..., first], sin[..., second])


def _places(x_axes: str, length: dict[str, int], shape: tuple[int, ...]) -> NDArray[np.int32]:
    """The places in x of the entries [B, N, H, d], with heads side by side from its first channel on."""
    strides, step = {}, 1
    for axis in reversed(x_axes):
        strides[axis] = step
        step *= length[axis]
    steps = [strides.get(axis, shape[3] if axis == "h" else 1) for axis in "bnhd"]
    counts = np.ix_(*(np.arange(size, dtype=np.int32) for size in shape))
    found: NDArray[np.int32] = np.zeros((), np.int32)
    for by, count in zip(steps, counts, strict=True):
        found = found + by * count
    return found


def _pairs(pair: NDArray[np.int64]) -> tuple[Array, Array, bool, int]:
    """The first and the second channels of all pairs, whether they are interleaved, and the number of blocks.

    Both are empty if the channels are not paired in one of these ways.

    Args:
        pair: The channel that each channel is mixed with; -1 for a channel that is mixed with none.
    """
    width, none = len(pair), np.zeros(0, np.int64)
    mixed = np.flatnonzero(pair >= 0)
    if not len(mixed):
        return none, none, False, 1
    apart = int(abs(pair[mixed[0]] - mixed[0]))
    ways = [
        (np.arange(apart), np.arange(apart) + apart, False, 1),
        (np.arange(0, width - 1, 2), np.arange(1, width, 2), True, 1),
    ]
    if width % (2 * apart) == 0:
        halves = np.arange(width).reshape(-1, 2, apart)
        ways.append((halves[:, 0].reshape(-1), halves[:, 1].reshape(-1), False, len(halves)))
    for first, second, interleaved, blocks in ways:
        partner = np.full(width, -1)
        if len(second) and second[-1] < width:
            partner[first], partner[second] = second, first
        if (pair[mixed] == partner[mixed]).all():
            return first, second, interleaved, blocks
    return none, none, False, 1
