"""Find softmax attention in a graph, and read or write its heads and the linear layers next to it.

out = concat_h softmax(s Q_h K_h^T + mask) V_h

Q_h, K_h and V_h are columns of token tensors [B, N, C]. Any chain of views may lie between the tokens and the products.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from repaconv.graph.index_selections import are_consecutive
from repaconv.graph.linear_layers import Linear, layer_at, linear_of, write_linear
from repaconv.graph.nodes_and_constants import Array, Writer, attribute, made_by, nodes_of, only_reader, scalar
from repaconv.graph.operator_facts import VIEWS
from repaconv.graph.symbolic_shapes import Size, as_numbers, rank_of, sizes
from repaconv.graph.tensor_views import View
from repaconv.graph.view_chains import chain_up_from, columns_of, reads, view_of, view_of_chain

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True)
class Heads:
    """Queries, keys or values [B, H, N, e]: columns ``offset`` to ``offset + H e`` of ``source`` [B, N, C]."""

    source: ir.Value
    offset: int
    count: int
    width: int
    rows: Size
    factor: float

    @property
    def tokens(self) -> int:
        """Number of tokens N. It is known for every attention that `attentions` returns."""
        assert isinstance(self.rows, int)
        return self.rows

    @property
    def whole(self) -> bool:
        """Whether the heads cover all columns of their source."""
        shape = sizes(self.source)
        return shape is not None and self.count * self.width == shape[2]


@dataclass(frozen=True)
class Attention:
    """One softmax attention: Q, K and V, the factor of the scores, the mask added to them, and the output.

    ``product`` is the MatMul of queries and keys, ``mixed`` the MatMul of softmax weights and values. Nothing else
    reads the values between the two.

    ``product`` multiplies queries and keys, ``mixed`` weights and values; the softmax's way is read by nothing else.
    """

    q: Heads
    k: Heads
    v: Heads
    scale: float
    mask: ir.Value | None
    out: ir.Value
    product: ir.Node
    mixed: ir.Node

    @property
    def node(self) -> ir.Node:
        """The node that writes the output."""
        node = self.out.producer()
        assert node is not None
        return node


def attentions(model: ir.Model) -> list[Attention]:
    """Return all attentions of a graph whose shapes determine heads and tokens."""
    found = [_attention_at(node) for node in nodes_of(model, "Softmax")]
    return [attention for attention in found if attention is not None]


def _attention_at(softmax: ir.Node) -> Attention | None:
    """Return the attention that contains a Softmax node, or None."""
    rank = rank_of(softmax.outputs[0])
    if rank != 4 or attribute(softmax, "axis", -1) not in (-1, 3):
        return None
    scale, mask, product = _scores(softmax.inputs[0])
    mixed = only_reader(softmax.outputs[0], "MatMul")
    if product is None or mixed is None or mixed.inputs[0] is not softmax.outputs[0]:
        return None
    q, k = heads_of(product.inputs[0]), heads_of(product.inputs[1], transposed=True)
    v, out = heads_of(mixed.inputs[1]), merged_heads(mixed.outputs[0])
    if q is None or k is None or v is None or out is None:
        return None
    if as_numbers(one.rows for one in (q, k, v)) is None or as_numbers((sizes(mixed.outputs[0]) or ())[1:]) is None:
        return None
    if v.factor != 1 or not _is_read_once(product, softmax) or sizes(softmax.outputs[0]) != sizes(product.outputs[0]):
        return None
    return Attention(q, k, v, scale * q.factor * k.factor, mask, out, product, mixed)


def _is_read_once(product: ir.Node, softmax: ir.Node) -> bool:
    """Return whether each value from the product to the softmax has only one reader."""
    node: ir.Node | None = product
    while node is not None and node is not softmax:
        node = only_reader(node.outputs[0])
    return node is softmax


def _scores(value: ir.Value | None) -> tuple[float, ir.Value | None, ir.Node | None]:
    """Return the scale, the mask and the MatMul whose scaled and masked output is this value."""
    mask = None
    node = made_by(value, "Add")
    if node is not None:
        first, second = node.inputs
        assert first is not None
        assert second is not None
        value, mask = (first, second) if _scaled_product(first)[1] is not None else (second, first)
    scale, product = _scaled_product(value)
    return scale, mask, product


def _scaled_product(value: ir.Value | None) -> tuple[float, ir.Node | None]:
    """Return the factor and the MatMul that a value is the product of."""
    scale, node = 1.0, made_by(value, "MatMul", "Mul", "Div")
    while node is not None and node.op_type != "MatMul":
        by = scalar(node.inputs[1])
        if by is None:
            return 1.0, None
        scale = scale / by if node.op_type == "Div" else scale * by
        node = made_by(node.inputs[0], "MatMul", "Mul", "Div")
    return scale, node


def heads_of(value: ir.Value | None, *, transposed: bool = False) -> Heads | None:
    """Find the token tensor [B, N, C] that a value [B, H, N, e] is a view of.

    A tensor that has these columns only is preferred; otherwise it is the farthest one up the chain. None if there
    is none.
    """
    if value is None:
        return None
    chain = chain_up_from(value)
    found = None
    for length in range(2, len(chain) + 1):
        if rank_of(chain[length - 1]) == 3 and (read := _heads_of_chain(chain[:length], transposed=transposed)):
            found = read
            if found.whole:
                break
    return found


def _heads_of_chain(chain: list[ir.Value], *, transposed: bool) -> Heads | None:
    """Return the first value of a chain as heads of the last, or None."""
    view = view_of_chain(chain)
    if view is None or len(view.of) != 3 or len(view.axes) != 4 or set(view.places) - {2}:
        return None
    tokens, width = (3, 2) if transposed else (2, 3)
    columns = view.columns(1, width)
    shape = as_numbers(view.shape[axis] for axis in (1, width))
    if shape is None or columns is None or not are_consecutive(columns):
        return None
    if view.axes[0] != view.of[0] or view.axes[tokens] != view.of[1]:
        return None
    count, each = shape
    return Heads(view.source, int(columns[0]), count, each, view.shape[tokens], view.scale)


def merged_heads(value: ir.Value) -> ir.Value | None:
    """Return the [B, N, H e] or [B N, H e] form of a value [B, H, N, e].

    None if another node reads a value in between, or if no such form exists.
    """
    end, shape = value, sizes(value)
    while shape is not None and len(shape) > 3:
        node = only_reader(end, *VIEWS)
        if node is None:
            return None
        end, shape = node.outputs[0], sizes(node.outputs[0])
    view = view_of(end)
    if view is None or view.source is not value or len(view.of) != 4:
        return None
    batch, heads, tokens, width = view.of
    return end if view.axes in ((batch, tokens, heads + width), (batch + tokens, heads + width)) else None


def write_columns(write: Writer, heads: Heads) -> ir.Value:
    """Write heads as [B, N, H e]: the source itself, or a Slice of it."""
    if heads.whole:
        return heads.source
    begin, end = heads.offset, heads.offset + heads.count * heads.width
    return write("Slice", heads.source, *(write.constant([bound]) for bound in (begin, end, 2)))


# Linear layers that write and read heads:
#
# Q_h = x Wq_h + bq_h,   proj(concat_h(S_h V_h)) = sum_h S_h V_h Wo_h + bo


@dataclass(frozen=True)
class Projection:
    """Heads as x W_h + b_h: ``weight`` [H, d, e], ``bias`` [H, e].

    ``linear`` is False for heads that are the tokens themselves (W_h is then a multiple of the identity).
    """

    x: ir.Value
    tokens: int
    weight: Array
    bias: Array
    linear: bool = True


def heads_at_layer(heads: Heads) -> Heads:
    """Return the same heads as columns of the tensor that their source is a slice of, if it is one."""
    view = view_of_chain(chain_up_from(heads.source))
    columns = view.columns(2) if view is not None and len(view.of) == len(view.axes) == 3 else None
    if (
        view is None
        or columns is None
        or view.axes != view.of
        or set(view.places) - {2}
        or not are_consecutive(columns)
    ):
        return heads
    offset = int(columns[0]) + heads.offset
    return replace(heads, source=view.source, offset=offset, factor=view.scale * heads.factor)


def projection_of(heads: Heads, node: ir.Node, place: int) -> Projection | None:
    """Return the linear layer that writes heads, if only this input of this node reads them."""
    heads = heads_at_layer(heads)
    linear = linear_of(heads.source)
    columns = range(heads.offset, heads.offset + heads.count * heads.width)
    if linear is None or rank_of(linear.x) != 3 or not read_by_one(heads.source, columns, node, place):
        return None
    weight = linear.weight[:, columns].reshape(-1, heads.count, heads.width).swapaxes(0, 1)
    bias = linear.shift()[columns].reshape(heads.count, heads.width)
    return Projection(linear.x, heads.tokens, heads.factor * weight, heads.factor * bias)


def read_by_one(source: ir.Value, columns: range, node: ir.Node, place: int) -> bool:
    """Return whether only this input of this node reads these columns of a tensor."""
    found = reads(source)
    others = [columns_of(read.chain) for read in found if (read.node, read.place) != (node, place)]
    return len(others) < len(found) and all(other is not None and not other & set(columns) for other in others)


def scores_of(found: Attention) -> tuple[Projection, Projection] | None:
    """Return the linear layers that write queries and keys, if only the scores read them."""
    q = projection_of(found.q, found.product, 0)
    k = projection_of(found.k, found.product, 1)
    return None if q is None or k is None or found.k.count not in (1, found.q.count) else (q, k)


def values_of(found: Attention) -> tuple[Projection, Linear] | None:
    """Return the linear layer that writes the values, and the one that alone reads the attention's output."""
    v = projection_of(found.v, found.mixed, 1)
    proj = layer_at(only_reader(found.out))
    if v is None or proj is None or proj.x is not found.out or found.v.count not in (1, found.q.count):
        return None
    return v, proj


