"""Manual baseline of Non-deep ViT: branches merged as in the paper, with attention scores X W X^T in every head.

There is no official code. W = sum_b Wq_b Wk_b^T is d x d per head; the bias of the queries remains as one term per key,
and that of the keys vanishes in the softmax. Values and outputs are summed (eqs. 6-7, ``value-sum``) or concatenated
(Algorithm 1, ``output-sum``), as the metadata says. Both LayerNorms keep their affine.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from manual_baselines.shared_layers import (
    Mlp,
    PatchEmbed,
    depth_of,
    entries_with_prefix,
    with_weights,
    without_initialized_weights,
)

EPS = 1e-6


class JoinedAttention(nn.Module):
    """softmax(X W X^T / D) V O; the tokens are the keys of all heads."""

    def __init__(self, width: int, heads: int, values: int, divisor: float) -> None:
        super().__init__()
        self.heads, self.scale = heads, 1 / divisor
        self.query, self.value = nn.Linear(width, heads * width), nn.Linear(width, values)
        self.proj = nn.Linear(values, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        query = self.query(x).reshape(batch, tokens, self.heads, -1).transpose(1, 2)
        value = self.value(x).reshape(batch, tokens, self.heads, -1).transpose(1, 2)
        scores = (query @ x.unsqueeze(1).transpose(-2, -1)) * self.scale
        mixed = scores.softmax(dim=-1) @ value
        return self.proj(mixed.transpose(1, 2).reshape(batch, tokens, -1))


class Block(nn.Module):
    def __init__(self, weights: dict[str, Tensor], heads: int, divisor: float) -> None:
        super().__init__()
        width, hidden = len(weights["proj.weight"]), len(weights["fc1.weight"])
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=EPS), nn.LayerNorm(width, eps=EPS)
        self.attn = JoinedAttention(width, heads, len(weights["value.weight"]), divisor)
        self.mlp = Mlp(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class NonDeepViT(nn.Module):
    def __init__(self, weights: dict[str, Tensor], heads: int, divisor: float) -> None:
        super().__init__()
        kernel = weights["patch_embed.proj.weight"]
        width = len(kernel)
        of_block = entries_with_prefix(weights, "blocks.0.attn.") | entries_with_prefix(weights, "blocks.0.mlp.")
        self.patch_embed = PatchEmbed(kernel)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(weights["pos_embed"].shape))
        self.blocks = nn.Sequential(*[Block(of_block, heads, divisor) for _ in range(depth_of(weights))])
        self.norm = nn.LayerNorm(width, eps=EPS)
        self.head = nn.Linear(width, len(weights["head.weight"]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


def join_attention(branches: list[dict[str, Tensor]], heads: int, *, summed: bool) -> dict[str, Tensor]:
    """qkv and proj of every branch -> query, value and proj."""
    width = len(branches[0]["proj.weight"])
    queries, keys, values = ([_heads(b["qkv.weight"][part], heads) for b in branches] for part in _thirds(width))
    query_bias, _, value_bias = ([_heads(b["qkv.bias"][part], heads) for b in branches] for part in _thirds(width))
    outputs = [b["proj.weight"].reshape(width, heads, -1) for b in branches]
    pairs = list(zip(queries, keys, query_bias, strict=True))
    join = (lambda parts, _: sum(parts)) if summed else torch.cat
    return {
        "query.weight": sum(k.mT @ q for q, k, _ in pairs).flatten(0, 1),
        "query.bias": sum((k.mT @ bias[..., None]) for _, k, bias in pairs).flatten(),
        "value.weight": join(values, 1).flatten(0, 1),
        "value.bias": join(value_bias, 1).flatten(),
        "proj.weight": join(outputs, 2).flatten(1),
        "proj.bias": sum(b["proj.bias"] for b in branches),
    }


def _thirds(width: int) -> list[slice]:
    return [slice(part * width, (part + 1) * width) for part in range(3)]


def _heads(rows: Tensor, heads: int) -> Tensor:
    return rows.reshape(heads, -1, *rows.shape[1:])


def deployed(checkpoint: dict[str, Any]) -> nn.Module:
    """The network with its branches joined.

    ``meta`` of the checkpoint has the number of heads, how the values are joined and how the scores are divided.
    """
    trained, arch, join = checkpoint["model"], checkpoint["meta"]["arch"], checkpoint["meta"]["join"]
    heads, count = arch["num_heads"], arch["num_branches"]
    weights = {name: w for name, w in trained.items() if ".branches." not in name and name != "join_lambda"}
    for index in range(depth_of(trained)):
        attn, mlp = (
            [entries_with_prefix(trained, f"blocks.{index}.{part}.branches.{b}.") for b in range(count)]
            for part in ("attn", "mlp")
        )
        joined = join_attention(attn, heads, summed=join["attn_value"] == "value-sum")
        weights |= {f"blocks.{index}.attn.{name}": weight for name, weight in joined.items()}
        weights |= {f"blocks.{index}.mlp.{name}": sum(branch[name] for branch in mlp) for name in mlp[0]}
    head = len(weights["head.weight"][0]) // heads
    divisor = (math.sqrt(count) if join["score_scale"] == "sqrt" else count) * math.sqrt(head)
    return with_weights(without_initialized_weights(NonDeepViT, weights, heads, divisor), weights)
