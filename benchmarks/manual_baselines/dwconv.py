"""Manual baseline of drop-in depthwise convolution: eqs. 9-11 as written, in DINOv2's blocks.

There is no official code and nothing to fold: the network is trained with this architecture. Values and output are
linear layers on tokens, the convolution runs on the feature map between two transposes, LayerScales and affines remain.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from manual_baselines.shared_layers import (
    Attention,
    Mlp,
    PatchEmbed,
    depth_of,
    entries_with_prefix,
    with_weights,
    without_initialized_weights,
)


class DropIn(nn.Module):
    """proj(dw * v(x)) on a square map of patches."""

    def __init__(self, width: int, kernel: int, side: int) -> None:
        super().__init__()
        self.side = side
        self.v, self.proj = nn.Linear(width, width), nn.Linear(width, width)
        self.dw = nn.Conv2d(width, width, kernel, padding=kernel // 2, groups=width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        v = self.v(x).transpose(1, 2).reshape(batch, width, self.side, self.side)
        return self.proj(self.dw(v).reshape(batch, width, tokens).transpose(1, 2))


class LayerScale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Block(nn.Module):
    def __init__(self, weights: dict[str, Tensor], heads: int, side: int) -> None:
        super().__init__()
        width, kernel = len(weights["norm1.weight"]), weights.get("attn.dw.weight")
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, heads) if kernel is None else DropIn(width, kernel.shape[-1], side)
        self.mlp = Mlp(width, len(weights["mlp.fc1.weight"]))
        scaled = "ls1.gamma" in weights
        self.ls1, self.ls2 = (LayerScale(width) if scaled else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class DropInViT(nn.Module):
    """A ViT without class token: the head gets the mean of the patches."""

    def __init__(self, weights: dict[str, Tensor], heads: int) -> None:
        super().__init__()
        kernel = weights["patch_embed.proj.weight"]
        width, tokens = len(kernel), weights["pos_embed"].shape[1]
        blocks = [entries_with_prefix(weights, f"blocks.{index}.") for index in range(depth_of(weights))]
        self.patch_embed = PatchEmbed(kernel)
        self.pos_embed = nn.Parameter(torch.zeros(1, tokens, width))
        self.blocks = nn.Sequential(*[Block(block, heads, math.isqrt(tokens)) for block in blocks])
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, len(weights["head.weight"]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.patch_embed(x) + self.pos_embed)
        return self.head(self.norm(x).mean(dim=1))


def gated(weights: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """Weights of the blocks as their gates choose them.

    The ``count`` blocks with the largest gates get their convolution over the values of attention; the others keep
    attention.
    """
    chosen = weights["gate.weight"].argsort(descending=True)[:count].tolist()
    found = {name: weight for name, weight in weights.items() if ".attn." not in name and name != "gate.weight"}
    for index in range(depth_of(weights)):
        attn = entries_with_prefix(weights, f"blocks.{index}.attn.")
        kept = {name: weight for name, weight in attn.items() if name.startswith("dw.") == (index in chosen)}
        kept |= {name: weight for name, weight in attn.items() if name.startswith("proj.")}
        if index in chosen:
            kept = {name: weight for name, weight in kept.items() if not name.startswith("qkv.")}
            kept |= {f"v.{kind}": attn[f"qkv.{kind}"].chunk(3)[2] for kind in ("weight", "bias")}
        found |= {f"blocks.{index}.attn.{name}": weight for name, weight in kept.items()}
    return found


def deployed(checkpoint: dict[str, Any], heads: int) -> nn.Module:
    """The network as trained; if it has gates, with the blocks that they chose."""
    weights = checkpoint["model"]
    if "gate.weight" in weights:
        weights = gated(weights, checkpoint["meta"]["gate"]["p"])
    return with_weights(without_initialized_weights(DropInViT, weights, heads), weights)
