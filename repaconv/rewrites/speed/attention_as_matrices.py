"""An attention's scores and values over one matrix a head, or over that matrix's rank (nondeep's forms).

    Q_h K_h^T = (X Wq_h + bq_h)(Y Wk_h + bk_h)^T = (X W_h + u_h) Y^T + what is constant along keys
        with W_h = Wq_h Wk_h^T and u_h = bq_h Wk_h^T; the softmax does not see the rest
    sum_h S_h (Y Wv_h + bv_h) Wo_h + bo = sum_h S_h Y (Wv_h Wo_h) + (bo + sum_h bv_h Wo_h)
        since the rows of S_h, a softmax, sum to 1

X are the tokens of the queries, Y those of keys and values. Both matrices of a head go back to two over their rank by
a thin SVD, in which only singular values go that are zero to the rounding of the numbers in the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from repaconv.algebra.low_rank_products import thin
from repaconv.graph.attention_patterns import (
    Attention,
    Projection,
    as_heads,
    at_layer,
    attentions,
    projected,
    read_by_one,
    scores_of,
    take,
    values_of,
    write_heads,
)
from repaconv.graph.linear_layers import Linear, linear_of, write_linear
from repaconv.graph.nodes_and_constants import Array, Writer, only_reader
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import rank_of
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir


def _for_all(heads: Projection, count: int) -> Projection:
    """A head for each of so many."""
    return replace(
        heads,
        weight=np.broadcast_to(heads.weight, (count, *heads.weight.shape[1:])),
        bias=np.broadcast_to(heads.bias, (count, heads.bias.shape[1])),
    )


def _thin_heads(lefts: Array, rights: Array, write: Writer) -> tuple[Array, Array]:
    """The same for each head, [H, m, r] and [H, r, n], filled up with zeros to the largest rank."""
    rounding = float(np.finfo(write.dtype.numpy()).eps) if write.dtype is not None else 0.0
    pairs = [thin(left, right, rounding) for left, right in zip(lefts, rights, strict=True)]
    rank = max(left.shape[1] for left, _ in pairs)
    return (
        np.stack([np.pad(left, ((0, 0), (0, rank - left.shape[1]))) for left, _ in pairs]),
        np.stack([np.pad(right, ((0, rank - right.shape[0]), (0, 0))) for _, right in pairs]),
    )


# --- writing -------------------------------------------------------------------------------------------------------


def _write_scores(model: ir.Model, found: Attention, q: Projection, k: Projection) -> None:
    """The product of queries and keys anew; values that shared their layer get one of their own."""
    write = Writer(model, found.product)
    product = write("MatMul", write_heads(write, q), write_heads(write, k, transposed=True))
    shared = any(at_layer(found.v).source is at_layer(heads).source for heads in (found.q, found.k))
    apart = projected(found.v, found.mixed, 1) if shared else None
    write.replace(found.product.outputs[0], product)
    if apart is not None:
        found.mixed.replace_input_with(1, write_heads(Writer(model, found.mixed), apart))


def _write_values(model: ir.Model, found: Attention, v: Projection, proj: Linear) -> None:
    """Weights times values and the layer behind anew; queries and keys that shared the values' layer get their own."""
    source = at_layer(found.v).source
    alone = [
        (index, heads)
        for index, entry in enumerate((found.q, found.k))
        if at_layer(entry).source is source and (heads := projected(entry, found.product, index)) is not None
    ]
    write, width = Writer(model, found.mixed), v.weight.shape[2]
    mixed = write("MatMul", found.mixed.inputs[0], write_heads(write, v))
    write = Writer(model, proj.node)
    joined = write("Transpose", mixed, perm=[0, 2, 1, 3])
    out = write("Reshape", joined, write.constant([-1, found.q.tokens, found.q.count * width]))
    out = write_linear(write, out, proj.weight, proj.bias)
    if rank_of(proj.out) == 2:
        out = write("Reshape", out, write.constant([-1, proj.weight.shape[1]]))
    write.replace(proj.out, out)
    for index, heads in alone:
        before = Writer(model, found.product)
        found.product.replace_input_with(index, write_heads(before, heads, transposed=index == 1))


# --- the rewrites --------------------------------------------------------------------------------------------------


def _scores_as_matrix(model: ir.Model) -> Iterator[Change]:
    for found in attentions(model):
        scores = scores_of(found)
        if scores is None or not scores[1].linear:
            continue
        q, k = scores
        turned = k.weight.swapaxes(1, 2)
        wide = replace(q, weight=q.weight @ turned, bias=(q.bias[:, None] @ turned)[:, 0])
        keys = Projection(
            k.x, k.tokens, np.eye(k.weight.shape[1])[None], np.zeros((1, k.weight.shape[1])), linear=False
        )
        _write_scores(model, found, wide, keys)
        yield _told("scores-as-matrix", found, f"{found.q.count} heads of {found.q.width} as X W X^T")


