"""Accelerating Vision Transformers with Drop-in Depthwise Convolution: convolutions replace attention heads.

If a head's attention is local, the same at every position and for every input, the head is a convolution of the values
with a fixed kernel (eq. 8). The token mixer of each block, in the layout dwconv-v1, is one of:

    proj(softmax(q k^T / sqrt(dh)) v)            attention, eq. 4
    proj(dw * v),  v = X W^V                     drop-in depthwise, eq. 11; kernels by channel or shared by head
    the same over sum_h sigma(gamma)_h W^V_h and W^O_h     ensembled heads, eqs. 12-13
    proj(W^C * X)                                full convolution, eqs. 9-10
    attention in some heads, kernels in others   scattered
    proj(E v)                                    static: a constant matrix per head (converted networks only)
    (1 - g) attention + g convolution            gated, eq. 18: the p largest gates select the convolution

A converted network (`repaconv.conversion`) may add a multiple of the values' mean over the grid to a convolution. It
keeps attention for the tokens before the patches, class token and registers, which are not on the grid. After its last
convolution it may merge tokens; the merged tokens are not on a grid. Those blocks are PYRA's, without modulation.

Folded, exactly:

- A hard gate into the side that it selects; the weights of the other side are dropped.
- Ensembled heads into one head.
- Kernels shared by head into kernels by channel.
- norm1's affine into qkv or v, which come before the padding.
- Biases after the convolution into proj, LayerScale into proj, the scores' divisor into q.
- A full convolution into a pointwise and a depthwise one, if each output channel's kernel is exactly a product of the
  two; otherwise W^O into the full convolution. A product that was stored in FP32 differs from a product by 6e-8. It is
  treated as one only if the user asks for it, and has its own row in the certificate.

Not folded: v's bias cannot move after the zero-padded convolution, because it would also be added outside the image.
For the same reason norm1's shift cannot be folded into a full convolution. SPViT is not a special case, contrary to the
paper: its code has a BatchNorm and a ReLU between convolution and W^O.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from repaconv.algebra.affine_maps import Affine
from repaconv.backbones.shared_layers import ActivationKind
from repaconv.backbones.vit import ViTConfig
from repaconv.backbones.vit_block_folding import fold_attention, folded_block, linear_of, named_tensors, score_scale
from repaconv.backbones.vit_inference_block import BlockSpec, DeployBlock
from repaconv.backbones.vit_layers import LayerNormSpec, MlpSpec, SwiGlu, SwiGluSpec
from repaconv.backbones.vit_training_blocks import BlockTraits, PlainBlock, scale_affine
from repaconv.core.errors import Refused
from repaconv.method_api.contract import FoldedPart
from repaconv.method_api.fold_error import max_rel_error
from repaconv.methods.dwconv.token_mixer_reading import Mixer
from repaconv.methods.dwconv.training_mixers import DropIn
from repaconv.methods.pyra.merging_schedules import first_merging_block, require_possible_schedule
from repaconv.methods.pyra.paper_equations import MergedBlock
from repaconv.results import FoldStep

# --- Separate a full convolution into a pointwise and a depthwise one (eqs. 9-10), and measure the error of doing so.

MAX_SEPARATION_ERROR = {"auto": 1e-12, "refactor": 1e-7, "keep": -1.0}
"""Maximum error of a separation, by the setting ``full_conv``: FP64 rounding, FP32 rounding (6e-8), or never."""


def separable_factors(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Factor a kernel [c, d, k, k] into pointwise [c, d] and depthwise [c, 1, k, k], by each channel's rank-1 SVD."""
    u, s, v = torch.linalg.svd(weight.flatten(2), full_matrices=False)
    root = s[:, :1].sqrt()
    return u[:, :, 0] * root, (v[:, 0] * root).view(len(weight), 1, *weight.shape[2:])


def nearest_separable(weight: Tensor) -> tuple[Tensor, float]:
    """The separable kernel [c, d, k, k] nearest to a full convolution's kernel, in float64, and its error.

    The error is max|kernel - product| / max|kernel| of the output channel where it is largest.
    """
    weight = weight.double()
    pointwise, kernels = separable_factors(weight)
    product = pointwise[:, :, None, None] * kernels
    return product, max(map(max_rel_error, product, weight))


