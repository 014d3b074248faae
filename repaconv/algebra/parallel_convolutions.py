"""The algebra of convolutions beside each other: y = W * x + b over zero-padded images, exactly, in float64.

- ``f + g``: what reads one value and is summed is one convolution;
- ``Conv.eye(C)``: the shortcut, a 1x1 convolution of C groups;
- ``f.then(norm)``: a diagonal affine behind it, as a BatchNorm in eval mode is.

A sum first brings both sides to one kernel, the smaller in the centre of the larger, and to one grouping, which joins
groups as far as both need it. Convolutions are values: no move changes its operands.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from repaconv.algebra.affine_maps import Affine

Pair = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Conv:
    """y = W * x + b.

    Attributes:
        weight: float64, [out, in / groups, height, width].
        bias: float64, [out].
        groups: Of channels, as torch has them.
        stride: By height and width.
        padding: Zeros on both sides, by height and width.

    Raises:
        ValueError: If the shapes do not belong together.
    """

    weight: Tensor
    bias: Tensor
    groups: int = 1
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)

    def __post_init__(self) -> None:
        """Bring both to float64 and hold the shape rule."""
        object.__setattr__(self, "weight", self.weight.detach().to(torch.float64))
        object.__setattr__(self, "bias", self.bias.detach().to(torch.float64))
        whole = self.weight.ndim == 4 and self.groups > 0 and self.weight.shape[0] % self.groups == 0
        if not whole or self.bias.shape != self.weight.shape[:1]:
            shapes = f"weight {list(self.weight.shape)}, bias {list(self.bias.shape)}"
            raise ValueError(f"no convolution: {shapes}, {self.groups} groups")

    @classmethod
    def eye(cls, width: int) -> Conv:
        """The identity over ``width`` channels."""
        one = torch.ones(width, 1, 1, 1, dtype=torch.float64)
        return cls(one, torch.zeros(width, dtype=torch.float64), groups=width)

    @property
    def in_width(self) -> int:
        """Number of input channels."""
        return self.weight.shape[1] * self.groups

    @property
    def kernel(self) -> Pair:
        """Height and width."""
        return self.weight.shape[2], self.weight.shape[3]

    def __call__(self, x: Tensor) -> Tensor:
        """Apply to x [B, in, H, W], giving [B, out, H', W'] in float64."""
        return F.conv2d(x.to(torch.float64), self.weight, self.bias, self.stride, self.padding, groups=self.groups)

    def then(self, norm: Affine) -> Conv:
        """Compose with a diagonal map of the output: norm(self(x)).

        Raises:
            ValueError: If the map is not diagonal, or of another width.
        """
        if norm.weight.shape != self.bias.shape:
            raise ValueError(f"no diagonal over {len(self.bias)} channels: weight {list(norm.weight.shape)}")
        scaled = self.weight * norm.weight[:, None, None, None]
        return replace(self, weight=scaled, bias=self.bias * norm.weight + norm.bias)

    def padded(self, kernel: Pair) -> Conv:
        """The same with a larger kernel of zeros around its own, and so much more padding.

        Raises:
            ValueError: If its kernel has no centre in that one.
        """
        more = [new - old for new, old in zip(kernel, self.kernel, strict=True)]
        if min(more) < 0 or any(extra % 2 for extra in more):
            raise ValueError(f"a kernel of {self.kernel} has no place in the centre of one of {kernel}")
        y, x = (extra // 2 for extra in more)
        return replace(
            self, weight=F.pad(self.weight, (x, x, y, y)), padding=(self.padding[0] + y, self.padding[1] + x)
        )

    def grouped(self, groups: int) -> Conv:
        """The same with neighbouring groups joined to ``groups``; zeros stand between what was apart.

        Raises:
            ValueError: If the groups do not join to so many.
        """
        if self.groups % groups:
            raise ValueError(f"{self.groups} groups do not join to {groups}")
        apart = self.groups // groups
        fine = self.weight.view(groups, apart, -1, *self.weight.shape[1:])  # [g, a, out / (g a), in / (g a), h, w]
        joined = torch.einsum("gaoihw,ab->gaobihw", fine, torch.eye(apart, dtype=torch.float64))
        return replace(self, weight=joined.reshape(len(self.weight), -1, *self.kernel), groups=groups)

    def __add__(self, other: Conv) -> Conv:
        """Run in parallel and sum: (f + g)(x) = f(x) + g(x).

        Raises:
            ValueError: If the two do not read and give the same places and channels, as at the border.
        """
        kernel = tuple(max(sides) for sides in zip(self.kernel, other.kernel, strict=True))
        groups = gcd(self.groups, other.groups)
        f, g = (each.padded((kernel[0], kernel[1])).grouped(groups) for each in (self, other))
        for what in ("stride", "padding", "in_width"):
            if getattr(f, what) != getattr(g, what):
                raise ValueError(
                    f"cannot add: {what} {getattr(f, what)} and {getattr(g, what)} on a kernel of {kernel}"
                )
        if f.weight.shape != g.weight.shape:
            raise ValueError(f"cannot add: {len(f.weight)} and {len(g.weight)} channels")
        return replace(f, weight=f.weight + g.weight, bias=f.bias + g.bias)
