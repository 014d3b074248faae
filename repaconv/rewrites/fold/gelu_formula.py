"""gelu: write GELU so that ONNX Runtime computes it as one operator.

    x / 2 erfc(-c x)  =  x / 2 (1 - erf(-c x))  =  x / 2 (1 + erf(x / (1 / c))),    c = 0.7071...
    x / 2 (1 + tanh(k (x + a x^3))),    k = sqrt(2 / pi),    a = 0.044715

ONNX Runtime fuses only some forms. By erf, one that divides x, and halves x or the product; TensorFlow, Keras and JAX
multiply x by c, and use erfc, and PyTorch's exporter halves 1 + erf before opset 20. By tanh, one where x^3 is a Pow
and x is halved first, as in transformers; others write x x x, or x (1 + a x x), or halve the sum with 1 (JAX).
tf2onnx also writes the same Transpose before every operator of an image: here it follows the activation.

Source: Hendrycks and Gimpel 2016, "Gaussian Error Linear Units (GELUs)", section 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from repaconv.graph.index_selections import perm_of
from repaconv.graph.models_in_onnx_ir import clean
from repaconv.graph.nodes_and_constants import Array, Writer, is_constant, made_by, nodes_of, only_reader, scalar
from repaconv.graph.operator_facts import ARITHMETIC
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import rank_of, shaped_like, sizes
from repaconv.graph.tensor_views import transposed
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir

CLOSE = 1e-6
"""How far c, k and a may be from those numbers, relatively: they are rounded to float32. The graph's own ones stay."""
FACTORS = {"Erf": (0, math.sqrt(0.5)), "Tanh": (0, math.sqrt(2 / math.pi), 0, math.sqrt(2 / math.pi) * 0.044715)}
"""The argument of each function in GELU, as the factors of x^0, x, ..."""
DEPTH = 12
"""The longest chain of operators that is followed."""


class _Multiple(NamedTuple):
    """A value as factor x, with the axes of x in an order."""

    x: ir.Value
    axes: tuple[int, ...]
    factor: float


class _Polynomial(NamedTuple):
    """A value as a sum of powers of x, with the axes of x in an order; None for a number."""

    axes: tuple[int, ...] | None
    factors: Array


class _Gelu(NamedTuple):
    """A GELU of x, with its axes in an order, its last node, and the factors of its function's argument."""

    x: ir.Value
    axes: tuple[int, ...]
    factors: list[float]
    last: ir.Node


def apply(model: ir.Model) -> Iterator[Change]:
    """Write GELU as PyTorch or transformers do wherever other operators compute it by erf or tanh; in place."""
    for bent in nodes_of(model, *FACTORS):
        found = _gelu(bent)
        if found is None:
            continue
        x = found.x
        write = Writer(model, found.last)

        def step(operator: str, *inputs: ir.Value | float, write: Writer = write, x: ir.Value = x) -> ir.Value:
            values = [write.constant(each, x) if isinstance(each, float) else each for each in inputs]
            return shaped_like(write(operator, *values), x)

        if bent.op_type == "Erf":
            inner = step("Div", x, 1 / found.factors[1])
        else:
            cube = step("Mul", step("Pow", x, 3.0), found.factors[3] / found.factors[1])
            inner = step("Mul", step("Add", x, cube), found.factors[1])
        gate = step("Add", step(bent.op_type, inner), 1.0)
        new = step("Mul", step("Mul", x, 0.5), gate)
        write.replace(found.last.outputs[0], transposed(write, new, found.axes))
        description = f"{bent.op_type.lower()} of {'a multiple' if bent.op_type == 'Erf' else 'powers'} of x -> GELU"
        yield Change(rewrite=GELU.name, place=bent.name or "", description=description)
    clean(model)


def _gelu(bent: ir.Node) -> _Gelu | None:
    """Return the GELU that contains an Erf or a Tanh; None if there is none, or if it is in a form that is fused."""
    gate = only_reader(bent.outputs[0], "Add", "Sub")
    scaled = _scaled(gate) if gate is not None else None
    product = only_reader(scaled[0].outputs[0], "Mul") if scaled is not None else None
    if gate is None or scaled is None or product is None or product.graph is not bent.graph or None in bent.inputs:
        return None
    ones = [scalar(value) for value in gate.inputs]
    sign = 1 if gate.op_type == "Add" else -1
    if ones not in ([1, None], [None, 1]) or (sign < 0 and ones[1] == 1):
        return None
    gated = scaled[0].outputs[0]
    other = product.inputs[1 if product.inputs[0] is gated else 0]
    scaled_product = _scaled(product)
    for outer in _multiples(other):
        half = outer.factor * scaled[1]
        last, factor = (product, 1.0) if half == 0.5 else scaled_product  # one half is enough
        x, shape = outer.x, sizes(outer.x)
        inner = _polynomial(bent.inputs[0], x)
        if half * factor != 0.5 or inner is None or inner.axes != outer.axes or x.dtype is None or shape is None:
            continue
        factors, wanted = sign * inner.factors, FACTORS[bent.op_type]
        if factors.shape != np.shape(wanted) or not np.allclose(factors, wanted, rtol=CLOSE, atol=0):
            continue
        if sizes(last.outputs[0]) != tuple(shape[axis] for axis in outer.axes):
            continue  # a constant has more axes than x
        halved_later = bent.op_type == "Erf" or last is product  # than x is multiplied by 1 + erf or 1 + tanh
        fused = gated is gate.outputs[0] and halved_later and _is_fused(bent, x, gate)
        return None if fused else _Gelu(x, outer.axes, factors.tolist(), last)
    return None