def is_rounded_product(error: float) -> bool:
    """Whether a kernel is separable only up to the rounding of its storage in FP32."""
    return error > MAX_SEPARATION_ERROR["auto"]


def separation_part(module: str, error: float) -> FoldedPart:
    """The certificate's row for a full convolution that becomes a pointwise and a depthwise one."""
    description = ("full convolution -> pointwise and depthwise: every channel's kernel is a product",)
    step = FoldStep(module=module, folded=description, equation="eqs. 9-10", max_rel_error=error)
    if is_rounded_product(error):
        why = "full_conv=refactor: a product stored in float32, to its rounding"
        step = step.model_copy(update={"allowed": MAX_SEPARATION_ERROR["refactor"], "reason": why})
    return FoldedPart({}, step)


# --- Accelerating Vision Transformers with Drop-in Depthwise Convolution: convolutions replace attention heads.

# Attention of the tokens before the patches, next to a mixer of the patches (converted networks only).


class FoldedMixer(NamedTuple):
    """A folded token mixer: its deploy tensors, descriptions of what was folded, and whether norm1 keeps its affine."""

    tensors: dict[str, Tensor]
    descriptions: tuple[str, ...]
    keeps_norm: bool = False


def fold_prefix(
    block: Mapping[str, Tensor], mixer: Mixer, patches: FoldedMixer, norm: Affine, scale: Affine
) -> FoldedMixer:
    """Fold the attention of the tokens before the patches, whose few queries attend to all tokens.

    The matrices of keys and values are applied on the queries' side. The keys' bias vanishes; the values' is in proj.

    Args:
        block: Weights in float64 by the names within the block.
        mixer: The mixer as trained.
        patches: The folded mixer of the patches.
        norm: norm1's affine.
        scale: The LayerScale ls1.
    """
    width, heads = norm.out_width, mixer.heads
    qkv = score_scale(width, heads) @ linear_of(block, "attn.prefix.qkv") @ norm
    q, k, v = (qkv.rows(slice(part * width, (part + 1) * width)) for part in range(3))
    proj = scale @ linear_of(block, "attn.prefix.proj")
    proj = Affine(proj.weight, proj.bias + proj.weight @ v.bias)
    tensors = {name.replace("attn.", "attn.patches.", 1): tensor for name, tensor in patches.tensors.items()}
    tensors |= named_tensors({"attn.prefix.q": q, "attn.prefix.proj": proj})
    tensors["attn.prefix.k"] = k.weight.view(heads, -1, width)
    tensors["attn.prefix.v"] = v.weight.view(heads, -1, width).transpose(1, 2).contiguous()
    description = f"attention of {mixer.prefix} tokens before the patches: keys and values -> their queries"
    return FoldedMixer(tensors, (*patches.descriptions, description))


# The token mixer of any kind.

EQUATIONS = {
    "attention": "eq. 4",
    "depthwise": "eq. 11",
    "ensembled": "eqs. 12-13",
    "full": "eqs. 9-10",
    "static": "eq. 8",
}


def fold_mixer(
    block: Mapping[str, Tensor], mixer: Mixer, width: int, norm: Affine, scale: Affine, *, separate: bool
) -> FoldedMixer:
    """Fold the token mixer of one block.

    Args:
        block: Weights in float64 by the names within the block.
        mixer: The mixer as trained.
        width: Channels.
        norm: norm1's affine.
        scale: The LayerScale ls1.
        separate: Whether a full convolution becomes a pointwise and a depthwise one.
    """
    if not any(mixer.conv):
        folded = fold_attention(block, mixer.heads, norm, scale)
        descriptions = ("the gate -> attention; the kernels go",) if mixer.rows else ()
        return FoldedMixer(named_tensors(folded), (*descriptions, "1 / sqrt(dh) -> q"))
    proj = scale @ linear_of(block, "attn.proj")
    if mixer.kind == "full":
        return _fold_full(block, norm, proj, separate=separate)
    if not all(mixer.conv):
        return _fold_scattered(block, mixer, width, norm, proj)
    patches = _fold_patches(block, mixer, width, norm, proj)
    return fold_prefix(block, mixer, patches, norm, scale) if mixer.prefix else patches


