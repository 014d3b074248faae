"""The four network families of RePaViT's official code: what stands around their channel-idle FFNs.

Each family reads its skeleton from keys and shapes, builds the training form around FFNs given to it, and folds
what is not the FFN: the affines of the norms and the scores' divisor into the linear layers beside them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from repaconv.affine import Affine
from repaconv.artefacts import Fact, FoldStep, ImageSize, parse_image_size
from repaconv.backbones.metaformer import MetaFormer, MetaFormerConfig, PoolBlock, pooling
from repaconv.backbones.mixer import Mixer, MixerBlock, MixerConfig
from repaconv.backbones.mixer import deploy_block as mixer_deploy_block
from repaconv.backbones.parts import ActivationKind, Norm
from repaconv.backbones.swin import Swin, SwinBlock, SwinConfig
from repaconv.backbones.swin import deploy_block as swin_deploy_block
from repaconv.backbones.tokens import AttentionSpec, IdleMlpSpec, MlpSpec, NoNorm
from repaconv.backbones.vit import BlockSpec, DeployBlock, ViT, ViTConfig
from repaconv.errors import Refused
from repaconv.methods.repavit.activity import Ffn, Rule
from repaconv.skeletons.plain import (
    BlockTraits,
    NormTraits,
    PlainAttention,
    PlainBlock,
    block_tensors,
    fold_attention,
    fold_stem,
    fold_tail,
    linear_of,
    named,
    read_heads,
    read_norms,
    read_skeleton,
    scale_affine,
    weight_of,
)
from repaconv.trained.certificate import max_rel_error
from repaconv.trained.contract import FoldedPart
from repaconv.trained.knobs import Knobs, natural, positive, small

MlpFactory = Callable[[int], nn.Module]
"""Builds the training FFN of block i, without its shortcut."""


class Skeleton(Protocol):
    """A checkpoint's network around its FFNs; blocks are counted through all stages."""

    @property
    def image_size(self) -> ImageSize | None:
        """What it was built for; None where any size will do."""

    def config(self, active: Sequence[int], act: ActivationKind = "GELU") -> Any:
        """Of the deploy form, with A of every FFN and their activation."""

    def training(self, config: Any, mlp: MlpFactory) -> nn.Module:
        """The network as trained."""

    def deploy(self, config: Any) -> nn.Module:
        """The network as folded."""

    def pair(self, config: Any, index: int, mlp: MlpFactory) -> tuple[nn.Module, nn.Module, tuple[int, ...]]:
        """Block i as trained and folded, and the shape of an input to prove it on."""

    def around(self, block: Mapping[str, Tensor], index: int) -> tuple[dict[str, Tensor], tuple[str, ...], Affine]:
        """What a block folds besides its FFN, in words too, and the LayerScale around the FFN."""

    def rest(self, config: Any, tensors: Mapping[str, Tensor]) -> Iterator[FoldedPart]:
        """All but the blocks."""


class Family(Protocol):
    """One of the four."""

    backbone: str
    rule: Rule
    conv: bool
    ffn: re.Pattern[str]
    """Matches an FFN's prefix; the groups before it name the block."""

    def read(self, tensors: dict[str, Tensor], ffns: Sequence[Ffn], knobs: Knobs, args: Mapping[str, Any]) -> Skeleton:
        """Understand the skeleton."""


# --- plain ViT ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlainSkeleton:
    """A plain ViT; in the official code the attention's norm is inside it (``attn.norm``)."""

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

    def training(self, config: ViTConfig, mlp: MlpFactory) -> nn.Module:
        return ViT(config, lambda config, index: self._block(config, index, mlp))

    def deploy(self, config: ViTConfig) -> nn.Module:
        return ViT(config)

    def pair(self, config: ViTConfig, index: int, mlp: MlpFactory) -> tuple[nn.Module, nn.Module, tuple[int, ...]]:
        return self._block(config, index, mlp), DeployBlock(config, index), (2, min(config.sequence, 5), config.width)

    def around(self, block: Mapping[str, Tensor], index: int) -> tuple[dict[str, Tensor], tuple[str, ...], Affine]:
        width, traits, inside = self.sizes["width"], self.traits[index], self.inside[index]
        norm = inside.affine(block, "attn.norm", width) if inside else traits.norm1.affine(block, "norm1", width)
        folded = fold_attention(block, self.heads, norm, scale_affine(block, "ls1", width))
        told = ("attn.norm's affine -> attn.qkv",) if inside else ()
        return named(folded), (*told, *traits.told(), "1 / sqrt(dh) -> q"), scale_affine(block, "ls2", width)

    def rest(self, config: ViTConfig, tensors: Mapping[str, Tensor]) -> Iterator[FoldedPart]:
        yield fold_stem(tensors)
        yield fold_tail(config, tensors)


