"""Channel axes of values, per-channel constants, and nodes that scale and shift channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from repaconv.algebra.channel_maps import Vector, channel_vector
from repaconv.graph.nodes_and_constants import Array, Writer, attribute, constant, is_constant
from repaconv.graph.operator_facts import ARITHMETIC, EPSILON
from repaconv.graph.symbolic_shapes import rank_of, shaped_like, sizes

if TYPE_CHECKING:
    import onnx_ir as ir

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
    whole = np.array(numbers, ndmin=len(shape))
    width = shape[place]
    return channel_vector(whole, place, width) if isinstance(width, int) else None


def batchnorm(node: ir.Node) -> tuple[Vector, Vector] | None:
    """Return scale and shift of a BatchNormalization with constant statistics; None if they are not finite."""
    parts = [constant(value) for value in node.inputs[1:]]
    if any(part is None for part in parts) or len(parts) != 4 or attribute(node, "training_mode", 0):
        return None
    gamma, beta, mean, variance = (part for part in parts if part is not None)
    with np.errstate(all="ignore"):
        scale = gamma / np.sqrt(variance + float(attribute(node, "epsilon", EPSILON)))
        shift = beta - mean * scale
    return (scale, shift) if np.isfinite(scale).all() and np.isfinite(shift).all() else None


def write_batchnorm(write: Writer, x: ir.Value, scale: Vector, shift: Vector) -> ir.Value:
    """Write a scale and a shift as one BatchNormalization with mean 0 and variance 1 - epsilon."""
    width = len(scale)
    parts = (scale, shift, np.zeros(width), np.full(width, 1 - EPSILON))
    return shaped_like(write("BatchNormalization", x, *map(write.constant, parts), epsilon=EPSILON), x)


class ScaleAndShift(NamedTuple):
    """x scale + shift, constants with one size per axis of x: the axis's own, or 1 if they are the same along it."""

    scale: Array
    shift: Array | None

    def moved(self, move: Callable[[Array], Array | None]) -> ScaleAndShift | None:
        """The map with both constants as they act on another value; None if one of them cannot act there."""
        scale, shift = move(self.scale), None if self.shift is None else move(self.shift)
        return None if scale is None or (shift is None) != (self.shift is None) else ScaleAndShift(scale, shift)


def affine_of(
    node: ir.Node, numbers: Callable[[ir.Value | None], Array | None] = constant
) -> tuple[ir.Value, ScaleAndShift] | None:
    """Return the input of a BatchNormalization, Neg, Mul, Div, Add or Sub, and its constants; None without constants.

    ``numbers`` reads a constant.
    """
    out, rank = node.outputs[0], rank_of(node.outputs[0])
    if node.domain or node.op_type not in ("BatchNormalization", "Neg", *ARITHMETIC):
        return None
    if node.op_type == "Neg":
        x = node.inputs[0]
        floats = x is not None and not is_constant(x) and x.dtype is not None and x.dtype.is_floating_point()
        return (x, ScaleAndShift(np.full((1,) * rank, -1.0), None)) if x is not None and floats and rank else None
    if node.op_type == "BatchNormalization":
        both, x = batchnorm(node), node.inputs[0]
        column = (1, -1, *[1] * (rank - 2))  # channels are axis 1 of an output of unknown rank, too
        return (
            (x, ScaleAndShift(*(part.reshape(column) for part in both))) if both is not None and x is not None else None
        )
    for place in (0, 1):
        x, given = node.inputs[place], numbers(node.inputs[1 - place])
        if x is None or is_constant(x) or not sizes(x) == sizes(out) is not None:
            continue
        if given is None or given.dtype.kind != "f" or not given.size:
            continue
        number = _without_constant_axes(np.array(given, ndmin=rank))
        if node.op_type == "Mul":
            return x, ScaleAndShift(number, None)
        if node.op_type == "Div":
            return (x, ScaleAndShift(1 / number, None)) if place == 0 and number.all() else None
        one, minus = np.ones_like(number), node.op_type == "Sub"
        shift = -number if minus and not place else number
        if np.isposinf(shift).any():  # no mask: in a bias, it is refused as that of a network that diverged
            return None
        return x, ScaleAndShift(-one if minus and place else one, shift)
    return None


def _without_constant_axes(numbers: Array) -> Array:
    """Return a constant without the axes along which it is the same: exporters may write it as large as an image."""
    for axis in range(numbers.ndim):
        first = numbers.take([0], axis)
        numbers = first if (numbers == first).all() else numbers
    return numbers


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
        node: A BatchNormalization, whose channel axis is always 1, a Neg, or an Add, Sub, Mul or Div with a constant.
        axis: `LAST` or `IMAGE`.
        least: See `channel_axis`.
        numbers: Reads the constant.
    """
    found = affine_of(node, numbers)
    if found is None:
        return None
    x, affine = found
    if node.op_type == "BatchNormalization":
        scale, shift = (None if part is None else part.reshape(-1) for part in affine)
    else:
        scale, shift = (None if part is None else per_channel(part, node.outputs[0], axis, least) for part in affine)
    return None if scale is None or (shift is None) != (affine.shift is None) else Scaled(x, scale, shift)
