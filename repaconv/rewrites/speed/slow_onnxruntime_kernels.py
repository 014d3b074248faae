"""mish-as-quotient, prelu-as-sum, softmax-as-quotient, lrn-as-conv: fast operators of ONNX Runtime for slow ones.

Mish:        x tanh(log(1 + e^x)) = x n / (n + 2),   n = e (e + 2),   e = exp(min(x, 20))
PReLU:       max(0, x) + a min(0, x) = a x + max(0, (1 - a) x)   for a <= 1
                                     = a x + (1 - a) max(0, x)
Softmax:     exp(x - max x) / sum exp(x - max x)
LogSoftmax:  x - max x - log sum exp(x - max x)
LRN:         x / s^b,   s = k + a/n sum of x^2 over n channels,   s^(3/4) = sqrt(s sqrt(s))

From 20 on, the quotient of Mish is 1 also in float64. ONNX Runtime computes Softplus and powers number by number. A
Softmax over any other axis than the last is transposed by the runtime before and after; maxima and sums need not be.
The s of a local response normalization (LRN) is a 1x1 convolution of x^2.

A PReLU with one slope is a LeakyRelu, which the convolution before it computes. With one slope per channel of an image,
factors are depthwise 1x1 convolutions: they keep the blocked channel layout, which a PReLU leaves and enters again.
Elsewhere, with slopes of at most 1, it is the larger of x and a x. Inputs are taken to be finite. tf2onnx writes Keras'
PReLU as max(0, x) - a max(0, -x).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from repaconv.graph.nodes_and_constants import (
    Array,
    Writer,
    attribute,
    constant,
    is_read_once,
    made_by,
    nodes_of,
    scalar,
)
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import Sizes, known_product, rank_of, set_shape, shaped_like, sizes
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir

SATURATED_FROM = 20.0
"""From here on tanh(log(1 + e^x)) is 1 in float64; PyTorch's Softplus returns x from here on."""
SMALL_SOFTMAX = 1024
"""Numbers from which on a Softmax is written as a quotient."""
MOST_CHANNELS = 512
"""Channels up to which a product of all is faster than ONNX Runtime's LRN."""
IMAGE_AXES = 4
"""The number of axes of images [B, c, h, w]."""


def _mish_as_quotient(model: ir.Model) -> Iterator[Change]:
    for node in (*nodes_of(model, "Mish"), *nodes_of(model, "Mul")):
        x = node.inputs[0] if node.op_type == "Mish" else _of_mish(node)
        if x is None or not _is_plain(x):
            continue
        write = Writer(model, node)
        two = write.constant(2.0, x)
        power = write("Exp", write("Min", x, write.constant(SATURATED_FROM, x)))
        share = write("Mul", power, write("Add", power, two))
        write.replace(node.outputs[0], write("Mul", x, write("Div", share, write("Add", share, two))))
        yield Change(rewrite="mish-as-quotient", place=node.name or "", description="x n / (n + 2)")


def _of_mish(product: ir.Node) -> ir.Value | None:
    """The x of a product x tanh(softplus(x)), if nothing else reads its factor."""
    for x, factor in (product.inputs, product.inputs[::-1]):
        tanh = made_by(factor, "Tanh")
        if tanh is None or factor is None or not is_read_once(factor):
            continue
        if _softplus_of(tanh.inputs[0]) is x:
            return x
    return None


def _softplus_of(value: ir.Value | None) -> ir.Value | None:
    """The x of log(1 + e^x), also if that is x itself where x is above `SATURATED_FROM` or more."""
    where = made_by(value, "Where")
    if where is not None:
        test, x = made_by(where.inputs[0], "Greater"), where.inputs[1]
        limit = scalar(test.inputs[1]) if test is not None and test.inputs[0] is x else None
        return x if limit is not None and limit >= SATURATED_FROM and _softplus_of(where.inputs[2]) is x else None
    node = made_by(value, "Softplus")
    return node.inputs[0] if node is not None else None


def _prelu_as_sum(model: ir.Model) -> Iterator[Change]:
    for node in nodes_of(model, "PRelu", "Add", "Sub"):
        x, slopes = _of_prelu(node)
        written = _written(Writer(model, node), x, slopes) if x is not None and slopes is not None else None
        if written is not None:
            new, description = written
            set_shape(new, sizes(node.outputs[0]), node.outputs[0])
            Writer(model, node).replace(node.outputs[0], new)
            yield Change(rewrite="prelu-as-sum", place=node.name or "", description=description)


def _of_prelu(node: ir.Node) -> tuple[ir.Value | None, Array | None]:
    """The x and the slopes of a PReLU, also of one that Keras writes as max(0, x) - a max(0, -x)."""
    if node.op_type == "PRelu":
        return node.inputs[0], constant(node.inputs[1])
    for above, below in (node.inputs, node.inputs[::-1])[: 2 if node.op_type == "Add" else 1]:
        relu, product = made_by(above, "Relu"), made_by(below, "Mul")
        if relu is None or product is None or not _are_read_once(relu, product):
            continue
        if sizes(above) is None or sizes(below) != sizes(above):
            continue
        for value, given in (product.inputs, product.inputs[::-1]):
            other = made_by(value, "Relu")
            negative = made_by(other.inputs[0], "Neg") if other is not None and _are_read_once(other) else None
            if negative is None or negative.inputs[0] is not relu.inputs[0]:
                continue
            if (slopes := constant(given)) is not None:
                return relu.inputs[0], slopes if node.op_type == "Sub" else -slopes
    return None, None


