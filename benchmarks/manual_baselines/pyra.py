"""Manual baseline of PYRA: LoRA merged into qkv, and the official token merging as it is.

Every block has argsort, gathers, scatter_add (ONNX's ScatterElements), and token sizes in the attention scores. All
affines remain.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from manual_baselines.shared_layers import Mlp, PatchEmbed, depth_of, with_weights, without_initialized_weights

EPS = 1e-6


class KeyedAttention(nn.Module):
    """Attention that weighs keys by how many tokens were merged into them; also returns the keys' mean over heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, size: Tensor | None) -> tuple[Tensor, Tensor]:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q @ k.transpose(-2, -1)) * self.scale
        if size is not None:
            scores = scores + size.log()[:, None, None, :, 0]
        mixed = (scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(batch, tokens, width)
        return self.proj(mixed), k.mean(1)


class Block(nn.Module):
    """x += attn(norm1(x)), merge r tokens, x += mlp(norm2(x))."""

    def __init__(self, width: int, heads: int, r: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=EPS), nn.LayerNorm(width, eps=EPS)
        self.attn, self.mlp = KeyedAttention(width, heads), Mlp(width, 4 * width)
        self.r = r
        self.pyra_a, self.pyra_b = nn.Parameter(torch.zeros(r, 1)), nn.Parameter(torch.zeros(1, width))
        self.pyra_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, size: Tensor | None) -> tuple[Tensor, Tensor]:
        mixed, keys = self.attn(self.norm1(x), size)
        x = x + mixed
        size = torch.ones_like(x[..., :1]) if size is None else size
        x, size = self.merge(x, size, keys)
        return x + self.mlp(self.norm2(x)), size

    def merge(self, x: Tensor, size: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Bipartite soft matching; the merged tokens are modulated by their rank and channel."""
        source, kept, target = matching(keys, self.r)
        even, odd = (x * size)[:, ::2], (x * size)[:, 1::2]
        going, into = _rows(even, source), _rows(odd, target)
        normed = self.pyra_norm(going + into)
        by_channel = 2 * torch.sigmoid(self.pyra_a.transpose(0, 1) @ normed)
        by_row = 2 * torch.sigmoid(normed @ self.pyra_b.transpose(0, 1)) - 1
        going = going + (going * by_channel) * by_row
        merged = torch.cat([_rows(even, kept), _added(odd, target, going)], dim=1)
        even, odd = size[:, ::2], size[:, 1::2]
        size = torch.cat([_rows(even, kept), _added(odd, target, _rows(even, source))], dim=1)
        return merged / size, size


def matching(keys: Tensor, r: int) -> tuple[Tensor, Tensor, Tensor]:
    """Indices of the even tokens to merge, by descending similarity; of the other even tokens, in order; and of the odd
    tokens that they are merged into.
    """
    metric = keys / keys.norm(dim=-1, keepdim=True)
    scores = metric[:, ::2] @ metric[:, 1::2].transpose(-1, -2)
    scores[:, 0, :] = -math.inf  # the class token stays
    best, partner = scores.max(dim=-1)
    order = best.argsort(dim=-1, descending=True).unsqueeze(-1)
    source, kept = order[:, :r], order[:, r:].sort(dim=1)[0]
    return source, kept, partner.unsqueeze(-1).gather(1, source)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(1, index.expand(-1, -1, x.shape[2]))


def _added(x: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    return x.scatter_add(1, index.expand(-1, -1, x.shape[2]), rows)


class PyraViT(nn.Module):
    def __init__(self, weights: dict[str, Tensor], heads: int) -> None:
        super().__init__()
        kernel = weights["patch_embed.proj.weight"]
        width = len(kernel)
        schedule = [len(weights[f"blocks.{index}.pyra_a"]) for index in range(depth_of(weights))]
        self.patch_embed = PatchEmbed(kernel)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(weights["pos_embed"].shape))
        self.blocks = nn.ModuleList([Block(width, heads, r) for r in schedule])
        self.norm = nn.LayerNorm(width, eps=EPS)
        self.head = nn.Linear(width, len(weights["head.weight"]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed
        size = None
        for block in self.blocks:
            x, size = block(x, size)
        return self.head(self.norm(x)[:, 0])


def merge_lora(trained: dict[str, Tensor]) -> dict[str, Tensor]:
    """W += B A; the official code has no scaling factor."""
    weights = {name: weight for name, weight in trained.items() if ".LoRA_" not in name}
    for name in [name for name in trained if name.endswith(".LoRA_a.weight")]:
        attn = name.removesuffix("LoRA_a.weight")
        product = trained[f"{attn}LoRA_b.weight"] @ trained[name]
        weights[f"{attn}qkv.weight"] = weights[f"{attn}qkv.weight"] + product
    return weights


def deployed(checkpoint: dict[str, Any], heads: int) -> nn.Module:
    """The network as trained, with its LoRA merged; pyra_a has as many rows as tokens are merged per block."""
    weights = merge_lora(checkpoint["model"])
    return with_weights(without_initialized_weights(PyraViT, weights, heads), weights)


def example_lora(weights: dict[str, Tensor], rank: int, seed: int) -> dict[str, Tensor]:
    """Seeded adapters on every qkv layer: networks of PYRA are always trained with them."""
    random = torch.Generator().manual_seed(seed)
    adapters = {}
    for index in range(depth_of(weights)):
        out, width = weights[f"blocks.{index}.attn.qkv.weight"].shape
        for factor, shape in (("a", (rank, width)), ("b", (out, rank))):
            noise = torch.randn(shape, generator=random)
            adapters[f"blocks.{index}.attn.LoRA_{factor}.weight"] = 0.3 * noise / math.sqrt(shape[1])
    return adapters