class Plain:
    """DeiT with a pre-norm as CLIP has it; what else follows timm's, DeiT's or DINO's keys."""

    backbone, rule, conv = "vit", Rule(linear=True), False
    ffn = re.compile(r"^(?P<block>blocks\.\d+\.)mlp\.")

    def read(
        self, tensors: dict[str, Tensor], ffns: Sequence[Ffn], knobs: Knobs, args: Mapping[str, Any]
    ) -> PlainSkeleton:
        """The official norms' eps are 1e-5 inside the attention and 1e-6 outside."""
        sizes = read_skeleton(tensors, knobs, {}, "")
        heads = read_heads(sizes["width"], len(ffns), knobs, args.get("num_heads"), "args")
        blocks = [block_tensors(tensors, f"blocks.{index}.") for index in range(len(ffns))]
        inner = any("attn.norm.weight" in block for block in blocks)
        # a norm2 beside the FFN's own BatchNorms would stand between shortcut and idle part: not this method
        norms = replace(
            read_norms(tensors, knobs, without=("norm2",)), eps=knobs.take("attn_eps", small, 1e-5 if inner else 1e-6)
        )
        weight_of(tensors, "blocks.0.attn.qkv.weight", 2)
        return PlainSkeleton(
            sizes=sizes,
            heads=heads,
            hidden=tuple(ffn.hidden for ffn in ffns),
            traits=tuple(
                replace(BlockTraits.read(block, norms), norm2=NormTraits(None, norms.eps)) for block in blocks
            ),
            inside=tuple(
                NormTraits.read(block, "attn.norm", norms) if "attn.norm.weight" in block else None for block in blocks
            ),
            qkv_bias="blocks.0.attn.qkv.bias" in tensors,
        )


def deploy_ffn(hidden: int, active: int, act: ActivationKind) -> MlpSpec | IdleMlpSpec:
    """The deploy form's FFN on tokens."""
    return MlpSpec(hidden, act) if active == hidden else IdleMlpSpec(active, act)


# --- Swin -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SwinSkeleton:
    """A Swin transformer."""

    frame: SwinConfig  # without FFNs
    hidden: tuple[tuple[int, ...], ...]

    @property
    def image_size(self) -> ImageSize:
        return self.frame.image_size, self.frame.image_size

    def _place(self, index: int) -> tuple[int, int]:
        """(stage, index within it) of block i."""
        for stage, hidden in enumerate(self.hidden):
            if index < len(hidden):
                return stage, index
            index -= len(hidden)
        raise IndexError(index)

    def config(self, active: Sequence[int], act: ActivationKind = "GELU") -> SwinConfig:
        left = iter(active)
        return replace(
            self.frame, ffn=tuple(tuple(deploy_ffn(h, next(left), act) for h in stage) for stage in self.hidden)
        )

    def training(self, config: SwinConfig, mlp: MlpFactory) -> nn.Module:
        first = [sum(len(hidden) for hidden in self.hidden[:stage]) for stage in range(len(self.hidden))]
        return Swin(
            config,
            lambda config, stage, index: SwinBlock(
                config, stage, index, mlp(first[stage] + index), shortcut=True, deployed=False
            ),
        )

    def deploy(self, config: SwinConfig) -> nn.Module:
        return Swin(config)

    def pair(self, config: SwinConfig, index: int, mlp: MlpFactory) -> tuple[nn.Module, nn.Module, tuple[int, ...]]:
        stage, place = self._place(index)
        trained = SwinBlock(config, stage, place, mlp(index), shortcut=True, deployed=False)
        return trained, swin_deploy_block(config, stage, place), (1, config.side(stage) ** 2, config.widths[stage])

    def around(self, block: Mapping[str, Tensor], index: int) -> tuple[dict[str, Tensor], tuple[str, ...], Affine]:
        stage, _ = self._place(index)
        width = self.frame.widths[stage]
        norm = NormTraits("layer", self.frame.eps).affine(block, "norm1", width)
        folded = named(fold_attention(block, self.frame.heads[stage], norm, Affine.eye(width)))
        kept = ("attn.relative_position_bias_table", "attn.relative_position_index", "attn_mask")
        folded |= {name: block[name] for name in kept if name in block}
        return folded, ("norm1's affine -> attn.qkv", "1 / sqrt(dh) -> q"), Affine.eye(width)

    def rest(self, config: SwinConfig, tensors: Mapping[str, Tensor]) -> Iterator[FoldedPart]:
        yield FoldedPart({n: w.double() for n, w in tensors.items() if n.startswith("patch_embed.")})
        for stage in range(len(config.widths) - 1):
            place = f"layers.{stage}.downsample"
            norm = Affine.diagonal(tensors[f"{place}.norm.weight"], tensors[f"{place}.norm.bias"])
            reduction = linear_of(tensors, f"{place}.reduction")
            yield affine_into_linear(norm, reduction, place, f"{place}.reduction", "norm's affine -> reduction")
        yield from norm_and_head(tensors, config.classes)