def _are_read_once(*nodes: ir.Node) -> bool:
    return all(is_read_once(node.outputs[0]) for node in nodes)


def _written(write: Writer, x: ir.Value, slopes: Array) -> tuple[ir.Value, str] | None:
    """The PReLU of x by other operators, and what they are; None if it stays."""
    shape = (1,) * (rank_of(x) - slopes.ndim) + slopes.shape
    if slopes.size and (slopes == slopes.flat[0]).all():
        alpha = float(slopes.flat[0])  # attributes are float32
        return (write("LeakyRelu", x, alpha=alpha), "one slope") if float(np.float32(alpha)) == alpha else None
    if rank_of(x) == len(shape) == IMAGE_AXES and slopes.size == shape[1]:
        each = slopes.reshape(-1, 1, 1, 1)
        if (each > 1).any():
            part = _depthwise(write, write("Relu", x), 1 - each)
        else:
            part = write("Relu", _depthwise(write, x, 1 - each))
        return write("Add", _depthwise(write, x, each), part), f"a sum, {slopes.size} slopes"
    if (slopes <= 1).all():
        return write("Max", x, write("Mul", x, write.constant(slopes, x))), f"the larger of two, {slopes.size} slopes"
    return None


def _depthwise(write: Writer, x: ir.Value, factors: Array) -> ir.Value:
    return shaped_like(write("Conv", x, write.constant(factors, x), group=len(factors)), x)


def _softmax_as_quotient(model: ir.Model) -> Iterator[Change]:
    for node in (*nodes_of(model, "Softmax"), *nodes_of(model, "LogSoftmax")):
        x, shape = node.inputs[0], sizes(node.inputs[0])
        if x is None or shape is None or not _is_plain(x):
            continue
        axis = int(attribute(node, "axis", -1)) % len(shape)
        if all(size == 1 for size in shape[axis + 1 :]) or _is_small(shape):
            continue
        write = Writer(model, node)
        axes = write.constant([axis])
        less = write("Sub", x, write("ReduceMax", x, axes, keepdims=1))
        power = write("Exp", less)
        total = write("ReduceSum", power, axes, keepdims=1)
        quotient = write("Div", power, total) if node.op_type == "Softmax" else write("Sub", less, write("Log", total))
        write.replace(node.outputs[0], quotient)
        yield Change(rewrite="softmax-as-quotient", place=node.name or "", description=f"over axis {axis}")


def _is_plain(x: ir.Value) -> bool:
    """Whether these are numbers in float32 or float64; exp(20) exceeds float16."""
    import onnx_ir as ir

    return x.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE)


def _is_small(shape: Sizes) -> bool:
    """Whether starting five operators takes longer than transposing so few numbers."""
    return known_product(shape) < SMALL_SOFTMAX and all(isinstance(size, int) for size in shape)


def _lrn_as_conv(model: ir.Model) -> Iterator[Change]:
    for node in nodes_of(model, "LRN"):
        x, shape = node.inputs[0], sizes(node.inputs[0])
        size, given = int(attribute(node, "size", 1)), {"alpha": float(np.float32(1e-4)), "beta": 0.75, "bias": 1.0}
        alpha, beta, bias = (float(attribute(node, name, default)) for name, default in given.items())
        if x is None or shape is None or len(shape) != IMAGE_AXES or not _is_plain(x) or alpha < 0 or bias <= 0:
            continue
        width = shape[1]
        if not isinstance(width, int) or width > MOST_CHANNELS:
            continue
        write = Writer(model, node)
        away = np.arange(width) - np.arange(width)[:, None]
        band = (away >= -((size - 1) // 2)) & (away <= size // 2)
        weights = write.constant(band[:, :, None, None] * (alpha / size), x)
        total = write("Conv", write("Mul", x, x), weights, write.constant(np.full(width, bias), x))
        write.replace(node.outputs[0], write("Div", x, _power(write, total, beta)))
        yield Change(rewrite="lrn-as-conv", place=node.name or "", description=f"over {size} channels")


def _power(write: Writer, x: ir.Value, by: float) -> ir.Value:
    """A power of numbers above 0, by square roots if it can be."""
    if by == 0.75:
        return write("Sqrt", write("Mul", x, write("Sqrt", x)))
    if by == 0.5:
        return write("Sqrt", x)
    return x if by == 1 else write("Pow", x, write.constant(by, x))


AFTER_WINOGRAD = 97
"""winograd applies an activation to each phase only where it is one operator."""
MISH_AS_QUOTIENT = Rewrite(
    "mish-as-quotient", "Mish", _mish_as_quotient, order=AFTER_WINOGRAD, keeps=True, fp32_only=True
)
PRELU_AS_SUM = Rewrite(
    "prelu-as-sum",
    "PReLU with constant slopes, also written as max(0, x) - a max(0, -x)",
    _prelu_as_sum,
    order=AFTER_WINOGRAD,
    keeps=True,
    fp32_only=True,
)
SOFTMAX_AS_QUOTIENT = Rewrite(
    "softmax-as-quotient",
    "Softmax or LogSoftmax over another axis than the last",
    _softmax_as_quotient,
    opset=18,
    order=93,
    keeps=True,
    fp32_only=True,
)
LRN_AS_CONV = Rewrite(
    "lrn-as-conv",
    "local response normalization",
    _lrn_as_conv,
    order=93,
    keeps=True,
    fp32_only=True,
)