def _scores_by_rank(model: ir.Model) -> Iterator[Change]:
    for found in attentions(model):
        scores = scores_of(found)
        if scores is None:
            continue
        (q, k), count = scores, found.q.count
        lefts = np.concatenate([q.weight, q.bias[:, None]], 1)
        write = Writer(model, found.product)
        left, right = _thin_heads(lefts, _for_all(k, count).weight.swapaxes(1, 2), write)
        queries = replace(q, weight=left[:, :-1], bias=left[:, -1])
        keys = Projection(k.x, k.tokens, right.swapaxes(1, 2), np.zeros((count, right.shape[1])))
        pairs = count * q.tokens * k.tokens
        before = q.macs() + k.macs() + pairs * q.weight.shape[2]
        if queries.macs() + keys.macs() + pairs * right.shape[1] >= before:
            continue
        _write_scores(model, found, queries, keys)
        yield _told("scores-by-rank", found, f"{count} heads over rank {right.shape[1]} for {found.q.width}")


def _values_as_matrix(model: ir.Model) -> Iterator[Change]:
    for found in attentions(model):
        values = values_of(found)
        if values is None or not values[0].linear:
            continue
        v, proj = _for_all(values[0], found.q.count), values[1]
        out = proj.weight.reshape(found.q.count, found.v.width, -1)
        bias = proj.shift() + np.einsum("he,heo->o", v.bias, out)
        whole = replace(proj, weight=(v.weight @ out).reshape(-1, out.shape[2]), bias=bias)
        channels = v.weight.shape[1]
        tokens = Projection(v.x, v.tokens, np.eye(channels)[None], np.zeros((1, channels)), linear=False)
        _write_values(model, found, tokens, whole)
        yield _told("values-as-matrix", found, f"{found.q.count} heads of {found.v.width}: the tokens are the values")


def _values_by_rank(model: ir.Model) -> Iterator[Change]:
    for found in attentions(model):
        values = values_of(found)
        if values is None:
            continue
        v, proj, count = _for_all(values[0], found.q.count), values[1], found.q.count
        out = proj.weight.reshape(count, found.v.width, -1)
        left, right = _thin_heads(v.weight, out, Writer(model, found.mixed))
        thinner = Projection(v.x, v.tokens, left, np.zeros((count, left.shape[2])))
        bias = proj.shift() + np.einsum("he,heo->o", v.bias, out)
        pairs = count * found.q.tokens * v.tokens
        before = values[0].macs() + pairs * found.v.width + found.q.tokens * proj.weight.size
        if thinner.macs() + pairs * left.shape[2] + found.q.tokens * right.size >= before:
            continue
        _write_values(model, found, thinner, replace(proj, weight=right.reshape(-1, out.shape[2]), bias=bias))
        yield _told("values-by-rank", found, f"{count} heads over rank {left.shape[2]} for {found.v.width}")


def _scale_into_queries(model: ir.Model) -> Iterator[Change]:
    """s (X W + b) = X (s W) + s b, wherever s stands: on the scores, the queries or the keys."""
    for found in attentions(model):
        queries, keys = at_layer(found.q), at_layer(found.k)
        linear, part = linear_of(queries.source), range(queries.offset, queries.offset + queries.count * queries.width)
        if found.scale == 1 or linear is None or not read_by_one(queries.source, part, found.product, 0):
            continue
        factors = np.ones(linear.weight.shape[1])
        factors[part] = found.scale
        write = Writer(model, linear.node)
        layer = write_linear(write, linear.x, linear.weight * factors, linear.shift() * factors)
        layer.shape = linear.out.shape
        write.replace(linear.out, layer)
        write, operands = Writer(model, found.product), list(found.product.inputs)
        for index, heads in enumerate((queries, keys)):
            if heads.factor != 1:
                source = layer if heads.source is linear.out else heads.source
                bare = take(write, replace(heads, source=source))
                sizes = (heads.count, heads.tokens, heads.width)
                operands[index] = as_heads(write, bare, sizes, transposed=index == 1)
        last = found.product.outputs[0]
        while (node := only_reader(last, "Mul", "Div")) is not None:
            last = node.outputs[0]
        write.replace(last, write("MatMul", *operands))
        yield _told("scale-into-q", found, f"{found.scale:.6g} inside the queries' layer")


def _told(name: str, found: Attention, told: str) -> Change:
    return Change(rewrite=name, place=found.node.name or "", description=told)


SCORES_AS_MATRIX = Rewrite(
    "scores-as-matrix",
    "softmax attention whose queries and keys are linear layers that nothing else reads",
    _scores_as_matrix,
    order=20,
)
SCORES_BY_RANK = Rewrite(
    "scores-by-rank",
    "the same, or keys that are the tokens themselves, where two layers over the exact rank take fewer products",
    _scores_by_rank,
    order=21,
)
VALUES_AS_MATRIX = Rewrite(
    "values-as-matrix",
    "softmax attention whose values are a linear layer that nothing else reads, with one linear layer behind it",
    _values_as_matrix,
    order=22,
)
VALUES_BY_RANK = Rewrite(
    "values-by-rank",
    "the same, or values that are the tokens themselves, where two layers over the exact rank take fewer products",
    _values_by_rank,
    order=23,
)
SCALE_INTO_Q = Rewrite(
    "scale-into-q",
    "scores, queries or keys of an attention times a number, the queries from a linear layer and read by nothing else",
    _scale_into_queries,
    order=15,
)
