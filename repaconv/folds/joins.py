"""join: several products of heads that are added, or that share their softmax, are one product.

With queries Q_b, keys K_b and factors c_b of n branches, head by head along the width,

    sum_b c_b Q_b K_b^T = [c_1 Q_1 .. c_n Q_n] [K_1 .. K_n]^T,    S V_b = (S [V_1 .. V_n])_b

Which form the one product then takes follows from its cost: over its heads' rank r, or against the tokens themselves,
X W X^T, where r (2 d + N) >= d (d + N). The softmax kills what is constant along keys, so their bias goes; its rows sum
to one, so the values' bias goes behind the projection.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from repaconv.artefacts import Change
from repaconv.graphs.contract import Rewrite
from repaconv.graphs.graph import Array, Writer, attribute, clean, constant, made_by, scalar
from repaconv.graphs.linears import linear_of
from repaconv.graphs.normal import normalise
from repaconv.graphs.operators import VIEWS
from repaconv.graphs.shapes import Size, sizes
from repaconv.graphs.views import View, set_shape, view_of
from repaconv.ranks import side_by_side

if TYPE_CHECKING:
    import onnx_ir as ir

JOINED = "repaconv.joined"
"""Marks a softmax whose product was put together here, so that its form is chosen here too."""


@dataclass(frozen=True)
class Heads:
    """Tokens [B, N, H d] seen as heads [B, H, N, d]."""

    tokens: ir.Value
    count: int
    width: int
    around: tuple[Size, Size]  # B and N


def heads_of(value: ir.Value | None, *, transposed: bool = False) -> Heads | None:
    """What a value [B, H, N, d] (or [B, H, d, N]) shows of tokens [B, N, H d], channels head by head."""
    view = view_of(value) if value is not None else None
    if view is None or len(view.axes) != 4 or len(view.of) != 3:
        return None
    batch, head, rows, inner = view.axes
    if transposed:
        rows, inner = inner, rows
    if batch != view.of[0] or rows != view.of[1] or head + inner != view.of[2]:
        return None
    shape = sizes(view.source)
    counts = [int(np.prod([n for f in part if isinstance(n := view.size[f], int)])) for part in (head, inner)]
    if shape is None or shape[2] != counts[0] * counts[1]:
        return None
    return Heads(view.source, counts[0], counts[1], (shape[0], shape[1]))


def as_heads(write: Writer, tokens: ir.Value, count: int, *, transposed: bool = False) -> ir.Value:
    """The inverse: [B, N, H d] to [B, H, N, d], or [B, H, d, N]."""
    shape = sizes(tokens)
    assert shape is not None and isinstance(shape[2], int)  # noqa: PT018
    size = {0: shape[0], 1: shape[1], 2: count, 3: shape[2] // count}
    last = ((3,), (1,)) if transposed else ((1,), (3,))
    found = View(tokens, ((0,), (1,), (2, 3)), ((0,), (2,), *last), size).write(write)
    assert found is not None
    return found


def as_tokens(write: Writer, value: ir.Value) -> ir.Value:
    """[B, H, N, d] to [B, N, H d]."""
    shape = sizes(value)
    assert shape is not None
    each = ((0,), (1,), (2,), (3,))
    found = View(value, each, ((0,), (2,), (1, 3)), dict(enumerate(shape))).write(write)
    assert found is not None
    return found


def apply(model: ir.Model) -> Iterator[Change]:
    """See `repaconv.graphs.contract.Apply`."""
    normalise(model)
    for node in tuple(model.graph):
        if node.op_type == "Softmax" and not node.domain:
            yield from _join_scores(model, node)
            yield from _join_values(model, node)
    clean(model)


# --- scores -------------------------------------------------------------------------------------------


def _terms(value: ir.Value | None, factor: float) -> list[tuple[float, ir.Node]] | None:
    """The products that a value is a sum of, with a factor each."""
    node = made_by(value, "MatMul", "Add", "Sub", "Mul", "Div")
    if node is None or node.inputs[0] is None or node.inputs[1] is None:
        return None
    if node.op_type == "MatMul":
        return [(factor, node)]
    if node.op_type in ("Mul", "Div"):
        for mine, other in ((0, 1), (1, 0)):
            number = scalar(node.inputs[other])
            if number is not None and not (node.op_type == "Div" and mine):
                return _terms(node.inputs[mine], factor * number if node.op_type == "Mul" else factor / number)
        return None
    left = _terms(node.inputs[0], factor)
    right = _terms(node.inputs[1], factor if node.op_type == "Add" else -factor)
    return None if left is None or right is None else left + right


def _join_scores(model: ir.Model, softmax: ir.Node) -> Iterator[Change]:
    terms = _terms(softmax.inputs[0], 1.0)
    if terms is None or len(terms) < 2:
        return
    queries = [heads_of(node.inputs[0]) for _, node in terms]
    keys = [heads_of(node.inputs[1], transposed=True) for _, node in terms]
    found = _alike(queries), _alike(keys)
    if found[0] is None or found[1] is None or found[0][0].count != found[1][0].count:
        return
    count = found[0][0].count
    write = Writer(model, softmax)
    scaled = []
    for (factor, _), one in zip(terms, found[0], strict=True):
        new = write("Mul", one.tokens, write.constant(factor)) if factor != 1 else one.tokens
        set_shape(new, sizes(one.tokens), one.tokens)
        scaled.append(new)
    q = as_heads(write, _interleaved(write, scaled, count), count)
    k = as_heads(write, _interleaved(write, [one.tokens for one in found[1]], count), count, transposed=True)
    scores = write("MatMul", q, k)
    set_shape(scores, sizes(softmax.inputs[0]), q)
    softmax.replace_input_with(0, scores)
    softmax.meta[JOINED] = True
    told = f"{len(terms)} sums of scores -> one product, heads {sum(one.width for one in found[0])} wide"
    yield Change(rewrite=JOIN.name, place=softmax.name or "", told=told)


def _alike(parts: list[Heads | None]) -> list[Heads] | None:
    """All of them, if they are heads of the same number over the same tokens' places."""
    found = [one for one in parts if one is not None]
    same = len(found) == len(parts) and len({(one.count, one.around) for one in found}) == 1
    return found if same else None


