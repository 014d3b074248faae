"""Transformer blocks that merge tokens (ToMe, PYRA) between attention and FFN, in deploy form.

The merging uses only ONNX operators that all parsers support: products, TopK, gathers of rows and products with one-hot
matrices. It does not use ScatterElements, which some parsers refuse and others compute wrongly. Tokens have the order
of the official code, on which the next block's split depends: the tokens before the patches, the even tokens that
remain, in ascending order, then the odd ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from repaconv.backbones import shared_layers
from repaconv.backbones.shared_layers import attention, heads_of
from repaconv.backbones.vit_layers import AttentionSpec, MlpSpec

Sized = tuple[Tensor, Tensor | None]
"""Tokens [B, N, d], and their sizes [B, N, 1]: how many original tokens each one contains. None before any merging."""


@dataclass(frozen=True)
class MergeSpec:
    """The token merging of one block.

    Attributes:
        r: Number of tokens that are merged into others.
        sized: Whether earlier blocks merged tokens, so that tokens have sizes.
        prefix: Number of tokens before the patches, which are never merged.
        modulated: Whether the merged tokens are modulated first (PYRA).
        eps: eps of the modulation's norm.
    """

    r: int
    sized: bool
    prefix: int
    modulated: bool
    eps: float = 1e-5
    kind: Literal["merge"] = "merge"


class Modulation(nn.Module):
    """PYRA's modulation of the merged tokens: s + s dD dr with dD = 2 sigmoid(u), dr = tanh(v).

    The affine of its norm is folded into both generators.
    """

    def __init__(self, r: int, width: int, eps: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps, elementwise_affine=False)
        self.rows = nn.Parameter(torch.zeros(1, r))  # W_r^T, by rank of the pair
        self.scale = nn.Parameter(torch.ones(width))  # gamma
        self.shift = nn.Parameter(torch.zeros(width))  # beta sum(W_r)
        self.channels = nn.Linear(width, 1)  # gamma W_D / 2 and beta W_D / 2

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Pairs [B, r, d], by descending similarity -> [B, r, d]."""
        if shared_layers.runs_on_gpu(source):  # the same by fewer kernels
            n = self.norm(source + target)
            by_channel = torch.addcmul(self.shift, self.scale, self.rows @ n).sigmoid()
            return torch.addcmul(source, source * by_channel, self.channels(n).tanh(), value=2)
        n = self.norm(source - -target)  # ONNX Runtime makes SkipLayerNormalization of a plain sum, 7 times as slow
        by_channel = 2 * torch.sigmoid(self.scale * (self.rows @ n) + self.shift)  # [B, 1, d]
        by_row = torch.tanh(self.channels(n))  # [B, r, 1]
        return source + source * by_channel * by_row


