"""Layers that the manual baselines share, as in timm."""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PatchEmbed(nn.Module):
    """Patch embedding: images to tokens."""

    def __init__(self, kernel: Tensor, *, bias: bool = True) -> None:
        super().__init__()
        width, channels, patch, _ = kernel.shape
        self.proj = nn.Conv2d(channels, width, patch, stride=patch, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """timm's attention, computed by torch's fused attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(batch, tokens, width))


class Mlp(nn.Module):
    """fc2(gelu(fc1(x)))."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


def depth_of(weights: dict[str, Tensor]) -> int:
    """Number of blocks."""
    return 1 + max(int(found[1]) for name in weights if (found := re.match(r"blocks\.(\d+)\.", name)))


def entries_with_prefix(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The entries whose names start with the prefix, by their names without it."""
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


def with_weights(module: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    """The module with exactly these weights, in their dtype, in eval mode."""
    module.to(weights["head.weight"].dtype).load_state_dict(weights, strict=True)
    return module.eval().requires_grad_(requires_grad=False)


def without_initialized_weights(build: type[nn.Module], *sizes: object) -> nn.Module:
    """A module without initialized weights: their initialization would take most of the time of a large network."""
    with torch.device("meta"):
        module = build(*sizes)
    return module.to_empty(device="cpu")
