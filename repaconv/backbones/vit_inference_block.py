"""The transformer block in deploy form: a spec of mixer, FFN, norms and token merging, and the modules built by it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from repaconv.backbones.constant_and_prefix_token_mixers import DropInSpec
from repaconv.backbones.convolution_mixers import ConvMixerSpec
from repaconv.backbones.shared_layers import attention
from repaconv.backbones.token_merging_block import MergeSpec, MergingBlock, Sized
from repaconv.backbones.vit_layers import AttentionSpec, IdleMlpSpec, MlpSpec, NormSpec, SwiGluSpec

# The last block of a network that reads only its class token: it uses the other tokens only as keys and values.


class ReadOutAttention(nn.Module):
    """Attention of the first ``reads`` tokens over all. The scores' divisor is in ``q``; ``kv`` has rows [k | v]."""

    def __init__(self, width: int, spec: AttentionSpec, reads: int) -> None:
        super().__init__()
        self.heads, self.reads = spec.heads, reads
        self.q, self.kv, self.proj = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, size: Tensor | None) -> Tensor:
        """x [B, N, d], size [B, N, 1] or None -> [B, reads, d]."""
        k, v = self.kv(x).chunk(2, -1)
        q, k, v = (p.view(*p.shape[:2], self.heads, -1).transpose(1, 2) for p in (self.q(x[:, : self.reads]), k, v))
        out: Tensor = self.proj(attention(q, k, v, size).transpose(1, 2).flatten(2))
        return out


class ReadOutBlock(nn.Module):
    """x += attn(norm1(x)), x += mlp(norm2(x)), only for the first ``reads`` tokens."""

    def __init__(
        self, width: int, norm1: nn.Module, mixer: AttentionSpec, norm2: nn.Module, mlp: MlpSpec, reads: int
    ) -> None:
        super().__init__()
        self.norm1, self.attn = norm1, ReadOutAttention(width, mixer, reads)
        self.norm2, self.mlp, self.reads = norm2, mlp.build(width), reads

    def forward(self, state: Tensor | Sized) -> Tensor:
        """Tokens [B, N, d], or tokens and sizes [B, N, 1], to [B, reads, d]."""
        x, size = state if isinstance(state, tuple) else (state, None)
        x = x[:, : self.reads] + self.attn(self.norm1(x), size)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


# The general block.

MixerSpec = AttentionSpec | ConvMixerSpec | DropInSpec
FfnSpec = MlpSpec | SwiGluSpec | IdleMlpSpec


@dataclass(frozen=True)
class BlockSpec:
    """One deploy block: x += mixer(norm1(x)), x += ffn(norm2(x)).

    Attributes:
        mixer: The token mixer.
        ffn: The feed-forward network; an idle-mlp includes the shortcut.
        norm1, norm2: The norms before mixer and FFN.
        merge: Token merging in this or an earlier block; None without it, and if ``reads`` is not 0.
        reads: The number of tokens that are read after the block, 0 for all.
    """

    mixer: MixerSpec
    ffn: FfnSpec
    norm1: NormSpec
    norm2: NormSpec
    merge: MergeSpec | None = None
    reads: int = 0


class DeployBlock(nn.Module):
    """The module of a `BlockSpec` without token merging that computes all tokens.

    Args:
        spec: The block.
        width: Channels d.
        grid: Number of patches in (height, width).
    """

    def __init__(self, spec: BlockSpec, width: int, grid: tuple[int, int]) -> None:
        super().__init__()
        self.norm1 = spec.norm1.build(width)
        self.attn = spec.mixer.build(width, grid)
        self.norm2 = spec.norm2.build(width)
        self.mlp = spec.ffn.build(width)
        self.shortcut = not isinstance(spec.ffn, IdleMlpSpec)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, d] -> [B, N, d]."""
        x = x + self.attn(self.norm1(x))
        y: Tensor = self.mlp(self.norm2(x))
        return x + y if self.shortcut else y


def deploy_block(spec: BlockSpec, width: int, grid: tuple[int, int]) -> nn.Module:
    """Build the module of any `BlockSpec`, for ``width`` channels and a grid of (height, width) patches."""
    if spec.merge is None and not spec.reads:
        return DeployBlock(spec, width, grid)
    assert isinstance(spec.mixer, AttentionSpec)
    assert isinstance(spec.ffn, MlpSpec)
    norm1, norm2 = spec.norm1.build(width), spec.norm2.build(width)
    if spec.merge is None:
        return ReadOutBlock(width, norm1, spec.mixer, norm2, spec.ffn, spec.reads)
    return MergingBlock(width, norm1, spec.mixer, norm2, spec.ffn, spec.merge)
