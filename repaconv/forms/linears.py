"""Linear layers on tokens, written otherwise: one product for several, several for one, sums inside the product.

A linear layer is x W + b with constant W [c, d] and b [d], as MatMul and Add or as Gemm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from repaconv.artefacts import Change
from repaconv.graphs.contract import Rewrite
from repaconv.graphs.graph import Array, Writer, attribute, constant, dims, made_by, nodes_of, only_reader
from repaconv.graphs.selections import split_sizes
from repaconv.graphs.shapes import sizes

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True)
class Linear:
    """x W + b in float64: ``weight`` [c, d], ``bias`` [d] or None; ``out`` is the value that it is."""

    x: ir.Value
    weight: Array
    bias: Array | None
    out: ir.Value

    @property
    def node(self) -> ir.Node:
        """That writes the output."""
        node = self.out.producer()
        assert node is not None
        return node

    def shift(self) -> Array:
        """The bias, zeros where there is none."""
        return np.zeros(self.weight.shape[1]) if self.bias is None else self.bias


def linear_of(value: ir.Value | None) -> Linear | None:
    """The linear layer that a value is, if nothing reads its product before the bias."""
    node = made_by(value, "Add", "MatMul", "Gemm")
    if node is None or value is None:
        return None
    if node.op_type == "Gemm":
        return _gemm(node)
    if node.op_type == "MatMul":
        x, weight = node.inputs[0], constant(node.inputs[1])
        return Linear(x, weight, None, value) if x is not None and weight is not None and weight.ndim == 2 else None
    for product, shift in (node.inputs, node.inputs[::-1]):
        inner, bias = made_by(product, "MatMul"), constant(shift)
        if inner is None or bias is None or len(inner.outputs[0].consumers()) != 1:
            continue
        found = linear_of(inner.outputs[0])
        if found is not None and bias.size == found.weight.shape[1] and _is_row(bias, value):
            return Linear(found.x, found.weight, bias.reshape(-1), value)
    return None


def _is_row(bias: Array, value: ir.Value) -> bool:
    """Whether a constant is added to every token alike, and adds no axes."""
    return 0 < bias.ndim <= max(len(dims(value) or ()), 1) and bias.size == bias.shape[-1]


def _gemm(node: ir.Node) -> Linear | None:
    x, weight = node.inputs[0], constant(node.inputs[1])
    bias = constant(node.inputs[2]) if len(node.inputs) > 2 else None
    if x is None or weight is None or attribute(node, "transA", 0):
        return None
    if len(node.inputs) > 2 and (bias is None or bias.size != bias.shape[-1]):
        return None
    weight = (weight.T if attribute(node, "transB", 0) else weight) * attribute(node, "alpha", 1.0)
    if bias is not None:
        bias = np.broadcast_to(bias.reshape(-1) * attribute(node, "beta", 1.0), weight.shape[1:])
    return Linear(x, weight, bias, node.outputs[0])


def layer_at(node: ir.Node | None) -> Linear | None:
    """The linear layer that a MatMul or a Gemm is, with the bias behind it if nothing else reads what lies between."""
    found = linear_of(node.outputs[0]) if node is not None and made_by(node.outputs[0], "MatMul", "Gemm") else None
    after = only_reader(found.out, "Add") if found is not None else None
    whole = linear_of(after.outputs[0]) if after is not None else None
    return whole if found is not None and whole is not None and whole.x is found.x else found


def layers_behind(value: ir.Value) -> list[Linear] | None:
    """The linear layers that read a value; None if something else does."""
    found = [layer_at(node) for node in value.consumers()]
    if value.is_graph_output() or not found:
        return None
    layers = [layer for layer in found if layer is not None and layer.x is value]
    return layers if len(layers) == len(found) else None


def linears(model: ir.Model) -> list[Linear]:
    """All of a graph; the product inside one with a bias is not another one."""
    found = [linear for node in model.graph if node.outputs and (linear := linear_of(node.outputs[0]))]
    products = {
        id(linear.node.inputs[i].producer()) for linear in found if linear.node.op_type == "Add" for i in (0, 1)
    }
    return [linear for linear in found if id(linear.node) not in products]


def write_linear(write: Writer, x: ir.Value, weight: Array, bias: Array | None) -> ir.Value:
    """x W + b as MatMul and Add, which is the same for tokens of any rank."""
    product = write("MatMul", x, write.constant(weight))
    return product if bias is None or not bias.any() else write("Add", product, write.constant(bias))


def _a_layer_for_each_part(model: ir.Model) -> Iterator[Change]:
    for split in nodes_of(model, "Split"):
        linear = linear_of(split.inputs[0])
        if linear is None or only_reader(linear.out) is None:
            continue
        rank, parts = len(dims(linear.out) or ()), split_sizes(split, linear.weight.shape[1])
        if attribute(split, "axis", 0) not in (-1, rank - 1) or not rank or parts is None:
            continue
        bounds, write = np.cumsum(parts)[:-1], Writer(model, split)
        weights, biases = np.split(linear.weight, bounds, 1), np.split(linear.shift(), bounds)
        for old, weight, bias in zip(list(split.outputs), weights, biases, strict=True):
            write.replace(old, write_linear(write, linear.x, weight, bias))
        yield Change(
            rewrite="linear-each",
            place=linear.node.name or "",
            told=f"{linear.weight.shape[0]} x {linear.weight.shape[1]} as {len(weights)} layers",
        )


def _one_layer_for_all(model: ir.Model) -> Iterator[Change]:
    by_input: dict[int, list[Linear]] = {}
    for linear in linears(model):
        by_input.setdefault(id(linear.x), []).append(linear)
    for group in by_input.values():
        rank = len(dims(group[0].x) or ())
        if len(group) < 2 or not rank or any(linear.out.is_graph_output() for linear in group):
            continue
        write = Writer(model, group[0].node)
        weight = np.concatenate([linear.weight for linear in group], 1)
        whole = write_linear(write, group[0].x, weight, np.concatenate([linear.shift() for linear in group]))
        parts = write.split(whole, [linear.weight.shape[1] for linear in group])
        for linear, part in zip(group, parts, strict=True):
            write.replace(linear.out, part)
        yield Change(
            rewrite="one-linear",
            place=group[0].node.name or "",
            told=f"{len(group)} layers of one input as one of {weight.shape[0]} x {weight.shape[1]}",
        )


def _sum_in_the_product(model: ir.Model) -> Iterator[Change]:
    """W_a a + W_x x + b = [W_a W_x] [a; x] + b."""
    for node in nodes_of(model, "Add"):
        left, right = (linear_of(value) for value in node.inputs)
        if left is None or right is None or left.x is right.x:
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
            told=f"a sum of two layers as one of {weight.shape[0]} x {weight.shape[1]}",
        )


def _columns_that_are_read(model: ir.Model) -> Iterator[Change]:
    for split in nodes_of(model, "Split"):
        linear, dead = linear_of(split.inputs[0]), [not (out.uses() or out.is_graph_output()) for out in split.outputs]
        rank = len(dims(split.inputs[0]) or ())
        if linear is None or only_reader(linear.out) is None or attribute(split, "axis", 0) not in (-1, rank - 1):
            continue
        parts = split_sizes(split, linear.weight.shape[1])
        if not any(dead) or all(dead) or parts is None or not rank:
            continue
        write = Writer(model, split)
        read = np.repeat(~np.array(dead), parts)
        whole = write_linear(write, linear.x, linear.weight[:, read], linear.shift()[read])
        live = [out for out, unread in zip(split.outputs, dead, strict=True) if not unread]
        kept = [size for size, unread in zip(parts, dead, strict=True) if not unread]
        for old, new in zip(live, write.split(whole, kept) if len(kept) > 1 else [whole], strict=True):
            write.replace(old, new)
        yield Change(
            rewrite="read-columns",
            place=linear.node.name or "",
            told=f"{int(read.sum())} of {read.size} columns are read",
        )


LINEAR_EACH = Rewrite(
    "linear-each",
    "a linear layer whose output is only split along channels",
    _a_layer_for_each_part,
    order=70,
    keeps=True,
)
ONE_LINEAR = Rewrite("one-linear", "linear layers that read one value", _one_layer_for_all, order=80, keeps=True)
CONCAT_LINEAR = Rewrite(
    "concat-linear",
    "a sum of two linear layers of different inputs that nothing else reads",
    _sum_in_the_product,
    order=90,
)
READ_COLUMNS = Rewrite(
    "read-columns",
    "a linear layer that is only split along channels, with parts that nothing reads",
    _columns_that_are_read,
    order=26,
    keeps=True,
)
