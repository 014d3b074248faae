"""Move a number that multiplies a product of two values, or one of them, to where a layer absorbs the number.

    s (q k^T) = (s q) k^T        s (a * b) = (s a) * b        (s q) k^T = q (s k)^T        s (x + C) = s x + s C
    s ((q / n) k^T) = (q / (n / s)) k^T

Networks scale attention in several ways. The layer that computes queries or keys takes the number, where only views and
selections lie between. In cosine attention (Swin V2), the norms of queries or keys take a number for each head. In SAM,
relative positions read the queries without the scale, so that the keys take it. In deformable attention, the positions
C around which a layer samples are added before they are scaled.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from repaconv.graph.index_selections import swaps_last
from repaconv.graph.nodes_and_constants import (
    Writer,
    constant,
    is_constant,
    is_read_once,
    made_by,
    nodes_of,
    only_reader,
    scalar,
)
from repaconv.graph.operator_facts import IMAGE_NORMS, MOVES, ROW_NORMS, SELECTIONS
from repaconv.graph.symbolic_shapes import Sizes, shaped_like, sizes

if TYPE_CHECKING:
    import onnx_ir as ir


def move_before_products(model: ir.Model) -> list[tuple[str, str]]:
    """Move numbers to before the products that they multiply, where a layer absorbs them; in place.

    Returns:
        Name and operator of each node that multiplied or divided.
    """
    ways = (_move, _move_over, _move_before_sum, _move_into_divisor)
    floats = [node for node in nodes_of(model, "Mul", "Div") if not _is_of_integers(node)]
    moved = [node for node in floats if any(way(model, node) for way in ways)]
    return [(node.name or "", node.op_type) for node in moved]


def _is_of_integers(node: ir.Node) -> bool:
    """Whether a node multiplies or divides integers, of which a quotient is rounded."""
    kind = node.outputs[0].dtype
    return kind is not None and not kind.is_floating_point()


def _move(model: ir.Model, node: ir.Node) -> bool:
    """Multiply a factor of the product that a node multiplies by a number; False if no layer would absorb that."""
    x, number = _scaled(node)
    product = made_by(x, "MatMul", "Mul", "Div")
    if product is None:
        return False
    if only_reader(product.outputs[0]) is None or sizes(product.outputs[0]) != sizes(node.outputs[0]):
        return False
    factors = product.inputs[:1] if product.op_type == "Div" else product.inputs
    at = next((at for at, value in enumerate(factors) if _is_of_layer(value)), None)
    if at is None or any(map(is_constant, product.inputs)):
        return False
    product.replace_input_with(at, _written(Writer(model, product), node.op_type, product.inputs[at], number))
    Writer(model, node).replace(node.outputs[0], product.outputs[0])
    return True


def _move_over(model: ir.Model, node: ir.Node) -> bool:
    """Multiply the other factor of a product by the number of a node, if only a layer there absorbs it."""
    (x, number), product = _scaled(node), only_reader(node.outputs[0], "MatMul")
    if x is None or product is None:
        return False
    at = 0 if product.inputs[0] is node.outputs[0] else 1
    other = product.inputs[1 - at]
    if sizes(x) != sizes(node.outputs[0]) or _is_of_layer(x) or not _is_of_layer(other):
        return False
    scaled = _written(Writer(model, product), node.op_type, other, number)
    product.replace_input_with(at, x)
    product.replace_input_with(1 - at, scaled)
    return True


def _move_before_sum(model: ir.Model, node: ir.Node) -> bool:
    """Multiply both terms of a sum of a value and a constant that varies along several axes by the number of a node."""
    scaled, number = _scaled(node)
    total = made_by(scaled, "Add", "Sub")
    if total is None:
        return False
    at = next((at for at, value in enumerate(total.inputs) if is_constant(value)), None)
    added, x = (None, None) if at is None else (total.inputs[at], total.inputs[1 - at])
    if at is None or added is None or x is None or len(added.uses()) > 1 or only_reader(total.outputs[0]) is None:
        return False
    given, shape = constant(added), sizes(total.outputs[0])
    if given is None or sum(size > 1 for size in given.shape) < 2 or not shape == sizes(node.outputs[0]) == sizes(x):
        return False  # the linear graph takes what varies along one axis
    if not _is_of_layer(x):
        return False
    write = Writer(model, total)
    factor = number if node.op_type == "Mul" else 1 / number
    total.replace_input_with(at, write.constant(given * factor, like=added))
    total.replace_input_with(1 - at, _written(write, node.op_type, x, number))
    Writer(model, node).replace(node.outputs[0], total.outputs[0])
    return True


def _move_into_divisor(model: ir.Model, node: ir.Node) -> bool:
    """Divide the divisors of a factor's rows by the numbers by which a node multiplies the matrices of a product.

    The product is that of cosine attention, whose rows are divided by their norms; each head has a number. One number
    for all matrices stays after the product: a runtime multiplies by it in the product.
    """
    at = 0 if is_constant(node.inputs[0]) else 1
    x, given = node.inputs[1 - at], constant(node.inputs[at])
    product, shape = made_by(x, "MatMul"), sizes(node.outputs[0])
    if product is None or given is None or shape is None or only_reader(product.outputs[0]) is None:
        return False
    if (node.op_type == "Div" and at == 0) or sizes(x) != shape or given.size < 2 or set(given.shape[-2:]) != {1}:
        return False
    if not given.all() or not np.isfinite(given).all():
        return False
    division = next(filter(None, (_division(value, shape) for value in product.inputs)), None)
    if division is None:
        return False
    write, divisor = Writer(model, division), division.inputs[1]
    assert divisor is not None
    numbers = 1 / given if node.op_type == "Mul" else given
    division.replace_input_with(1, shaped_like(write("Mul", divisor, write.constant(numbers)), divisor))
    Writer(model, node).replace(node.outputs[0], product.outputs[0])
    return True


def _division(factor: ir.Value | None, shape: Sizes) -> ir.Node | None:
    """The Div that computes a factor of a product [*batch, rows, columns] and divides each row by one computed number.

    None if there is no such Div, or if something else reads its result or the factor.
    """
    turned = made_by(factor, "Transpose") if is_read_once(factor) else None
    factor = turned.inputs[0] if turned is not None and swaps_last(turned) else factor
    division = made_by(factor, "Div") if is_read_once(factor) else None
    if division is None or is_constant(division.inputs[1]):
        return None
    divided = sizes(division.outputs[0])
    alike = divided is not None and divided[:-2] == shape[:-2] and sizes(division.inputs[1]) == (*divided[:-1], 1)
    return division if alike else None


def _scaled(node: ir.Node) -> tuple[ir.Value | None, float]:
    """The value that a node multiplies or divides by a finite number other than 0, and the number; None for others."""
    numbers = [scalar(value) for value in node.inputs]
    place = 0 if numbers[0] is None else 1
    number = numbers[1 - place]
    if not number or not math.isfinite(number) or (node.op_type == "Div" and place == 1):
        return None, 1.0
    return node.inputs[place], number


def _written(write: Writer, operator: str, x: ir.Value | None, number: float) -> ir.Value:
    """Write a value multiplied or divided by a number."""
    assert x is not None
    return shaped_like(write(operator, x, write.constant(number, like=x)), x)


def _is_of_layer(value: ir.Value | None) -> bool:
    """Whether a layer that can absorb a number computes a value, directly or through views and selections.

    The values between have no other reader, except that a selection's source may have other selections.
    """
    selected = False
    while value is not None and not value.is_graph_output():
        readers = value.consumers()
        if len(value.uses()) > 1 and not (selected and all(user.op_type in MOVES for user in readers)):
            return False
        node = value.producer()
        if node is None or node.domain:
            return False
        if node.op_type in MOVES:
            selected = selected or node.op_type in SELECTIONS
            value = node.inputs[0]
        elif node.op_type in ("Add", "Sub") and any(map(is_constant, node.inputs)):
            value = node.inputs[1 if is_constant(node.inputs[0]) else 0]
        else:
            return _absorbs(node)
    return False


def _absorbs(node: ir.Node) -> bool:
    """Whether a number can go into the constants of a node, which no other node shares."""
    if node.op_type in ("Mul", "Div"):
        return is_constant(node.inputs[1]) or (node.op_type == "Mul" and is_constant(node.inputs[0]))
    if node.op_type not in ("MatMul", "Conv", "BatchNormalization", *ROW_NORMS, *IMAGE_NORMS):
        return False
    given = node.inputs[1]
    return given is not None and is_constant(given) and (node.op_type in ROW_NORMS or len(given.uses()) == 1)
