"""Token mixers that replace attention in networks converted without training, in deploy form.

`StaticSpec` has one constant matrix per head. `PrefixedSpec` is for networks with tokens other than patches, on which a
convolution cannot act. These tokens keep their attention over all tokens; they are few, so that it is cheap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from repaconv.backbones.convolution_mixers import DepthwiseSpec, EnsembledSpec


@dataclass(frozen=True)
class StaticSpec:
    """A mixer in which each head mixes the patches by a constant matrix."""

    heads: int
    kind: Literal["static"] = "static"

    def build(self, width: int, grid: tuple[int, int]) -> nn.Module:
        """Build the module, for tokens of this width on this grid."""
        return StaticMixer(width, grid, self)


class StaticMixer(nn.Module):
    """proj(E v(x)), with constant E [h, n, n] instead of the softmax."""

    def __init__(self, width: int, grid: tuple[int, int], spec: StaticSpec) -> None:
        super().__init__()
        count = grid[0] * grid[1]
        self.heads = spec.heads
        self.v, self.proj = nn.Linear(width, width), nn.Linear(width, width)
        self.static = nn.Parameter(torch.zeros(spec.heads, count, count))

    def forward(self, x: Tensor) -> Tensor:
        """[B, n, d] -> [B, n, d]."""
        v = self.v(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2)
        out: Tensor = self.proj((self.static @ v).transpose(1, 2).flatten(2))
        return out


PatchMixerSpec = DepthwiseSpec | EnsembledSpec | StaticSpec


@dataclass(frozen=True)
class PrefixedSpec:
    """A mixer for the patches, and attention over all tokens for the ``prefix`` tokens before them."""

    patches: PatchMixerSpec
    prefix: int
    heads: int
    head: int
    kind: Literal["prefixed"] = "prefixed"

    def build(self, width: int, grid: tuple[int, int]) -> nn.Module:
        """Build the module, for tokens of this width on this grid."""
        return PrefixedMixer(width, grid, self)


class PrefixedMixer(nn.Module):
    """The patches are mixed among themselves; the tokens before them attend to all tokens."""

    def __init__(self, width: int, grid: tuple[int, int], spec: PrefixedSpec) -> None:
        super().__init__()
        self.count = spec.prefix
        self.patches = spec.patches.build(width, grid)
        self.prefix = FewQueries(width, spec.heads, spec.head)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, d] -> [B, N, d]."""
        return torch.cat([self.prefix(x[:, : self.count], x), self.patches(x[:, self.count :])], 1)


class FewQueries(nn.Module):
    """Attention of a few query tokens over many, without computing the many's keys and values.

    Their matrices are applied on the queries' side. Per head: scores = (q K) x^T, values = (softmax(scores) x) V^T,
    with K, V [dh, d]. The keys' bias shifts all scores of a row equally, so it vanishes. The values' bias is in
    ``proj``, because the attention weights sum to one.
    """

    def __init__(self, width: int, heads: int, head: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.proj = nn.Linear(width, heads * head), nn.Linear(heads * head, width)
        self.k = nn.Parameter(torch.zeros(heads, head, width))
        self.v = nn.Parameter(torch.zeros(heads, width, head))

    def forward(self, few: Tensor, x: Tensor) -> Tensor:
        """[B, p, d] and [B, N, d] -> [B, p, d]."""
        q = self.q(few).view(*few.shape[:2], self.heads, -1).transpose(1, 2)  # [B, h, p, dh]
        scores = (q @ self.k) @ x.transpose(1, 2).unsqueeze(1)  # [B, h, p, N]
        mixed = (scores.softmax(-1) @ x.unsqueeze(1)) @ self.v
        out: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return out


DropInSpec = StaticSpec | PrefixedSpec
