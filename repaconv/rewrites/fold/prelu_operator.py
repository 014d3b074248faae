"""prelu: write an activation of two slopes, one for each sign, as one operator.

    relu(x) - a relu(-x) = relu(x) + a (x - |x|) / 2 = prelu(x, a),    max(x, a x) = leaky_relu(x, a)  if a <= 1

Keras writes PReLU in the first way, and code for TensorFlow in the others. ONNX Runtime fuses none of them, and
computes a LeakyRelu inside the convolution before it.

Each of these operators is a multiple of x where x > 0, and another one where x < 0. Constants multiply both slopes,
sums add them, and a Relu, an Abs, a maximum or a minimum chooses for each sign.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from repaconv.graph.models_in_onnx_ir import clean
from repaconv.graph.nodes_and_constants import Array, Writer, constant, is_constant, is_read_once, nodes_of
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import shaped_like, sizes
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir

MOST_STEPS = 8
"""Operators in a row that are followed; six are usual."""


class _Slopes(NamedTuple):
    """A value that is a multiple of x for each sign of x.

    Attributes:
        x: The value x.
        up: What x is multiplied by where it is positive.
        down: What x is multiplied by where it is negative.
        nodes: The operators between x and the value.
    """

    x: ir.Value
    up: Array
    down: Array
    nodes: frozenset[ir.Node]


def apply(model: ir.Model) -> Iterator[Change]:
    """Write PRelu, LeakyRelu or a multiple for operators that have its two slopes; in place."""
    for node in reversed(nodes_of(model, *_OF_TWO, "Mul", "Div")):
        found = _of_node(node, MOST_STEPS) if node.graph is not None else None
        if found is None or not any(one.op_type in _OF_TWO for one in found.nodes):
            continue
        if not sizes(node.outputs[0]) == sizes(found.x) is not None:
            continue  # a constant may have more axes than x
        new = _written(Writer(model, node), found)
        if new is None:
            continue
        operators = ", ".join(one.op_type for one in model.graph if one in found.nodes)
        activation = new.producer()
        assert activation is not None
        Writer(model, node).replace(node.outputs[0], new)
        model.graph.remove(node, safe=True)  # so that it reads nothing
        yield Change(rewrite=PRELU.name, place=node.name or "", description=f"{operators} -> {activation.op_type}")
    clean(model)


def _written(write: Writer, found: _Slopes) -> ir.Value | None:
    """The activation, and its product with the slope of positive numbers; None if that is no fewer operators."""
    factor = float(found.up.flat[0])
    if not (factor > 0 and (found.up == factor).all()) or len(found.nodes) < 2 + (factor != 1):
        return None
    with np.errstate(over="ignore"):
        slope = found.down / factor
    if not _is_in_range(np.append(slope, factor), found.x):
        return None
    only = float(slope.flat[0]) if (slope == slope.flat[0]).all() else None
    if only == 1:  # a product with a constant, which other rewrites fold
        return None
    if only in _OPERATORS:
        new = write(_OPERATORS[only], found.x)
    elif only is not None and float(np.float32(only)) == only:  # an attribute is a float32
        new = write("LeakyRelu", found.x, alpha=only)
    else:
        new = write("PRelu", found.x, write.constant(slope, found.x))
    new = shaped_like(new, found.x)
    return new if factor == 1 else shaped_like(write("Mul", new, write.constant(factor, found.x)), new)


def _is_in_range(numbers: Array, x: ir.Value) -> bool:
    """Whether none of these numbers becomes zero, infinite or NaN in the type of x, of float64 in float32."""
    kind = np.float16 if x.dtype is not None and x.dtype.name == "FLOAT16" else np.float32
    with np.errstate(over="ignore", under="ignore"):
        rounded = numbers.astype(kind)
    return bool(np.isfinite(rounded).all()) and np.array_equal(rounded != 0, numbers != 0)


_OPERATORS: dict[float | None, str] = {0.0: "Relu", -1.0: "Abs"}


def _of_node(node: ir.Node, steps: int) -> _Slopes | None:
    """The slopes of a node's output; None if it is not a multiple of one value for each sign."""
    if node.domain or not steps:
        return None
    if node.op_type in _OF_ONE:
        inner = _of_value(node.inputs[0], steps)
        return inner and _Slopes(inner.x, *_OF_ONE[node.op_type](inner), inner.nodes | {node})
    if node.op_type in ("Mul", "Div"):
        return _scaled(node, steps)
    if node.op_type not in _OF_TWO or len(node.inputs) != 2 or any(map(is_constant, node.inputs)):
        return None
    first = _of_value(node.inputs[0], steps)
    second = _of_value(node.inputs[1], steps) if first is not None else None
    if first is None or second is None or first.x is not second.x:
        return None
    return _Slopes(first.x, *_OF_TWO[node.op_type](first, second), first.nodes | second.nodes | {node})


def _of_value(value: ir.Value | None, steps: int) -> _Slopes | None:
    """The slopes of a value that one operator reads; any other value is the x of others."""
    if value is None or value.dtype is None or value.dtype.name not in ("FLOAT", "DOUBLE", "FLOAT16"):
        return None
    node = value.producer()
    inner = _of_node(node, steps - 1) if node is not None and is_read_once(value) else None
    return inner or _Slopes(value, np.ones(()), np.ones(()), frozenset())


def _scaled(node: ir.Node, steps: int) -> _Slopes | None:
    """The slopes of a product with a constant, or of a quotient by one."""
    values = [value for value in node.inputs if not is_constant(value)]
    if len(values) != 1 or (node.op_type == "Div" and node.inputs[0] is not values[0]):
        return None
    inner = _of_value(values[0], steps)
    factor = constant(node.inputs[1 if node.inputs[0] is values[0] else 0])
    if inner is None or factor is None:
        return None
    with np.errstate(all="ignore"):
        factor = 1 / factor if node.op_type == "Div" else factor
        slopes = inner.up * factor, inner.down * factor
    if not all(np.isfinite(each).all() for each in slopes):  # their product with zero would be NaN
        return None
    return _Slopes(inner.x, *slopes, inner.nodes | {node})


_OF_ONE: dict[str, Callable[[_Slopes], tuple[Array, Array]]] = {
    "Neg": lambda f: (-f.up, -f.down),
    "Relu": lambda f: (np.maximum(f.up, 0), np.minimum(f.down, 0)),
    "Abs": lambda f: (np.abs(f.up), -np.abs(f.down)),
}
_OF_TWO: dict[str, Callable[[_Slopes, _Slopes], tuple[Array, Array]]] = {
    "Add": lambda f, g: (f.up + g.up, f.down + g.down),
    "Sub": lambda f, g: (f.up - g.up, f.down - g.down),
    "Max": lambda f, g: (np.maximum(f.up, g.up), np.minimum(f.down, g.down)),
    "Min": lambda f, g: (np.minimum(f.up, g.up), np.maximum(f.down, g.down)),
}

PRELU = Rewrite("prelu", "an activation of two slopes that is written as several operators", apply)
