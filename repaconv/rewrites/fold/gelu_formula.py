"""gelu: write x / 2 (1 + erf(x / sqrt(2))) so that ONNX Runtime computes it as one operator.

    x / 2 erfc(-c x)  =  x / 2 (1 - erf(-c x))  =  x / 2 (1 + erf(x / (1 / c))),    c = 0.7071...

ONNX Runtime fuses only a form that divides, such as PyTorch's. TensorFlow, Keras and JAX multiply x by c, and use erfc.
tf2onnx also writes the same Transpose before every operator of an image: here it follows the activation.

Source: Hendrycks and Gimpel 2016, "Gaussian Error Linear Units (GELUs)", section 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from repaconv.graph.index_selections import perm_of
from repaconv.graph.model_rewriting import clean
from repaconv.graph.nodes_and_constants import Writer, made_by, nodes_of, only_reader, scalar
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import rank_of, shaped_like, sizes
from repaconv.graph.tensor_views import transposed
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir

CLOSE = 1e-6
"""How far c may be from 1 / sqrt(2), relatively: it is rounded to float32. The graph's own c stays."""


class _Multiple(NamedTuple):
    """A value as factor x, with the axes of x in an order."""

    x: ir.Value
    axes: tuple[int, ...]
    factor: float


def apply(model: ir.Model) -> Iterator[Change]:
    """Write GELU as PyTorch does wherever other operators compute it by erf; in place."""
    for erf in nodes_of(model, "Erf"):
        found = _gelu(erf)
        if found is None:
            continue
        inner, last = found
        x = inner.x
        write = Writer(model, last)
        quotient = shaped_like(write("Div", x, write.constant(1 / inner.factor, x)), x)
        gate = shaped_like(write("Erf", quotient), x)
        gate = shaped_like(write("Add", gate, write.constant(1.0, x)), x)
        half = shaped_like(write("Mul", x, write.constant(0.5, x)), x)
        new = shaped_like(write("Mul", half, gate), x)
        write.replace(last.outputs[0], transposed(write, new, inner.axes))
        yield Change(rewrite=GELU.name, place=erf.name or "", description="erf of a multiple of x -> GELU")
    clean(model)


def _gelu(erf: ir.Node) -> tuple[_Multiple, ir.Node] | None:
    """What an Erf is of, and the last node of the GELU that it is in; None if it is in none, or in PyTorch's form."""
    gate = only_reader(erf.outputs[0], "Add", "Sub")
    product = only_reader(gate.outputs[0], "Mul") if gate is not None else None
    if gate is None or product is None or product.graph is not erf.graph or None in erf.inputs:
        return None
    ones = [scalar(value) for value in gate.inputs]
    sign = 1 if gate.op_type == "Add" else -1
    if ones not in ([1, None], [None, 1]) or (sign < 0 and ones[1] == 1):
        return None
    other = product.inputs[1 if product.inputs[0] is gate.outputs[0] else 0]
    scaled = _scaled(product)
    for inner in _multiples(erf.inputs[0]):
        for outer in _multiples(other):
            last, factor = (product, 1.0) if outer.factor == 0.5 else scaled  # one half is enough
            if (inner.x, inner.axes) != (outer.x, outer.axes) or outer.factor * factor != 0.5:
                continue
            inner = inner._replace(factor=sign * inner.factor)
            if not math.isclose(inner.factor, math.sqrt(0.5), rel_tol=CLOSE) or inner.x.dtype is None:
                continue
            shape = sizes(inner.x)
            if shape is None or sizes(last.outputs[0]) != tuple(shape[axis] for axis in inner.axes):
                continue  # a constant has more axes than x
            return None if _is_fused(erf, inner.x, gate) else (inner, last)
    return None


def _is_fused(erf: ir.Node, x: ir.Value, gate: ir.Node) -> bool:
    """Whether the erf is of x divided by a number, and 1 is added to it."""
    quotient = made_by(erf.inputs[0], "Div")
    return quotient is not None and quotient.inputs[0] is x and gate.op_type == "Add"


def _scaled(product: ir.Node) -> tuple[ir.Node, float]:
    """The node that alone reads a product, if it multiplies it by a number, and that; the product's own if not."""
    after = only_reader(product.outputs[0], "Mul", "Div")
    number = _factor(after, product.outputs[0]) if after is not None else None
    return (product, 1.0) if after is None or number is None else (after, number)


def _factor(node: ir.Node, x: ir.Value | None) -> float | None:
    """What a Neg, Mul or Div multiplies x by; None if that is no number."""
    if node.op_type == "Neg":
        return -1.0
    number = scalar(node.inputs[1 if node.inputs[0] is x else 0])
    if node.op_type == "Mul":
        return number
    return 1 / number if number and node.inputs[0] is x else None


def _multiples(value: ir.Value | None) -> list[_Multiple]:
    """What a value is a multiple of, nearest first: itself, and what lies before Neg, Mul, Div and Transpose."""
    if value is None or not rank_of(value):
        return []
    found = [_Multiple(value, tuple(range(rank_of(value))), 1.0)]
    while (node := made_by(found[-1].x, "Neg", "Mul", "Div", "Transpose")) is not None:
        here, factor = found[-1], 1.0
        axes = here.axes
        if node.op_type == "Transpose":
            x, order = node.inputs[0], perm_of(node, len(axes))
            axes = tuple(order[axis] for axis in axes)
        else:
            pairs = [(each, _factor(node, each)) for each in node.inputs]
            x, number = next(((each, number) for each, number in pairs if number is not None), (None, None))
            factor = number or 0.0
        if x is None or not factor or rank_of(x) != len(axes):
            break
        found.append(_Multiple(x, axes, here.factor * factor))
    return found


GELU = Rewrite("gelu", "0.5 x (1 + erf(x / sqrt(2))), or with erfc's 1 - erf, or with a product by 0.7071", apply)