class SwinFamily:
    """Swin."""

    backbone, rule, conv = "swin", Rule(), False
    ffn = re.compile(r"^(?P<block>layers\.\d+\.blocks\.\d+\.)mlp\.")

    def read(
        self, tensors: dict[str, Tensor], ffns: Sequence[Ffn], knobs: Knobs, args: Mapping[str, Any]
    ) -> SwinSkeleton:
        """Window, heads and, where windows are shifted, the image size stand in the shapes."""
        kernel = weight_of(tensors, "patch_embed.proj.weight", 4)
        depths = _stages(ffns, r"layers\.(\d+)\.blocks\.(\d+)\.")
        tables = [
            weight_of(tensors, f"layers.{s}.blocks.0.attn.relative_position_bias_table", 2) for s in range(len(depths))
        ]
        windows = [(math.isqrt(len(table)) + 1) // 2 for table in tables]
        patch, window = kernel.shape[2], max(windows)
        masked = self._masked(tensors, patch, windows)
        said = args.get("input_size") if isinstance(args.get("input_size"), int) else None
        found, source = (masked, "attn_mask") if masked else (said, "args")
        if found is None:
            size = knobs.need("image_size", parse_image_size, "224", "no window is shifted, so no mask tells the size")
        else:
            size = knobs.take("image_size", parse_image_size, (found, found), (found, found), source, free=True)
        hidden, left = [], iter(ffns)
        for depth in depths:
            hidden.append(tuple(next(left).hidden for _ in range(depth)))
        frame = SwinConfig(
            image_size=size[0],
            patch=patch,
            widths=tuple(
                weight_of(tensors, f"layers.{s}.blocks.0.norm1.weight", 1).shape[0] for s in range(len(depths))
            ),
            heads=tuple(table.shape[1] for table in tables),
            window=window,
            ffn=tuple((IdleMlpSpec(0),) * depth for depth in depths),
            classes=_classes(tensors),
            in_channels=kernel.shape[1],
            eps=knobs.take("norm_eps", small, 1e-5),
        )
        self._require_windows(frame, windows, size, masked)
        told = {"depths": depths, "widths": frame.widths, "heads": frame.heads, "window": window, "patch": patch}
        knobs.facts += [
            Fact(name=name, value=list(v) if isinstance(v, tuple | list) else v, source="shapes")
            for name, v in told.items()
        ]
        return SwinSkeleton(frame, tuple(hidden))

    def _masked(self, tensors: Mapping[str, Tensor], patch: int, windows: Sequence[int]) -> int | None:
        for name, mask in tensors.items():
            if match := re.match(r"layers\.(\d+)\.blocks\.\d+\.attn_mask$", name):
                stage = int(match[1])
                if mask.ndim == 3 and stage < len(windows):
                    return windows[stage] * math.isqrt(len(mask)) * patch * (1 << stage)
        return None

    def _require_windows(self, frame: SwinConfig, windows: Sequence[int], size: ImageSize, masked: int | None) -> None:
        stages = range(len(windows))
        odd = any(frame.side(s) % 2 for s in stages[:-1]) or size[0] % frame.patch
        misfit = any(windows[s] != frame.clipped(s) or frame.side(s) % max(frame.clipped(s), 1) for s in stages)
        heads = any(width % heads for width, heads in zip(frame.widths, frame.heads, strict=True))
        if size[0] != size[1] or (masked and masked != size[0]) or odd or misfit or heads:
            raise Refused(
                f"images of {size[0]} x {size[1]} pixels do not fit windows of {', '.join(map(str, windows))} tokens"
                + (f"; the masks are for {masked} x {masked}." if masked else "."),
                hint="Give the size that it was trained at: --set image_size=N.",
                code="swin.image-size",
            )


# --- PoolFormer -----------------------------------------------------------------------------------

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

    def _place(self, index: int) -> tuple[int, int]:
        for stage, count in enumerate(self.frame.layers):
            if index < count:
                return stage, index
            index -= count
        raise IndexError(index)

    def config(self, active: Sequence[int], act: ActivationKind = "GELU") -> MetaFormerConfig:
        left = iter(active)
        blocks = tuple(tuple(next(left) for _ in range(n)) for n in self.frame.layers)
        return replace(self.frame, active=blocks, act=act)

    def training(self, config: MetaFormerConfig, mlp: MlpFactory) -> nn.Module:
        first = [sum(config.layers[:stage]) for stage in range(len(config.layers))]

        def block(config: MetaFormerConfig, stage: int, index: int) -> nn.Module:
            return PoolMixerBlock(config, stage, mlp(first[stage] + index), layer_scale=self.layer_scale)

        return MetaFormer(config, block, final_affine=True)

    def deploy(self, config: MetaFormerConfig) -> nn.Module:
        return MetaFormer(config, PoolBlock, final_affine=not config.classes)

    def pair(
        self, config: MetaFormerConfig, index: int, mlp: MlpFactory
    ) -> tuple[nn.Module, nn.Module, tuple[int, ...]]:
        stage, place = self._place(index)
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


class PoolFormerFamily:
    """PoolFormer; its pooling, strides and paddings stand in the code alone."""

    backbone, rule, conv = "metaformer", Rule(truncated=True), True
    ffn = re.compile(r"^(?P<block>network\.\d+\.\d+\.)mlp\.")

    def read(
        self, tensors: dict[str, Tensor], ffns: Sequence[Ffn], knobs: Knobs, args: Mapping[str, Any]
    ) -> PoolFormerSkeleton:
        """``pool_size`` is asked for where the widths are not those of a published model."""
        kernel = weight_of(tensors, "patch_embed.proj.weight", 4)
        layers = _stages(ffns, r"network\.(\d+)\.(\d+)\.", step=2)
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
            classes=_classes(tensors),
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
            Fact(name=name, value=list(getattr(frame, name)), source="shapes")
            for name in ("layers", "widths", "hidden")
        ]
        return PoolFormerSkeleton(frame, any(name.endswith("layer_scale_1") for name in tensors))


