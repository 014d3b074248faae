"""Select tokens with GatherND instead of GatherElements, and search for the best score along columns instead of rows.

x[b, i_br, :] = sum_n [n = i_br] x[b, n, :]
argmax_m (A B)_nm = argmax_m (B^T A^T)_mn      vectorized over columns, while a row is searched number by number
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from repaconv.graph.index_selections import axes_of, swaps_last
from repaconv.graph.nodes_and_constants import Writer, attribute, is_constant, made_by, nodes_of
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import rank_of, sizes
from repaconv.graph.tensor_views import last_axes_swapped
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir


class Rows(NamedTuple):
    """A node that selects rows, its tokens x [B, n, c], and the index [B, r, 1] of the rows."""

    x: ir.Value
    index: ir.Value
    node: ir.Node


def picked_rows(model: ir.Model) -> list[Rows]:
    """All GatherElements nodes that select whole rows: one index per row, repeated over channels."""
    found = [_rows(node) for node in nodes_of(model, "GatherElements")]
    return [rows for rows in found if rows is not None]


def _rows(node: ir.Node) -> Rows | None:
    x, repeated = node.inputs[0], made_by(node.inputs[1], "Expand")
    index = repeated.inputs[0] if repeated is not None else None
    shape, rows, all_rows = sizes(x), sizes(index), sizes(node.inputs[1])
    if x is None or index is None or shape is None or rows is None or all_rows is None or len(shape) != 3:
        return None
    whole = len(rows) == 3 and rows[2] == 1 and all_rows == (shape[0], rows[1], shape[2]) and rows[0] == shape[0]
    return Rows(x, index, node) if whole and attribute(node, "axis", 0) in (1, -2) else None


def _by_gather_nd(model: ir.Model) -> Iterator[Change]:
    import onnx_ir as ir

    for x, index, node in picked_rows(model):
        write = Writer(model, node)
        if index.dtype != ir.DataType.INT64:  # the only type that GatherND reads
            index = write("Cast", index, to=ir.DataType.INT64)
            index.dtype = ir.DataType.INT64
        write.replace(node.outputs[0], write("GatherND", x, index, batch_dims=1))
        yield Change(rewrite="rows-by-gathernd", place=node.name or "", description="one index per row")


BEST = ("ArgMax", "ArgMin", "ReduceMax", "ReduceMin")


def _best_down_columns(model: ir.Model) -> Iterator[Change]:
    for product in nodes_of(model, "MatMul"):
        scores, rank = product.outputs[0], rank_of(product.outputs[0])
        readers = scores.consumers()
        alike = all(rank_of(factor) == rank and not is_constant(factor) for factor in product.inputs)
        if rank < 3 or not alike or not readers or scores.is_graph_output() or not all(map(_best_of_rows, readers)):
            continue
        if any(node.graph is not product.graph for node in readers):
            continue
        before = Writer(model, product)
        a, b = (_with_last_axes_swapped(before, factor, rank) for factor in product.inputs)
        turned = before("MatMul", b, a)
        for node in readers:
            write, axis = Writer(model, node), rank - 2
            if node.op_type.startswith("Arg"):
                last = attribute(node, "select_last_index", 0)
                found = write(node.op_type, turned, axis=axis, keepdims=0, select_last_index=last)
            else:
                found = write(node.op_type, turned, write.constant([axis]), keepdims=0)
            write.replace(node.outputs[0], found)
        yield Change(
            rewrite="best-down-columns",
            place=product.name or "",
            description=f"{', '.join(node.op_type for node in readers)} along the columns of the transposed product",
        )


def _best_of_rows(node: ir.Node) -> bool:
    if node.op_type not in BEST or node.domain or attribute(node, "keepdims", 1):
        return False
    rank = rank_of(node.inputs[0])
    axes = [attribute(node, "axis", 0) % rank] if node.op_type.startswith("Arg") else axes_of(node, rank)
    return axes == [rank - 1]


def _with_last_axes_swapped(write: Writer, factor: ir.Value | None, rank: int) -> ir.Value | None:
    """A factor with its last two axes swapped; if it is such a transpose already, its input."""
    turn = made_by(factor, "Transpose")
    if turn is not None and swaps_last(turn):
        return turn.inputs[0]
    return last_axes_swapped(write, factor, rank)


ROWS_BY_GATHERND = Rewrite(
    "rows-by-gathernd",
    "a GatherElements whose index is the same for all channels",
    _by_gather_nd,
    opset=12,
    order=46,
    keeps=True,
)
BEST_DOWN_COLUMNS = Rewrite(
    "best-down-columns",
    "a product of two activations, if only its largest or smallest number per row, or its index, is read",
    _best_down_columns,
    opset=18,
    order=47,
    keeps=True,
)