def _fold_patches(block: Mapping[str, Tensor], mixer: Mixer, width: int, norm: Affine, proj: Affine) -> FoldedMixer:
    """Fold a mixer without attention."""
    if mixer.kind == "static":
        linears = named_tensors({"attn.v": linear_of(block, "attn.v") @ norm, "attn.proj": proj})
        return FoldedMixer({**linears, "attn.static": block["attn.static"]}, ())
    fold = _fold_ensembled if mixer.kind == "ensembled" else _fold_depthwise
    folded = fold(block, mixer, width, norm, proj)
    mean = {"attn.mean": block["attn.mean"][:, None, None]} if mixer.mean else {}
    return FoldedMixer({**folded.tensors, **mean}, folded.descriptions)


def _fold_full(block: Mapping[str, Tensor], norm: Affine, proj: Affine, *, separate: bool) -> FoldedMixer:
    """eqs. 9-10: fold a full convolution into two if its kernel is a product, else fold W^O into it."""
    weight, bias = block["attn.conv.weight"], block.get("attn.conv.bias")
    if separate:
        pointwise, kernels = separable_factors(weight)
        return FoldedMixer(_convolution(Affine.linear(pointwise) @ norm, kernels, bias, proj), ())
    composed = torch.einsum("oc,cikl->oikl", proj.weight, weight)
    tensors = {"attn.conv.weight": composed, "attn.conv.bias": _bias_into_proj(bias, proj).bias}
    return FoldedMixer(tensors, ("W^O -> the full convolution",), keeps_norm=True)


def _fold_ensembled(block: Mapping[str, Tensor], mixer: Mixer, _width: int, norm: Affine, proj: Affine) -> FoldedMixer:
    """eqs. 12-13: fold the weighted sum of all heads into one head."""
    shares = block["attn.gamma"].softmax(0)
    v = linear_of(block, "attn.v") @ norm
    summed = Affine(_ensemble(v.weight, shares), _ensemble(v.bias, shares))
    output = Affine(_ensemble(proj.weight.T.contiguous(), shares).T, proj.bias)
    tensors = named_tensors({"attn.v": summed, "attn.proj": _bias_into_proj(block.get("attn.dw.bias"), output)})
    descriptions = (f"{mixer.heads} heads, ensembled -> one",)
    return FoldedMixer({**tensors, "attn.dw.weight": block["attn.dw.weight"]}, descriptions)


def _fold_depthwise(block: Mapping[str, Tensor], mixer: Mixer, width: int, norm: Affine, proj: Affine) -> FoldedMixer:
    """eq. 11: fold a mixer in which every head is a convolution; queries and keys are dropped."""
    kernels, bias, shared = _kernels(block, mixer, width)
    projected = linear_of(block, "attn.qkv" if mixer.qkv else "attn.v")
    v = projected.rows(slice(2 * mixer.queries(width), None)) @ norm
    dead = ("the gate -> the convolution; q and k go",) if mixer.qkv else ()
    return FoldedMixer(_convolution(v, kernels, bias, proj), (*dead, *shared))