# --- MLP-Mixer ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MixerSkeleton:
    """An MLP-Mixer."""

    frame: MixerConfig
    hidden: tuple[int, ...]

    @property
    def image_size(self) -> ImageSize:
        return self.frame.image_size

    def config(self, active: Sequence[int], act: ActivationKind = "GELU") -> MixerConfig:
        return replace(
            self.frame, ffn=tuple(deploy_ffn(h, a, act) for h, a in zip(self.hidden, active, strict=True)), act=act
        )

    def training(self, config: MixerConfig, mlp: MlpFactory) -> nn.Module:
        return Mixer(config, lambda config, index: MixerBlock(config, mlp(index), shortcut=True, deployed=False))

    def deploy(self, config: MixerConfig) -> nn.Module:
        return Mixer(config)

    def pair(self, config: MixerConfig, index: int, mlp: MlpFactory) -> tuple[nn.Module, nn.Module, tuple[int, ...]]:
        trained = MixerBlock(config, mlp(index), shortcut=True, deployed=False)
        return trained, mixer_deploy_block(config, index), (2, config.sequence, config.width)

    def around(self, block: Mapping[str, Tensor], index: int) -> tuple[dict[str, Tensor], tuple[str, ...], Affine]:
        norm = Affine.diagonal(block["mlp_tokens.norm.weight"], block["mlp_tokens.norm.bias"])
        fc1, fc2 = linear_of(block, "mlp_tokens.fc1") @ norm, linear_of(block, "mlp_tokens.fc2")
        folded = named({"mlp_tokens.fc1": fc1, "mlp_tokens.fc2": fc2})
        return folded, ("mlp_tokens.norm's affine -> mlp_tokens.fc1",), Affine.eye(self.frame.width)

    def rest(self, config: MixerConfig, tensors: Mapping[str, Tensor]) -> Iterator[FoldedPart]:
        yield FoldedPart({n: w.double() for n, w in tensors.items() if n.startswith("stem.")})
        yield from norm_and_head(tensors, config.classes)


