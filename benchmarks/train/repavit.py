"""RePaViT: a plain ViT whose FFNs have three channels of four without activation, between two BatchNorms."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import digits
import torch
from torch import Tensor, nn
from training_loop import HEADS, HIDDEN, WIDTH, config, fit, initialise

from repaconv.backbones.vit import ViT, ViTConfig
from repaconv.backbones.vit_training_blocks import BlockTraits, PlainAttention, PlainBlock
from repaconv.backbones.vit_training_norms import NormTraits
from repaconv.methods.repavit.paper_equations import ChannelIdleMlp

DEPTH, EPOCHS, IDLE_RATIO, EPS = 4, 50, 0.75, 1e-5


class LearningBatchNorm(nn.BatchNorm1d):
    """BatchNorm over the channels of tokens [B, N, d], which learns its statistics; repaconv's own only evaluates."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, d] -> [B, N, d]."""
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


def block(sizes: ViTConfig, index: int) -> nn.Module:
    """One training block; its norms lie inside attention and FFN, as in the official code."""
    attn = PlainAttention(WIDTH, HEADS, norm=NormTraits("layer", EPS))
    mlp = ChannelIdleMlp(WIDTH, HIDDEN, round(HIDDEN * (1 - IDLE_RATIO)), EPS)
    mlp.norm1, mlp.norm2 = LearningBatchNorm(WIDTH, EPS), LearningBatchNorm(HIDDEN, EPS)
    outside = NormTraits(None, EPS)
    return PlainBlock(sizes, attn, mlp, BlockTraits(outside, outside, scale1=False, scale2=False))


def train(data: digits.Digits, seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """The net, and its checkpoint as the official main.py writes one.

    That one's args name the model, and the model's name tells the heads; here they stand in args themselves.
    """
    torch.manual_seed(seed)
    net = ViT(config(DEPTH, pre_norm=True, patch_bias=False), block)
    initialise(net)
    fit(net, data, epochs=EPOCHS, seed=seed)
    args = Namespace(
        idle_ratio=IDLE_RATIO,
        heuristic="static",
        feature_norm="BatchNorm",
        channel_idle=True,
        num_heads=HEADS,
        epochs=EPOCHS,
        seed=seed,
        **digits.facts(),
    )
    return net, {"model": net.state_dict(), "args": args}