class Merge(nn.Module):
    """Merges r even tokens into the odd tokens most similar to them."""

    def __init__(self, spec: MergeSpec, width: int) -> None:
        super().__init__()
        self.spec = spec
        self.modulation = Modulation(spec.r, width, spec.eps) if spec.modulated else None

    def forward(self, x: Tensor, size: Tensor | None, metric: Tensor) -> Sized:
        """x [B, N, d], size [B, N, 1] or None, metric [B, N, c] -> tokens and sizes of the N - r remaining tokens.

        A token x of size t, into which tokens of sizes s_i and (modulated) size-weighted values z_i are merged, becomes

            (t x + sum_i z_i) / (t + sum_i s_i)  =  x + sum_i (z_i - s_i x) / (t + sum_i s_i)

        The remaining tokens are therefore gathered once, and one product adds the contributions of the r merged ones.
        """
        if shared_layers.runs_on_gpu(x):
            return self._by_fewer_kernels(x, size, metric)
        r, prefix, (even, odd) = self.spec.r, self.spec.prefix, self._firsts
        scores = self._scores(metric)
        source, kept = self._choice(scores.amax(-1))
        target = 2 * scores.argmax(-1).gather(1, source) + odd
        first, others = torch.arange(prefix, device=x.device), torch.arange(odd, x.shape[1], 2, device=x.device)
        before = [first.expand(x.shape[0], -1)] if prefix else []
        remaining = torch.cat([*before, 2 * kept + even, others.expand(x.shape[0], -1)], 1)  # [B, N - r]
        both = torch.cat([2 * source + even, target], 1)
        assignment = (remaining.unsqueeze(2) == target.unsqueeze(1)).to(x.dtype)  # [B, N - r, r]
        z = pairs = _rows(x, both)  # [B, 2 r, d]
        subtracted = pairs[:, r:]
        if size is None:  # all sizes are 1
            size = 1 + assignment.sum(2, keepdim=True)
        else:
            sizes = _rows(size, both)  # [B, 2 r, 1]
            z, subtracted = pairs * sizes, sizes[:, :r] * subtracted
            size = _rows(size, remaining) + assignment @ sizes[:, :r]
        added = z[:, :r] if self.modulation is None else self.modulation(z[:, :r], z[:, r:])
        return _rows(x, remaining) + (assignment / size) @ (added - subtracted), size

    def _by_fewer_kernels(self, x: Tensor, size: Tensor | None, metric: Tensor) -> Sized:
        """The same as `forward`, by operators that ONNX lacks, or that runtimes run slowly.

        Small networks take as long on a GPU as the launches of their kernels.
        """
        r, prefix, (even, odd) = self.spec.r, self.spec.prefix, self._firsts
        best, partner = self._scores(metric).max(-1)  # of equal ones the first, like argmax
        order = _largest(best, best.shape[1])
        source, kept = order[:, :r], order[:, r:].sort(1).values
        target = partner.gather(1, source)
        evens, odds = x[:, even::2], x[:, odd::2]
        assignment = (torch.arange(odds.shape[1], device=x.device)[:, None] == target.unsqueeze(1)).to(x.dtype)
        z, into = _rows(evens, source), _rows(odds, target)
        subtracted = into
        if size is None:  # all sizes are 1
            size_of_odds = 1 + assignment.sum(2, keepdim=True)
            sizes = [size_of_odds.new_ones(x.shape[0], prefix + kept.shape[1], 1), size_of_odds]
        else:
            sizes_of_evens, size_of_odds = size[:, even::2], size[:, odd::2]
            merged = _rows(sizes_of_evens, source)
            z, into, subtracted = z * merged, into * _rows(size_of_odds, target), into * merged
            size_of_odds = size_of_odds + assignment @ merged
            sizes = [size[:, :prefix], _rows(sizes_of_evens, kept), size_of_odds]
        added = z if self.modulation is None else self.modulation(z, into)
        odds = odds + (assignment / size_of_odds) @ (added - subtracted)
        return torch.cat([x[:, :prefix], _rows(evens, kept), odds], 1), torch.cat(sizes, 1)

    def _choice(self, best: Tensor) -> tuple[Tensor, Tensor]:
        """Split the even tokens [B, E]: those that are merged, by descending similarity, and the others, ascending."""
        count, r = best.shape[1], self.spec.r
        source, places = _largest(best, r), torch.arange(count, device=best.device)
        merged = (source.unsqueeze(2) == places).to(best.dtype).sum(1)
        order = places + count * merged  # all different, so that TopK has no ties
        return source, order.topk(count - r, 1, largest=False, sorted=True).indices

    def _scores(self, metric: Tensor) -> Tensor:
        """Cosine similarities [B, even, odd]."""
        metric, (even, odd) = metric / (metric * metric).sum(-1, keepdim=True).sqrt(), self._firsts
        return metric[:, even::2] @ metric[:, odd::2].transpose(1, 2)

    @property
    def _firsts(self) -> tuple[int, int]:
        """The first even and the first odd token after the prefix."""
        prefix = self.spec.prefix
        return prefix + prefix % 2, prefix + 1 - prefix % 2

    def decision_margin(self, _x: Tensor, _size: Tensor | None, metric: Tensor) -> Tensor:
        """The smallest margin [B] by which a merge was decided: for each sample, of all similarities that are compared.

        These are the best and second-best partner of a merged token, consecutive ranks of merged tokens (only with
        modulation, which depends on the rank), and the last merged and first remaining token.
        """
        r, scores = self.spec.r, self._scores(metric)
        best, order = scores.amax(-1).sort(dim=1, descending=True)
        leads = [best[:, :r] - best[:, 1 : r + 1]] if best.shape[1] > r else [best[:, : r - 1] - best[:, 1:r]]
        if not self.spec.modulated:  # without modulation the order of the merged tokens has no effect
            leads = [lead[:, -1:] for lead in leads if best.shape[1] > r]
        if scores.shape[2] > 1:
            two = scores.gather(1, order[:, :r, None].expand(-1, -1, scores.shape[2])).topk(2, dim=2).values
            leads.append(two[..., 0] - two[..., 1])
        return torch.cat([torch.ones_like(best[:, :1]), *leads], 1).amin(1)


def _largest(x: Tensor, r: int) -> Tensor:
    """Indices [B, r] of the largest values of x [B, N], descending; equal values in order of index, as in ONNX's TopK.

    torch's topk does not define the order of equal values, so a stable sort is used. The exporter does not support a
    stable sort; it translates topk into TopK.
    """
    if torch.compiler.is_exporting():
        return x.topk(r, 1, largest=True, sorted=True).indices
    return x.sort(dim=1, descending=True, stable=True).indices[:, :r]


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """Gather rows: x [B, N, d], index [B, r] -> [B, r, d]."""
    return x.gather(1, index.unsqueeze(2).expand(-1, -1, x.shape[2]))


class KeyedAttention(nn.Module):
    """Attention that weights keys by their size, and also returns the mean over heads of its keys."""

    def __init__(self, width: int, spec: AttentionSpec) -> None:
        super().__init__()
        self.heads = spec.heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, size: Tensor | None) -> tuple[Tensor, Tensor]:
        """x [B, N, d], size [B, N, 1] -> [B, N, d] and keys [B, N, dh]."""
        q, k, v = heads_of(self.qkv(x), self.heads)
        return self.proj(attention(q, k, v, size).transpose(1, 2).flatten(2)), k.mean(1)


class MergingBlock(nn.Module):
    """x += attn(norm1(x)); merge tokens; x += mlp(norm2(x))."""

    def __init__(
        self, width: int, norm1: nn.Module, mixer: AttentionSpec, norm2: nn.Module, mlp: MlpSpec, merge: MergeSpec
    ) -> None:
        super().__init__()
        self.norm1, self.attn = norm1, KeyedAttention(width, mixer)
        self.merge = Merge(merge, width) if merge.r else None
        self.norm2, self.mlp = norm2, mlp.build(width)

    def forward(self, state: Tensor | Sized) -> Sized:
        """Tokens, or tokens and sizes, to tokens and sizes."""
        x, size = state if isinstance(state, tuple) else (state, None)
        mixed, keys = self.attn(self.norm1(x), size)
        x = x + mixed
        if self.merge is not None:
            x, size = self.merge(x, size, keys)
        return x + self.mlp(self.norm2(x)), size
