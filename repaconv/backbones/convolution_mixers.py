"""Token mixers that are convolutions over the grid of patches, in deploy form (Drop-in Depthwise Convolution).

Kernels are cross-correlations with zero padding k // 2. The values' bias stays before the padding; after it, it would
also be added outside the image. The convolution's bias is in ``proj``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from repaconv.backbones import shared_layers
from repaconv.backbones.shared_layers import attention


def depthwise(channels: int, kernel: int) -> nn.Conv2d:
    """A depthwise convolution without bias that preserves the size of the grid."""
    return nn.Conv2d(channels, channels, kernel, padding=kernel // 2, groups=channels, bias=False)


def to_grid(x: Tensor, grid: tuple[int, int]) -> Tensor:
    """Tokens [B, h w, c] -> [B, c, h, w]."""
    return x.transpose(1, 2).unflatten(2, grid)  # type: ignore[no-untyped-call, no-any-return]


def to_tokens(x: Tensor) -> Tensor:
    """[B, c, h, w] -> [B, h w, c]."""
    return x.flatten(2).transpose(1, 2)


def convolved(v: Tensor, dw: nn.Module, mean: Tensor | None) -> Tensor:
    """dw(v) of [B, c, h, w], plus ``mean`` [c, 1, 1] times v's mean over the grid if ``mean`` is given."""
    out: Tensor = dw(v)
    return out if mean is None else out + mean * v.mean((2, 3), keepdim=True)


@dataclass(frozen=True)
class DepthwiseSpec:
    """eq. 11: all heads are depthwise convolutions. ``mean`` adds a multiple of the values' mean over the grid."""

    kernel: int
    mean: bool = False
    kind: Literal["depthwise"] = "depthwise"

    def build(self, width: int, grid: tuple[int, int]) -> nn.Module:
        """Build the module, for tokens of this width on this grid."""
        return DepthwiseMixer(width, grid, self)


class DepthwiseMixer(nn.Module):
    """proj(dw(v(x))) on [B, d, h, w] throughout: 1x1, depthwise and 1x1 convolution."""

    def __init__(self, width: int, grid: tuple[int, int], spec: DepthwiseSpec) -> None:
        super().__init__()
        self.grid = grid
        self.v, self.proj = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)
        self.dw = depthwise(width, spec.kernel)
        self.mean = nn.Parameter(torch.zeros(width, 1, 1)) if spec.mean else None

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, d] -> [B, N, d]."""
        if shared_layers.runs_on_gpu(x):  # products on tokens: on an H200 in float32, 1x1 convolutions were slower
            v = F.linear(x, self.v.weight.flatten(1), self.v.bias)
            mixed = convolved(to_grid(v, self.grid).contiguous(), self.dw, self.mean)
            return F.linear(to_tokens(mixed), self.proj.weight.flatten(1), self.proj.bias)
        return to_tokens(self.proj(convolved(self.v(to_grid(x, self.grid)), self.dw, self.mean)))


@dataclass(frozen=True)
class EnsembledSpec:
    """eq. 13: all heads are summed into one of ``head`` channels."""

    head: int
    kernel: int
    mean: bool = False
    kind: Literal["ensembled"] = "ensembled"

    def build(self, width: int, grid: tuple[int, int]) -> nn.Module:
        """Build the module, for tokens of this width on this grid."""
        return EnsembledMixer(width, grid, self)


class EnsembledMixer(nn.Module):
    """proj(dw(v(x))) with one head's channels. v and proj are linear layers on tokens, faster at this width."""

    def __init__(self, width: int, grid: tuple[int, int], spec: EnsembledSpec) -> None:
        super().__init__()
        self.grid = grid
        self.v, self.proj = nn.Linear(width, spec.head), nn.Linear(spec.head, width)
        self.dw = depthwise(spec.head, spec.kernel)
        self.mean = nn.Parameter(torch.zeros(spec.head, 1, 1)) if spec.mean else None

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, d] -> [B, N, d]."""
        out: Tensor = self.proj(to_tokens(convolved(to_grid(self.v(x), self.grid), self.dw, self.mean)))
        return out


@dataclass(frozen=True)
class FullConvSpec:
    """eq. 9: a full convolution that is not separable, with W^O folded into it."""

    kernel: int
    kind: Literal["full-convolution"] = "full-convolution"

    def build(self, width: int, grid: tuple[int, int]) -> nn.Module:
        """Build the module, for tokens of this width on this grid."""
        return FullConvMixer(width, grid, self)


class FullConvMixer(nn.Module):
    """One k x k convolution."""

    def __init__(self, width: int, grid: tuple[int, int], spec: FullConvSpec) -> None:
        super().__init__()
        self.grid = grid
        self.conv = nn.Conv2d(width, width, spec.kernel, padding=spec.kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, d] -> [B, N, d]."""
        return to_tokens(self.conv(to_grid(x, self.grid)))


@dataclass(frozen=True)
class ScatteredSpec:
    """Some heads are attention, the others are convolutions; ``mean`` as in `DepthwiseSpec`."""

    attending: int
    convolving: int
    head: int
    kernel: int
    mean: bool = False
    kind: Literal["scattered"] = "scattered"

    def build(self, width: int, grid: tuple[int, int]) -> nn.Module:
        """Build the module, for tokens of this width on this grid."""
        return ScatteredMixer(width, grid, self)


class ScatteredMixer(nn.Module):
    """Attention in some heads and convolutions in the others.

    Rows of ``qkv``: [q | k | v of the attending heads | v of the others]. Columns of proj: [attention | convolution].
    """

    def __init__(self, width: int, grid: tuple[int, int], spec: ScatteredSpec) -> None:
        super().__init__()
        self.grid, self.heads = grid, spec.attending
        attending, convolving = spec.attending * spec.head, spec.convolving * spec.head
        self.sizes = [attending, attending, attending, convolving]
        self.qkv, self.proj = nn.Linear(width, sum(self.sizes)), nn.Linear(attending + convolving, width)
        self.dw = depthwise(convolving, spec.kernel)
        self.mean = nn.Parameter(torch.zeros(convolving, 1, 1)) if spec.mean else None

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, d] -> [B, N, d]."""
        q, k, v, c = self.qkv(x).split(self.sizes, -1)
        q, k, v = (part.view(*part.shape[:2], self.heads, -1).transpose(1, 2) for part in (q, k, v))
        mixed = attention(q, k, v).transpose(1, 2).flatten(2)
        convolution = to_tokens(convolved(to_grid(c, self.grid), self.dw, self.mean))
        out: Tensor = self.proj(torch.cat([mixed, convolution], -1))
        return out


ConvMixerSpec = DepthwiseSpec | EnsembledSpec | FullConvSpec | ScatteredSpec
