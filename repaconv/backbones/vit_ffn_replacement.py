"""A plain vision transformer for methods that replace only the FFNs (RePaViT)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from repaconv.algebra.affine_maps import Affine
from repaconv.backbones.ffn_replacement_interface import Ffn, MlpFactory, deploy_ffn
from repaconv.backbones.shared_layers import ActivationKind
from repaconv.backbones.tensor_names import weight_of
from repaconv.backbones.vit import ViT, ViTConfig
from repaconv.backbones.vit_block_folding import fold_attention, fold_stem, fold_tail, named_tensors
from repaconv.backbones.vit_checkpoint_reader import read_heads, read_vit_sizes
from repaconv.backbones.vit_inference_block import BlockSpec, DeployBlock
from repaconv.backbones.vit_layers import AttentionSpec, NoNorm
from repaconv.backbones.vit_training_blocks import BlockTraits, PlainAttention, PlainBlock, scale_affine
from repaconv.backbones.vit_training_norms import NormTraits, read_norms
from repaconv.checkpoints.checkpoint_reader import under_prefix
from repaconv.method_api.contract import FoldedPart
from repaconv.method_api.settings import SettingsReader, small
from repaconv.results import ImageSize


@dataclass(frozen=True)
class VitFfnReplacement:
    """A plain ViT whose FFNs are replaced; see `FfnReplacement`.

    Attributes:
        sizes: Fields of `ViTConfig` except the blocks.
        heads: Number of heads.
        hidden: Channels inside each FFN as trained.
        traits: Norms and LayerScales of each block.
        inside: The norm of each block that is inside the attention (``attn.norm``), as in RePaViT's official code.
        qkv_bias: Whether ``attn.qkv`` has a bias.
    """

    sizes: Mapping[str, Any]
    heads: int
    hidden: tuple[int, ...]
    traits: tuple[BlockTraits, ...]
    inside: tuple[NormTraits | None, ...]
    qkv_bias: bool

    @property
    def image_size(self) -> ImageSize:
        size: ImageSize = self.sizes["image_size"]
        return size

    def config(self, active: Sequence[int], act: ActivationKind = "GELU") -> ViTConfig:
        head = self.sizes["width"] // self.heads
        blocks = tuple(
            BlockSpec(
                mixer=AttentionSpec(self.heads, head, head),
                ffn=deploy_ffn(hidden, a, act),
                norm1=(inside or traits.norm1).spec,
                norm2=NoNorm(),
            )
            for hidden, a, traits, inside in zip(self.hidden, active, self.traits, self.inside, strict=True)
        )
        return ViTConfig(**self.sizes, blocks=blocks)

    def _block(self, config: ViTConfig, index: int, mlp: MlpFactory) -> nn.Module:
        attn = PlainAttention(config.width, self.heads, qkv_bias=self.qkv_bias, norm=self.inside[index])
        return PlainBlock(config, attn, mlp(index), self.traits[index])

    def build_training(self, config: ViTConfig, mlp: MlpFactory) -> nn.Module:
        return ViT(config, lambda config, index: self._block(config, index, mlp))

    def block_pair(
        self, config: ViTConfig, index: int, mlp: MlpFactory
    ) -> tuple[nn.Module, nn.Module, tuple[int, ...]]:
        deploy = DeployBlock(config.blocks[index], config.width, config.grid)
        return self._block(config, index, mlp), deploy, (2, min(config.sequence, 5), config.width)

    def fold_other_parts(
        self, block: Mapping[str, Tensor], index: int
    ) -> tuple[dict[str, Tensor], tuple[str, ...], Affine]:
        width, traits, inside = self.sizes["width"], self.traits[index], self.inside[index]
        norm = inside.affine(block, "attn.norm", width) if inside else traits.norm1.affine(block, "norm1", width)
        folded = fold_attention(block, self.heads, norm, scale_affine(block, "ls1", width))
        descriptions = ("attn.norm's affine -> attn.qkv",) if inside else ()
        return (
            named_tensors(folded),
            (*descriptions, *traits.fold_descriptions(), "1 / sqrt(dh) -> q"),
            scale_affine(block, "ls2", width),
        )

    def fold_outside_blocks(self, config: ViTConfig, tensors: Mapping[str, Tensor]) -> Iterator[FoldedPart]:
        yield fold_stem(tensors)
        yield fold_tail(config, tensors)


def read_vit(
    tensors: dict[str, Tensor], ffns: Sequence[Ffn], reader: SettingsReader, args: Mapping[str, Any]
) -> VitFfnReplacement:
    """Read a plain ViT around its FFNs.

    The default of ``attn_eps`` is that of the official code: 1e-5 for norms inside the attention, 1e-6 for others.

    Raises:
        Refused: If a tensor is missing or has a wrong shape.
    """
    sizes = read_vit_sizes(tensors, reader, {}, "")
    heads = read_heads(sizes["width"], len(ffns), reader, args.get("num_heads"), "args")
    blocks = [under_prefix(tensors, f"blocks.{index}.") for index in range(len(ffns))]
    inner = any("attn.norm.weight" in block for block in blocks)
    # a norm2 in addition to the FFN's own BatchNorms would be between shortcut and idle channels: not this method
    norms = replace(
        read_norms(tensors, reader, without=("norm2",)), eps=reader.take("attn_eps", small, 1e-5 if inner else 1e-6)
    )
    weight_of(tensors, "blocks.0.attn.qkv.weight", 2)
    return VitFfnReplacement(
        sizes=sizes,
        heads=heads,
        hidden=tuple(ffn.hidden for ffn in ffns),
        traits=tuple(replace(BlockTraits.read(block, norms), norm2=NormTraits(None, norms.eps)) for block in blocks),
        inside=tuple(
            NormTraits.read(block, "attn.norm", norms) if "attn.norm.weight" in block else None for block in blocks
        ),
        qkv_bias="blocks.0.attn.qkv.bias" in tensors,
    )