def _fold_scattered(block: Mapping[str, Tensor], mixer: Mixer, width: int, norm: Affine, proj: Affine) -> FoldedMixer:
    """Fold a mixer of both kinds of heads: reorder them, attention first, and drop q and k of the convolutions."""
    kernels, bias, shared = _kernels(block, mixer, width)
    some, head = mixer.queries(width), width // mixer.heads
    projected = linear_of(block, "attn.qkv")
    q, k, v = (projected.rows(slice(*ends)) @ norm for ends in ((0, some), (some, 2 * some), (2 * some, None)))
    attending, convolving = (torch.tensor(mixer.channels(width, conv=conv)) for conv in (False, True))
    if some == width:
        q, k = q.rows(attending), k.rows(attending)
    q = Affine(q.weight / math.sqrt(head), q.bias / math.sqrt(head))
    parts = (q, k, v.rows(attending), v.rows(convolving))
    output = proj.columns(torch.cat([attending, convolving]))
    if bias is not None:
        output = Affine(output.weight, output.bias + output.weight[:, len(attending) :] @ bias)
    joined = Affine(torch.cat([part.weight for part in parts]), torch.cat([part.bias for part in parts]))
    tensors = {**named_tensors({"attn.qkv": joined, "attn.proj": output}), "attn.dw.weight": kernels}
    if mixer.mean:
        tensors["attn.mean"] = block["attn.mean"][convolving][:, None, None]
    descriptions = (f"{sum(mixer.conv)} heads -> convolutions, their q and k go", "heads -> [attention | convolution]")
    return FoldedMixer(tensors, (*descriptions, *shared))


def _kernels(block: Mapping[str, Tensor], mixer: Mixer, width: int) -> tuple[Tensor, Tensor | None, tuple[str, ...]]:
    """Kernels and bias by channel, and a description if they were shared by head."""
    kernels = mixer.kernels(block["attn.dw.weight"], width)
    bias = mixer.kernels(block["attn.dw.bias"], width) if mixer.dw_bias else None
    by_channel = mixer.rows in (len(kernels), width)
    return kernels, bias, () if by_channel else ("kernels shared by head -> by channel",)


def _convolution(v: Affine, kernels: Tensor, bias: Tensor | None, proj: Affine) -> dict[str, Tensor]:
    """The tensors of v, dw and proj as convolutions; dw's bias is folded into proj's, v's stays before the padding."""
    tensors = named_tensors({"attn.v": v, "attn.proj": _bias_into_proj(bias, proj)})
    pointwise = {name: w[:, :, None, None] if w.ndim == 2 else w for name, w in tensors.items()}
    return {**pointwise, "attn.dw.weight": kernels}


def _bias_into_proj(bias: Tensor | None, proj: Affine) -> Affine:
    """Fold the convolution's bias into proj's."""
    return proj if bias is None else Affine(proj.weight, proj.bias + proj.weight @ bias)


def _ensemble(rows: Tensor, shares: Tensor) -> Tensor:
    """sum_h share_h rows_h, for rows [h dh, ...]."""
    by_head = rows.view(len(shares), -1, *rows.shape[1:])
    return torch.einsum("h,hr...->r...", shares, by_head)


# One block.


