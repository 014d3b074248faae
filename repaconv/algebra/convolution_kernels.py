"""Kernels: what is a convolution of one value, over images that are zero outside; composed and added in float64.

A tap stands at an offset from the place that it is read for, so kernels of any size and padding have one border: zeros.
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
    """out[i] = bias + sum_t weight[t] x[stride i + t], x being zero outside the image.

    Attributes:
        weight: float64, [out, in / groups, *taps].
        bias: [out], or None.
        groups: Of channels, as ONNX has them.
        strides: By axis.
        taps: By axis: the offsets.
        reach: By axis: how far behind the image's last place the last one lies that a tap at offset 0 may read. Which
            outputs there are hangs on the stride and on this alone.
        learnt: Numbers of a graph that went into it.
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
        """As frameworks describe one: weight [out, in / groups, ...]; pads before every axis, then behind every axis.

        Raises:
            ValueError: If the outputs are in no such groups.
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
        """Run in parallel and summed.

        Raises:
            ValueError: If the two do not read and give the same places and channels, as at the border.
        """
        if not fits(self, other, fixed=False):
            raise ValueError(f"cannot add kernels of {list(self.weight.shape)} and {list(other.weight.shape)}")
        return summed([self, other])

    def then(self, scale: Vector, shift: Vector | None) -> Kernel:
        """With a scale and a shift a channel behind it."""
        bias = None if self.bias is None else self.bias * scale
        if shift is not None:
            bias = shift if bias is None else bias + shift
        return replace(self, weight=self.weight * scale.reshape(-1, *[1] * (self.weight.ndim - 1)), bias=bias)

    def of_scaled(self, scale: Vector, shift: Vector | None) -> Kernel:
        """With a scale and a shift a channel before it; where there is a shift, it must not be padded.

        W (s x + t) + b = (W s) x + (sum W t + b)
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
        """Of an image with more zeros before and behind every axis, as ONNX has them."""
        both = list(zip(pads[: len(self.taps)], pads[len(self.taps) :], strict=True))
        taps = tuple(_shifted(taps, -before) for taps, (before, _) in zip(self.taps, both, strict=True))
        return replace(
            self, taps=taps, reach=tuple(end + sum(more) for end, more in zip(self.reach, both, strict=True))
        )

    @property
    def acts_by_place(self) -> bool:
        """Whether an output reads one place, its own."""
        return self.is_pointwise and not any(self.reach) and {*self.strides} <= {1} and not self.is_padded

    @property
    def is_padded(self) -> bool:
        """Whether it reads beyond a border."""
        return any(pad > 0 for pad in self.pads)

    @property
    def is_pointwise(self) -> bool:
        """Whether an output reads one place."""
        return all(len(taps) == 1 for taps in self.taps)

    @property
    def is_diagonal(self) -> bool:
        """Whether it is a scale and a shift a channel."""
        alone = self.weight.shape[1] == 1 and self.groups == len(self.weight) and self.weight.size == self.groups
        return alone and not any(self.reach) and set(self.strides) <= {1} and all(t[0] == 0 for t in self.taps)

    @property
    def attributes(self) -> dict[str, int | list[int]]:
        """Of the Conv that it is."""
        return {
            "kernel_shape": list(self.weight.shape[2:]),
            "strides": list(self.strides),
            "dilations": [taps.step for taps in self.taps],
            "group": self.groups,
            "pads": self.pads,
        }

    @property
    def pads(self) -> list[int]:
        """Zeros before and behind every axis, as ONNX has them."""
        after = [taps[-1] + end for taps, end in zip(self.taps, self.reach, strict=True)]
        return [*(-taps[0] for taps in self.taps), *after]


def eye(width: int, rank: int) -> Kernel:
    """The identity over ``width`` channels of a value of ``rank`` axes."""
    ones = (1,) * (rank - 2)
    return Kernel(np.ones((width, 1, *ones)), None, width, ones, (range(1),) * (rank - 2), (0,) * (rank - 2), 0)


