"""Read ONNX nodes (Conv, AveragePool, per-channel scales) as kernels of `repaconv.algebra.convolution_kernels`."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from repaconv.algebra.convolution_kernels import Kernel, eye
from repaconv.graph.channel_axes import IMAGE, scale_and_shift
from repaconv.graph.nodes_and_constants import Array, attribute, constant
from repaconv.graph.symbolic_shapes import sizes

if TYPE_CHECKING:
    import onnx_ir as ir


def kernel_of(node: ir.Node) -> Kernel | None:
    """A Conv or AveragePool as a convolution kernel of its first input.

    Returns:
        The kernel. None if the weights are not constant, or if the node is no convolution at the image border, such as
        an average that does not count its padding.
    """
    shape, out = sizes(node.inputs[0]), sizes(node.outputs[0])
    padded = any(attribute(node, "pads", (0,)))
    auto = attribute(node, "auto_pad", "NOTSET")
    if node.domain or shape is None or out is None or len(shape) != len(out) or auto not in ("NOTSET", "VALID"):
        return None
    if node.op_type == "Conv":
        return _convolution(node, len(shape) - 2)
    counted = attribute(node, "count_include_pad", 0) or not padded
    width = shape[1]
    if node.op_type != "AveragePool" or not counted or attribute(node, "ceil_mode", 0) or not isinstance(width, int):
        return None
    size = tuple(attribute(node, "kernel_shape", ()))
    mean = _placed(node, np.full((width, 1, *size), 1 / prod(size)), None, width)
    return replace(mean, learnt=0)


def _convolution(node: ir.Node, axes: int) -> Kernel | None:
    weight, given = constant(node.inputs[1]), node.inputs[2] if len(node.inputs) > 2 else None
    bias = constant(given)
    if weight is None or weight.ndim != axes + 2 or (given is not None and bias is None):
        return None
    return _placed(node, weight, bias, int(attribute(node, "group", 1)))


def _placed(node: ir.Node, weight: Array, bias: Array | None, groups: int) -> Kernel:
    strides, pads, dilations = (attribute(node, name, None) for name in ("strides", "pads", "dilations"))
    return Kernel.convolution(weight, bias, groups=groups, strides=strides, pads=pads, dilations=dilations)


def scale_of(node: ir.Node) -> Kernel | None:
    """A per-channel scale and shift of an image as a 1x1 depthwise kernel; None if the node is none."""
    found = scale_and_shift(node, IMAGE)
    shape = sizes(found.x) if found is not None else None
    if found is None or shape is None or any(value.uses() for value in node.outputs[1:]):
        return None
    width = len(found.scale)
    return replace(eye(width, len(shape)).then(found.scale, found.shift), learnt=width)