def _is_fused(bent: ir.Node, x: ir.Value, gate: ir.Node) -> bool:
    """Whether 1 is added to an erf of x divided by a number, or to a tanh of a number times x + a Pow(x, 3)."""
    if gate.op_type != "Add" or any(rank_of(value) > 1 for value in gate.inputs if is_constant(value)):
        return False
    if bent.op_type == "Erf":
        quotient = made_by(bent.inputs[0], "Div")
        return quotient is not None and quotient.inputs[0] is x
    product = made_by(bent.inputs[0], "Mul")
    added = made_by(_scaled_input(product)[0], "Add") if product is not None else None
    cubes = [value for value in added.inputs if value is not x] if added is not None else []
    cube = made_by(cubes[0], "Mul") if len(cubes) == 1 else None
    power = made_by(_scaled_input(cube)[0], "Pow") if cube is not None else None
    return power is not None and power.inputs[0] is x


def _scaled(node: ir.Node) -> tuple[ir.Node, float]:
    """Return the only reader of a node and its number if it multiplies by one; else the node itself and 1."""
    after = only_reader(node.outputs[0], "Mul", "Div")
    number = _factor(after, node.outputs[0]) if after is not None else None
    return (node, 1.0) if after is None or number is None else (after, number)


def _factor(node: ir.Node, x: ir.Value | None) -> float | None:
    """The number by which a Neg, Mul or Div multiplies x; None if x is not multiplied by a number."""
    if node.op_type == "Neg":
        return -1.0
    number = scalar(node.inputs[1 if node.inputs[0] is x else 0])
    if node.op_type == "Mul":
        return number
    return 1 / number if number and node.inputs[0] is x else None


def _scaled_input(node: ir.Node) -> tuple[ir.Value | None, float]:
    """Return the input that a Neg, Mul or Div multiplies by a number, and the number; None and 0 if there is none."""
    pairs = ((each, _factor(node, each)) for each in node.inputs)
    return next(((each, number) for each, number in pairs if number is not None), (None, 0.0))


def _multiples(value: ir.Value | None) -> list[_Multiple]:
    """The values that a value is a multiple of: itself, then the inputs of Neg, Mul, Div and Transpose before it."""
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
            x, factor = _scaled_input(node)
        if x is None or not factor or rank_of(x) != len(axes):
            break
        found.append(_Multiple(x, axes, here.factor * factor))
    return found


def _polynomial(value: ir.Value | None, x: ir.Value, depth: int = DEPTH) -> _Polynomial | None:
    """Read a value as a sum of powers of x; None if it is no such sum."""
    if value is x:
        return _Polynomial(tuple(range(rank_of(x))), np.array([0.0, 1.0]))
    if (number := scalar(value)) is not None:
        return _Polynomial(None, np.array([number]))
    node = made_by(value, *ARITHMETIC, "Neg", "Pow", "Transpose")
    parts = [_polynomial(each, x, depth - 1) for each in node.inputs] if node is not None and depth else []
    known = [part for part in parts if part is not None]
    if node is None or not known or len(known) < len(parts):
        return None
    orders = {part.axes for part in known if part.axes is not None}
    if len(orders) != 1:
        return None
    (axes,) = orders
    factors = _OPERATORS[node.op_type](*(part.factors for part in known))
    if factors is None or len(factors) > MOST_FACTORS:
        return None
    if node.op_type == "Transpose":
        if rank_of(value) != len(axes):
            return None  # a constant has more axes than x
        axes = tuple(axes[axis] for axis in perm_of(node, len(axes)))
    return _Polynomial(axes, np.polynomial.polyutils.trimseq(factors))


def _power(factors: Array, exponent: Array) -> Array | None:
    whole = exponent.tolist() in ([2], [3])
    return np.polynomial.polynomial.polypow(factors, int(exponent[0])) if whole else None


MOST_FACTORS = 8
"""The largest number of factors of a polynomial: up to x^7."""
_OPERATORS: dict[str, Callable[..., Array | None]] = {
    "Add": np.polynomial.polynomial.polyadd,
    "Sub": np.polynomial.polynomial.polysub,
    "Mul": np.polynomial.polynomial.polymul,
    "Div": lambda factors, by: factors / by if by.shape == (1,) and by[0] else None,
    "Neg": np.negative,
    "Pow": _power,
    "Transpose": np.array,
}

GELU = Rewrite(
    "gelu",
    "0.5 x (1 + erf(x / sqrt(2))), or with erfc's 1 - erf, or with a product by 0.7071; 0.5 x (1 + tanh(0.798 (x + "
    "0.0447 x^3)))",
    apply,
)