def _interleaved(write: Writer, parts: list[ir.Value], count: int) -> ir.Value:
    """Tokens [B, N, H d_b] beside each other head by head, [B, N, H sum d_b]."""
    shapes = [sizes(value) for value in parts]
    widths = [int(shape[2]) for shape in shapes if shape is not None]
    joined = write("Concat", *parts, axis=2)
    first = shapes[0]
    assert first is not None
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


# --- values -------------------------------------------------------------------------------------------


def _join_values(model: ir.Model, softmax: ir.Node) -> Iterator[Change]:
    readers = list(softmax.outputs[0].uses())
    products: list[ir.Node] = [node for node, place in readers if place == 0 and node.op_type == "MatMul"]
    if len(products) < 2 or len(products) != len(readers):
        return
    values = _alike([heads_of(node.inputs[1]) for node in products])
    ends = [_tokens_behind(node.outputs[0]) for node in products]
    if values is None or any(end is None for end in ends):
        return
    order = {node: place for place, node in enumerate(model.graph)}
    if any(_made_of(one.tokens, products, order) for one in values):
        return
    count = values[0].count
    last = max(products, key=lambda node: order[node])
    write = Writer(model, last)
    v = as_heads(write, _interleaved(write, [one.tokens for one in values], count), count)
    mixed = write("MatMul", softmax.outputs[0], v)
    shape = sizes(products[0].outputs[0])
    assert shape is not None
    set_shape(mixed, (*shape[:3], sum(one.width for one in values)), v)
    tokens = as_tokens(write, mixed)
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
        rewrite=JOIN.name, place=last.name or "", told=f"{len(values)} sets of values -> one, heads {width} wide"
    )


def _made_of(value: ir.Value, nodes: list[ir.Node], order: dict[ir.Node, int]) -> bool:
    """Whether a value is computed from what some nodes write."""
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


def _tokens_behind(value: ir.Value) -> ir.Value | None:
    """The tokens [B, N, H d] that heads [B, H, N, d] are shown as, if nothing else reads those."""
    end = value
    while True:
        users = list(end.uses())
        if end.is_graph_output() or not users:
            return None
        if len(users) != 1 or users[0][0].op_type not in VIEWS:
            break
        end = users[0][0].outputs[0]
    view = view_of(end)
    if view is None or view.source is not value or len(view.of) != 4:
        return None
    batch, head, rows, inner = view.of
    return end if view.axes == (batch, rows, head + inner) else None


# --- the form that is cheapest --------------------------------------------------------------------------


def choose(model: ir.Model) -> Iterator[Change]:
    """Give joined attentions their cheapest form; see `repaconv.graphs.contract.Apply`."""
    normalise(model)
    for node in tuple(model.graph):
        if node.op_type == "Softmax" and not node.domain and node.meta.get(JOINED):
            yield from _choose(model, node)
    clean(model)


