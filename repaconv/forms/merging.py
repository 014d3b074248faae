"""Rows of tokens picked by a computed index, in three ways: GatherElements, GatherND, a product with ones and zeros.

x[b, i_br, :] = sum_n [n = i_br] x[b, n, :]
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from repaconv.artefacts import Change
from repaconv.graphs.contract import Rewrite
from repaconv.graphs.graph import Writer, attribute, constant, made_by, nodes_of
from repaconv.graphs.shapes import sizes

if TYPE_CHECKING:
    import onnx_ir as ir


class Rows(NamedTuple):
    """x [B, n, c] and the index [B, r, 1] of the rows that a node picks."""

    x: ir.Value
    index: ir.Value
    node: ir.Node


def picked_rows(model: ir.Model) -> list[Rows]:
    """All GatherElements of whole rows: the index is one number a row, repeated over channels."""
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


def counts_up(value: ir.Value | None) -> bool:
    """Whether an index is never negative: it comes from TopK, ArgMax or a constant that is not."""
    numbers = constant(value)
    if numbers is not None:
        return bool((numbers >= 0).all())
    node = made_by(value, "TopK", "ArgMax", "ArgMin", "GatherElements", "Unsqueeze", "Reshape", "Expand", "Add")
    if node is None or node.op_type in ("TopK", "ArgMax", "ArgMin"):
        return node is not None and (node.op_type != "TopK" or value is node.outputs[1])
    return all(counts_up(entry) for entry in (node.inputs if node.op_type == "Add" else node.inputs[:1]))


def _as_product(model: ir.Model) -> Iterator[Change]:
    import onnx_ir as ir

    for x, index, node in picked_rows(model):
        count = (sizes(x) or (0, None))[1]
        if not isinstance(count, int) or not counts_up(index):
            continue
        write = Writer(model, node)
        equal = write("Equal", index, write.constant(np.arange(count)))
        equal.dtype = ir.DataType.BOOL
        ones = write("Cast", equal, to=int(x.dtype or 1))
        write.replace(node.outputs[0], write("MatMul", ones, x))
        yield _told("gather-as-matmul", node, f"rows of {count} by a product with ones and zeros")


def _by_gather_nd(model: ir.Model) -> Iterator[Change]:
    for x, index, node in picked_rows(model):
        write = Writer(model, node)
        write.replace(node.outputs[0], write("GatherND", x, index, batch_dims=1))
        yield _told("rows-by-gathernd", node, "an index a row")


def _told(name: str, node: ir.Node, told: str) -> Change:
    return Change(rewrite=name, place=node.name or "", told=told)


GATHER_AS_MATMUL = Rewrite(
    "gather-as-matmul",
    "rows of finite numbers picked by an index that is never negative and the same for all channels",
    _as_product,
    order=45,
    keeps=True,
)
ROWS_BY_GATHERND = Rewrite(
    "rows-by-gathernd",
    "rows picked by an index that is the same for all channels",
    _by_gather_nd,
    opset=12,
    order=46,
    keeps=True,
)
