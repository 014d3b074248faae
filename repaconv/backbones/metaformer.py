"""MetaFormer (arXiv 2111.11418): a convolutional stem, stages of residual blocks, strided convolutions between stages.

A method provides the training blocks; without one the deploy form is built. Tensor names are those of the official
PoolFormer and RIFormer listings: ``patch_embed.proj``, ``network.<even>`` for stages, ``network.<odd>.proj`` for
downsampling, ``norm``, ``head``. `PoolFormerFfnReplacement` is a PoolFormer with the FFNs of RePaViT.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from repaconv.algebra.affine_maps import Affine
from repaconv.backbones.ffn_replacement_interface import Ffn, MlpFactory, stage_and_index, stage_depths
from repaconv.backbones.registered_backbone import Backbone
from repaconv.backbones.shared_layers import ActivationKind, ConvMlp, IdleConvMlp, Norm, NormKind, NormThenScale
from repaconv.backbones.tensor_names import classes_of, weight_of
from repaconv.backbones.vit_block_folding import norm_and_head
from repaconv.method_api.contract import FoldedPart
from repaconv.method_api.settings import SettingsReader, natural, positive, small
from repaconv.results import Fact, ImageSize


@dataclass(frozen=True)
class MetaFormerConfig:
    """The configuration of a MetaFormer; tuples have one entry per stage.

    Attributes:
        layers: Number of blocks.
        widths: Channels.
        hidden: Channels inside the feed-forward network.
        classes: Width of the head, 0 for pooled features.
        in_channels: Channels of an image.
        stem, down: (kernel, stride, padding) of the first and of the downsampling convolutions.
        norm: Kind of all norms.
        eps: eps of all norms.
        act: Activation of the feed-forward networks.
        pool: Side of the pooling window of a PoolFormer; None for blocks without a token mixer.
        active: The activated channels of every feed-forward network of a PoolFormer, by stage and block; the idle
            channels and the shortcut are one matrix.
    """

    layers: tuple[int, ...]
    widths: tuple[int, ...]
    hidden: tuple[int, ...]
    classes: int
    in_channels: int = 3
    stem: tuple[int, int, int] = (7, 4, 2)
    down: tuple[int, int, int] = (3, 2, 1)
    norm: NormKind = "GN"
    eps: float = 1e-5
    act: ActivationKind = "GELU"
    pool: int | None = None
    active: tuple[tuple[int, ...], ...] = ()


BlockFactory = Callable[[MetaFormerConfig, int, int], nn.Module]
"""Builds one block: (config, stage, index) -> [B, C, H, W] -> [B, C, H, W]."""


class IdentityMixerBlock(nn.Module):
    """The deploy block without a token mixer: x += norm1(x), x += mlp(norm2(x)); norm2 has no affine."""

    def __init__(self, config: MetaFormerConfig, stage: int, index: int) -> None:
        super().__init__()
        width = config.widths[stage]
        self.norm1 = NormThenScale(config.norm, width, config.eps)
        self.norm2 = Norm(config.norm, width, config.eps, affine=False)
        self.mlp = ConvMlp(width, config.hidden[stage], config.act)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        x = x + self.norm1(x)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class PoolBlock(nn.Module):
    """PoolFormer's deploy block: x += scale (pool(n) - n) with n = norm1(x) without affine, then the FFN.

    The norm's shift vanishes, because average pooling preserves a constant, which pool(n) - n cancels.
    """

    def __init__(self, config: MetaFormerConfig, stage: int, index: int) -> None:
        super().__init__()
        assert config.pool is not None
        width, active = config.widths[stage], config.active[stage][index]
        self.norm1 = Norm(config.norm, width, config.eps, affine=False)
        self.scale = nn.Parameter(torch.ones(width, 1, 1))
        self.pool = pooling(config.pool)
        self.mlp = (
            IdleConvMlp(width, active, config.act)
            if active < config.hidden[stage]
            else ConvMlp(width, active, config.act)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        n = self.norm1(x)
        x = x + self.scale * (self.pool(n) - n)
        y: Tensor = self.mlp(x)
        return y if isinstance(self.mlp, IdleConvMlp) else x + y


def pooling(side: int) -> nn.Module:
    """PoolFormer's pooling: the mean over those pixels of the window that are inside the image."""
    return nn.AvgPool2d(side, stride=1, padding=side // 2, count_include_pad=False)


class PatchEmbed(nn.Module):
    """A strided convolution named ``proj``."""

    def __init__(self, channels: int, width: int, kernel: int, stride: int, padding: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, kernel, stride, padding)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C', H', W']."""
        out: Tensor = self.proj(x)
        return out


class MetaFormer(nn.Module):
    """A MetaFormer: images [B, C, H, W] of any size to logits [B, classes], or to features [B, widths[-1]].

    Args:
        config: The configuration.
        block: Builds the blocks; by default deploy blocks.
        final_affine: Whether the final norm has an affine. In the deploy form it is folded into the head.
    """

    def __init__(
        self, config: MetaFormerConfig, block: BlockFactory = IdentityMixerBlock, *, final_affine: bool
    ) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(config.in_channels, config.widths[0], *config.stem)
        network: list[nn.Module] = []
        for stage, count in enumerate(config.layers):
            if stage:
                network.append(PatchEmbed(config.widths[stage - 1], config.widths[stage], *config.down))
            network.append(nn.Sequential(*(block(config, stage, index) for index in range(count))))
        self.network = nn.ModuleList(network)
        self.norm = Norm(config.norm, config.widths[-1], config.eps, affine=final_affine)
        self.head = nn.Linear(config.widths[-1], config.classes) if config.classes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, classes]."""
        x = self.patch_embed(x)
        for module in self.network:
            x = module(x)
        out: Tensor = self.head(self.norm(x).mean((2, 3)))
        return out


class MetaFormerBackbone(Backbone):
    """The registered backbone."""

    def takes(self, config: MetaFormerConfig, height: int, width: int) -> bool:
        """Whether images of this size leave at least one pixel for the last stage."""
        for kernel, stride, padding in (config.stem, *(config.down,) * (len(config.layers) - 1)):
            height, width = ((side + 2 * padding - kernel) // stride + 1 for side in (height, width))
        return height > 0 and width > 0


def _deploy_form(config: MetaFormerConfig) -> nn.Module:
    block = IdentityMixerBlock if config.pool is None else PoolBlock
    return MetaFormer(config, block, final_affine=config.classes == 0)


BACKBONE = MetaFormerBackbone("metaformer", MetaFormerConfig, _deploy_form, any_image_size=True)


# PoolFormer around its FFNs. No tensor shows pooling, strides and paddings.

POOLS, REPAVIT_POOLS = {64: 3, 96: 3}, {64: 7, 96: 3}
"""The side of the pooling window of the published models of four stages, by the channels of the first stage: 64 in s12,
s24 and s36, 96 in m36 and m48. RePaViT trained the former with another window than PoolFormer's own code and timm have.
"""


class PoolMixerBlock(nn.Module):
    """PoolFormer's training block: x += layer_scale_1 (pool(n) - n) with n = norm1(x); x += mlp(x)."""

    def __init__(self, config: MetaFormerConfig, stage: int, mlp: nn.Module, *, layer_scale: bool) -> None:
        super().__init__()
        assert config.pool is not None
        width = config.widths[stage]
        self.norm1 = Norm(config.norm, width, config.eps, affine=True)
        self.pool = pooling(config.pool)
        self.layer_scale_1 = nn.Parameter(torch.ones(width)) if layer_scale else None
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        n = self.norm1(x)
        mixed = self.pool(n) - n
        x = x + (mixed if self.layer_scale_1 is None else self.layer_scale_1[:, None, None] * mixed)
        out: Tensor = x + self.mlp(x)
        return out


