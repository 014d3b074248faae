"""Manual baseline of RePaViT: the official reparam merges the FFN into three linear layers and changes nothing else.

fc1 has the idle channels and the shortcut, fc2 and fc3 the activated ones. The attention's LayerNorm keeps its affine.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manual_baselines.shared_layers import (
    Attention,
    PatchEmbed,
    depth_of,
    entries_with_prefix,
    with_weights,
    without_initialized_weights,
)

EPS = 1e-5


class RePaMlp(nn.Module):
    """The inference-time FFN, including its shortcut."""

    def __init__(self, width: int, active: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, width)
        self.fc2, self.fc3 = nn.Linear(width, active), nn.Linear(active, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc1(x) + self.fc3(F.gelu(self.fc2(x)))


class NormedAttention(Attention):
    """Attention that includes its norm, as in the official code."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.norm = nn.LayerNorm(width, eps=EPS)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, active: int) -> None:
        super().__init__()
        self.attn, self.mlp = NormedAttention(width, heads), RePaMlp(width, active)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x + self.attn(x))


class RePaViT(nn.Module):
    """timm's vision transformer with a norm before the blocks and no bias in the patch embedding."""

    def __init__(self, weights: dict[str, Tensor], heads: int) -> None:
        super().__init__()
        kernel = weights["patch_embed.proj.weight"]
        width, active = len(kernel), len(weights["blocks.0.mlp.fc2.weight"])
        self.patch_embed = PatchEmbed(kernel, bias=False)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(weights["pos_embed"].shape))
        self.norm_pre = nn.LayerNorm(width, eps=1e-6)
        self.blocks = nn.Sequential(*[Block(width, heads, active) for _ in range(depth_of(weights))])
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, len(weights["head.weight"]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed
        x = self.norm(self.blocks(self.norm_pre(x)))
        return self.head(x[:, 0])


def reparam(mlp: dict[str, Tensor], idle_ratio: float) -> dict[str, Tensor]:
    """fc1, norm1, fc2 and norm2 as trained -> fc1, fc2 and fc3."""
    w1, c1, w2, c2 = (mlp[f"{layer}.{kind}"] for layer in ("fc1", "fc2") for kind in ("weight", "bias"))
    (s1, t1), (s2, t2) = (_scale_and_shift(entries_with_prefix(mlp, f"{norm}.")) for norm in ("norm1", "norm2"))
    w1, c1 = w1 * s1, c1 + w1 @ t1
    w2, c2 = w2 * s2, c2 + w2 @ t2
    active = math.ceil(len(w1) * (1 - idle_ratio))
    idle_in, idle_out = w1[active:], w2[:, active:]
    return {
        "fc1.weight": torch.eye(len(w2), dtype=w2.dtype) + idle_out @ idle_in,
        "fc1.bias": c2 + idle_out @ c1[active:],
        "fc2.weight": w1[:active],
        "fc2.bias": c1[:active],
        "fc3.weight": w2[:, :active],
    }


def _scale_and_shift(norm: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    scale = norm["weight"] / (norm["running_var"] + EPS).sqrt()
    return scale, norm["bias"] - norm["running_mean"] * scale


def deployed(checkpoint: dict[str, Any], heads: int) -> nn.Module:
    """The network after the official reparam; ``args`` of the checkpoint has the idle ratio."""
    trained = checkpoint["model"]
    weights = {name: weight for name, weight in trained.items() if ".mlp." not in name}
    for index in range(depth_of(trained)):
        prefix = f"blocks.{index}.mlp."
        folded = reparam(entries_with_prefix(trained, prefix), checkpoint["args"].idle_ratio)
        weights |= {f"{prefix}{name}": weight for name, weight in folded.items()}
    return with_weights(without_initialized_weights(RePaViT, weights, heads), weights)