def as_heads(write: Writer, x: ir.Value, heads: tuple[int, int, int], *, transposed: bool = False) -> ir.Value:
    """Write tokens [B, N, H e] as [B, H, N, e], or as [B, H, e, N] if ``transposed``.

    ``heads`` is (H, N, e).
    """
    count, tokens, width = heads
    if count == 1:
        turned = write("Transpose", x, perm=[0, 2, 1]) if transposed else x
        return write("Unsqueeze", turned, write.constant([1]))
    apart = write("Reshape", x, write.constant([-1, tokens, count, width]))
    return write("Transpose", apart, perm=[0, 2, 3, 1] if transposed else [0, 2, 1, 3])


def as_heads_with_shape(write: Writer, tokens: ir.Value, count: int, *, transposed: bool = False) -> ir.Value:
    """Write tokens [B, N, H e] as [B, H, N, e], or transposed, with the output shape set. N may be dynamic."""
    shape = sizes(tokens)
    assert shape is not None
    assert isinstance(shape[2], int)
    size = {0: shape[0], 1: shape[1], 2: count, 3: shape[2] // count}
    last = ((3,), (1,)) if transposed else ((1,), (3,))
    found = View(tokens, ((0,), (1,), (2, 3)), ((0,), (2,), *last), size).write(write)
    assert found is not None
    return found


def as_tokens_with_shape(write: Writer, value: ir.Value) -> ir.Value:
    """Write [B, H, N, d] as tokens [B, N, H d], with the output shape set. N may be dynamic."""
    shape = sizes(value)
    assert shape is not None
    each = ((0,), (1,), (2,), (3,))
    found = View(value, each, ((0,), (2,), (1, 3)), dict(enumerate(shape))).write(write)
    assert found is not None
    return found


def write_heads(write: Writer, heads: Projection, *, transposed: bool = False) -> ir.Value:
    """Write the linear layer of a projection, and reshape its output with `as_heads`."""
    count, channels, width = heads.weight.shape
    x = heads.x
    if heads.linear:
        x = write_linear(write, x, heads.weight.swapaxes(0, 1).reshape(channels, -1), heads.bias.reshape(-1))
    return as_heads(write, x, (count, heads.tokens, width), transposed=transposed)
