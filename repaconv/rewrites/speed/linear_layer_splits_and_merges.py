"""Split a linear layer by its outputs, merge two added layers into one, or write a one-output layer as a sum."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from repaconv.graph.channel_axes import IMAGE
from repaconv.graph.index_selections import split_sizes
from repaconv.graph.linear_layers import linear_of, linears, write_linear
from repaconv.graph.nodes_and_constants import Writer, attribute, constant, made_by, nodes_of, only_reader
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import rank_of, sizes
from repaconv.graph.token_grids import static_grid
from repaconv.results import Change
from repaconv.rewrites.speed.split_convolutions import split_convolution

if TYPE_CHECKING:
    import onnx_ir as ir


def _a_layer_for_each_part(model: ir.Model) -> Iterator[Change]:
    for split in nodes_of(model, "Split"):
        if _is_made_for_tokens(split):
            yield from split_convolution(model, split, "linear-each")
            continue
        linear = linear_of(split.inputs[0])
        if linear is None or only_reader(linear.out) is None:
            continue
        rank, parts = rank_of(linear.out), split_sizes(split, linear.weight.shape[1])
        if attribute(split, "axis", 0) not in (-1, rank - 1) or not rank or parts is None:
            continue
        bounds, write = np.cumsum(parts)[:-1], Writer(model, split)
        weights, biases = np.split(linear.weight, bounds, 1), np.split(linear.shift(), bounds)
        for old, weight, bias in zip(list(split.outputs), weights, biases, strict=True):
            write.replace(old, write_linear(write, linear.x, weight, bias))
        yield Change(
            rewrite="linear-each",
            place=linear.node.name or "",
            description=f"{linear.weight.shape[0]} x {linear.weight.shape[1]} as {len(weights)} layers",
        )


def _is_made_for_tokens(split: ir.Node) -> bool:
    """Whether a 1x1 convolution makes queries, keys and values: its channels are split, and a part is reshaped.

    A runtime with channels last or in blocks copies each part into another layout before the Reshape.
    """
    conv = made_by(split.inputs[0], "Conv")
    weight = constant(conv.inputs[1]) if conv is not None else None
    if static_grid(split.inputs[0]) is None or weight is None or weight.shape[2:] != (1, 1):
        return False
    reshaped = any(made_by(node.outputs[0], "Reshape") for part in split.outputs for node in part.consumers())
    return reshaped and attribute(split, "axis", 0) in (IMAGE, IMAGE - 4)


def _sum_in_the_product(model: ir.Model) -> Iterator[Change]:
    """Merge two linear layers whose outputs are added: W_a a + W_x x + b = [W_a W_x] [a; x] + b."""
    for node in nodes_of(model, "Add"):
        left, right = (linear_of(value) for value in node.inputs)
        if left is None or right is None or left.x is right.x or left.weight.shape[1] != right.weight.shape[1]:
            continue
        if any(only_reader(part.out) is None for part in (left, right)):
            continue
        before, after = sizes(left.x), sizes(right.x)
        if before is None or after is None or before[:-1] != after[:-1]:
            continue
        write = Writer(model, node)
        joined = write("Concat", left.x, right.x, axis=-1)
        weight = np.concatenate([left.weight, right.weight])
        write.replace(node.outputs[0], write_linear(write, joined, weight, left.shift() + right.shift()))
        yield Change(
            rewrite="concat-linear",
            place=node.name or "",
            description=f"a sum of two layers as one of {weight.shape[0]} x {weight.shape[1]}",
        )


def _one_column_as_sum(model: ir.Model) -> Iterator[Change]:
    for linear in linears(model):
        if linear.weight.shape[1] != 1:
            continue
        write = Writer(model, linear.node)
        weighed = write("Mul", linear.x, write.constant(linear.weight[:, 0]))
        out = write("ReduceSum", weighed, write.constant([-1]), keepdims=1)
        if linear.bias is not None and linear.bias.any():
            out = write("Add", out, write.constant(linear.bias))
        write.replace(linear.out, out)
        yield Change(
            rewrite="column-as-sum",
            place=linear.node.name or "",
            description=f"{linear.weight.shape[0]} x 1 as a sum over channels",
        )


LINEAR_EACH = Rewrite(
    "linear-each",
    "a linear layer whose output is only split by channels; also a 1x1 convolution, if one of the parts is reshaped",
    _a_layer_for_each_part,
    order=70,
    keeps=True,
)
CONCAT_LINEAR = Rewrite(
    "concat-linear",
    "a sum of two linear layers of different inputs that nothing else reads",
    _sum_in_the_product,
    order=90,
)
COLUMN_AS_SUM = Rewrite(
    "column-as-sum",
    "a linear layer with one output channel",
    _one_column_as_sum,
    opset=13,
    order=93,
    keeps=True,
)
