"""A plain vision transformer, run block by block, for scoring and conversion."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from repaconv.backbones.blockwise_vit import BlockwiseReading
from repaconv.backbones.tensor_names import official_names
from repaconv.backbones.vit import ViT, ViTConfig
from repaconv.checkpoints import Checkpoint
from repaconv.core.errors import Refused
from repaconv.methods.dwconv.checkpoint_reading import read_or_plain_vit
from repaconv.methods.dwconv.paper_equations import ConvBlock
from repaconv.verification.model_runners import with_weights

PLAIN_VIT_TENSORS = ("patch_embed.proj.weight", "pos_embed", "blocks.0.norm1.weight")
"""Tensors of every plain vision transformer, by which it differs from other networks."""
BATCH_SIZE = 16
"""Batch size for the calibration images."""

Reading = BlockwiseReading[ConvBlock]


def read_plain(checkpoint: Checkpoint, settings: dict[str, str]) -> Reading:
    """Read a plain vision transformer from a checkpoint.

    Raises:
        Refused: If it is not one, or a block has no attention or merges tokens.
        UsageProblem: If a setting is unknown or malformed.
    """
    tensors, _, _ = official_names(checkpoint)
    if missing := [name for name in PLAIN_VIT_TENSORS if name not in tensors]:
        raise Refused(
            f"{checkpoint.path} is not a plain vision transformer: it has no {missing[0]}.",
            hint="Give the checkpoint of a ViT or DeiT with timm's names of its tensors. Other networks can be folded: "
            "repaconv fold.",
            code="convert.not-plain",
        )
    reading = read_or_plain_vit(checkpoint, settings)
    replaced = [i for i, block in enumerate(reading.blocks) if block.merged or block.mixer.kind != "attention"]
    if replaced:
        raise Refused(
            f"{checkpoint.path}: blocks {', '.join(map(str, replaced))} merge tokens or have heads without attention.",
            hint="Give the plain network that it was made from.",
            code="convert.not-plain",
        )
    return reading


@dataclass(frozen=True)
class PlainViT:
    """A plain vision transformer in float32 and eval mode, and the reading of its checkpoint."""

    reading: Reading
    net: ViT

    @classmethod
    def of(cls, reading: Reading) -> PlainViT:
        """Build the network."""
        net = with_weights(reading.module(), reading.tensors, torch.float32)
        assert isinstance(net, ViT)
        return cls(reading, net)

    @property
    def config(self) -> ViTConfig:
        """The configuration of the inference-time network."""
        return self.reading.config

    @property
    def blocks(self) -> list[Any]:
        """The blocks in order."""
        return list(self.net.blocks)

    @property
    def heads(self) -> int:
        """The number of heads of a block."""
        return self.reading.blocks[0].mixer.heads


def queries_keys_values(block: Any, x: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values [B, h, N, dh] of a block with attention, for tokens [B, N, d]."""
    q, k, v = block.attn.qkv(block.norm1(x)).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    return q, k, v


def attention_output(block: Any, x: Tensor, heads: int) -> Tensor:
    """Return the outputs [B, N, d] of the heads of a block, before W^O."""
    mixed = nn.functional.scaled_dot_product_attention(*queries_keys_values(block, x, heads))
    return mixed.transpose(1, 2).flatten(2)


def after_attention(block: Any, x: Tensor, mixed: Tensor) -> Tensor:
    """Return the residual stream [B, N, d] after the attention, given the outputs of the heads."""
    out: Tensor = x + block.ls1(block.attn.proj(mixed))
    return out


def after_ffn(block: Any, x: Tensor) -> Tensor:
    """Return the residual stream [B, N, d] after the FFN, which is the end of the block."""
    out: Tensor = x + block.ls2(block.mlp(block.norm2(x)))
    return out


def batches(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split tensors into batches of the same images."""
    return zip(*(torch.split(tensor, BATCH_SIZE) for tensor in tensors), strict=True)


def map_batches(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Apply a function to all images, batch by batch."""
    return torch.cat([function(*some) for some in batches(*tensors)])
