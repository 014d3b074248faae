"""The transformer block in deploy form: its mixer, its FFN, its norms and what it does about merging tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from repaconv.backbones.convmixers import ConvMixerSpec
from repaconv.backbones.dropins import DropInSpec
from repaconv.backbones.merging import MergeSpec, MergingBlock
from repaconv.backbones.readout import ReadOutBlock
from repaconv.backbones.tokens import AttentionSpec, IdleMlpSpec, MlpSpec, NormSpec, SwiGluSpec

MixerSpec = AttentionSpec | ConvMixerSpec | DropInSpec
FfnSpec = MlpSpec | SwiGluSpec | IdleMlpSpec


@dataclass(frozen=True)
class BlockSpec:
    """One deploy block: x += mixer(norm1(x)), x += ffn(norm2(x)); an idle-mlp holds its shortcut itself.

    ``merge`` is what it does about merging tokens, ``reads`` the number of tokens that are read behind it, 0 for all.
    """

    mixer: MixerSpec
    ffn: FfnSpec
    norm1: NormSpec
    norm2: NormSpec
    merge: MergeSpec | None = None
    reads: int = 0


class DeployBlock(nn.Module):
    """The block of a `BlockSpec` that neither merges tokens nor leaves any out.

    Args:
        spec: The block.
        width: Channels d.
        grid: Patches in (height, width).
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
    """The module of any `BlockSpec`, for ``width`` channels and (height, width) patches."""
    if spec.merge is None and not spec.reads:
        return DeployBlock(spec, width, grid)
    assert isinstance(spec.mixer, AttentionSpec)
    assert isinstance(spec.ffn, MlpSpec)
    norm1, norm2 = spec.norm1.build(width), spec.norm2.build(width)
    if spec.merge is None:
        return ReadOutBlock(width, norm1, spec.mixer, norm2, spec.ffn, spec.reads)
    return MergingBlock(width, norm1, spec.mixer, norm2, spec.ffn, spec.merge)