def _choose(model: ir.Model, softmax: ir.Node) -> Iterator[Change]:
    scores = made_by(softmax.inputs[0], "MatMul")
    users = list(softmax.outputs[0].uses())
    mixing = users[0][0] if len(users) == 1 else None
    if scores is None or mixing is None or mixing.op_type != "MatMul" or len(list(scores.outputs[0].uses())) != 1:
        return
    if attribute(softmax, "axis", -1) not in (-1, 3):
        return  # what is constant along keys counts then
    q, k = heads_of(scores.inputs[0]), heads_of(scores.inputs[1], transposed=True)
    v, out = heads_of(mixing.inputs[1]), _tokens_behind(mixing.outputs[0])
    if q is None or k is None or v is None or out is None or not (q.count == k.count == v.count):
        return
    layers = [linear_of(one.tokens) for one in (q, k, v)]
    readers = list(out.uses())
    proj = readers[0][0] if len(readers) == 1 else None
    weight = constant(proj.inputs[1]) if proj is not None and proj.op_type == "MatMul" else None
    if any(layer is None for layer in layers) or weight is None or weight.ndim != 2 or proj is None:
        return
    query_layer, key_layer, value_layer = (layer for layer in layers if layer is not None)
    x, bq, bv = query_layer.x, query_layer.bias, value_layer.bias
    tokens = q.around[1]
    if key_layer.x is not x or value_layer.x is not x or not isinstance(tokens, int):
        return
    query, key = _scores(query_layer.weight.T, bq, key_layer.weight.T, q.count, tokens)
    value, projection = _values(value_layer.weight.T, weight.T, q.count, tokens)
    write = Writer(model, scores)
    parts = [part for part in (query[:, :-1], key, value) if part is not None]
    stacked = np.concatenate(parts)
    bias = np.concatenate([query[:, -1], np.zeros(len(stacked) - len(query))])
    shape = sizes(x)
    assert shape is not None
    fused = write("MatMul", x, write.constant(stacked.T))
    set_shape(fused, (*shape[:2], len(stacked)), x)
    if bq is not None or bv is not None or bias.any():
        fused = write("Add", fused, write.constant(bias))
        set_shape(fused, (*shape[:2], len(stacked)), x)
    pieces = _slices(write, fused, [len(part) for part in parts])
    first = as_heads(write, pieces.pop(0), q.count)
    second = as_heads(
        write, pieces.pop(0) if key is not None else x, q.count if key is not None else 1, transposed=True
    )
    new = write("MatMul", first, second)
    set_shape(new, sizes(scores.outputs[0]), first)
    softmax.replace_input_with(0, new)
    third = as_heads(write, pieces.pop(0) if value is not None else x, q.count if value is not None else 1)
    after = Writer(model, mixing)
    mixed = after("MatMul", softmax.outputs[0], third)
    whole = sizes(mixing.outputs[0])
    assert whole is not None
    set_shape(mixed, (*whole[:3], projection.shape[1] // q.count), third)
    done = after("MatMul", as_tokens(after, mixed), after.constant(projection.T))
    set_shape(done, sizes(proj.outputs[0]), x)
    if bv is not None:
        done = after("Add", done, after.constant(bv @ weight))
        set_shape(done, sizes(proj.outputs[0]), x)
    after.replace(proj.outputs[0], done)
    told = f"scores {'X W X^T' if key is None else f'over heads {len(key) // q.count} wide'}"
    yield Change(
        rewrite=CHOOSE.name, place=softmax.name or "", told=f"{told}; keys' bias gone, values' behind the projection"
    )


def _slices(write: Writer, value: ir.Value, widths: list[int]) -> list[ir.Value]:
    """A value's channels in pieces."""
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
    """Rows of q with the bias as last column, and of k; None where the tokens are the keys."""
    shift = np.zeros(len(queries)) if bias is None else bias
    with_bias = np.concatenate([queries, shift[:, None]], 1)
    pairs = [(q.T, k) for q, k in zip(np.split(with_bias, heads), np.split(keys, heads), strict=True)]
    lefts, rights = side_by_side(pairs, tokens)
    return np.concatenate([left.T for left in lefts]), None if rights is None else np.concatenate(rights)


def _values(values: Array, proj: Array, heads: int, tokens: int) -> tuple[Array | None, Array]:
    """Rows of v, or None where the tokens are the values; and the projection."""
    pairs = list(zip(np.split(proj, heads, 1), np.split(values, heads), strict=True))
    lefts, rights = side_by_side(pairs, tokens)
    return None if rights is None else np.concatenate(rights), np.concatenate(lefts, 1)


JOIN = Rewrite("join", "for heads of one number over the same tokens, added up or behind one softmax", apply)
CHOOSE = Rewrite("heads", "for queries, keys and values that are linear in the same tokens", choose)
