"""Find linear layers x W + b with constant W [c, d] and b [d], written as MatMul and Add or as Gemm; write them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from repaconv.graph.nodes_and_constants import Array, Writer, attribute, constant, input_at, made_by, only_reader
from repaconv.graph.symbolic_shapes import rank_of

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True)
class Linear:
    """A linear layer x W + b in float64: ``weight`` [c, d], ``bias`` [d] or None, and its output ``out``."""

    x: ir.Value
    weight: Array
    bias: Array | None
    out: ir.Value

    @property
    def node(self) -> ir.Node:
        """The node that writes the output."""
        node = self.out.producer()
        assert node is not None
        return node

    def shift(self) -> Array:
        """Return the bias, or zeros if there is none."""
        return np.zeros(self.weight.shape[1]) if self.bias is None else self.bias


def linear_of(value: ir.Value | None) -> Linear | None:
    """Return the linear layer that computes a value, if nothing else reads its product before the bias."""
    node = made_by(value, "Add", "MatMul", "Gemm")
    if node is None or value is None:
        return None
    if node.op_type == "Gemm":
        return _gemm(node)
    if node.op_type == "MatMul":
        x, weight = node.inputs[0], _matrix(node.inputs[1])
        return Linear(x, weight, None, value) if x is not None and weight is not None and weight.ndim == 2 else None
    for product, shift in (node.inputs, node.inputs[::-1]):
        inner, bias = made_by(product, "MatMul"), constant(shift)
        if inner is None or bias is None or len(inner.outputs[0].consumers()) != 1:
            continue
        found = linear_of(inner.outputs[0])
        if found is not None and bias.size == found.weight.shape[1] and _is_row(bias, inner.outputs[0]):
            return Linear(found.x, found.weight, bias.reshape(-1), value)
    return None


def _matrix(value: ir.Value | None) -> Array | None:
    """Return a constant of floats; None for one of integers, whose layers round, wrap and have fewer operators."""
    found = constant(value)
    return found if found is not None and found.dtype.kind == "f" else None


def _is_row(bias: Array, product: ir.Value) -> bool:
    """Return whether a constant adds one row to every token of a product, and no axes."""
    return 0 < bias.ndim <= max(rank_of(product), 1) and bias.size == bias.shape[-1]


def _gemm(node: ir.Node) -> Linear | None:
    x, weight = node.inputs[0], _matrix(node.inputs[1])
    bias = constant(input_at(node, 2))
    if x is None or weight is None or attribute(node, "transA", 0):
        return None
    if len(node.inputs) > 2 and (bias is None or bias.size != (bias.shape or (1,))[-1]):
        return None
    weight = (weight.T if attribute(node, "transB", 0) else weight) * attribute(node, "alpha", 1.0)
    if bias is not None:
        bias = np.broadcast_to(bias.reshape(-1) * attribute(node, "beta", 1.0), weight.shape[1:])
    return Linear(x, weight, bias, node.outputs[0])


def layer_at(node: ir.Node | None) -> Linear | None:
    """Return the linear layer of a MatMul or Gemm, with the following bias if nothing else reads the product."""
    found = linear_of(node.outputs[0]) if node is not None and made_by(node.outputs[0], "MatMul", "Gemm") else None
    after = only_reader(found.out, "Add") if found is not None else None
    whole = linear_of(after.outputs[0]) if after is not None else None
    return whole if found is not None and whole is not None and whole.x is found.x else found


def layers_after(value: ir.Value) -> list[Linear] | None:
    """Return the linear layers that read a value; None if anything else reads it, or one in a branch or loop body."""
    found = [layer_at(node) if node.graph is value.graph else None for node in value.consumers()]
    if value.is_graph_output() or not found:
        return None
    layers = [layer for layer in found if layer is not None and layer.x is value]
    return layers if len(layers) == len(found) else None


def linears(model: ir.Model) -> list[Linear]:
    """Return all linear layers of a graph; a product with a following bias counts once."""
    found = [linear for node in model.graph if node.outputs and (linear := linear_of(node.outputs[0]))]
    products = {
        id(linear.node.inputs[i].producer()) for linear in found if linear.node.op_type == "Add" for i in (0, 1)
    }
    return [linear for linear in found if id(linear.node) not in products]


def write_linear(write: Writer, x: ir.Value, weight: Array, bias: Array | None) -> ir.Value:
    """Write x W + b as MatMul and Add, which works for tokens of any rank."""
    product = write("MatMul", x, write.constant(weight))
    return product if bias is None or not bias.any() else write("Add", product, write.constant(bias))
