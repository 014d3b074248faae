"""Rethinking ViT Depth (arXiv 2511.19718): the parallel branches of each transformer block are merged into one.

The training-time block at the joining factor lambda (branches b = 1..n, heads h, X normalized by a shared LayerNorm):

    A_bh = (X Wq_bh + bq_bh)(X Wk_bh + bk_bh)^T,     S_bh = softmax((A_bh + lambda sum_{b' != b} A_b'h) / D)
    x += sum_b concat_h(S_bh V_bh) Wo_b + bo_b                       output-sum, Alg. 1
    x += sum_b concat_h(S_bh (V_bh + lambda sum_{b' != b} V_b'h)) Wo_b + bo_b    value-sum, eqs. 6-7
    x += sum_b W2_b act(h_b + lambda sum_{b' != b} h_b') + b2_b,    h_b = W1_b LN2(x) + b1_b

At lambda = 1 the S_bh of all branches are equal, and so are the inputs of the FFN's activation. Then, exactly:

- The FFN is a single one whose weights are the sums over branches (eq. 1).
- The scores are one product. It is either the concatenation [Q_1..Q_n][K_1..K_n]^T / D, or X W X^T with
  W = sum_b Wq_b Wk_b^T. Softmax is invariant to terms that are constant along keys, so all bk vanish; bq remains as
  one term per key. The cheaper form is chosen by the shapes. If the concatenated matrices are rank-deficient, a thin
  SVD reduces their width to their rank.
- The values of an output-sum network are concatenated, [V_1..V_n] and [Wo_1; ..; Wo_n]. Those of a value-sum network
  are added.
- bv is folded into the output bias, because the rows of the softmax sum to 1. D is folded into Wq.

Where the paper and mathematics disagree: Algorithm 1 and eqs. 6-7 are two different networks (cross terms V_A Wo_B),
each with its own fold. The divisor D is sqrt(1 + (n-1) lambda^2) sqrt(dh) in the text and 2 sqrt(dh) in eq. 6. No
tensor shows which of them was trained, so the metadata must. Folding LayerNorm backwards (eq. 2) is not exact. Folding
its affine forwards into the next linear layers, which the paper calls impossible, is exact. Below lambda = 1 a network
cannot be folded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch
from torch import Tensor, nn

from repaconv.algebra.affine_maps import Affine
from repaconv.algebra.low_rank_products import Product, common_rank, side_by_side
from repaconv.backbones.shared_layers import ActivationKind, activation
from repaconv.backbones.vit import ViTConfig
from repaconv.backbones.vit_block_folding import folded_block, linear_of, named_tensors
from repaconv.backbones.vit_inference_block import BlockSpec, DeployBlock
from repaconv.backbones.vit_layers import AttentionSpec, MlpSpec
from repaconv.backbones.vit_training_blocks import BlockTraits, PlainBlock, scale_affine
from repaconv.method_api.contract import FoldedPart

# The network as trained.


@dataclass(frozen=True)
class Join:
    """How the branches of a network are joined. No tensor shows these settings.

    Attributes:
        value: Algorithm 1 (``output-sum``) or eqs. 6-7 (``value-sum``).
        scale: Divisor of the scores: sqrt(1 + (n-1) lambda^2) sqrt(dh) (``sqrt``) or (1 + (n-1) lambda) sqrt(dh)
            (``sum``).
        factor: The joining factor lambda.
    """

    value: str  # "output-sum" or "value-sum"
    scale: str  # "sqrt" or "sum"
    factor: float = 1.0  # lambda

    def divisor(self, branches: int, head: int) -> float:
        """D, for n branches and heads of width dh."""
        others = (branches - 1) * (self.factor**2 if self.scale == "sqrt" else self.factor)
        return (math.sqrt(1 + others) if self.scale == "sqrt" else 1 + others) * math.sqrt(head)

    def mix(self, parts: Tensor) -> Tensor:
        """part_b + lambda sum_{b' != b} part_b', for parts [n, ...]."""
        return parts + self.factor * (parts.sum(0) - parts)


class AttentionBranch(nn.Module):
    """The weights of one attention branch: qkv with rows [q | k | v], head-major, and proj."""

    def __init__(self, width: int, *, qkv_bias: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.proj = nn.Linear(width, width)


class BranchAttention(nn.Module):
    """The attention of n branches at lambda, as trained."""

    def __init__(self, width: int, heads: int, branches: int, join: Join, *, qkv_bias: bool) -> None:
        super().__init__()
        self.heads, self.join = heads, join
        self.divisor = join.divisor(branches, width // heads)
        self.branches = nn.ModuleList(AttentionBranch(width, qkv_bias=qkv_bias) for _ in range(branches))

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, d] -> [B, N, d]."""
        batch, tokens, width = x.shape
        shape = (batch, tokens, 3, self.heads, width // self.heads)
        qkv = torch.stack([branch.qkv(x).view(shape) for branch in self.branches])  # type: ignore[operator]
        q, k, v = qkv.permute(3, 0, 1, 4, 2, 5)  # each [n, B, H, N, dh]
        weights = (self.join.mix(q @ k.transpose(-2, -1)) / self.divisor).softmax(-1)
        mixed = weights @ (self.join.mix(v) if self.join.value == "value-sum" else v)
        parts = mixed.transpose(2, 3).flatten(3)
        outputs = [branch.proj(part) for branch, part in zip(self.branches, parts, strict=True)]  # type: ignore[operator]
        return torch.stack(outputs).sum(0)


class BranchMlp(nn.Module):
    """The FFN of n branches at lambda, as trained."""

    def __init__(self, width: int, hidden: int, branches: int, join: Join, act: ActivationKind) -> None:
        super().__init__()
        self.join, self.act = join, activation(act)
        self.branches = nn.ModuleList(MlpSpec(hidden, act).build(width) for _ in range(branches))

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, d] -> [B, N, d]."""
        h = self.join.mix(torch.stack([branch.fc1(x) for branch in self.branches]))  # type: ignore[operator]
        active = self.act(h)
        outputs = [branch.fc2(part) for branch, part in zip(self.branches, active, strict=True)]  # type: ignore[operator]
        return torch.stack(outputs).sum(0)


# Folding the branches, head by head.


def score_products(queries: list[Affine], keys: list[Affine], heads: int, divisor: float) -> list[Product]:
    """[Wq_1 bq_1; ..; Wq_n bq_n]^T / D and [Wk_1; ..; Wk_n] of each head; bk vanishes, as it is constant along keys."""
    products = []
    for rows in _rows(queries[0].out_width, heads):
        q = torch.cat([torch.cat([b.weight[rows], b.bias[rows, None]], 1) for b in queries]) / divisor
        products.append((q.T.numpy(), torch.cat([b.weight[rows] for b in keys]).numpy()))
    return products


def fold_scores(
    queries: list[Affine], keys: list[Affine], heads: int, divisor: float, tokens: int
) -> tuple[Affine, Tensor]:
    """Fold the scores into q and k of all heads, concatenated; k has no rows if the tokens themselves are the keys."""
    lefts, rights = side_by_side(score_products(queries, keys, heads, divisor), tokens)
    q = torch.from_numpy(np.concatenate([left.T for left in lefts]))  # [.., d + 1]
    k = q.new_zeros(0, keys[0].in_width) if rights is None else torch.from_numpy(np.concatenate(rights))
    return Affine(q[:, :-1], q[:, -1]), k


def value_products(values: list[Affine], outputs: list[Affine], heads: int) -> list[Product]:
    """[Wo_1 .. Wo_n] and [Wv_1; ..; Wv_n] of each head."""
    return [
        (
            torch.cat([o.weight[:, rows] for o in outputs], 1).numpy(),
            torch.cat([v.weight[rows] for v in values]).numpy(),
        )
        for rows in _rows(values[0].out_width, heads)
    ]


def fold_values(values: list[Affine], outputs: list[Affine], heads: int, tokens: int) -> tuple[Tensor, Affine]:
    """Fold values and outputs into v of all heads, concatenated, and proj, whose bias includes bv.

    v has no rows where the tokens themselves are the values.
    """
    lefts, rights = side_by_side(value_products(values, outputs, heads), tokens)
    proj = torch.from_numpy(np.concatenate(lefts, 1))
    v = proj.new_zeros(0, values[0].in_width) if rights is None else torch.from_numpy(np.concatenate(rights))
    bias = summed(outputs).bias
    for value, output in zip(values, outputs, strict=True):
        bias = bias + output.weight @ value.bias  # softmax rows sum to 1
    return v, Affine(proj, bias)


def summed(parts: Sequence[Affine]) -> Affine:
    """eq. 1: the sum of parallel linear layers, as one linear layer."""
    return reduce(Affine.__add__, parts)


def _rows(out: int, heads: int) -> list[slice]:
    head = out // heads
    return [slice(index * head, (index + 1) * head) for index in range(heads)]


# One block.


@dataclass(frozen=True)
class BranchBlock:
    """One transformer block: the number of branches in attention and FFN, how they join, its norms and scales.

    Attributes:
        attn, mlp: Branches of the attention and of the FFN.
        hidden: Channels inside a branch of the FFN.
        traits: Norms and LayerScales around attention and FFN.
    """

    attn: int
    mlp: int
    heads: int
    hidden: int
    join: Join
    traits: BlockTraits
    qkv_bias: bool
    act: ActivationKind = "GELU"

    def build(self, config: ViTConfig) -> nn.Module:
        """Build the block as trained."""
        attn = BranchAttention(config.width, self.heads, self.attn, self.join, qkv_bias=self.qkv_bias)
        mlp = BranchMlp(config.width, self.hidden, self.mlp, self.join, self.act)
        return PlainBlock(config, attn, mlp, self.traits)

    def spec(self, width: int, qk: int | None, v: int | None) -> BlockSpec:
        """The deploy block with heads of these widths; None where the tokens themselves are the keys or values."""
        mixer = AttentionSpec(
            self.heads, qk or width, v or width, "linear" if qk else "input", "linear" if v else "input"
        )
        return BlockSpec(mixer, MlpSpec(self.hidden, self.act), self.traits.norm1.spec, self.traits.norm2.spec)

    def spec_for(self, config: ViTConfig, weights: Mapping[str, Tensor]) -> BlockSpec:
        """The deploy block, with heads as wide as the rank of these weights requires."""
        queries, keys, values, outputs = self._branches(weights, config.width)
        scores = score_products(queries, keys, self.heads, self._divisor(config))
        mixed = value_products(values, outputs, self.heads)
        return self.spec(config.width, *(common_rank(products, config.sequence) for products in (scores, mixed)))

    def _divisor(self, config: ViTConfig) -> float:
        return self.join.divisor(self.attn, config.width // self.heads)

    def _branches(self, weights: Mapping[str, Tensor], width: int) -> tuple[list[Affine], ...]:
        """Queries, keys, values and outputs by branch; values and outputs of a value-sum network are summed to one."""
        norm1 = self.traits.norm1.affine(weights, "norm1", width)
        qkv = [linear_of(weights, f"attn.branches.{b}.qkv") @ norm1 for b in range(self.attn)]
        queries, keys, values = ([b.rows(slice(i * width, (i + 1) * width)) for b in qkv] for i in range(3))
        outputs = [linear_of(weights, f"attn.branches.{b}.proj") for b in range(self.attn)]
        if self.join.value == "value-sum":
            values, outputs = [summed(values)], [summed(outputs)]
        return queries, keys, values, outputs

    def fold(self, config: ViTConfig, index: int, weights: Mapping[str, Tensor]) -> Iterator[FoldedPart]:
        """Fold attention by eqs. 6-7 or Alg. 1 and the FFN by eq. 1, with the linear parts of norms and scales."""
        width, tokens = config.width, config.sequence
        queries, keys, values, outputs = self._branches(weights, width)
        q, k = fold_scores(queries, keys, self.heads, self._divisor(config), tokens)
        v, proj = fold_values(values, outputs, self.heads, tokens)
        bias = torch.cat([q.bias, q.bias.new_zeros(len(k) + len(v))])
        norm2 = self.traits.norm2.affine(weights, "norm2", width)
        fc1 = summed([linear_of(weights, f"mlp.branches.{b}.fc1") for b in range(self.mlp)])
        fc2 = summed([linear_of(weights, f"mlp.branches.{b}.fc2") for b in range(self.mlp)])
        folded = {
            "attn.qkv": Affine(torch.cat([q.weight, k, v]), bias),
            "attn.proj": scale_affine(weights, "ls1", width) @ proj,
            "mlp.fc1": fc1 @ norm2,
            "mlp.fc2": scale_affine(weights, "ls2", width) @ fc2,
        }
        yield folded_block(
            f"blocks.{index}.",
            lambda: self.build(config),
            weights,
            lambda: DeployBlock(config.blocks[index], width, config.grid),
            named_tensors(folded),
            (2, min(tokens, 9), width),
            descriptions=(
                f"{self.attn} branches' scores -> {'concat' if len(k) else 'X W X^T'}, "
                f"heads {q.out_width // self.heads} wide",
                f"{self.attn} branches' values ({self.join.value}) -> heads {proj.in_width // self.heads} wide",
                f"{self.mlp} branches of the FFN -> their sum",
                "bk -> nothing (softmax), bv -> proj's bias, 1 / D -> q",
                *self.traits.fold_descriptions(),
            ),
            not_folded_parts=self.traits.not_folded(),
            equation="eqs. 1, 6, 7" if self.join.value == "value-sum" else "eq. 1, Alg. 1",
        )
