"""Read ONNX nodes (Conv, AveragePool, Pad, per-channel scales) as kernels of `repaconv.algebra.convolution_kernels`."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from repaconv.algebra.convolution_kernels import Kernel, eye
from repaconv.graph.channel_axes import IMAGE, scale_and_shift
from repaconv.graph.nodes_and_constants import Array, attribute, constant, input_at, is_constant, scalar, stored
from repaconv.graph.symbolic_shapes import sizes

if TYPE_CHECKING:
    import onnx_ir as ir

LAYERS = ("Conv", "ConvTranspose")
LEAST_RANK = 3
"""Smallest rank of an image that a convolution reads: [B, C, L]."""


def kernel_of(node: ir.Node) -> Kernel | None:
    """A Conv, AveragePool or Pad as a convolution kernel of its first input.

    Returns:
        The kernel. None if the weights are not constant, or if the node is no convolution at the image border, such as
        an average that does not count its padding, or a Pad with other values than zeros.
    """
    shape, out = sizes(node.inputs[0]), sizes(node.outputs[0])
    padded = any(attribute(node, "pads", (0,)))
    auto = attribute(node, "auto_pad", "NOTSET")
    if node.domain or shape is None or out is None or len(shape) != len(out) or auto not in ("NOTSET", "VALID"):
        return None
    if node.op_type == "Conv":
        return _convolution(node, len(shape) - 2)
    counted = attribute(node, "count_include_pad", 0) or not padded
    width = shape[1] if len(shape) > 2 else None
    if node.op_type == "Pad" and isinstance(width, int):
        pads, fill = spatial_padding(node), pad_value(node)
        return None if pads is None or fill != 0 else eye(width, len(shape)).around(pads)
    if node.op_type != "AveragePool" or not counted or attribute(node, "ceil_mode", 0) or not isinstance(width, int):
        return None
    size = tuple(attribute(node, "kernel_shape", ()))
    mean = _placed(node, np.full((width, 1, *size), 1 / prod(size)), None, width)
    return replace(mean, learnt=0)


def weight_and_bias(node: ir.Node) -> tuple[Array, Array | None] | None:
    """The weight and bias of a Conv, or of a ConvTranspose without groups.

    Returns:
        The weight [outputs, inputs of a group, ...] in its own type, and the bias in float64, None if there is none.
        None for other nodes, and if the weight or bias is computed.
    """
    weight, given = input_at(node, 1), input_at(node, 2)
    if node.op_type not in LAYERS or node.domain or weight is None or not is_constant(weight):
        return None
    bias = constant(given)
    if given is not None and bias is None:
        return None
    numbers = stored(weight)
    return numbers if node.op_type == "Conv" else numbers.swapaxes(0, 1), bias


def is_padded(node: ir.Node) -> bool:
    """Whether a convolution or a pool pads its image."""
    return any(attribute(node, "pads", (0,))) or attribute(node, "auto_pad", "NOTSET") not in ("NOTSET", "VALID")


def counts_padding(node: ir.Node) -> bool:
    """Whether an AveragePool counts padding, so that a constant would be smaller at the border."""
    return bool(attribute(node, "count_include_pad", 0)) and (is_padded(node) or bool(attribute(node, "ceil_mode", 0)))


def resizes_pixels_only(resize: ir.Node) -> bool:
    """Whether a Resize makes every pixel a mean of pixels of its channel, with weights that add up to 1."""
    before, after = sizes(resize.inputs[0]), sizes(resize.outputs[0])
    crops = attribute(resize, "coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize"
    if before is None or after is None or len(before) < 3 or before[:2] != after[:2] or crops:
        return False
    axes = [int(axis) % len(before) for axis in attribute(resize, "axes", range(len(before)))]
    if min(axes) > 1:
        return True
    if input_at(resize, 3) is not None:
        return bool(attribute(resize, "keep_aspect_ratio_policy", "stretch") == "stretch")
    scales = constant(input_at(resize, 2))
    # 4 channels times 1.2 are 4, of other values
    return scales is not None and all(scale == 1 for axis, scale in zip(axes, scales, strict=False) if axis < 2)


def spatial_padding(pad: ir.Node) -> list[int] | None:
    """The constant spatial padding of a Pad, before and after every axis; None if it pads other axes or crops."""
    given = constant(pad.inputs[1])
    if given is None or given.size % 2 or given.size < 6 or any(value is not None for value in pad.inputs[3:]):
        return None
    begin, end = given.reshape(2, -1).astype(int).tolist()
    whole = not any((*begin[:2], *end[:2])) and min(*begin, *end) >= 0 and any((*begin, *end))
    return [*begin[2:], *end[2:]] if whole and attribute(pad, "mode", "constant") in ("constant", b"constant") else None


def pad_value(pad: ir.Node) -> float | None:
    """The number that a Pad writes; None if it is computed."""
    return scalar(pad.inputs[2]) if input_at(pad, 2) is not None else 0.0


def _convolution(node: ir.Node, axes: int) -> Kernel | None:
    weight, given = constant(node.inputs[1]), input_at(node, 2)
    bias = constant(given)
    if weight is None or weight.ndim != axes + 2 or (given is not None and bias is None):
        return None
    return _placed(node, weight, bias, int(attribute(node, "group", 1)))


def _placed(node: ir.Node, weight: Array, bias: Array | None, groups: int) -> Kernel:
    strides, pads, dilations = (attribute(node, name, None) for name in ("strides", "pads", "dilations"))
    return Kernel.convolution(weight, bias, groups=groups, strides=strides, pads=pads, dilations=dilations)


def scale_of(node: ir.Node) -> Kernel | None:
    """A per-channel scale and shift of an image as a 1x1 depthwise kernel; None if the node is none."""
    found = scale_and_shift(node, IMAGE, LEAST_RANK)
    shape = sizes(found.x) if found is not None else None
    if found is None or shape is None or any(value.uses() for value in node.outputs[1:]):
        return None
    width = len(found.scale)
    return replace(eye(width, len(shape)).then(found.scale, found.shift), learnt=width)