@dataclass(frozen=True)
class PoolFormerFfnReplacement:
    """A PoolFormer whose FFNs are replaced; see `FfnReplacement`.

    Attributes:
        frame: The configuration, without activated channels.
        layer_scale: Whether the blocks have ``layer_scale_1``.
        image_size: None, as any size is accepted.
    """

    frame: MetaFormerConfig
    layer_scale: bool
    image_size: ImageSize | None = None

    def config(self, active: Sequence[int], act: ActivationKind = "GELU") -> MetaFormerConfig:
        remaining = iter(active)
        blocks = tuple(tuple(next(remaining) for _ in range(n)) for n in self.frame.layers)
        return replace(self.frame, active=blocks, act=act)

    def build_training(self, config: MetaFormerConfig, mlp: MlpFactory) -> nn.Module:
        first = [sum(config.layers[:stage]) for stage in range(len(config.layers))]

        def block(config: MetaFormerConfig, stage: int, index: int) -> nn.Module:
            return PoolMixerBlock(config, stage, mlp(first[stage] + index), layer_scale=self.layer_scale)

        return MetaFormer(config, block, final_affine=True)

    def block_pair(
        self, config: MetaFormerConfig, index: int, mlp: MlpFactory
    ) -> tuple[nn.Module, nn.Module, tuple[int, ...]]:
        stage, place = stage_and_index(index, self.frame.layers)
        trained = PoolMixerBlock(config, stage, mlp(index), layer_scale=self.layer_scale)
        return trained, PoolBlock(config, stage, place), (2, config.widths[stage], 7, 5)

    def fold_other_parts(
        self, block: Mapping[str, Tensor], index: int
    ) -> tuple[dict[str, Tensor], tuple[str, ...], Affine]:
        scale = block["norm1.weight"].double()
        if "layer_scale_1" in block:
            scale = scale * block["layer_scale_1"].double()
        descriptions = (
            "norm1's weight and layer_scale_1 -> one scale after the pooling",
            "norm1's bias -> nothing: pool(n) - n",
        )
        return {"scale": scale[:, None, None]}, descriptions, Affine.eye(len(scale))

    def fold_outside_blocks(self, config: MetaFormerConfig, tensors: Mapping[str, Tensor]) -> Iterator[FoldedPart]:
        yield FoldedPart({name: w.double() for name, w in tensors.items() if ".proj." in name})
        yield from norm_and_head(tensors, config.classes)


