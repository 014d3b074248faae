"""heads: joined attentions in the form that costs least.

Over its heads' rank r, or against the tokens themselves, X W X^T, where r (2 d + N) >= d (d + N). The softmax kills
what is constant along keys, so their bias goes; its rows sum to one, so the values' bias goes behind the projection.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from repaconv.artefacts import Change
from repaconv.folds.joins import JOINED, all_of, tokens_of
from repaconv.graphs.contract import Rewrite
from repaconv.graphs.graph import Array, Writer, attribute, clean, constant, made_by, only_reader
from repaconv.graphs.heads import shown_as_heads, shown_as_tokens
from repaconv.graphs.linears import Linear, linear_of
from repaconv.graphs.normal import normalise
from repaconv.graphs.shapes import set_shape, sizes
from repaconv.ranks import side_by_side

if TYPE_CHECKING:
    import onnx_ir as ir


class _Attention(NamedTuple):
    """Scores and what mixes values by them, between linear layers: queries', keys' and values' of one x."""

    scores: ir.Node
    mixing: ir.Node
    heads: int
    tokens: int
    q: Linear
    k: Linear
    v: Linear
    proj: ir.Node
    weight: Array  # of the projection, [H e, c]


def apply(model: ir.Model) -> Iterator[Change]:
    """See `repaconv.graphs.contract.Apply`."""
    normalise(model)
    for node in tuple(model.graph):
        if node.op_type == "Softmax" and not node.domain and node.meta.get(JOINED):
            found = _around(node)
            if found is not None:
                yield _written(model, node, found)
    clean(model)


def _around(softmax: ir.Node) -> _Attention | None:
    scores, mixing = made_by(softmax.inputs[0], "MatMul"), only_reader(softmax.outputs[0], "MatMul")
    if scores is None or mixing is None or len(scores.outputs[0].uses()) != 1:
        return None
    if attribute(softmax, "axis", -1) not in (-1, 3):
        return None  # what is constant along keys counts then
    parts = (all_of(scores.inputs[0]), all_of(scores.inputs[1], transposed=True), all_of(mixing.inputs[1]))
    heads = [part for part in parts if part is not None]
    if len(heads) < 3 or len({part.count for part in heads}) > 1 or not isinstance(heads[0].rows, int):
        return None
    layers = [layer for part in heads if (layer := linear_of(part.source)) is not None]
    out = tokens_of(mixing.outputs[0])
    proj = only_reader(out, "MatMul") if out is not None else None
    weight = constant(proj.inputs[1]) if proj is not None else None
    if len(layers) < 3 or any(layer.x is not layers[0].x for layer in layers) or proj is None:
        return None
    if weight is None or weight.ndim != 2:
        return None
    q, k, v = layers
    return _Attention(scores, mixing, heads[0].count, heads[0].rows, q, k, v, proj, weight)


def _written(model: ir.Model, softmax: ir.Node, found: _Attention) -> Change:
    """The same in that form; in place."""
    q, k, v, count = found.q, found.k, found.v, found.heads
    query, key = _scores(q.weight.T, q.bias, k.weight.T, count, found.tokens)
    value, projection = _values(v.weight.T, found.weight.T, count, found.tokens)
    write, x, shape = Writer(model, found.scores), q.x, sizes(q.x)
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
    first = shown_as_heads(write, pieces.pop(0), count)
    second = shown_as_heads(write, x, 1, transposed=True) if key is None else None
    second = second or shown_as_heads(write, pieces.pop(0), count, transposed=True)
    new = write("MatMul", first, second)
    set_shape(new, sizes(found.scores.outputs[0]), first)
    softmax.replace_input_with(0, new)
    third = shown_as_heads(write, x, 1) if value is None else shown_as_heads(write, pieces.pop(0), count)
    _project(Writer(model, found.mixing), softmax.outputs[0], third, projection, found)
    told = f"scores {'X W X^T' if key is None else f'over heads {len(key) // count} wide'}"
    told = f"{told}; keys' bias gone, values' behind the projection"
    return Change(rewrite=CHOOSE.name, place=softmax.name or "", told=told)


def _project(write: Writer, weights: ir.Value, values: ir.Value, projection: Array, found: _Attention) -> None:
    """Weights times values, and the projection with what the values' bias becomes; in place of the old one."""
    mixed = write("MatMul", weights, values)
    whole, end = sizes(found.mixing.outputs[0]), found.proj.outputs[0]
    assert whole is not None
    set_shape(mixed, (*whole[:3], projection.shape[1] // found.heads), values)
    done = write("MatMul", shown_as_tokens(write, mixed), write.constant(projection.T))
    set_shape(done, sizes(end), values)
    if found.v.bias is not None:
        done = write("Add", done, write.constant(found.v.bias @ found.weight))
        set_shape(done, sizes(end), values)
    write.replace(end, done)


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


CHOOSE = Rewrite("heads", "for queries, keys and values that are linear in the same tokens", apply)
