"""join: merge parallel attention products into one. heads: write the merged attention in its cheapest form.

The scores of a merged attention are computed over the rank r of its heads, or directly on the tokens as X W X^T if
r (2 d + N) >= d (d + N), for N tokens of width d. The softmax ignores what is constant along keys, so the keys' bias is
dropped. The rows of the softmax sum to 1, so the values' bias moves to after the projection.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import isfinite
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from repaconv.algebra.low_rank_products import side_by_side
from repaconv.graph.attention_patterns import (
    Attention,
    Heads,
    as_heads_with_shape,
    as_tokens_with_shape,
    attentions,
    heads_of,
    merged_heads,
)
from repaconv.graph.canonical_form import normalize
from repaconv.graph.linear_layers import Linear, linear_of
from repaconv.graph.models_in_onnx_ir import clean
from repaconv.graph.nodes_and_constants import Array, Writer, constant, made_by, only_reader, scalar
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import as_numbers, rank_of, set_shape, sizes
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir


# --- join: several products of heads that are added, or that share a softmax, become one product.
#
# With queries Q_b, keys K_b and factors c_b of n branches, concatenated head by head,
#
#     sum_b c_b Q_b K_b^T = [c_1 Q_1 .. c_n Q_n] [K_1 .. K_n]^T,    S V_b = (S [V_1 .. V_n])_b
#
# `choose_cheapest` below then chooses the form of the one product.

JOINED = "repaconv.joined"
"""Marks a softmax whose product was joined here, so that `choose_cheapest` treats it."""


def join(model: ir.Model) -> Iterator[Change]:
    """Join the scores and the values of parallel attention branches around each Softmax; in place."""
    normalize(model)
    for node in tuple(model.graph):
        if node.op_type == "Softmax" and not node.domain:
            yield from _join_scores(model, node)
            yield from _join_values(model, node)
    clean(model)


# Scores

_IN_SUMS = ("MatMul", "Add", "Sub", "Mul", "Div")


def _terms(value: ir.Value | None) -> list[tuple[float, ir.Node]] | None:
    """The MatMul nodes whose outputs add up to a value, each once with its factor; None if the value is no such sum.

    Every node is visited once: a sum that is added to itself n times in series has 2^n terms.
    """
    operands: dict[ir.Node, list[tuple[ir.Node, float]]] = {}
    top = made_by(value, *_IN_SUMS)
    todo = [top]
    while todo:
        node = todo.pop()
        found = _operands(node) if node is not None else None
        if node is None or found is None:
            return None
        if node not in operands:
            operands[node] = found
            todo += [inner for inner, _ in reversed(found)]
    assert top is not None
    readers = Counter(inner for found in operands.values() for inner, _ in found)
    factors, ready = dict.fromkeys(operands, 0.0) | {top: 1.0}, [top]
    while ready:  # a node after all its readers in the sum
        node = ready.pop()
        for inner, factor in operands[node]:
            factors[inner] += factors[node] * factor
            readers[inner] -= 1
            if not readers[inner]:
                ready.append(inner)
    terms = [(factors[node], node) for node in operands if node.op_type == "MatMul"]
    return terms if all(isfinite(factor) for factor, _ in terms) else None


def _operands(node: ir.Node) -> list[tuple[ir.Node, float]] | None:
    """The nodes whose outputs a node of a sum adds up, each with its factor; None if it does something else."""
    if node.op_type == "MatMul":
        return []
    given = [(made_by(value, *_IN_SUMS), scalar(value)) for value in node.inputs]
    if node.op_type in ("Add", "Sub"):
        signs = (1.0, 1.0 if node.op_type == "Add" else -1.0)
        found = [(inner, sign) for (inner, _), sign in zip(given, signs, strict=True) if inner is not None]
        return found if len(found) == 2 else None
    (first, left), (second, right) = given
    if first is not None and right is not None:
        return [(first, right if node.op_type == "Mul" else 1 / right)] if right or node.op_type == "Mul" else None
    return [(second, left)] if second is not None and left is not None and node.op_type == "Mul" else None


def _join_scores(model: ir.Model, softmax: ir.Node) -> Iterator[Change]:
    terms = _terms(softmax.inputs[0])
    if terms is None or len(terms) < 2:
        return
    queries = [_whole_heads(node.inputs[0]) for _, node in terms]
    keys = [_whole_heads(node.inputs[1], transposed=True) for _, node in terms]
    found = _matching_heads(queries), _matching_heads(keys)
    if found[0] is None or found[1] is None or found[0][0].count != found[1][0].count:
        return
    count = found[0][0].count
    write = Writer(model, softmax)
    scaled = []
    for (factor, _), one in zip(terms, found[0], strict=True):
        new = write("Mul", one.source, write.constant(factor)) if factor != 1 else one.source
        set_shape(new, sizes(one.source), one.source)
        scaled.append(new)
    q = as_heads_with_shape(write, _interleaved(write, scaled, count), count)
    k = as_heads_with_shape(write, _interleaved(write, [one.source for one in found[1]], count), count, transposed=True)
    scores = write("MatMul", q, k)
    set_shape(scores, sizes(softmax.inputs[0]), q)
    softmax.replace_input_with(0, scores)
    softmax.meta[JOINED] = True
    description = f"{len(terms)} sums of scores -> one product, heads {sum(one.width for one in found[0])} wide"
    yield Change(rewrite=JOIN.name, place=softmax.name or "", description=description)


def _matching_heads(parts: list[Heads | None]) -> list[Heads] | None:
    """All heads, if each exists and all have the same count, batch and number of tokens; otherwise None."""
    found = [one for one in parts if one is not None]
    same = len(found) == len(parts) and len({(one.count, (sizes(one.source) or ())[:2]) for one in found}) == 1
    return found if same else None


def _interleaved(write: Writer, parts: list[ir.Value], count: int) -> ir.Value:
    """Concatenate tokens [B, N, H d_b] head by head: [B, N, H sum d_b]."""
    shapes = [sizes(value) for value in parts]
    widths = as_numbers(shape[2] for shape in shapes if shape is not None)
    joined = write("Concat", *parts, axis=2)
    first = shapes[0]
    assert first is not None
    assert widths is not None
    whole = (*first[:2], sum(widths))
    set_shape(joined, whole, parts[0])
    starts = np.cumsum([0, *widths[:-1]])
    order = [
        start + h * (w // count) + j
        for h in range(count)
        for start, w in zip(starts, widths, strict=True)
        for j in range(w // count)
    ]
    new = write("Gather", joined, write.constant([int(i) for i in order]), axis=2)
    set_shape(new, whole, parts[0])
    return new


# Values


def _join_values(model: ir.Model, softmax: ir.Node) -> Iterator[Change]:
    readers = list(softmax.outputs[0].uses())
    products: list[ir.Node] = [node for node, place in readers if place == 0 and node.op_type == "MatMul"]
    if len(products) < 2 or len(products) != len(readers) or any(node.graph is not model.graph for node in products):
        return
    values = _matching_heads([_whole_heads(node.inputs[1]) for node in products])
    ends = [_tokens_of(node.outputs[0]) for node in products]
    if values is None or any(end is None for end in ends):
        return
    order = {node: place for place, node in enumerate(model.graph)}
    if any(_depends_on(one.source, products, order) for one in values):
        return
    count = values[0].count
    last = max(products, key=lambda node: order[node])
    write = Writer(model, last)
    v = as_heads_with_shape(write, _interleaved(write, [one.source for one in values], count), count)
    mixed = write("MatMul", softmax.outputs[0], v)
    shape = sizes(products[0].outputs[0])
    assert shape is not None
    set_shape(mixed, (*shape[:3], sum(one.width for one in values)), v)
    tokens = as_tokens_with_shape(write, mixed)
    width, start = sum(one.width for one in values), 0
    for one, end in zip(values, ends, strict=True):
        assert end is not None
        places = [h * width + start + j for h in range(count) for j in range(one.width)]
        start += one.width
        part = write("Gather", tokens, write.constant(places), axis=2)
        set_shape(part, sizes(end), tokens)
        write.replace(end, part)
    softmax.meta[JOINED] = True
    yield Change(
        rewrite=JOIN.name, place=last.name or "", description=f"{len(values)} sets of values -> one, heads {width} wide"
    )


def _depends_on(value: ir.Value, nodes: list[ir.Node], order: dict[ir.Node, int]) -> bool:
    """Whether a value depends on one of some nodes."""
    first, seen, todo = min(order[node] for node in nodes), set(), [value]
    while todo:
        node = todo.pop().producer()
        if node is None or node in seen or order.get(node, first) < first:
            continue
        if node in nodes:
            return True
        seen.add(node)
        todo += [entry for entry in node.inputs if entry is not None]
    return False


def _whole_heads(value: ir.Value | None, *, transposed: bool = False) -> Heads | None:
    """The heads that a value holds, if they cover all channels of their tokens without a factor; otherwise None."""
    found = heads_of(value, transposed=transposed)
    return found if found is not None and found.whole and found.factor == 1 else None


def _tokens_of(value: ir.Value) -> ir.Value | None:
    """The tokens [B, N, H d] that heads [B, H, N, d] are reshaped to, if nothing else reads the heads."""
    end = merged_heads(value)
    return end if end is not None and rank_of(end) == 3 and not end.is_graph_output() else None


JOIN = Rewrite("join", "for heads of one number over the same tokens, added up or after one softmax", join)


# --- heads: write joined attentions in their cheapest form.


class _Layers(NamedTuple):
    """The linear layers of an attention: queries, keys and values of the same x, and the projection."""

    q: Linear
    k: Linear
    v: Linear
    proj: ir.Node
    weight: Array  # of the projection, [H e, c]


def choose_cheapest(model: ir.Model) -> Iterator[Change]:
    """Write every joined attention in its cheapest form; in place."""
    normalize(model)
    for found in attentions(model):
        softmax = made_by(found.mixed.inputs[0], "Softmax")
        layers = _layers(found) if softmax is not None and softmax.meta.get(JOINED) else None
        if softmax is not None and layers is not None:
            yield _write_cheapest(model, softmax, found, layers)
    clean(model)


def _layers(found: Attention) -> _Layers | None:
    heads = (found.q, found.k, found.v)
    if found.scale != 1 or found.mask is not None or rank_of(found.out) != 3:
        return None
    if not all(one.whole for one in heads) or len({one.count for one in heads}) > 1:
        return None
    layers = [layer for one in heads if (layer := linear_of(one.source)) is not None]
    proj = only_reader(found.out, "MatMul")
    weight = constant(proj.inputs[1]) if proj is not None else None
    if len(layers) < 3 or any(layer.x is not layers[0].x for layer in layers):
        return None
    if proj is None or weight is None or weight.ndim != 2:
        return None
    q, k, v = layers
    return _Layers(q, k, v, proj, weight)


def _write_cheapest(model: ir.Model, softmax: ir.Node, found: Attention, layers: _Layers) -> Change:
    """Write an attention in its cheapest form; in place."""
    (q, k, v, proj, weight), count, tokens = layers, found.q.count, found.q.tokens
    query, key = _scores(q.weight.T, q.bias, k.weight.T, count, tokens)
    value, projection = _values(v.weight.T, weight.T, count, tokens)
    write, x, shape = Writer(model, found.product), q.x, sizes(q.x)
    parts = [part for part in (query[:, :-1], key, value) if part is not None]
    stacked = np.concatenate(parts)
    bias = np.concatenate([query[:, -1], np.zeros(len(stacked) - len(query))])
    assert shape is not None
    fused = write("MatMul", x, write.constant(stacked.T))
    set_shape(fused, (*shape[:2], len(stacked)), x)
    if q.bias is not None or v.bias is not None or bias.any():
        fused = write("Add", fused, write.constant(bias))
        set_shape(fused, (*shape[:2], len(stacked)), x)
    pieces = _slices(write, fused, [len(part) for part in parts])
    first = as_heads_with_shape(write, pieces.pop(0), count)
    second = as_heads_with_shape(write, *((x, 1) if key is None else (pieces.pop(0), count)), transposed=True)
    new = write("MatMul", first, second)
    set_shape(new, sizes(found.product.outputs[0]), first)
    softmax.replace_input_with(0, new)
    third = as_heads_with_shape(write, *((x, 1) if value is None else (pieces.pop(0), count)))

    after, whole, end = Writer(model, found.mixed), sizes(found.mixed.outputs[0]), proj.outputs[0]
    assert whole is not None
    mixed = after("MatMul", softmax.outputs[0], third)
    set_shape(mixed, (*whole[:3], projection.shape[1] // count), third)
    done = after("MatMul", as_tokens_with_shape(after, mixed), after.constant(projection.T))
    set_shape(done, sizes(end), x)
    if v.bias is not None:
        done = after("Add", done, after.constant(v.bias @ weight))
        set_shape(done, sizes(end), x)
    after.replace(end, done)
    description = f"scores {'X W X^T' if key is None else f'over heads {len(key) // count} wide'}"
    description = f"{description}; the keys' bias removed, the values' bias moved after the projection"
    return Change(rewrite=CHOOSE.name, place=softmax.name or "", description=description)


def _slices(write: Writer, value: ir.Value, widths: list[int]) -> list[ir.Value]:
    """Split the channels of a value into slices of these widths."""
    shape, start, found = sizes(value), 0, []
    assert shape is not None
    for width in widths:
        new = value
        if len(widths) > 1:
            new = write("Slice", value, *(write.constant([n]) for n in (start, start + width, 2)))
            set_shape(new, (*shape[:2], width), value)
        found.append(new)
        start += width
    return found


def _scores(queries: Array, bias: Array | None, keys: Array, heads: int, tokens: int) -> tuple[Array, Array | None]:
    """Weights of the queries with their bias as last column, and of the keys; None if the tokens serve as keys."""
    shift = np.zeros(len(queries)) if bias is None else bias
    with_bias = np.concatenate([queries, shift[:, None]], 1)
    pairs = [(q.T, k) for q, k in zip(np.split(with_bias, heads), np.split(keys, heads), strict=True)]
    lefts, rights = side_by_side(pairs, tokens)
    return np.concatenate([left.T for left in lefts]), None if rights is None else np.concatenate(rights)


def _values(values: Array, proj: Array, heads: int, tokens: int) -> tuple[Array | None, Array]:
    """Weights of the values, or None if the tokens serve as values, and the weights of the projection."""
    pairs = list(zip(np.split(proj, heads, 1), np.split(values, heads), strict=True))
    lefts, rights = side_by_side(pairs, tokens)
    return None if rights is None else np.concatenate(rights), np.concatenate(lefts, 1)


CHOOSE = Rewrite("heads", "for queries, keys and values that are linear in the same tokens", choose_cheapest)