def read_poolformer(
    tensors: dict[str, Tensor], ffns: Sequence[Ffn], reader: SettingsReader, args: Mapping[str, Any]
) -> PoolFormerFfnReplacement:
    """Read a PoolFormer around its FFNs.

    Raises:
        Refused: If a tensor is missing or has a wrong shape.
        SettingNeeded: If ``pool_size`` is not set and the widths are not those of a published model.
    """
    kernel = weight_of(tensors, "patch_embed.proj.weight", 4)
    layers = stage_depths(ffns, r"network\.(\d+)\.(\d+)\.", step=2)
    first = [sum(layers[:stage]) for stage in range(len(layers))]
    widths = tuple(ffns[index].width for index in first)
    hidden = tuple(ffns[index].hidden for index in first)
    pool = read_pool_size(reader, widths, REPAVIT_POOLS)
    down = tensors.get("network.1.proj.weight")
    frame = MetaFormerConfig(
        layers=tuple(layers),
        widths=widths,
        hidden=hidden,
        classes=classes_of(tensors),
        in_channels=kernel.shape[1],
        stem=(
            kernel.shape[2],
            reader.take("stem_stride", positive, 4),
            reader.take("stem_padding", natural, 2),
        ),
        down=(
            3 if down is None or down.ndim != 4 else down.shape[2],
            reader.take("down_stride", positive, 2),
            reader.take("down_padding", natural, 1),
        ),
        eps=reader.take("eps", small, 1e-5),
        pool=pool,
        active=tuple((0,) * count for count in layers),
    )
    reader.facts += [
        Fact(name=name, value=list(getattr(frame, name)), source="shapes") for name in ("layers", "widths", "hidden")
    ]
    return PoolFormerFfnReplacement(frame, any(name.endswith("layer_scale_1") for name in tensors))


def read_pool_size(reader: SettingsReader, widths: Sequence[int], published: Mapping[int, int]) -> int:
    """Read the side of a PoolFormer's pooling window from the setting ``pool_size``, or from the published models.

    Raises:
        SettingNeeded: If it is not set and the widths are not those of a published model.
    """
    known = published.get(widths[0]) if len(widths) == 4 else None
    if known is None:
        return reader.need("pool_size", _odd_number, "3", "no tensor tells the side of PoolFormer's pooling window")
    source = f"width {widths[0]}, as in the published models"
    return reader.take("pool_size", _odd_number, known, known, source, free=True)


def _odd_number(text: str) -> int:
    value = positive(text)
    if value % 2 == 0:
        raise ValueError("not odd, so the pooling would change the size")
    return value
