"""PYRA (ECCV 2024, arXiv 2403.09192): token merging with a learned modulation of the merged tokens, and LoRA.

The block of the official code, which is the specification here (keys k include LoRA and bias, mean over heads):

    x += proj(softmax(q k^T / sqrt(dh) + log(size)) v)              size: number of tokens merged into a token
    a, b = normalized mean keys of even and odd tokens; the r even tokens most similar to an odd one are merged into it:
        n  = LN(z_s + z_d),   dD = 2 sigmoid(W_r^T n),   dr = 2 sigmoid(n W_D^T) - 1,   z = x size
        z_d += z_s + z_s dD dr,   x = z / size              class and distillation token are never merged
    x += mlp(norm2(x))

Folded, exactly:

- LoRA into qkv (`repaconv.methods.lora`).
- The scores' divisor into q only, because the merging compares k.
- norm1's affine into qkv, norm2's into fc1, the final norm's into the head, the two heads of a distilled network into
  one.
- LN's affine into both generators of the modulation; 2 sigmoid(u) - 1 = tanh(u / 2), with the factor 1/2 in W_D.
- If only the class token is read, the last block does not merge, and computes only keys and values of other tokens.

Not folded: the choice of the merged tokens, sizes, dD and dr, because they depend on the input.

Where paper and code differ, the code is implemented, because it is what was trained: it merges after the attention,
splits tokens alternately, compares keys, and averages by size. Dropping k's bias, which is exact in plain attention,
would change the choice of tokens. The official code has class and distillation token only. Here register tokens are not
merged either, and a mean over patches is weighted by size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from repaconv.backbones.shared_layers import ActivationKind
from repaconv.backbones.token_merging_block import MergeSpec, Sized
from repaconv.backbones.vit import ViTConfig
from repaconv.backbones.vit_block_folding import fold_attention, fold_mlp, folded_block, named_tensors
from repaconv.backbones.vit_inference_block import BlockSpec, deploy_block
from repaconv.backbones.vit_layers import AttentionSpec, MlpSpec
from repaconv.backbones.vit_training_blocks import BlockTraits, PlainBlock, scale_affine
from repaconv.method_api.contract import FoldedPart

MERGED_TOLERANCE = dict.fromkeys(
    ("stored", "exported", "form", "simplified", "onnx", "preprocessing", "engine", "agreement"), 1e-4
)
MERGED_REASONS = dict.fromkeys(
    MERGED_TOLERANCE, "FP32 rounding passes through a normalization and a choice of tokens in every merging block"
)

# The block as trained.


class KeyedAttention(nn.Module):
    """Attention as trained: it weights keys by size, and also returns the mean over heads of its keys."""

    def __init__(self, width: int, heads: int, *, qkv_bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=qkv_bias), nn.Linear(width, width)

    def forward(self, x: Tensor, size: Tensor | None) -> tuple[Tensor, Tensor]:
        """x [B, N, d], size [B, N, 1] -> [B, N, d] and keys [B, N, dh]."""
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5
        if size is not None:
            scores = scores + size.log()[:, None, :, 0][:, :, None]
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, tokens, width)
        return self.proj(mixed), k.mean(1)


class PyraBlock(PlainBlock):
    """The block as trained; it merges ``r`` tokens, and modulates them if it has ``pyra_a``."""

    def __init__(self, config: ViTConfig, block: MergedBlock) -> None:
        attn = KeyedAttention(config.width, block.heads, qkv_bias=block.qkv_bias)
        super().__init__(config, attn, MlpSpec(block.hidden, block.act).build(config.width), block.traits)
        self.r, self.modulated, self.prefix = block.r, block.modulated, config.prefix
        if block.modulated:
            self.pyra_a = nn.Parameter(torch.zeros(block.r, 1))
            self.pyra_b = nn.Parameter(torch.zeros(1, config.width))
            self.pyra_norm = nn.LayerNorm(config.width, block.eps)

    def forward(self, state: Tensor | Sized) -> Sized:  # type: ignore[override]
        """Tokens [B, N, d], or tokens and sizes [B, N, 1], to tokens and sizes."""
        x, size = state if isinstance(state, tuple) else (state, None)
        mixed, keys = self.attn(self.norm1(x), size)
        x = x + self.ls1(mixed)
        if self.r:
            x, size = self.merge(x, size, keys)
        return x + self.ls2(self.mlp(self.norm2(x))), size

    def merge(self, x: Tensor, size: Tensor | None, keys: Tensor) -> Sized:
        """Merge r tokens by bipartite soft matching, in descending order of the pairs' similarity."""
        metric = keys / keys.norm(dim=-1, keepdim=True)
        scores = metric[:, ::2] @ metric[:, 1::2].transpose(1, 2)
        scores[:, : self._evens] = -math.inf  # the class token, and registers
        scores[:, :, : self.prefix // 2] = -math.inf  # a distillation token, and registers
        best, partner = scores.max(-1)
        order = best.argsort(dim=1, descending=True, stable=True)
        source, kept = order[:, : self.r, None], order[:, self.r :].sort(1).values[..., None]
        target = partner[..., None].gather(1, source)
        size = torch.ones_like(x[..., :1]) if size is None else size
        z = x * size
        merged, receiving = _take(z[:, ::2], source), _take(z[:, 1::2], target)
        if self.modulated:
            n = self.pyra_norm(merged + receiving)
            by_channel = 2 * torch.sigmoid(self.pyra_a.T @ n)
            by_row = 2 * torch.sigmoid(n @ self.pyra_b.T) - 1
            merged = merged + merged * by_channel * by_row
        z = self._ordered(_take(z[:, ::2], kept), _added(z[:, 1::2], target, merged))
        odd_sizes = _added(size[:, 1::2], target, _take(size[:, ::2], source))
        sizes = self._ordered(_take(size[:, ::2], kept), odd_sizes)
        return z / sizes, sizes

    def _ordered(self, even: Tensor, odd: Tensor) -> Tensor:
        """Reorder: the tokens before the patches in their order, then even patches, then odd ones."""
        evens, odds = self._evens, self.prefix // 2
        first = [
            even[:, place // 2 :][:, :1] if place % 2 == 0 else odd[:, place // 2 :][:, :1]
            for place in range(self.prefix)
        ]
        return torch.cat([*first, even[:, evens:], odd[:, odds:]], 1)

    @property
    def _evens(self) -> int:
        """The number of even tokens before the patches."""
        return (self.prefix + 1) // 2


def _take(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(1, index.expand(-1, -1, x.shape[2]))


def _added(x: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    return x.scatter_add(1, index.expand(-1, -1, x.shape[2]), rows)


# Folding.


def fold_modulation(block: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Fold pyra_norm's affine (gamma, beta) into the generators pyra_a (W_r) and pyra_b (W_D)."""
    w_r, w_d = block["pyra_a"], block["pyra_b"]
    gamma, beta = block["pyra_norm.weight"], block["pyra_norm.bias"]
    return {
        "rows": w_r.T,
        "scale": gamma,
        "shift": beta * w_r.sum(),
        "channels.weight": gamma * w_d / 2,
        "channels.bias": (w_d @ beta) / 2,
    }


def _split_queries(folded: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Split attn.qkv into attn.q and attn.kv."""
    split = {name: w for name, w in folded.items() if not name.startswith("attn.qkv.")}
    for kind in ("weight", "bias"):
        rows = folded[f"attn.qkv.{kind}"]
        split[f"attn.q.{kind}"], split[f"attn.kv.{kind}"] = rows[: len(rows) // 3], rows[len(rows) // 3 :]
    return split


@dataclass(frozen=True)
class MergedBlock:
    """One transformer block that may merge tokens: its norms and scales, its sizes and its merging.

    Attributes:
        traits: Norms and LayerScales around attention and MLP.
        tokens: Number of tokens that enter the block.
        r: Number of tokens that it merges into others.
        modulated: Whether the merged tokens are modulated.
        eps: eps of ``pyra_norm``.
    """

    traits: BlockTraits
    heads: int
    hidden: int
    qkv_bias: bool
    tokens: int
    r: int
    modulated: bool
    act: ActivationKind = "GELU"
    eps: float = 1e-5

    def build(self, config: ViTConfig) -> nn.Module:
        """Build the block as trained."""
        return PyraBlock(config, self)

    def spec(self, bare: ViTConfig, *, last: bool) -> BlockSpec:
        """The deploy block; the ``last`` one computes only the class and the distillation token."""
        head, sized = bare.width // self.heads, self.tokens < bare.sequence
        merge = MergeSpec(self.r, sized, bare.prefix, self.modulated and self.r > 0, self.eps)
        return BlockSpec(
            AttentionSpec(self.heads, head, head),
            MlpSpec(self.hidden, self.act),
            self.traits.norm1.spec,
            self.traits.norm2.spec,
            merge if not last and (self.r or sized) else None,
            reads=len(bare.tokens) if last else 0,
        )

    def fold(self, config: ViTConfig, index: int, weights: Mapping[str, Tensor]) -> Iterator[FoldedPart]:
        """Fold the block by eqs. 3-7, and compare it with the trained one on random tokens.

        Of a last block that computes only the first tokens, these are compared.
        """
        width, spec, traits = config.width, config.blocks[index], self.traits
        norm1, norm2 = (getattr(traits, name).affine(weights, name, width) for name in ("norm1", "norm2"))
        scale1, scale2 = (scale_affine(weights, name, width) for name in ("ls1", "ls2"))
        folded = named_tensors(
            {**fold_attention(weights, self.heads, norm1, scale1), **fold_mlp(weights, norm2, scale2)}
        )
        if spec.reads:
            folded = _split_queries(folded)
        if spec.merge and spec.merge.modulated:
            folded |= {f"merge.modulation.{name}": w for name, w in fold_modulation(weights).items()}
        part = folded_block(
            f"blocks.{index}.",
            lambda: _Alone(self, config, self.build(config), spec.reads),
            {f"inner.{name}": w for name, w in weights.items()},
            lambda: _Alone(self, config, deploy_block(spec, width, config.grid), spec.reads),
            {f"inner.{name}": w for name, w in folded.items()},
            (2, self.tokens, width),
            descriptions=(*self._fold_descriptions(spec), *traits.fold_descriptions()),
            not_folded_parts=(*traits.not_folded(), *self._not_folded(spec)),
            equation="eqs. 3-7",
        )
        yield replace(part, tensors={f"blocks.{index}.{name}": w for name, w in folded.items()})

    def _fold_descriptions(self, spec: BlockSpec) -> Iterator[str]:
        yield "1 / sqrt(dh) -> q"
        if spec.reads:
            yield "queries, proj and mlp -> the tokens that are read"
        if spec.merge and spec.merge.modulated:
            yield "pyra_norm's affine -> both generators; 2 sigmoid(u) - 1 -> tanh(u / 2)"
        if self.r and not (spec.merge and spec.merge.r):
            yield "the merging -> nothing: the tokens that are read are never merged"

    def _not_folded(self, spec: BlockSpec) -> Iterator[str]:
        if spec.merge and spec.merge.r:
            choice = f"the choice of {self.r} tokens of {self.tokens}, their order and sizes"
            yield f"{choice}: they depend on the input"


class _Alone(nn.Module):
    """Run one block on tokens only, for the comparison: with synthetic sizes, and only the first ``reads`` outputs."""

    def __init__(self, block: MergedBlock, config: ViTConfig, inner: nn.Module, reads: int) -> None:
        super().__init__()
        self.sized, self.inner, self.reads = block.tokens < config.sequence, inner, reads

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, d] -> [B, N' or reads, d]."""
        sizes = 1 + torch.arange(x.shape[1], dtype=x.dtype)[None, :, None].expand(len(x), -1, -1) % 5
        out = self.inner((x, sizes) if self.sized else x)
        tokens: Tensor = out[0] if isinstance(out, tuple) else out
        return tokens[:, : self.reads or None]
