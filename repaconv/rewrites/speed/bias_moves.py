"""Move biases into the bias of a later layer, or remove them where they have no effect.

    (r + (x W + b)) V + c = (r + x W) V + (b V + c)                                       bias-forward
    softmax((q_i + bq) . (k_j + bk)) over j = softmax((q_i + bq) . k_j)                   no-key-bias
    sum_h S_h (V_h + bv_h) Wo_h + bo = sum_h S_h V_h Wo_h + (bo + sum_h bv_h Wo_h)        value-bias-forward

The second holds because a softmax ignores what is the same for all keys, the third because its rows sum to 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from repaconv.graph.attention_patterns import Heads, attentions, heads_at_layer, read_by_one, values_of
from repaconv.graph.linear_layers import layers_after, linear_of, linears, write_linear
from repaconv.graph.nodes_and_constants import Writer, only_reader
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import sizes
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir


def _biases_forward(model: ir.Model) -> Iterator[Change]:
    """Move the bias of a layer into the layers that read the sum: (r + (x W + b)) V + c = (r + x W) V + (b V + c)."""
    for linear in linears(model):
        value, shape = linear.out, sizes(linear.out)
        if linear.bias is None or not linear.bias.any():
            continue
        while len(value.uses()) == 1 and (node := only_reader(value, "Add")) is not None:
            value = node.outputs[0]
        layers = layers_after(value)
        if value is linear.out or sizes(value) != shape or not layers or any(layer.bias is None for layer in layers):
            continue
        write = Writer(model, linear.node)
        write.replace(linear.out, write_linear(write, linear.x, linear.weight, None))
        for layer in layers:
            before = Writer(model, layer.node)
            bias = layer.shift() + linear.bias @ layer.weight
            before.replace(layer.out, write_linear(before, value, layer.weight, bias))
        yield Change(
            rewrite="bias-forward",
            place=linear.node.name or "",
            description=f"a bias of {linear.bias.size} into the {len(layers)} layers that read the sum",
        )


def _no_key_biases(model: ir.Model) -> Iterator[Change]:
    for found in attentions(model):
        keys = heads_at_layer(found.k)
        if read_by_one(keys.source, _columns(keys), found.product, 1) and _without_bias(model, keys):
            description = f"{keys.count} heads of {keys.width}"
            yield Change(rewrite="no-key-bias", place=found.node.name or "", description=description)


def _value_biases_forward(model: ir.Model) -> Iterator[Change]:
    for found in attentions(model):
        parts = values_of(found)
        if parts is None or not parts[0].bias.any() or parts[1].bias is None:
            continue
        values, proj = parts
        out = proj.weight.reshape(found.q.count, found.v.width, -1)
        moved = np.einsum("he,heo->o", np.broadcast_to(values.bias, out.shape[:2]), out)
        write = Writer(model, proj.node)
        write.replace(proj.out, write_linear(write, proj.x, proj.weight, proj.bias + moved))
        _without_bias(model, heads_at_layer(found.v))
        description = f"{found.v.count} heads of {found.v.width}"
        yield Change(rewrite="value-bias-forward", place=found.node.name or "", description=description)


def _columns(heads: Heads) -> range:
    return range(heads.offset, heads.offset + heads.count * heads.width)


def _without_bias(model: ir.Model, heads: Heads) -> bool:
    """Set the bias of the heads' columns of a layer to zero; whether it was not zero before."""
    layer = linear_of(heads.source)
    if layer is None or layer.bias is None or not layer.bias[_columns(heads)].any():
        return False
    bias = layer.bias.copy()
    bias[_columns(heads)] = 0
    write = Writer(model, layer.node)
    write.replace(layer.out, write_linear(write, layer.x, layer.weight, bias))
    return True


NO_KEY_BIAS = Rewrite(
    "no-key-bias",
    "softmax attention whose keys are a linear layer with a bias that nothing else reads",
    _no_key_biases,
    order=24,
)
VALUE_BIAS_FORWARD = Rewrite(
    "value-bias-forward",
    "softmax attention before a linear layer, whose values are a linear layer with a bias that nothing else reads",
    _value_biases_forward,
    order=25,
)
BIAS_FORWARD = Rewrite(
    "bias-forward",
    "a linear layer with a bias in a sum, if only linear layers with a bias read the sum",
    _biases_forward,
    order=88,
)
