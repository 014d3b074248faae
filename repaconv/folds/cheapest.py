"""heads: joined attentions in the form that costs least.

Over its heads' rank r, or against the tokens themselves, X W X^T, where r (2 d + N) >= d (d + N). The softmax kills
what is constant along keys, so their bias goes; its rows sum to one, so the values' bias goes behind the projection.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from repaconv.artefacts import Change
from repaconv.folds.joins import JOINED
from repaconv.graphs.attention import Attention, attentions
from repaconv.graphs.contract import Rewrite
from repaconv.graphs.graph import clean
from repaconv.graphs.heads import shown_as_heads, shown_as_tokens
from repaconv.graphs.linears import Linear, linear_of
from repaconv.graphs.nodes import Array, Writer, constant, made_by, only_reader
from repaconv.graphs.normal import normalise
from repaconv.graphs.shapes import rank_of, set_shape, sizes
from repaconv.ranks import side_by_side

if TYPE_CHECKING:
    import onnx_ir as ir


class _Layers(NamedTuple):
    """Of an attention: the linear layers of one x that write queries, keys and values, and the product behind."""

    q: Linear
    k: Linear
    v: Linear
    proj: ir.Node
    weight: Array  # of the product, [H e, c]


def apply(model: ir.Model) -> Iterator[Change]:
    """See `repaconv.graphs.contract.Apply`."""
    normalise(model)
    for found in attentions(model):
        softmax = made_by(found.mixed.inputs[0], "Softmax")
        layers = _layers(found) if softmax is not None and softmax.meta.get(JOINED) else None
        if softmax is not None and layers is not None:
            yield _written(model, softmax, found, layers)
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


def _written(model: ir.Model, softmax: ir.Node, found: Attention, layers: _Layers) -> Change:
    """The same in that form; in place."""
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
    first = shown_as_heads(write, pieces.pop(0), count)
    second = shown_as_heads(write, *((x, 1) if key is None else (pieces.pop(0), count)), transposed=True)
    new = write("MatMul", first, second)
    set_shape(new, sizes(found.product.outputs[0]), first)
    softmax.replace_input_with(0, new)
    third = shown_as_heads(write, *((x, 1) if value is None else (pieces.pop(0), count)))

    after, whole, end = Writer(model, found.mixed), sizes(found.mixed.outputs[0]), proj.outputs[0]
    assert whole is not None
    mixed = after("MatMul", softmax.outputs[0], third)
    set_shape(mixed, (*whole[:3], projection.shape[1] // count), third)
    done = after("MatMul", shown_as_tokens(after, mixed), after.constant(projection.T))
    set_shape(done, sizes(end), x)
    if v.bias is not None:
        done = after("Add", done, after.constant(v.bias @ weight))
        set_shape(done, sizes(end), x)
    after.replace(end, done)
    told = f"scores {'X W X^T' if key is None else f'over heads {len(key) // count} wide'}"
    told = f"{told}; keys' bias gone, values' behind the projection"
    return Change(rewrite=CHOOSE.name, place=softmax.name or "", description=told)


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
