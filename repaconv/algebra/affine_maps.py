"""Exact affine maps y = W x + b over the channel axis, in float64.

Most folds of the papers are a few operations on such maps; kernels larger than 1x1 are in `convolution_kernels`:

- ``g @ f``: composition, first f, then g;

- ``f + g``, ``f - g``: parallel branches;

- ``Affine.eye(C)``: a shortcut;

- ``f.split_out(k)``, ``f.split_in(k)``, ``f.rows(i)``, ``f.columns(i)``: channels, split at a nonlinearity.

A per-channel map (a norm's affine, a LayerScale) keeps its weight as a diagonal of shape [C] through all operations
that allow it. Maps are immutable values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Affine:
    """The map y = W x + b.

    Attributes:
        weight: float64, [out, in]; or [C], the diagonal of W.
        bias: float64, [out].

    Raises:
        ValueError: If the shapes do not match.
    """

    weight: Tensor
    bias: Tensor

    def __post_init__(self) -> None:
        """Convert to float64 and check the shapes."""
        object.__setattr__(self, "weight", self.weight.detach().to(torch.float64))
        object.__setattr__(self, "bias", self.bias.detach().to(torch.float64))
        if self.weight.ndim not in (1, 2) or self.bias.shape != self.weight.shape[:1]:
            raise ValueError(f"no affine map: weight {list(self.weight.shape)}, bias {list(self.bias.shape)}")

    # Constructors.

    @classmethod
    def linear(cls, weight: Tensor, bias: Tensor | None = None) -> Affine:
        """Return the map of an nn.Linear: weight [out, in], bias [out] or None for zeros."""
        return cls(weight, _or_zeros(bias, weight))

    @classmethod
    def conv1x1(cls, weight: Tensor, bias: Tensor | None = None) -> Affine:
        """Return the map of a pointwise convolution: weight [out, in, 1, 1], bias [out].

        Raises:
            ValueError: If the kernel is not 1x1.
        """
        return cls.linear(_drop_1x1(weight), bias)

    @classmethod
    def diagonal(cls, scale: Tensor, shift: Tensor | None = None) -> Affine:
        """Return a per-channel map: a norm's affine (gamma, beta) or a LayerScale (gamma), both [C]."""
        return cls(scale, _or_zeros(shift, scale))

    @classmethod
    def depthwise1x1(cls, weight: Tensor, bias: Tensor | None = None) -> Affine:
        """Return the map of a depthwise 1x1 convolution, as RIFormer's Affine: weight [C, 1, 1, 1], bias [C].

        Raises:
            ValueError: If the kernel is not 1x1.
        """
        return cls.diagonal(_drop_1x1(weight).squeeze(1), bias)

    @classmethod
    def batchnorm(cls, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, eps: float) -> Affine:
        """Return the map of a BatchNorm in eval mode: gamma (x - mean) / sqrt(variance + eps) + beta, all [C].

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
        """Return the identity over ``width`` channels, as a diagonal [width]."""
        return cls(torch.ones(width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64))

    # Properties.

    @property
    def is_diagonal(self) -> bool:
        """Whether the weight is stored as [C]."""
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
        """Whether it is the identity; composing with it is then skipped."""
        return self.is_diagonal and bool((self.weight == 1).all()) and not bool(self.bias.any())

    def dense(self) -> Affine:
        """Return the same map with weight [out, in]."""
        return Affine(torch.diag(self.weight), self.bias) if self.is_diagonal else self

    def __call__(self, x: Tensor) -> Tensor:
        """Apply to x [..., in]; return [..., out] in float64."""
        x = x.to(torch.float64)
        return (x * self.weight if self.is_diagonal else x @ self.weight.T) + self.bias

    # Operations.

    def __matmul__(self, first: Affine) -> Affine:
        """Compose: (self @ first)(x) = self(first(x)), first [mid, in] and self [out, mid]; diagonal if both are.

        Raises:
            ValueError: If the output channels of ``first`` are not the input channels of this map.
        """
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
        """Add parallel maps: (f + g)(x) = f(x) + g(x); diagonal if both are.

        Raises:
            ValueError: If their input or output channels differ in number.
        """
        if (self.out_width, self.in_width) != (other.out_width, other.in_width):
            raise ValueError(
                f"cannot add: {self.in_width} -> {self.out_width} and {other.in_width} -> {other.out_width}"
            )
        f, g = (self, other) if self.is_diagonal and other.is_diagonal else (self.dense(), other.dense())
        return Affine(f.weight + g.weight, f.bias + g.bias)

    def __neg__(self) -> Affine:
        """Negate: (-f)(x) = -f(x)."""
        return Affine(-self.weight, -self.bias)

    def __sub__(self, other: Affine) -> Affine:
        """Subtract parallel maps: (f - g)(x) = f(x) - g(x)."""
        return self + -other

    def rows(self, index: slice | Tensor) -> Affine:
        """Keep these output channels, in this order: f.rows(i)(x) = f(x)[i], weight [len(i), in]."""
        return Affine(self.dense().weight[index], self.bias[index])

    def columns(self, index: slice | Tensor) -> Affine:
        """Keep these input channels, the others are zero: weight [out, len(index)], the bias stays."""
        return Affine(self.dense().weight[:, index], self.bias)

    def split_out(self, k: int) -> tuple[Affine, Affine]:
        """Split the output at channel k: f(x) = concat(first(x), second(x)), weights [k, in] and [out - k, in]."""
        return self.rows(slice(None, k)), self.rows(slice(k, None))

    def split_in(self, k: int) -> tuple[Affine, Affine]:
        """Split the input at channel k: f(x) = first(x[:k]) + second(x[k:]); first keeps the bias.

        The weights are [out, k] and [out, in - k].
        """
        first, second = self.columns(slice(None, k)), self.columns(slice(k, None))
        return first, Affine(second.weight, torch.zeros_like(second.bias))


def _or_zeros(bias: Tensor | None, weight: Tensor) -> Tensor:
    return torch.zeros(weight.shape[0], dtype=torch.float64) if bias is None else bias


def _drop_1x1(weight: Tensor) -> Tensor:
    if weight.ndim != 4 or weight.shape[2:] != (1, 1):
        raise ValueError(f"not a 1x1 convolution: weight {list(weight.shape)}")
    return weight[:, :, 0, 0]
