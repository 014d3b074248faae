"""Express traced values as convolution kernels of earlier values, in float64.

Convolutions, linear layers, BatchNorms, per-channel scales and shifts, and sums become kernels of
`repaconv.algebra.convolution_kernels`. If channels come last, as in a linear layer on tokens, a kernel has no spatial
axes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from repaconv.algebra.channel_maps import Vector, channel_vector
from repaconv.algebra.convolution_kernels import Kernel, composed, composed_size, eye, fits, summed
from repaconv.torch_fold.module_trace import FunctionCall, SubmoduleCall, Value, inner_name

# --- Images with an explicitly written border: `pad` and assignments into its result, as in Diverse Branch Block.


def border_of(step: FunctionCall) -> tuple[Value, list[int], Vector] | None:
    """Read a step's output as an image with a border of one number per channel.

    Returns:
        The image [B, C, ...], the padding before and after every axis in the order of ONNX, and the numbers [C] of the
        border; None for any other output.
    """
    written: list[FunctionCall] = []
    while step.name == "setitem":
        before = step.args[0]
        if not isinstance(before, Value) or before.step is None or not _plain(step.args[1]):
            return None
        written.append(step)
        step = before.step
    x, output = step.given(0, "input"), step.output
    pads = _pads(step) if step.name == "pad" and isinstance(x, Value) and output is not None else None
    if pads is None or output is None:
        return None
    axes, image = len(pads) // 2, torch.full(output.shape, float(step.given(3, "value") or 0.0), dtype=torch.float64)
    sizes = output.shape[2:]
    inner: Any = (..., *(slice(pads[i], sizes[i] - pads[i + axes]) for i in range(axes)))
    image[inner] = torch.nan
    for each in reversed(written):
        numbers = each.args[2]
        if isinstance(numbers, Value) and not numbers.constant:
            return None
        image[each.args[1]] = numbers.tensor.detach().cpu().double() if isinstance(numbers, Value) else numbers
    rest = torch.ones(sizes, dtype=torch.bool)
    rest[inner] = False
    border = image[..., rest].double()
    own = bool(image[inner].isnan().all()) and bool((border == border[:1, :, :1]).all())
    return (x, pads, border[0, :, 0].numpy()) if own else None


def _plain(index: Any) -> bool:
    """Whether an index consists of constant positions and slices only."""
    several = index if isinstance(index, tuple) else (index,)
    return all(one is None or one is ... or isinstance(one, (int, slice)) for one in several)


def _pads(step: FunctionCall) -> list[int] | None:
    """The spatial padding of a `pad` with a constant; None for other modes or axes."""
    given = step.given(1, "pad")
    x = step.given(0, "input")
    if step.given(2, "mode", "constant") != "constant" or not all(type(n) is int and n >= 0 for n in given):
        return None
    axes = len(x.shape) - 2
    whole = [*given, *[0] * (2 * axes - len(given))]
    if axes < 1 or len(whole) != 2 * axes or not any(whole):
        return None
    return [*whole[::2][::-1], *whole[1::2][::-1]]


# --- Values as kernels of other values.

IMAGE, LAST = 1, -1
"""The axis of channels: of images [B, C, ...], and of tokens [..., C]."""
CONVOLUTIONS = {"conv1d": 1, "conv2d": 2, "conv3d": 3}


class KernelSum(NamedTuple):
    """A value as a sum of kernels of other values.

    Attributes:
        terms: The kernels by source value.
        merges: What it merges: `PARALLEL` if more than one layer with weights, or a sum; `COMPUTED` if only a layer
            whose weight the forward computes from parameters; empty if nothing.
    """

    terms: dict[Value, Kernel]
    merges: str = ""


PARALLEL, COMPUTED = "layers in parallel", "a weight that every forward computes"


def numbers(value: Any) -> np.ndarray | None:
    """The numbers of a constant, in float64; an empty array for None, and None for anything else."""
    if value is None:
        return np.zeros(0)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return np.asarray(float(value))
    if not isinstance(value, Value) or not value.constant or not value.tensor.is_floating_point():
        return None
    return value.tensor.detach().cpu().double().numpy()


def per_channel(constant: Any, value: Value, axis: int) -> Vector | None:
    """A constant that is broadcast to a value as a vector of one number per channel; None if it varies otherwise."""
    found, rank = numbers(constant), len(value.shape)
    if found is None or constant is None or rank < 2 or found.ndim > rank:
        return None
    whole = np.array(found, ndmin=rank)
    return channel_vector(whole, axis, value.shape[axis])


class KernelSums:
    """Computes values inside one call of a submodule as kernels of the values that the call starts from.

    Args:
        inside: The call. Values computed before it are sources.
        axis: The axis of channels: `IMAGE` or `LAST`.
        grow: Whether a kernel may become larger than the kernels it is composed of; a later sum can make up for it.
        share: Whether a value with several readers may be composed into each of them instead of being a source.
    """

    def __init__(self, inside: SubmoduleCall, axis: int, *, grow: bool, share: bool) -> None:
        self.inside, self.axis, self.grow, self.share = inside, axis, grow, share
        self._found: dict[Value, KernelSum] = {}

    def of(self, value: Value, *, top: bool = False) -> KernelSum:
        """The kernel sum of a value; with ``top``, what the value is computed from even if several steps read it."""
        if len(value.reads) > 1 and not self.share and not top:
            return self.identity(value)
        if value not in self._found:
            step, kernel_sum = value.step, None
            if value is not self.inside.input and step is not None and self.inside.has(step):
                kernel_sum = _same(self, step) if step.same is not None else _RULES.get(step.name, _none)(self, step)
            self._found[value] = kernel_sum if kernel_sum is not None and kernel_sum.terms else self.identity(value)
        return self._found[value]

    def identity(self, value: Value) -> KernelSum:
        """The value as the identity kernel of itself."""
        rank = len(value.shape) if self.axis == IMAGE else 2
        return KernelSum({value: eye(value.shape[self.axis], rank)}) if len(value.shape) > 1 else KernelSum({})

    def with_kernel(self, kernel: Kernel, x: Value) -> KernelSum:
        """The kernel sum of a value after a kernel is applied to it."""
        inner = self.of(x)
        terms: dict[Value, Kernel] = {}
        for source, one in inner.terms.items():
            new = composed(replace(kernel, bias=None) if terms else kernel, one) if self._fits(kernel, one) else None
            if new is None:
                return KernelSum({x: kernel})
            terms[source] = new
        layers = not kernel.is_diagonal and not all(one.is_diagonal for one in inner.terms.values())
        return KernelSum(terms, PARALLEL if layers else inner.merges)

    def _fits(self, second: Kernel, first: Kernel) -> bool:
        """Whether two kernels in series may be composed, by the size of the result."""
        return self.grow or composed_size(second, first) <= second.weight.size + first.weight.size


def _none(_sums: KernelSums, _step: FunctionCall) -> None:
    return None


def _same(sums: KernelSums, step: FunctionCall) -> KernelSum | None:
    return sums.of(step.same) if step.same is not None else None


def convolution(step: FunctionCall) -> Kernel | None:
    """The kernel of a traced convolution with constant weights; None for any other step or string padding."""
    weight, bias, axes = numbers(step.given(1, "weight")), numbers(step.given(2, "bias")), CONVOLUTIONS.get(step.name)
    pads = step.given(4, "padding", 0)
    if weight is None or bias is None or axes is None or weight.ndim != axes + 2 or isinstance(pads, str):
        return None
    strides, pads, steps = (_each(n, axes) for n in (step.given(3, "stride", 1), pads, step.given(5, "dilation", 1)))
    groups, bias = int(step.given(6, "groups", 1)), bias if bias.size else None
    return Kernel.convolution(weight, bias, groups=groups, strides=strides, pads=(*pads, *pads), dilations=steps)


def _each(number: Any, axes: int) -> tuple[int, ...]:
    found = tuple(number) if isinstance(number, (tuple, list)) else (number,)
    return tuple(int(n) for n in (found * axes if len(found) == 1 else found))


def linear(step: FunctionCall) -> Kernel | None:
    """The kernel of a traced linear layer with constant weights; None for any other step."""
    weight, bias = numbers(step.given(1, "weight")), numbers(step.given(2, "bias"))
    if step.name != "linear" or weight is None or bias is None or weight.ndim != 2:
        return None
    return Kernel.convolution(weight, bias if bias.size else None)


def _convolution(sums: KernelSums, step: FunctionCall) -> KernelSum | None:
    kernel, x = convolution(step), step.given(0, "input")
    if kernel is None or sums.axis != IMAGE or len(x.shape) != kernel.weight.ndim:
        return None
    return _with_own_weight(sums, sums.with_kernel(kernel, x), step)


def _with_own_weight(sums: KernelSums, kernel_sum: KernelSum, step: FunctionCall) -> KernelSum:
    """The kernel sum of a layer, which merges something if the forward computes the layer's weight or bias.

    It may also assign them to a layer inside; the call of that layer alone merges nothing.
    """

    def is_computed(value: Value) -> bool:
        return value.computed or (value.written and "." in inner_name(value.name, sums.inside.name))

    given = (step.given(1, "weight"), step.given(2, "bias"))
    computed = any(isinstance(value, Value) and is_computed(value) for value in given)
    return kernel_sum._replace(merges=kernel_sum.merges or COMPUTED) if computed else kernel_sum


def _linear(sums: KernelSums, step: FunctionCall) -> KernelSum | None:
    kernel, x = linear(step), step.given(0, "input")
    if kernel is None or not (sums.axis == LAST or len(x.shape) == 2):
        return None
    return _with_own_weight(sums, sums.with_kernel(kernel, x), step)


def _batchnorm(sums: KernelSums, step: FunctionCall) -> KernelSum | None:
    x = step.given(0, "input")
    mean, variance, scale, shift = (numbers(step.given(1 + i, name)) for i, name in enumerate(_BATCHNORM))
    if step.given(5, "training", False) or mean is None or variance is None or scale is None or shift is None:
        return None
    if not mean.size or not variance.size or not (sums.axis == IMAGE or len(x.shape) == 2):
        return None
    factor = (scale if scale.size else 1.0) / np.sqrt(variance + float(step.given(7, "eps", 1e-5)))
    return _scaled(sums, x, factor, (shift if shift.size else 0.0) - mean * factor)


_BATCHNORM = ("running_mean", "running_var", "weight", "bias")


def _scaled(sums: KernelSums, x: Value, scale: Vector, shift: Vector | None) -> KernelSum | None:
    """The kernel sum of a value with a per-channel scale and shift."""
    inner = sums.of(x)
    terms: dict[Value, Kernel] = {}
    for source, one in inner.terms.items():
        new = one.then(scale, None if terms else shift)
        terms[source] = replace(new, learnt=one.learnt + (len(scale) if one.is_diagonal else 0))
    return KernelSum(terms, inner.merges)


def _multiplied(sums: KernelSums, step: FunctionCall) -> KernelSum | None:
    divides = step.name in ("div", "truediv", "true_divide")
    if len(step.args) != 2 or step.kwargs or (divides and step.swapped):
        return None
    for x, other in (step.args, step.args[::-1])[: 1 if divides else 2]:
        if isinstance(x, Value) and not x.constant and step.output is not None and x.shape == step.output.shape:
            vector = per_channel(other, x, sums.axis)
            if vector is None or (divides and not vector.all()):
                return None
            return _scaled(sums, x, 1 / vector if divides else vector, None)
    return None


def _negated(sums: KernelSums, step: FunctionCall) -> KernelSum | None:
    x = step.given(0, "input")
    return _scaled(sums, x, -np.ones(x.shape[sums.axis]), None) if len(x.shape) > 1 else None


def _added(sums: KernelSums, step: FunctionCall) -> KernelSum | None:
    if len(step.args) != 2 or step.kwargs or step.output is None:
        return None
    signs = (1.0, -1.0 if step.name.startswith("sub") else 1.0)[:: -1 if step.swapped else 1]
    found: list[KernelSum] = []
    shift: Vector | None = None
    for one, sign in zip(step.args, signs, strict=True):
        if isinstance(one, Value) and not one.constant:
            if one.shape != step.output.shape or (own := _signed(sums, one, sign)) is None:
                return None
            found.append(own)
        elif (vector := per_channel(one, step.output, sums.axis)) is not None:
            shift = sign * vector
        else:
            return None
    if len(found) == 1 and shift is not None:
        first, *rest = found[0].terms.items()
        return KernelSum({first[0]: first[1].then(np.ones(len(shift)), shift), **dict(rest)}, found[0].merges)
    return _sum(*found) if len(found) == 2 else None


def _signed(sums: KernelSums, value: Value, sign: float) -> KernelSum | None:
    kernel_sum = sums.of(value)
    return KernelSum(
        {s: k.then(np.full(len(k.weight), sign), None) for s, k in kernel_sum.terms.items()}, kernel_sum.merges
    )


def _sum(a: KernelSum, b: KernelSum) -> KernelSum | None:
    terms = dict(a.terms)
    for source, kernel in b.terms.items():
        if source in terms and not fits(terms[source], kernel, fixed=False):
            return None
        terms[source] = summed([terms[source], kernel]) if source in terms else kernel
    return KernelSum(terms, PARALLEL)


def _pooled(sums: KernelSums, step: FunctionCall) -> KernelSum | None:
    x, size = step.given(0, "input"), _each(step.given(1, "kernel_size"), 2)
    stride, pads = step.given(2, "stride"), _each(step.given(3, "padding", 0), 2)
    counted = not any(pads) or step.given(5, "count_include_pad", True)
    if sums.axis != IMAGE or len(x.shape) != 4 or step.given(4, "ceil_mode", False) or not counted:
        return None
    if (divisor := step.given(6, "divisor_override")) is not None and divisor != prod(size):
        return None
    weight, strides = np.full((x.shape[1], 1, *size), 1 / prod(size)), _each(stride, 2) if stride else size
    mean = Kernel.convolution(weight, groups=x.shape[1], strides=strides, pads=(*pads, *pads))
    return sums.with_kernel(replace(mean, learnt=0), x)


def _bordered(sums: KernelSums, step: FunctionCall) -> KernelSum | None:
    """The kernel sum of an image with a written border that equals what zero padding of the input would give."""
    found = border_of(step) if sums.axis == IMAGE else None
    if found is None:
        return None
    x, pads, border = found
    inner = sums.of(x)
    if len(pads) != 2 * (len(x.shape) - 2) or not all(one.acts_by_place for one in inner.terms.values()):
        return None
    given = sum((one.bias for one in inner.terms.values() if one.bias is not None), np.zeros(x.shape[1]))
    if not np.allclose(border, given, rtol=1e-12, atol=0):
        return None
    return KernelSum({source: one.around(pads) for source, one in inner.terms.items()}, inner.merges)


ADDS = ("add", "sub", "subtract")
_ADD = dict.fromkeys(ADDS, _added)
_MULTIPLY = dict.fromkeys(("mul", "multiply", "div", "truediv", "true_divide"), _multiplied)
_RULES: dict[str, Callable[[KernelSums, FunctionCall], KernelSum | None]] = {
    **dict.fromkeys(CONVOLUTIONS, _convolution),
    "linear": _linear,
    "batch_norm": _batchnorm,
    "avg_pool2d": _pooled,
    "pad": _bordered,
    "setitem": _bordered,
    "neg": _negated,
    **_ADD,
    **_MULTIPLY,
}


def as_module(kernel: Kernel) -> torch.nn.Module | None:
    """A torch layer in float64 for a kernel; None if torch has no layer with such padding, or it would be larger."""
    axes, width, out = len(kernel.taps), kernel.weight.shape[1] * kernel.groups, len(kernel.weight)
    before, after = kernel.pads[:axes], kernel.pads[axes:]
    made: Any
    if before != after or min(before, default=0) < 0 or (not axes and kernel.groups > 1):
        return None
    if not axes:
        made = torch.nn.Linear(width, out, bias=kernel.bias is not None)
    else:
        kind: Any = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)[axes - 1]
        steps, biased = tuple(taps.step for taps in kernel.taps), kernel.bias is not None
        made = kind(width, out, kernel.weight.shape[2:], kernel.strides, tuple(before), steps, kernel.groups, biased)
    made.weight.data = torch.from_numpy(np.ascontiguousarray(kernel.weight))
    if kernel.bias is not None:
        made.bias.data = torch.from_numpy(np.ascontiguousarray(kernel.bias))
    found: torch.nn.Module = made
    return found