def outwards(weight: Weight, factor: Vector, transposed: int = 0) -> Weight:
    """A factor a channel of the output, in the shape of a weight [out, ...].

    Args:
        weight: Of a layer.
        factor: [out].
        transposed: Of a transposed convolution, whose weight is [in, out / groups, ...], the groups.
    """
    if not transposed:
        return factor.reshape(-1, *[1] * (weight.ndim - 1))
    each: Weight = np.repeat(factor.reshape(transposed, -1), len(weight) // transposed, axis=0)
    return each.reshape(*each.shape, *[1] * (weight.ndim - 2))


def fits(a: Kernel, b: Kernel, *, fixed: bool) -> bool:
    """Whether both give the same places and channels.

    Args:
        a: One.
        b: The other.
        fixed: Whether all sizes are known, and those of both outputs the same.
    """
    widths = {(len(one.weight), one.weight.shape[1] * one.groups) for one in (a, b)}
    return len(widths) == 1 and a.strides == b.strides and (fixed or a.reach == b.reach)


def size_of(kernels: Sequence[Kernel]) -> int:
    """How many numbers the weight of their sum has."""
    groups, taps = _joint(kernels)
    out, into = kernels[0].weight.shape[0], kernels[0].weight.shape[1] * kernels[0].groups
    return int(out * (into // groups) * prod(map(len, taps)))


def _joint(kernels: Sequence[Kernel]) -> tuple[int, tuple[range, ...]]:
    """The groups and taps of their sum."""
    return gcd(*(one.groups for one in kernels)), tuple(map(_spanned, zip(*(one.taps for one in kernels), strict=True)))


def _spanned(taps: Sequence[range]) -> range:
    """The coarsest grid that has all of them."""
    first, last = min(one[0] for one in taps), max(one[-1] for one in taps)
    step = gcd(*(tap - first for one in taps for tap in one))
    return range(first, last + 1, step or 1)


def summed(kernels: Sequence[Kernel]) -> Kernel:
    """Run in parallel and summed, as one; they fit together."""
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
    """One behind the other, as one.

        sum_u W[u] (sum_t V[t] x[s i + t] + c)[i + u] = sum_ut W[u] V[t] x[s (i + u) + t] + sum_u W[u] c

    None where the second pads what the first gives, which is not what the first would give there: its bias, or what it
    reads of the image beyond a border.
    """
    plain = first.bias is None and all(taps == range(1) for taps in first.taps)
    plain = plain and {*first.strides} <= {1} and not any(first.reach)
    if second.is_padded and not plain:
        return None
    if second.is_diagonal:
        one = first.then(second.weight.reshape(-1), second.bias)
        return replace(one, learnt=first.learnt + second.learnt)
    if first.is_diagonal:
        one = second.of_scaled(first.weight.reshape(-1), first.bias)
        return replace(one, learnt=second.learnt + first.learnt)
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
    reach = tuple(a + s * b for a, s, b in zip(first.reach, first.strides, second.reach, strict=True))
    weight = weight.reshape(len(second.weight), *weight.shape[2:])
    return Kernel(weight, bias, groups, strides, taps, reach, first.learnt + second.learnt)


def composed_size(second: Kernel, first: Kernel) -> int:
    """How many numbers the weight of both in a row has."""
    inside = first.weight.shape[1] * first.groups // gcd(second.groups, first.groups)
    return int(len(second.weight) * inside * prod(len(_spanned(axis)) for axis in _moved(second, first)))


def _moved(second: Kernel, first: Kernel) -> list[list[range]]:
    """By axis: the first's taps from each place that the second reads."""
    axes = zip(first.taps, second.taps, first.strides, strict=True)
    return [[_shifted(mine, step * place) for place in read] for mine, read, step in axes]


def _coarser(one: Kernel, groups: int) -> Weight:
    """Its weight with fewer groups, [groups, out / groups, in / groups, *taps]: zeros between its own."""
    apart = one.groups // groups
    fine = one.weight.reshape(groups, apart, -1, *one.weight.shape[1:])
    weight = np.zeros((*fine.shape[:3], apart, *fine.shape[3:]))
    for place in range(apart):
        weight[:, place, :, place] = fine[:, place]
    return weight.reshape(groups, apart * fine.shape[2], apart * fine.shape[3], *fine.shape[4:])


def _shifted(taps: range, by: int) -> range:
    return range(taps.start + by, taps.stop + by, taps.step)


def _places(taps: Sequence[range], of: Sequence[range]) -> tuple[slice, ...]:
    """Where taps stand among more of them, by axis."""
    return tuple(map(_place, taps, of))


def _place(taps: range, of: range) -> slice:
    first, step = (taps[0] - of[0]) // of.step, taps.step // of.step if len(taps) > 1 else 1
    return slice(first, first + step * (len(taps) - 1) + 1, step)
