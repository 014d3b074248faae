"""Softmax attention in a graph: found, whatever operators write it; Q_h, K_h and V_h are columns of tokens [B, N, C].

    out = concat_h softmax(s Q_h K_h^T + mask) V_h

`repaconv.graphs.heads` has the linear layers around it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from repaconv.graphs.chains import chain_of, seen, view_of
from repaconv.graphs.nodes import Writer, attribute, made_by, nodes_of, only_reader, scalar
from repaconv.graphs.operators import VIEWS
from repaconv.graphs.selections import one_run
from repaconv.graphs.shapes import Size, as_numbers, rank_of, sizes

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
        """N, where it is known: of all `attentions` it is."""
        assert isinstance(self.rows, int)
        return self.rows

    @property
    def whole(self) -> bool:
        """Whether they are all of their source."""
        shape = sizes(self.source)
        return shape is not None and self.count * self.width == shape[2]


@dataclass(frozen=True)
class Attention:
    """One attention: its operands, what its scores are multiplied by, what is added to them, and its output.

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
        """That writes the output."""
        node = self.out.producer()
        assert node is not None
        return node


def attentions(model: ir.Model) -> list[Attention]:
    """All of a graph whose shapes say what is a head and what a token."""
    found = [_around(node) for node in nodes_of(model, "Softmax")]
    return [attention for attention in found if attention is not None]


def _around(softmax: ir.Node) -> Attention | None:
    rank = rank_of(softmax.outputs[0])
    if rank != 4 or attribute(softmax, "axis", -1) not in (-1, 3):
        return None
    scale, mask, product = _scores(softmax.inputs[0])
    mixed = only_reader(softmax.outputs[0], "MatMul")
    if product is None or mixed is None or mixed.inputs[0] is not softmax.outputs[0]:
        return None
    q, k = heads_of(product.inputs[0]), heads_of(product.inputs[1], transposed=True)
    v, out = heads_of(mixed.inputs[1]), joined(mixed.outputs[0])
    if q is None or k is None or v is None or out is None:
        return None
    if as_numbers(one.rows for one in (q, k, v)) is None or as_numbers((sizes(mixed.outputs[0]) or ())[1:]) is None:
        return None
    if v.factor != 1 or not _alone(product, softmax) or sizes(softmax.outputs[0]) != sizes(product.outputs[0]):
        return None
    return Attention(q, k, v, scale * q.factor * k.factor, mask, out, product, mixed)


def _alone(product: ir.Node, softmax: ir.Node) -> bool:
    """Whether all between the product and its softmax is read there alone."""
    node: ir.Node | None = product
    while node is not None and node is not softmax:
        node = only_reader(node.outputs[0])
    return node is softmax


def _scores(value: ir.Value | None) -> tuple[float, ir.Value | None, ir.Node | None]:
    """What stands between a product and its softmax: a number behind the product, then a mask."""
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
    scale, node = 1.0, made_by(value, "MatMul", "Mul", "Div")
    while node is not None and node.op_type != "MatMul":
        by = scalar(node.inputs[1])
        if by is None:
            return 1.0, None
        scale = scale / by if node.op_type == "Div" else scale * by
        node = made_by(node.inputs[0], "MatMul", "Mul", "Div")
    return scale, node


def heads_of(value: ir.Value | None, *, transposed: bool = False) -> Heads | None:
    """Of the nearest tensor [B, N, C] that has these numbers; where one has them and no others, of that."""
    if value is None:
        return None
    chain = chain_of(value)
    found = None
    for length in range(2, len(chain) + 1):
        if rank_of(chain[length - 1]) == 3 and (read := _read(chain[:length], transposed=transposed)):
            found = read
            if found.whole:
                break
    return found


def _read(chain: list[ir.Value], *, transposed: bool) -> Heads | None:
    view = seen(chain)
    if view is None or len(view.of) != 3 or len(view.axes) != 4 or set(view.places) - {2}:
        return None
    tokens, width = (3, 2) if transposed else (2, 3)
    columns = view.columns(1, width)
    shape = as_numbers(view.shape[axis] for axis in (1, width))
    if shape is None or columns is None or not one_run(columns):
        return None
    if view.axes[0] != view.of[0] or view.axes[tokens] != view.of[1]:
        return None
    count, each = shape
    return Heads(view.source, int(columns[0]), count, each, view.shape[tokens], view.scale)


def joined(value: ir.Value) -> ir.Value | None:
    """[B, H, N, e], moved to [B, N, H e] or [B N, H e]: what is so, if nothing else reads what lies between."""
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


def take(write: Writer, heads: Heads) -> ir.Value:
    """Heads as [B, N, H e]: the tensor that is so, or a part of its source."""
    if heads.whole:
        return heads.source
    begin, end = heads.offset, heads.offset + heads.count * heads.width
    return write("Slice", heads.source, *(write.constant([bound]) for bound in (begin, end, 2)))
