"""Channel axes of values, per-channel constants, and nodes that scale and shift channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from repaconv.algebra.channel_maps import channel_vector
from repaconv.graph.nodes_and_constants import Array, attribute, constant, is_constant
from repaconv.graph.operator_facts import ARITHMETIC, EPSILON
from repaconv.graph.symbolic_shapes import sizes

if TYPE_CHECKING:
    import onnx_ir as ir

Vector = NDArray[np.float64]

LAST, IMAGE = -1, 1
"""Position of the channel axis: last (tokens and rows), or second (images, four dimensions and more)."""


def channel_axis(value: ir.Value, axis: int, least: int = 4) -> int | None:
    """Return the channel axis of a value, counted from 0, or None if it has none.

    ``least`` is the smallest rank that has channels at axis 1. It is 3 for the values of a one-dimensional
    convolution.
    """
    shape = sizes(value)
    if shape is None or len(shape) < (2 if axis == LAST else least):
        return None
    return len(shape) - 1 if axis == LAST else 1


def per_channel(numbers: Array | None, value: ir.Value, axis: int, least: int = 4) -> Vector | None:
    """Return a constant as one number per channel of a value, or None if it is not one. See `channel_axis`.

    An exporter may write a vector that is expanded to an image of fixed size as large as the image.
    """
    shape, place = sizes(value), channel_axis(value, axis, least)
    if numbers is None or shape is None or place is None or numbers.ndim > len(shape):
        return None
    whole = numbers.reshape((1,) * (len(shape) - numbers.ndim) + numbers.shape)
    width = shape[place]
    return channel_vector(whole, place, width) if isinstance(width, int) else None


def batchnorm(node: ir.Node) -> tuple[Vector, Vector] | None:
    """Return scale and shift of a BatchNormalization with constant statistics, or None."""
    parts = [constant(value) for value in node.inputs[1:]]
    if any(part is None for part in parts) or len(parts) != 4 or attribute(node, "training_mode", 0):
        return None
    gamma, beta, mean, variance = (part for part in parts if part is not None)
    scale = gamma / np.sqrt(variance + float(attribute(node, "epsilon", EPSILON)))
    return scale, beta - mean * scale


class Scaled(NamedTuple):
    """x scale + shift along channels, both [C]. ``shift`` is None if nothing is added."""

    x: ir.Value
    scale: Vector
    shift: Vector | None


def scale_and_shift(
    node: ir.Node, axis: int, least: int = 4, numbers: Callable[[ir.Value | None], Array | None] = constant
) -> Scaled | None:
    """Return what a node multiplies the channels of a value by and adds to them, or None.

    Args:
        node: A BatchNormalization, whose channel axis is always 1, or an Add, Sub, Mul or Div with a constant.
        axis: `LAST` or `IMAGE`.
        least: See `channel_axis`.
        numbers: Reads the constant.
    """
    if node.domain or node.op_type not in ("BatchNormalization", *ARITHMETIC):
        return None
    out = node.outputs[0]
    if node.op_type == "BatchNormalization":
        both, x = batchnorm(node), node.inputs[0]
        return None if both is None or x is None else Scaled(x, *both)
    for place in (0, 1):
        x, given = node.inputs[place], numbers(node.inputs[1 - place])
        vector = per_channel(given, out, axis, least) if given is not None and given.dtype.kind == "f" else None
        if x is None or vector is None or is_constant(x) or sizes(x) != sizes(out):
            continue
        if node.op_type == "Mul":
            return Scaled(x, vector, None)
        if node.op_type == "Div":
            return Scaled(x, 1 / vector, None) if place == 0 and vector.all() else None
        minus = node.op_type == "Sub"
        scale = np.full(len(vector), -1.0 if minus and place else 1.0)
        return Scaled(x, scale, -vector if minus and not place else vector)
    return None
