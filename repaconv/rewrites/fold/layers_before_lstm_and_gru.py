"""recurrent: fold scales, shifts and linear layers into the LSTM, GRU or RNN that reads them.

    W (s x + t) + b = (W s) x + (b + W t),    W (M x + c) + b = (W M) x + (b + W c)

A recurrent layer multiplies its input by one matrix W for all gates, after BatchNorm (DeepSpeech 2) or a linear layer
that embeds the input. A linear layer is only folded if that needs no more multiplications: one that reduces channels
stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from repaconv.graph.channel_axes import affine_of
from repaconv.graph.index_selections import perm_of
from repaconv.graph.models_in_onnx_ir import clean
from repaconv.graph.nodes_and_constants import (
    Array,
    Writer,
    constant,
    input_at,
    is_constant,
    is_read,
    is_read_once,
    made_by,
    nodes_of,
)
from repaconv.graph.operator_facts import VIEWS
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import rank_of, set_shape, sizes
from repaconv.graph.view_chains import view_of_chain
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir


def apply(model: ir.Model) -> Iterator[Change]:
    """Fold what lies before each recurrent layer into it, as long as there is something; in place."""
    for node in nodes_of(model, "LSTM", "GRU", "RNN"):
        while (folded := _fold(model, node)) is not None:
            description = f"{folded.op_type} -> {node.op_type}"
            yield Change(rewrite=RECURRENT.name, place=node.name or "", description=description)
    clean(model)


def _fold(model: ir.Model, node: ir.Node) -> ir.Node | None:
    """Fold the operator before a recurrent layer, or before the views that it reads; None if nothing was folded."""
    weight, bias = (constant(input_at(node, place)) for place in (1, 3))
    chain = _views_before(node)
    before = chain[-1].producer() if chain else None
    if weight is None or before is None or (input_at(node, 3) is not None and bias is None):
        return None
    if not all(is_read_once(value) for value in node.inputs[1:4:2] if value is not None):
        return None  # a second layer would keep the weights
    found = _scaled(weight, before, chain) or _product(weight, before, chain)
    if found is None:
        return None
    x, new, added = found
    write = Writer(model, node)
    for value in chain[-2::-1]:
        view = value.producer()
        assert view is not None
        x = _moved(write, view, x, value)
    node.replace_input_with(0, x)
    node.replace_input_with(1, write.constant(new))
    if added is not None:
        half = added if bias is None else bias[:, : added.shape[1]] + added
        rest = np.zeros_like(added) if bias is None else bias[:, added.shape[1] :]
        node.resize_inputs(max(4, len(node.inputs)))
        node.replace_input_with(3, write.constant(np.concatenate([half, rest], axis=1)))
    model.graph.remove([producer for value in chain if (producer := value.producer()) is not None], safe=True)
    return before


def _views_before(node: ir.Node) -> list[ir.Value]:
    """The input of a layer and the values that it is a view of, nearest first; empty if one has another reader."""
    value = node.inputs[0]
    chain: list[ir.Value] = []
    while value is not None and is_read_once(value) and sizes(value) is not None:
        chain.append(value)
        view = made_by(value, *VIEWS)
        if view is None:
            return chain
        value = view.inputs[0]
    return []


def _scaled(weight: Array, before: ir.Node, chain: list[ir.Value]) -> tuple[ir.Value, Array, Array | None] | None:
    """Fold a scale and shift into the gates: its input, the new weight, and the gates' shifts; None for other nodes."""
    found = affine_of(before)
    view = view_of_chain(chain) if found is not None and not any(map(is_read, before.outputs[1:])) else None
    if found is None or view is None or sizes(found[0]) != sizes(chain[-1]):
        return None
    affine = found[1].moved(view.constant_after)
    if affine is None or any(part.size != part.shape[-1] for part in affine if part is not None):
        return None  # another constant for every step
    scale, shift = (None if part is None else part.reshape(-1) for part in affine)
    added = None if shift is None else (weight * shift).sum(-1)
    return found[0], weight * scale, added


def _product(weight: Array, before: ir.Node, chain: list[ir.Value]) -> tuple[ir.Value, Array, None] | None:
    """The input of a linear layer and the weight of that; None for other nodes, or if it would cost more."""
    x, matrix = before.inputs[0], constant(input_at(before, 1)) if made_by(chain[-1], "MatMul") is not None else None
    if matrix is None or x is None or matrix.ndim != 2 or is_constant(x) or sizes(x) is None:
        return None
    if not all(_keeps_last_axis(value) for value in chain[:-1]):
        return None
    new = weight @ matrix.T
    return (x, new, None) if new.size <= weight.size + matrix.size else None


def _keeps_last_axis(value: ir.Value) -> bool:
    node, rank = made_by(value, "Transpose"), rank_of(value)
    return node is not None and perm_of(node, rank)[-1] == rank - 1


def _moved(write: Writer, view: ir.Node, x: ir.Value, old: ir.Value) -> ir.Value:
    """Write a view of another value, which may have another number of channels if the view keeps the last axis."""
    new, shape = write.copy(view, x, *view.inputs[1:]), sizes(old)
    width = (sizes(x) or ())[-1]
    assert shape is not None
    set_shape(new, (*shape[:-1], width) if _keeps_last_axis(old) else shape, x)
    return new


RECURRENT = Rewrite(
    "recurrent", "scales, shifts and linear layers that only an LSTM, GRU or RNN with constant weights reads", apply
)
