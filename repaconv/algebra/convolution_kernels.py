"""Convolution kernels over zero-padded images, composed and added in float64.

Each tap has an offset from the output position. Kernels of any size and padding therefore share one border rule: zeros.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import gcd, prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from repaconv.algebra.channel_maps import Vector

if TYPE_CHECKING:
    from collections.abc import Sequence

Weight = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Kernel:
    """The convolution out[i] = bias + sum_t weight[t] x[stride i + t], with x = 0 outside the image.

    Attributes:
        weight: float64, [out, in / groups, *taps].
        bias: [out], or None.
        groups: Channel groups, as in ONNX.
        strides: Stride of each axis.
        taps: Offsets of the taps of each axis.
        reach: For each axis, how far beyond the image's last position a tap at offset 0 may read. The number of outputs
            depends only on this and the stride.
        learnt: Number of stored parameters that it was computed from.
    """

    weight: Weight
    bias: Vector | None
    groups: int
    strides: tuple[int, ...]
    taps: tuple[range, ...]
    reach: tuple[int, ...]
    learnt: int

    @classmethod
    def convolution(
        cls,
        weight: Weight,
        bias: Vector | None = None,
        *,
        groups: int = 1,
        strides: Sequence[int] | None = None,
        pads: Sequence[int] | None = None,
        dilations: Sequence[int] | None = None,
    ) -> Kernel:
        """Return a kernel from a framework's description: weight [out, in / groups, ...], pads as in ONNX.

        Raises:
            ValueError: If the outputs are not divisible by the groups.
        """
        axes = weight.ndim - 2
        if len(weight) % groups:
            raise ValueError(f"no convolution: weight {list(weight.shape)}, {groups} groups")
        pads = tuple(pads or (0,) * (2 * axes))
        places = zip(pads, dilations or (1,) * axes, weight.shape[2:], strict=False)
        taps = tuple(range(-pad, step * (length - 1) - pad + 1, step) for pad, step, length in places)
        reach = tuple(pad - tap[-1] for pad, tap in zip(pads[axes:], taps, strict=True))
        return cls(weight, bias, groups, tuple(strides or (1,) * axes), taps, reach, weight.size)

    def __add__(self, other: Kernel) -> Kernel:
        """Add parallel kernels.

        Raises:
            ValueError: If channels, strides or output positions differ.
        """
        if not fits(self, other, fixed=False):
            raise ValueError(f"cannot add kernels of {list(self.weight.shape)} and {list(other.weight.shape)}")
        return summed([self, other])

    def then(self, scale: Vector, shift: Vector | None) -> Kernel:
        """Return the kernel followed by a scale [out] and a shift [out], or None, per channel: s (W * x + b) + t."""
        bias = None if self.bias is None else self.bias * scale
        if shift is not None:
            bias = shift if bias is None else bias + shift
        return replace(self, weight=self.weight * scale.reshape(-1, *[1] * (self.weight.ndim - 1)), bias=bias)

    def of_scaled(self, scale: Vector, shift: Vector | None) -> Kernel:
        """Return the kernel preceded by a scale [in] and a shift [in], or None, per channel.

        W (s x + t) + b = (W s) x + (sum W t + b)

        With a shift it must not be padded, which is not checked: see `is_padded`.
        """
        out, inside = len(self.weight), self.weight.shape[1]
        factor = np.repeat(scale.reshape(self.groups, inside), out // self.groups, axis=0)
        bias = self.bias
        if shift is not None:
            terms = np.repeat(shift.reshape(self.groups, inside), out // self.groups, axis=0)
            added = (self.weight.reshape(out, inside, -1).sum(-1) * terms).sum(1)
            bias = added if bias is None else bias + added
        return replace(self, weight=self.weight * factor.reshape(out, inside, *[1] * len(self.taps)), bias=bias)

    def around(self, pads: Sequence[int]) -> Kernel:
        """Return the kernel on an image with more zeros around it; ``pads`` are before every axis, then after."""
        both = list(zip(pads[: len(self.taps)], pads[len(self.taps) :], strict=True))
        taps = tuple(_shifted(taps, -before) for taps, (before, _) in zip(self.taps, both, strict=True))
        return replace(
            self, taps=taps, reach=tuple(end + sum(more) for end, more in zip(self.reach, both, strict=True))
        )

    @property
    def acts_by_place(self) -> bool:
        """Whether each output reads only the input at its own position."""
        return self.is_pointwise and not any(self.reach) and {*self.strides} <= {1} and not self.is_padded

    @property
    def is_padded(self) -> bool:
        """Whether it reads beyond the border of the image."""
        return any(pad > 0 for pad in self.pads)

    @property
    def is_pointwise(self) -> bool:
        """Whether each output reads a single position."""
        return all(len(taps) == 1 for taps in self.taps)

    @property
    def is_diagonal(self) -> bool:
        """Whether it is a scale and a shift per channel."""
        alone = self.weight.shape[1] == 1 and self.groups == len(self.weight) and self.weight.size == self.groups
        return alone and not any(self.reach) and set(self.strides) <= {1} and all(t[0] == 0 for t in self.taps)

    @property
    def attributes(self) -> dict[str, int | list[int]]:
        """The attributes of an equivalent ONNX Conv."""
        return {
            "kernel_shape": list(self.weight.shape[2:]),
            "strides": list(self.strides),
            "dilations": [taps.step for taps in self.taps],
            "group": self.groups,
            "pads": self.pads,
        }

    @property
    def pads(self) -> list[int]:
        """Zeros before every axis, then after every axis, as in ONNX."""
        after = [taps[-1] + end for taps, end in zip(self.taps, self.reach, strict=True)]
        return [*(-taps[0] for taps in self.taps), *after]


def eye(width: int, rank: int) -> Kernel:
    """Return the identity over ``width`` channels of a value [N, width, ...] with ``rank`` axes."""
    ones = (1,) * (rank - 2)
    return Kernel(np.ones((width, 1, *ones)), None, width, ones, (range(1),) * (rank - 2), (0,) * (rank - 2), 0)


def per_output_channel(weight: Weight, factor: Vector, transposed: int = 0) -> Weight:
    """Reshape a factor per output channel, so that it broadcasts to a weight [out, ...].

    Args:
        weight: The weight of a layer.
        factor: [out].
        transposed: Groups of a transposed convolution, whose weight is [in, out / groups, ...]; 0 for other layers.
    """
    if not transposed:
        return factor.reshape(-1, *[1] * (weight.ndim - 1))
    each: Weight = np.repeat(factor.reshape(transposed, -1), len(weight) // transposed, axis=0)
    return each.reshape(*each.shape, *[1] * (weight.ndim - 2))


def fits(a: Kernel, b: Kernel, *, fixed: bool) -> bool:
    """Return whether both kernels have the same channels and output positions.

    Args:
        a: First kernel.
        b: Second kernel.
        fixed: Whether all sizes are known and both outputs have the same.
    """
    widths = {(len(one.weight), one.weight.shape[1] * one.groups) for one in (a, b)}
    return len(widths) == 1 and a.strides == b.strides and (fixed or a.reach == b.reach)


def size_of(kernels: Sequence[Kernel]) -> int:
    """Return the number of weights of the kernels' sum."""
    groups, taps = _joint(kernels)
    out, into = kernels[0].weight.shape[0], kernels[0].weight.shape[1] * kernels[0].groups
    return int(out * (into // groups) * prod(map(len, taps)))


def _joint(kernels: Sequence[Kernel]) -> tuple[int, tuple[range, ...]]:
    """Return the groups and taps of the kernels' sum."""
    return gcd(*(one.groups for one in kernels)), tuple(map(_spanned, zip(*(one.taps for one in kernels), strict=True)))


def _spanned(taps: Sequence[range]) -> range:
    """Return the coarsest grid that contains all taps."""
    first, last = min(one[0] for one in taps), max(one[-1] for one in taps)
    step = gcd(*(tap - first for one in taps for tap in one))
    return range(first, last + 1, step or 1)


def summed(kernels: Sequence[Kernel]) -> Kernel:
    """Add parallel kernels that fit together (`fits`): weight [out, in / groups, *taps] over all their taps."""
    groups, taps = _joint(kernels)
    first = kernels[0]
    out, inside = len(first.weight), first.weight.shape[1] * first.groups // groups
    weight = np.zeros((groups, out // groups, inside, *map(len, taps)))
    for one in kernels:
        here: Any = (..., *_places(one.taps, taps))
        weight[here] += _coarser(one, groups)
    shifts = [one.bias for one in kernels if one.bias is not None]
    bias = np.sum(shifts, axis=0) if shifts else None
    learnt = sum(one.learnt for one in kernels)
    return Kernel(weight.reshape(out, *weight.shape[2:]), bias, groups, first.strides, taps, first.reach, learnt)


def composed(second: Kernel, first: Kernel) -> Kernel | None:
    """Return the composition second(first(x)), or None if it is not a convolution.

    sum_u W[u] (sum_t V[t] x[s i + t] + c)[i + u] = sum_ut W[u] V[t] x[s (i + u) + t] + sum_u W[u] c

    It is None if the second pads the output of the first with zeros, where the first itself would give other values
    there: its bias, or what it reads of the image beyond the border.
    """
    if not is_zero_outside(first, second.pads):
        return None
    if second.is_diagonal:
        one = first.then(second.weight.reshape(-1), second.bias)
        return replace(one, learnt=first.learnt + second.learnt)
    taps: tuple[range, ...]
    reach = tuple(a + s * b for a, s, b in zip(first.reach, first.strides, second.reach, strict=True))
    if first.is_pointwise and first.weight.size == first.groups and {*first.strides} <= {1}:  # a scale, also a Pad
        one = second.of_scaled(first.weight.reshape(-1), first.bias)
        taps = tuple(_shifted(taps, own[0]) for taps, own in zip(second.taps, first.taps, strict=True))
        return replace(one, taps=taps, reach=reach, learnt=second.learnt + first.learnt)
    groups = gcd(second.groups, first.groups)
    outer, inner = _coarser(second, groups), _coarser(first, groups)
    moved = _moved(second, first)
    taps = tuple(map(_spanned, moved))
    weight = np.zeros((*outer.shape[:2], inner.shape[2], *map(len, taps)))
    for places in product(*(range(len(axis)) for axis in second.taps)):
        here: Any = (..., *_places([axis[place] for axis, place in zip(moved, places, strict=True)], taps))
        tap: Any = (..., *places)
        for group in range(groups):
            weight[group][here] += np.tensordot(outer[group][tap], inner[group], 1)
    bias = second.bias
    if first.bias is not None:
        through = outer.sum(tuple(range(3, outer.ndim)))
        shift = np.einsum("gom,gm->go", through, first.bias.reshape(groups, -1)).reshape(-1)
        bias = shift if bias is None else bias + shift
    strides = tuple(a * b for a, b in zip(first.strides, second.strides, strict=True))
    weight = weight.reshape(len(second.weight), *weight.shape[2:])
    return Kernel(weight, bias, groups, strides, taps, reach, first.learnt + second.learnt)


def is_zero_outside(kernel: Kernel, pads: Sequence[int]) -> bool:
    """Return whether a kernel gives zeros in a border around its output, as far as there is one on a side.

    Without a bias, an output before the first one reads positions up to ``taps[-1] - stride``, and one after the last
    reads from ``taps[0] + reach`` beyond the last pixel on.
    """
    axes = zip(
        pads[: len(kernel.taps)], pads[len(kernel.taps) :], kernel.taps, kernel.strides, kernel.reach, strict=True
    )
    return all(
        (begin <= 0 or (kernel.bias is None and taps[-1] < stride))
        and (end <= 0 or (kernel.bias is None and taps[0] + reach >= 0))
        for begin, end, taps, stride, reach in axes
    )


def composed_size(second: Kernel, first: Kernel) -> int:
    """Return the number of weights of the composition second(first(x))."""
    inside = first.weight.shape[1] * first.groups // gcd(second.groups, first.groups)
    return int(len(second.weight) * inside * prod(len(_spanned(axis)) for axis in _moved(second, first)))


def _moved(second: Kernel, first: Kernel) -> list[list[range]]:
    """Return for each axis the first kernel's taps, shifted to each position that the second reads."""
    axes = zip(first.taps, second.taps, first.strides, strict=True)
    return [[_shifted(mine, step * place) for place in read] for mine, read, step in axes]


def _coarser(one: Kernel, groups: int) -> Weight:
    """Return the weight with fewer groups, [groups, out / groups, in / groups, *taps], filled with zeros."""
    apart = one.groups // groups
    fine = one.weight.reshape(groups, apart, -1, *one.weight.shape[1:])
    weight = np.zeros((*fine.shape[:3], apart, *fine.shape[3:]))
    for place in range(apart):
        weight[:, place, :, place] = fine[:, place]
    return weight.reshape(groups, apart * fine.shape[2], apart * fine.shape[3], *fine.shape[4:])


def _shifted(taps: range, by: int) -> range:
    return range(taps.start + by, taps.stop + by, taps.step)


def _places(taps: Sequence[range], of: Sequence[range]) -> tuple[slice, ...]:
    """Return the positions of taps in a larger set of taps, by axis."""
    return tuple(map(_place, taps, of))


def _place(taps: range, of: range) -> slice:
    first, step = (taps[0] - of[0]) // of.step, taps.step // of.step if len(taps) > 1 else 1
    return slice(first, first + step * (len(taps) - 1) + 1, step)
