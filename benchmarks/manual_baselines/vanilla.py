"""The networks that the papers compare their methods with: ViT of any size, and PoolFormer; seeded, not trained."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manual_baselines.riformer import RIFormer
from manual_baselines.shared_layers import Attention, Mlp

VITS = {
    "tiny": (192, 12, 3, 16, 224),
    "base": (768, 12, 12, 16, 224),
    "large": (1024, 24, 16, 14, 336),
    "rehearsal": (24, 2, 3, 4, 32),
}
"""Width, depth, heads, patch, side."""


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attn, self.mlp = Attention(width, heads), Mlp(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """timm's vision transformer with a class token."""

    def __init__(self, size: str) -> None:
        super().__init__()
        width, depth, heads, patch, side = VITS[size]
        self.proj = nn.Conv2d(3, width, patch, stride=patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


class Pooled(nn.Module):
    """PoolFormer's block with the layers of RIFormer's: the mixer is average pooling minus its input."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        part = self.block
        normed = part.norm_reparam(x)
        mixed = F.avg_pool2d(normed, 3, stride=1, padding=1, count_include_pad=False) - normed
        x = x + part.layer_scale_1.unsqueeze(-1).unsqueeze(-1) * mixed
        return x + part.layer_scale_2.unsqueeze(-1).unsqueeze(-1) * part.mlp(part.norm2(x))


def vit(size: str) -> nn.Module:
    """A DeiT or ViT of that size."""
    torch.manual_seed(0)
    return ViT(size).eval().requires_grad_(requires_grad=False)


def poolformer(identity: RIFormer) -> nn.Module:
    """A PoolFormer with the sizes and weights of a RIFormer."""
    for index, part in enumerate(identity.network):
        if isinstance(part, nn.Sequential):
            identity.network[index] = nn.Sequential(*[Pooled(block) for block in part])
    return identity.eval()
