"""Heads of an attention as the linear layers that write and read them.

Q_h = x Wq_h + bq_h,   proj(concat_h(S_h V_h)) = sum_h S_h V_h Wo_h + bo
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from repaconv.graphs.attention import Attention, Heads
from repaconv.graphs.chains import chain_of, columns_of, reads, seen
from repaconv.graphs.linears import Linear, layer_at, linear_of, write_linear
from repaconv.graphs.nodes import Array, Writer, only_reader
from repaconv.graphs.selections import one_run
from repaconv.graphs.shapes import rank_of, sizes
from repaconv.graphs.views import View

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True)
class Projection:
    """Heads as x W_h + b_h: ``weight`` [H, d, e], ``bias`` [H, e]; ``linear`` says whether a layer writes them."""

    x: ir.Value
    tokens: int
    weight: Array
    bias: Array
    linear: bool = True

    def macs(self) -> int:
        """Products that its layer takes."""
        return self.tokens * self.weight.size if self.linear else 0


def at_layer(heads: Heads) -> Heads:
    """The same heads as columns of what computes them, where they are a part of that."""
    view = seen(chain_of(heads.source))
    columns = view.columns(2) if view is not None and len(view.of) == len(view.axes) == 3 else None
    if view is None or columns is None or view.axes != view.of or set(view.places) - {2} or not one_run(columns):
        return heads
    offset = int(columns[0]) + heads.offset
    return replace(heads, source=view.source, offset=offset, factor=view.scale * heads.factor)


def projected(heads: Heads, node: ir.Node, place: int) -> Projection | None:
    """The linear layer that writes heads which this node alone reads, as that input."""
    heads = at_layer(heads)
    linear = linear_of(heads.source)
    columns = range(heads.offset, heads.offset + heads.count * heads.width)
    if linear is None or rank_of(linear.x) != 3 or not read_by_one(heads.source, columns, node, place):
        return None
    weight = linear.weight[:, columns].reshape(-1, heads.count, heads.width).swapaxes(0, 1)
    bias = linear.shift()[columns].reshape(heads.count, heads.width)
    return Projection(linear.x, heads.tokens, heads.factor * weight, heads.factor * bias)


def read_by_one(source: ir.Value, columns: range, node: ir.Node, place: int) -> bool:
    """Whether this node reads columns of a tensor as that input, and nothing else does: not even its other input."""
    found = reads(source)
    others = [columns_of(read.chain) for read in found if (read.node, read.place) != (node, place)]
    return len(others) < len(found) and all(other is not None and not other & set(columns) for other in others)


def tokens_as_heads(heads: Heads) -> Projection | None:
    """Heads that are one tensor of tokens, the same for all."""
    if heads.count != 1 or not heads.whole:
        return None
    eye = heads.factor * np.eye(heads.width)[None]
    return Projection(heads.source, heads.tokens, eye, np.zeros((1, heads.width)), linear=False)


def scores_of(found: Attention) -> tuple[Projection, Projection] | None:
    """Queries and keys, if one layer writes these or tokens are the keys, and the scores alone read them."""
    q = projected(found.q, found.product, 0)
    k = projected(found.k, found.product, 1) or tokens_as_heads(found.k)
    return None if q is None or k is None or found.k.count not in (1, found.q.count) else (q, k)


def values_of(found: Attention) -> tuple[Projection, Linear] | None:
    """Values, likewise, and the linear layer that alone reads what is mixed of them."""
    v = projected(found.v, found.mixed, 1) or tokens_as_heads(found.v)
    proj = layer_at(only_reader(found.out))
    if v is None or proj is None or proj.x is not found.out or found.v.count not in (1, found.q.count):
        return None
    return v, proj


def as_heads(write: Writer, x: ir.Value, heads: tuple[int, int, int], *, transposed: bool = False) -> ir.Value:
    """Tokens [B, N, H e] as [B, H, N, e], or [B, H, e, N]; heads are (H, N, e)."""
    count, tokens, width = heads
    if count == 1:
        turned = write("Transpose", x, perm=[0, 2, 1]) if transposed else x
        return write("Unsqueeze", turned, write.constant([1]))
    apart = write("Reshape", x, write.constant([-1, tokens, count, width]))
    return write("Transpose", apart, perm=[0, 2, 3, 1] if transposed else [0, 2, 1, 3])


def shown_as_heads(write: Writer, tokens: ir.Value, count: int, *, transposed: bool = False) -> ir.Value:
    """The same with its shape, which may be free, written down."""
    shape = sizes(tokens)
    assert shape is not None
    assert isinstance(shape[2], int)
    size = {0: shape[0], 1: shape[1], 2: count, 3: shape[2] // count}
    last = ((3,), (1,)) if transposed else ((1,), (3,))
    found = View(tokens, ((0,), (1,), (2, 3)), ((0,), (2,), *last), size).write(write)
    assert found is not None
    return found


def shown_as_tokens(write: Writer, value: ir.Value) -> ir.Value:
    """[B, H, N, d] as tokens [B, N, H d], likewise."""
    shape = sizes(value)
    assert shape is not None
    each = ((0,), (1,), (2,), (3,))
    found = View(value, each, ((0,), (2,), (1, 3)), dict(enumerate(shape))).write(write)
    assert found is not None
    return found


def write_heads(write: Writer, heads: Projection, *, transposed: bool = False) -> ir.Value:
    """The layer, and its output as `as_heads` has it."""
    count, channels, width = heads.weight.shape
    x = heads.x
    if heads.linear:
        x = write_linear(write, x, heads.weight.swapaxes(0, 1).reshape(channels, -1), heads.bias.reshape(-1))
    return as_heads(write, x, (count, heads.tokens, width), transposed=transposed)