class MixerFamily:
    """The official MLP-Mixer, whose A is always its width."""

    backbone, rule, conv = "mixer", Rule(always_width=True), False
    ffn = re.compile(r"^(?P<block>blocks\.\d+\.)mlp_channels\.")

    def read(
        self, tensors: dict[str, Tensor], ffns: Sequence[Ffn], knobs: Knobs, args: Mapping[str, Any]
    ) -> MixerSkeleton:
        """The token MLPs tell the number of tokens."""
        kernel = weight_of(tensors, "stem.proj.weight", 4)
        fc1 = weight_of(tensors, "blocks.0.mlp_tokens.fc1.weight", 2)
        side, patch = math.isqrt(fc1.shape[1]), kernel.shape[2]
        square = (side * patch, side * patch) if side * side == fc1.shape[1] else None
        if square:
            size = knobs.take("image_size", parse_image_size, square, square, "tokens x patch", free=True)
        else:
            size = knobs.need("image_size", parse_image_size, "224x160", f"{fc1.shape[1]} tokens are no square")
        if (size[0] // patch) * (size[1] // patch) != fc1.shape[1]:
            raise Refused(
                f"images of {size[0]} x {size[1]} pixels are not the {fc1.shape[1]} patches that the token MLPs mix.",
                hint="Leave --set image_size out.",
                code="mixer.image-size",
            )
        frame = MixerConfig(
            image_size=size,
            patch=patch,
            width=kernel.shape[0],
            token_hidden=fc1.shape[0],
            ffn=tuple(IdleMlpSpec(0) for _ in ffns),
            classes=_classes(tensors),
            in_channels=kernel.shape[1],
            token_eps=knobs.take("token_eps", small, 1e-5),
            norm_eps=knobs.take("norm_eps", small, 1e-6),
        )
        return MixerSkeleton(frame, tuple(ffn.hidden for ffn in ffns))


FAMILIES: tuple[Family, ...] = (Plain(), SwinFamily(), PoolFormerFamily(), MixerFamily())


# --- shared ---------------------------------------------------------------------------------------


def affine_into_linear(norm: Affine, linear: Affine, module: str, name: str, told: str) -> FoldedPart:
    """A norm's affine into the linear layer behind it, both read on the same normalised tokens."""
    folded = linear @ norm
    n = torch.randn(5, norm.in_width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    error = max_rel_error(folded(n), linear(norm(n)))
    return FoldedPart(named({name: folded}), FoldStep(module=module, folded=(told,), max_rel_error=error))


def norm_and_head(tensors: Mapping[str, Tensor], classes: int) -> Iterator[FoldedPart]:
    """The final norm's affine through the pooling, which is linear, into the head; features keep the norm."""
    if not classes:
        yield FoldedPart({name: tensors[name].double() for name in ("norm.weight", "norm.bias")})
        return
    norm = Affine.diagonal(tensors["norm.weight"], tensors["norm.bias"])
    yield affine_into_linear(norm, linear_of(tensors, "head"), "head", "head", "norm's affine -> head")


def _classes(tensors: Mapping[str, Tensor]) -> int:
    return weight_of(tensors, "head.weight", 2).shape[0] if "head.weight" in tensors else 0


def _stages(ffns: Sequence[Ffn], pattern: str, step: int = 1) -> list[int]:
    """Blocks of every stage; stages and blocks are numbered without gaps.

    Raises:
        Refused: If they are not.
    """
    found: dict[int, set[int]] = {}
    for ffn in ffns:
        match = re.match(pattern, ffn.prefix)
        assert match is not None
        found.setdefault(int(match[1]), set()).add(int(match[2]))
    if sorted(found) != list(range(0, step * len(found), step)) or any(v != set(range(len(v))) for v in found.values()):
        raise Refused(
            f"the stages are numbered {', '.join(map(str, sorted(found)))}, or blocks within them are missing.",
            hint="The file is only part of a net.",
            code="checkpoint.missing-keys",
        )
    return [len(found[stage]) for stage in sorted(found)]


def _odd(text: str) -> int:
    value = positive(text)
    if value % 2 == 0:
        raise ValueError("not odd, so the pooling would change the size")
    return value
