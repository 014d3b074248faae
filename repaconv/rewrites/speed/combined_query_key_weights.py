"""scores-as-matrix: compute attention scores with one matrix per head instead of queries and keys (method nondeep).

    Q_h K_h^T = (X Wq_h + bq_h)(Y Wk_h + bk_h)^T = (X W_h + u_h) Y^T + a term that is constant along keys
        with W_h = Wq_h Wk_h^T and u_h = bq_h Wk_h^T; the softmax does not depend on the constant term

X are the tokens of the queries, Y the tokens of the keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from repaconv.graph.attention_patterns import (
    Attention,
    Projection,
    attentions,
    heads_at_layer,
    projection_of,
    scores_of,
    write_heads,
)
from repaconv.graph.nodes_and_constants import Writer
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir


def _write_scores(model: ir.Model, found: Attention, q: Projection, k: Projection) -> None:
    """Rewrite the product of queries and keys. Values that shared their layer with them get a layer of their own."""
    write = Writer(model, found.product)
    product = write("MatMul", write_heads(write, q), write_heads(write, k, transposed=True))
    shared = any(heads_at_layer(found.v).source is heads_at_layer(heads).source for heads in (found.q, found.k))
    apart = projection_of(found.v, found.mixed, 1) if shared else None
    write.replace(found.product.outputs[0], product)
    if apart is not None:
        found.mixed.replace_input_with(1, write_heads(Writer(model, found.mixed), apart))


def _scores_as_matrix(model: ir.Model) -> Iterator[Change]:
    for found in attentions(model):
        scores = scores_of(found)
        if scores is None:
            continue
        q, k = scores
        turned = k.weight.swapaxes(1, 2)
        wide = replace(q, weight=q.weight @ turned, bias=(q.bias[:, None] @ turned)[:, 0])
        keys = Projection(
            k.x, k.tokens, np.eye(k.weight.shape[1])[None], np.zeros((1, k.weight.shape[1])), linear=False
        )
        _write_scores(model, found, wide, keys)
        description = f"{found.q.count} heads of {found.q.width} as X W X^T"
        yield Change(rewrite="scores-as-matrix", place=found.node.name or "", description=description)


SCORES_AS_MATRIX = Rewrite(
    "scores-as-matrix",
    "softmax attention whose queries and keys are linear layers that nothing else reads",
    _scores_as_matrix,
    order=20,
)
