"""attention-op: write softmax attention as one Attention operator (opset 23), which needs no transposes of heads.

out = concat_h softmax(s Q_h K_h^T + mask) V_h        Q, K, V: [B, N, H e] as three-dimensional tensors
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from repaconv.graph.attention_patterns import attentions, write_columns
from repaconv.graph.nodes_and_constants import Writer, constant
from repaconv.graph.operator_facts import VIEWS
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import rank_of, sizes
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir


def _as_one_operator(model: ir.Model) -> Iterator[Change]:
    for found in attentions(model):
        batches = {(sizes(heads.source) or (None,))[0] for heads in (found.q, found.k, found.v)}
        if found.k.count != found.v.count or found.q.count % found.k.count or len(batches) > 1:
            continue
        write, scale = Writer(model, found.node), found.scale
        inputs = [write_columns(write, heads) for heads in (found.q, found.k, found.v)]
        exact = write.dtype is None or np.float32(scale) == write.dtype.numpy().type(scale)
        if scale <= 0 or not exact:  # an attribute is a float32, and ONNX Runtime takes one of 0 or less for none
            inputs[0], scale = write("Mul", inputs[0], write.constant(scale)), 1.0
        if found.mask is not None:
            inputs.append(_for_every_query(write, _above_lowest(write, found.mask), found.q.tokens, found.k.tokens))
        heads = {"q_num_heads": found.q.count, "kv_num_heads": found.k.count, "scale": scale}
        out = write("Attention", *inputs, **heads)
        if rank_of(found.out) == 2:
            out = write("Reshape", out, write.constant([-1, found.v.width * found.q.count]))
        place = found.node.name or ""
        write.replace(found.out, out)
        yield Change(
            rewrite="attention-op",
            place=place,
            description=f"{found.q.count} heads of {found.q.width} on {found.q.tokens} tokens as one Attention",
        )


def _above_lowest(write: Writer, mask: ir.Value) -> ir.Value:
    """Return a mask whose lowest finite numbers are 3/4 of that, where a score added to them rounds away, too.

    ONNX Runtime's Attention outputs 0 for a query whose scores are all the lowest number; softmax outputs the mean of
    the values. Infinite numbers stay as they are.
    """
    import onnx_ir as ir

    kind = mask.dtype or write.dtype
    if kind is None:
        return mask
    lowest = float(kind.min)
    above, stored = 0.75 * lowest, constant(mask)
    if stored is not None:
        is_lowest = stored == lowest
        return write.constant(np.where(is_lowest, above, stored), like=mask) if is_lowest.any() else mask
    if _is_logarithm(mask):
        return mask
    test = write("Equal", mask, write.constant(lowest, like=mask))
    test.dtype = ir.DataType.BOOL
    lifted = write("Where", test, write.constant(above, like=mask), mask)
    lifted.shape = mask.shape
    return lifted


def _is_logarithm(mask: ir.Value) -> bool:
    """Whether a mask holds logarithms, which are far above the lowest number: of sizes of merged tokens (PYRA)."""
    node = mask.producer()
    while node is not None and node.op_type in (*VIEWS, "Expand"):
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    return node is not None and node.op_type == "Log"


def _for_every_query(write: Writer, mask: ir.Value, queries: int, keys: int) -> ir.Value:
    """A mask [.., 1, N] or [.., M, N] expanded to [.., M, N]; ONNX Runtime does not broadcast it over the queries."""
    shape = sizes(mask) or ()
    if len(shape) > 1 and shape[-2:] == (queries, keys):
        return mask
    return write("Expand", mask, write.constant([1, 1, queries, keys]))


ATTENTION_OP = Rewrite(
    "attention-op",
    "softmax attention, masked or not, whose heads are consecutive channels",
    _as_one_operator,
    opset=23,
    order=60,
    keeps=True,
)