@dataclass(frozen=True)
class ConvBlock:
    """One transformer block: its token mixer, norms, scales and FFN.

    Attributes:
        mixer: The token mixer as trained.
        traits: Norms and LayerScales around mixer and FFN.
        hidden: Channels inside the FFN.
        swiglu: Whether the FFN is a SwiGLU.
        separate: Whether a full convolution becomes a pointwise and a depthwise one.
        act: The FFN's activation.
        error: By how much the separation changes the kernel; see `nearest_separable`.
        merged: The PYRA block that replaces this one, if it or an earlier block merges tokens.
    """

    mixer: Mixer
    traits: BlockTraits
    hidden: int
    swiglu: bool
    separate: bool = False
    act: ActivationKind = "GELU"
    error: float = 0.0
    merged: MergedBlock | None = None

    def build(self, config: ViTConfig) -> nn.Module:
        """Build the block as trained."""
        if self.merged:
            return self.merged.build(config)
        width = config.width
        mlp = SwiGlu(width, SwiGluSpec(self.hidden)) if self.swiglu else MlpSpec(self.hidden, self.act).build(width)
        return PlainBlock(config, DropIn(width, config.grid, self.mixer), mlp, self.traits)

    def spec(self, bare: ViTConfig, *, last: bool) -> BlockSpec:
        """The deploy block; see `MergedBlock.spec`."""
        if self.merged:
            return self.merged.spec(bare, last=last)
        norm1 = self.traits.norm1.spec
        if self.mixer.kind == "full" and not self.separate and isinstance(norm1, LayerNormSpec):
            norm1 = replace(norm1, affine=self.traits.norm1.kind == "layer")
        ffn = SwiGluSpec(self.hidden) if self.swiglu else MlpSpec(self.hidden, self.act)
        return BlockSpec(self.mixer.spec(bare.width, separate=self.separate), ffn, norm1, self.traits.norm2.spec)

    def fold(self, config: ViTConfig, index: int, weights: Mapping[str, Tensor]) -> Iterator[FoldedPart]:
        """Fold mixer, FFN and the linear parts around them; compare the result on a grid of at most 6 x 6 patches."""
        if self.merged:
            yield from self.merged.fold(config, index, weights)
            return
        width, traits, prefix = config.width, self.traits, f"blocks.{index}."
        # a small grid is sufficient for the comparison: it has borders and inner positions
        height, side = (min(side, 6 * config.patch) for side in config.image_size)
        small, block = replace(config, image_size=(height, side)), dict(weights)
        if self.mixer.kind == "static":  # its matrices are for one grid size
            small = config
        if self.separate:
            block["attn.conv.weight"], _ = nearest_separable(block["attn.conv.weight"])
            yield separation_part(f"{prefix}attn.conv", self.error)
        norm1, norm2 = traits.norm1.affine(block, "norm1", width), traits.norm2.affine(block, "norm2", width)
        scale1, scale2 = scale_affine(block, "ls1", width), scale_affine(block, "ls2", width)
        mixer = fold_mixer(block, self.mixer, width, norm1, scale1, separate=self.separate)
        first, last = ("mlp.w12", "mlp.w3") if self.swiglu else ("mlp.fc1", "mlp.fc2")
        mlp = {first: linear_of(block, first) @ norm2, last: scale2 @ linear_of(block, last)}
        keeps = mixer.keeps_norm and traits.norm1.kind == "layer"
        kept = {f"norm1.{name}": block[f"norm1.{name}"] for name in ("weight", "bias")} if keeps else {}
        descriptions = tuple(row for row in traits.fold_descriptions() if not (keeps and row.startswith("norm1")))
        not_folded_parts = ("norm1's affine: its shift may not pass the padding",) if keeps else ()
        yield folded_block(
            prefix,
            lambda: self.build(small),
            block,
            lambda: DeployBlock(small.blocks[index], width, small.grid),
            {**mixer.tensors, **named_tensors(mlp), **kept},
            (2, small.sequence, width),
            descriptions=(*mixer.descriptions, *descriptions),
            not_folded_parts=(*not_folded_parts, *traits.not_folded()),
            equation=EQUATIONS[self.mixer.kind],
        )


def with_token_merging(
    blocks: tuple[ConvBlock, ...], schedule: tuple[int, ...], sizes: Mapping[str, Any]
) -> tuple[ConvBlock, ...]:
    """Make the blocks merge tokens by a schedule. From the first merging block on, tokens have sizes.

    Args:
        blocks: Blocks that do not merge.
        schedule: Tokens that merge, block by block.
        sizes: The network's sizes, fields of `ViTConfig`.

    Raises:
        Refused: If a merging block or a later one is not plain attention with an ungated FFN, or more tokens are to
            merge than can.
    """
    require_possible_schedule(schedule, sizes)
    first, tokens = first_merging_block(schedule), ViTConfig(**sizes, blocks=()).sequence
    merged = list(blocks[:first])
    for index, (block, r) in enumerate(zip(blocks[first:], schedule[first:], strict=True), first):
        mixer = block.mixer
        if mixer.kind != "attention" or mixer.rows or block.swiglu:
            what = "has a gated FFN" if block.swiglu else "is a convolution"
            raise Refused(
                f"tokens merge in block {first}, and block {index} {what}; merged tokens are on no grid.",
                hint="Merge tokens only after the last convolution.",
                code="dwconv.merging",
            )
        inner = MergedBlock(
            block.traits, mixer.heads, block.hidden, mixer.qkv_bias, tokens, r, modulated=False, act=block.act
        )
        merged.append(replace(block, merged=inner))
        tokens -= r
    return tuple(merged)
