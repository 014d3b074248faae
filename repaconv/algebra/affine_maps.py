"""The algebra: exact affine maps y = W x + b over the channel axis, in float64.

Every fold of the five papers is a few moves on such maps:

- ``g @ f``: compose, first f, then g;
- ``f + g``, ``f - g``: what runs in parallel;
- ``Affine.eye(C)``: the shortcut;
- ``f.split_out(k)``, ``f.split_in(k)``, ``f.rows(i)``, ``f.columns(i)``: channels, split at a nonlinearity.

A map over channels alone (a norm's affine, a LayerScale) keeps its weight as a diagonal of shape [C]
through every move that allows it. Maps are values: no move changes its operands.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Affine:
    """y = W x + b.

    Attributes:
        weight: float64, [out, in], or [C] where W is the diagonal matrix of it.
        bias: float64, [out].

    Raises:
        ValueError: If the shapes do not belong together.
    """

    weight: Tensor
    bias: Tensor

    def __post_init__(self) -> None:
        """Bring both to float64 and hold the shape rule."""
        object.__setattr__(self, "weight", self.weight.detach().to(torch.float64))
        object.__setattr__(self, "bias", self.bias.detach().to(torch.float64))
        if self.weight.ndim not in (1, 2) or self.bias.shape != self.weight.shape[:1]:
            raise ValueError(f"no affine map: weight {list(self.weight.shape)}, bias {list(self.bias.shape)}")

    # --- where maps come from -------------------------------------------------------------------

    @classmethod
    def linear(cls, weight: Tensor, bias: Tensor | None = None) -> Affine:
        """nn.Linear: weight [out, in], bias [out]."""
        return cls(weight, _or_zeros(bias, weight))

    @classmethod
    def conv1x1(cls, weight: Tensor, bias: Tensor | None = None) -> Affine:
        """Pointwise convolution: weight [out, in, 1, 1], bias [out]."""
        return cls.linear(_drop_1x1(weight), bias)

    @classmethod
    def diagonal(cls, scale: Tensor, shift: Tensor | None = None) -> Affine:
        """Per-channel map: a norm's affine (gamma, beta), a LayerScale (gamma). Both [C]."""
        return cls(scale, _or_zeros(shift, scale))

    @classmethod
    def depthwise1x1(cls, weight: Tensor, bias: Tensor | None = None) -> Affine:
        """Depthwise 1x1 convolution, as RIFormer's Affine: weight [C, 1, 1, 1], bias [C]."""
        return cls.diagonal(_drop_1x1(weight).squeeze(1), bias)

    @classmethod
    def batchnorm(cls, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, eps: float) -> Affine:
        """BatchNorm in eval mode over [C] channels: gamma (x - mean) / sqrt(variance + eps) + beta.

        Raises:
            ValueError: If variance + eps is not positive somewhere.
        """
        spread = variance.detach().to(torch.float64) + eps
        if not bool((spread > 0).all()):
            raise ValueError("BatchNorm variance + eps is not positive in every channel")
        scale = weight.detach().to(torch.float64) / spread.sqrt()
        return cls.diagonal(scale, bias.to(torch.float64) - scale * mean.to(torch.float64))

    @classmethod
    def eye(cls, width: int) -> Affine:
        """The identity over ``width`` channels."""
        return cls(torch.ones(width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64))

    # --- what they are --------------------------------------------------------------------------

    @property
    def is_diagonal(self) -> bool:
        """Whether the weight is kept as [C]."""
        return self.weight.ndim == 1

    @property
    def out_width(self) -> int:
        """Number of output channels."""
        return self.weight.shape[0]

    @property
    def in_width(self) -> int:
        """Number of input channels."""
        return self.weight.shape[-1]

    def _is_identity(self) -> bool:
        """Whether composing with it changes nothing; it is then not multiplied out."""
        return self.is_diagonal and bool((self.weight == 1).all()) and not bool(self.bias.any())

    def dense(self) -> Affine:
        """The same map with weight [out, in]."""
        return Affine(torch.diag(self.weight), self.bias) if self.is_diagonal else self

    def __call__(self, x: Tensor) -> Tensor:
        """Apply to x [..., in], giving [..., out] in float64."""
        x = x.to(torch.float64)
        return (x * self.weight if self.is_diagonal else x @ self.weight.T) + self.bias

    # --- the moves ------------------------------------------------------------------------------

    def __matmul__(self, first: Affine) -> Affine:
        """Compose: (self @ first)(x) = self(first(x))."""
        if self.in_width != first.out_width:
            raise ValueError(f"cannot compose: {first.out_width} channels into {self.in_width}")
        if self._is_identity():
            return first
        if first._is_identity():
            return self
        bias = self(first.bias)
        if self.is_diagonal:
            scale = self.weight if first.is_diagonal else self.weight[:, None]
            return Affine(scale * first.weight, bias)
        return Affine(self.weight * first.weight if first.is_diagonal else self.weight @ first.weight, bias)

    def __add__(self, other: Affine) -> Affine:
        """Run in parallel and sum: (f + g)(x) = f(x) + g(x)."""
        if (self.out_width, self.in_width) != (other.out_width, other.in_width):
            raise ValueError(
                f"cannot add: {self.in_width} -> {self.out_width} and {other.in_width} -> {other.out_width}"
            )
        f, g = (self, other) if self.is_diagonal and other.is_diagonal else (self.dense(), other.dense())
        return Affine(f.weight + g.weight, f.bias + g.bias)

    def __neg__(self) -> Affine:
        """(-f)(x) = -f(x)."""
        return Affine(-self.weight, -self.bias)

    def __sub__(self, other: Affine) -> Affine:
        """(f - g)(x) = f(x) - g(x)."""
        return self + -other

    def rows(self, index: slice | Tensor) -> Affine:
        """Keep these output channels, in this order: f.rows(i)(x) = f(x)[i]."""
        return Affine(self.dense().weight[index], self.bias[index])

    def columns(self, index: slice | Tensor) -> Affine:
        """Keep these input channels, the others held at zero."""
        return Affine(self.dense().weight[:, index], self.bias)

    def split_out(self, k: int) -> tuple[Affine, Affine]:
        """Split the output at channel k: f(x) = concat(first(x), second(x))."""
        return self.rows(slice(None, k)), self.rows(slice(k, None))

    def split_in(self, k: int) -> tuple[Affine, Affine]:
        """Split the input at channel k: f(x) = first(x[:k]) + second(x[k:]); first keeps the bias."""
        first, second = self.columns(slice(None, k)), self.columns(slice(k, None))
        return first, Affine(second.weight, torch.zeros_like(second.bias))


def _or_zeros(bias: Tensor | None, weight: Tensor) -> Tensor:
    return torch.zeros(weight.shape[0], dtype=torch.float64) if bias is None else bias


def _drop_1x1(weight: Tensor) -> Tensor:
    if weight.ndim != 4 or weight.shape[2:] != (1, 1):
        raise ValueError(f"not a 1x1 convolution: weight {list(weight.shape)}")
    return weight[:, :, 0, 0]
