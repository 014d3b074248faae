"""PoolFormer around its FFNs; its pooling, strides and paddings stand in the code alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from repaconv.affine import Affine
from repaconv.artefacts import Fact, ImageSize
from repaconv.backbones.metaformer import MetaFormer, MetaFormerConfig, PoolBlock, pooling
from repaconv.backbones.parts import ActivationKind, Norm
from repaconv.skeletons.around import Ffn, MlpFactory, depths_of, place_of
from repaconv.skeletons.folding import norm_and_head
from repaconv.skeletons.names import classes_of, weight_of
from repaconv.trained.contract import FoldedPart
from repaconv.trained.knobs import Knobs, natural, positive, small

# s12, s24 and s36 are 64 wide at first and pool over 7 x 7, m36 and m48 are 96 wide and pool over 3 x 3.
OFFICIAL_POOLS = {64: 7, 96: 3}


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
class PoolFormerSkeleton:
    """A PoolFormer."""

    frame: MetaFormerConfig
    layer_scale: bool
    image_size: ImageSize | None = None

    def config(self, active: Sequence[int], act: ActivationKind = "GELU") -> MetaFormerConfig:
        left = iter(active)
        blocks = tuple(tuple(next(left) for _ in range(n)) for n in self.frame.layers)
        return replace(self.frame, active=blocks, act=act)

    def training(self, config: MetaFormerConfig, mlp: MlpFactory) -> nn.Module:
        first = [sum(config.layers[:stage]) for stage in range(len(config.layers))]

        def block(config: MetaFormerConfig, stage: int, index: int) -> nn.Module:
            return PoolMixerBlock(config, stage, mlp(first[stage] + index), layer_scale=self.layer_scale)

        return MetaFormer(config, block, final_affine=True)

    def pair(
        self, config: MetaFormerConfig, index: int, mlp: MlpFactory
    ) -> tuple[nn.Module, nn.Module, tuple[int, ...]]:
        stage, place = place_of(index, self.frame.layers)
        trained = PoolMixerBlock(config, stage, mlp(index), layer_scale=self.layer_scale)
        return trained, PoolBlock(config, stage, place), (2, config.widths[stage], 7, 5)

    def around(self, block: Mapping[str, Tensor], index: int) -> tuple[dict[str, Tensor], tuple[str, ...], Affine]:
        scale = block["norm1.weight"].double()
        if "layer_scale_1" in block:
            scale = scale * block["layer_scale_1"].double()
        told = (
            "norm1's weight and layer_scale_1 -> one scale behind the pooling",
            "norm1's bias -> nothing: pool(n) - n",
        )
        return {"scale": scale[:, None, None]}, told, Affine.eye(len(scale))

    def rest(self, config: MetaFormerConfig, tensors: Mapping[str, Tensor]) -> Iterator[FoldedPart]:
        yield FoldedPart({name: w.double() for name, w in tensors.items() if ".proj." in name})
        yield from norm_and_head(tensors, config.classes)


def read_poolformer(
    tensors: dict[str, Tensor], ffns: Sequence[Ffn], knobs: Knobs, args: Mapping[str, Any]
) -> PoolFormerSkeleton:
    """``pool_size`` is asked for where the widths are not those of a published model."""
    kernel = weight_of(tensors, "patch_embed.proj.weight", 4)
    layers = depths_of(ffns, r"network\.(\d+)\.(\d+)\.", step=2)
    first = [sum(layers[:stage]) for stage in range(len(layers))]
    widths = tuple(ffns[index].width for index in first)
    hidden = tuple(ffns[index].hidden for index in first)
    known = OFFICIAL_POOLS.get(widths[0]) if len(widths) == 4 else None
    if known:
        source = f"width {widths[0]}, as in the published models"
        pool = knobs.take("pool_size", _odd, known, known, source, free=True)
    else:
        pool = knobs.need("pool_size", _odd, "7", "no tensor tells the side of PoolFormer's pooling window")
    down = tensors.get("network.1.proj.weight")
    frame = MetaFormerConfig(
        layers=tuple(layers),
        widths=widths,
        hidden=hidden,
        classes=classes_of(tensors),
        in_channels=kernel.shape[1],
        stem=(
            kernel.shape[2],
            knobs.take("stem_stride", positive, 4),
            knobs.take("stem_padding", natural, 2),
        ),
        down=(
            3 if down is None or down.ndim != 4 else down.shape[2],
            knobs.take("down_stride", positive, 2),
            knobs.take("down_padding", natural, 1),
        ),
        eps=knobs.take("eps", small, 1e-5),
        pool=pool,
        active=tuple((0,) * count for count in layers),
    )
    knobs.facts += [
        Fact(name=name, value=list(getattr(frame, name)), source="shapes") for name in ("layers", "widths", "hidden")
    ]
    return PoolFormerSkeleton(frame, any(name.endswith("layer_scale_1") for name in tensors))


def _odd(text: str) -> int:
    value = positive(text)
    if value % 2 == 0:
        raise ValueError("not odd, so the pooling would change the size")
    return value
