"""Swin transformer (arXiv 2103.14030): attention within windows of tokens, which are shifted in every second block.

Tensor names are the official ones: ``patch_embed.{proj,norm}``, ``layers.<s>.blocks.<i>.{norm1,attn,mlp}``,
``layers.<s>.downsample``, ``norm``, ``head``; ``relative_position_index`` and ``attn_mask`` are buffers of the state
dict. A method provides the training blocks; without one the deploy form is built, in which norms have no affine and the
scores' divisor is in q.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from repaconv.algebra.affine_maps import Affine
from repaconv.backbones.ffn_replacement_interface import Ffn, MlpFactory, deploy_ffn, stage_and_index, stage_depths
from repaconv.backbones.registered_backbone import Backbone
from repaconv.backbones.shared_layers import ActivationKind
from repaconv.backbones.tensor_names import classes_of, weight_of
from repaconv.backbones.vit_block_folding import (
    affine_into_linear,
    fold_attention,
    linear_of,
    named_tensors,
    norm_and_head,
)
from repaconv.backbones.vit_layers import IdleMlpSpec, MlpSpec
from repaconv.backbones.vit_training_norms import NormTraits
from repaconv.core.errors import Refused
from repaconv.method_api.contract import FoldedPart
from repaconv.method_api.settings import SettingsReader, small
from repaconv.results import Fact, ImageSize, parse_image_size


@dataclass(frozen=True)
class SwinConfig:
    """The configuration of a Swin transformer; tuples have one entry per stage.

    Attributes:
        image_size: Side of an image in pixels; the masks are for this size only.
        patch: Side of a patch in pixels.
        widths: Channels.
        heads: Number of heads.
        window: Side of a window in tokens, before it is clipped to the size of the stage.
        ffn: The feed-forward networks of the deploy blocks, by stage.
        classes: Width of the head, 0 for pooled features.
        in_channels: Channels of an image.
        eps: eps of all norms.
        patch_norm: Whether the embedding has a norm.
        positions: Whether each token has a position embedding, ``absolute_pos_embed``.
    """

    image_size: int
    patch: int
    widths: tuple[int, ...]
    heads: tuple[int, ...]
    window: int
    ffn: tuple[tuple[MlpSpec | IdleMlpSpec, ...], ...]
    classes: int
    in_channels: int = 3
    eps: float = 1e-5
    patch_norm: bool = True
    positions: bool = False

    def side(self, stage: int) -> int:
        """The number of tokens along one side in this stage."""
        return self.image_size // self.patch // (1 << stage)

    def clipped(self, stage: int) -> int:
        """The side of the windows in this stage."""
        return min(self.window, self.side(stage))

    def shift(self, stage: int, index: int) -> int:
        """By how many tokens the windows of a block are shifted; 0 in every second block, and with a single window."""
        return self.window // 2 if index % 2 and self.side(stage) > self.window else 0


BlockFactory = Callable[[SwinConfig, int, int], nn.Module]
"""Builds one block: (config, stage, index) -> [B, L, C] -> [B, L, C]."""


class WindowAttention(nn.Module):
    """Softmax attention within windows, with a relative position bias and, for shifted windows, a mask.

    Args:
        width: Channels.
        heads: Number of heads.
        window: Side of a window in tokens.
        scaled: Whether to divide q by sqrt(dh).
        bias: Whether ``qkv`` has a bias.
    """

    relative_position_index: Tensor

    def __init__(self, width: int, heads: int, window: int, *, scaled: bool, bias: bool = True) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5 if scaled else None
        tokens = window * window
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width)
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))
        self.register_buffer("relative_position_index", torch.zeros(tokens, tokens, dtype=torch.int64))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """[B * windows, tokens, C], mask [windows, tokens, tokens] -> [B * windows, tokens, C]."""
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        scores = (q if self.scale is None else q * self.scale) @ k.transpose(-2, -1)
        index = self.relative_position_index.flatten()
        bias = self.relative_position_bias_table[index].view(tokens, tokens, self.heads).permute(2, 0, 1)
        if mask is None:
            scores = scores + bias
        else:
            by_window = scores.view(-1, mask.shape[0], self.heads, tokens, tokens)
            scores = (by_window + (bias + mask.unsqueeze(1))).view(-1, self.heads, tokens, tokens)
        out: Tensor = self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, tokens, width))
        return out


class SwinBlock(nn.Module):
    """x += attn(norm1(x)) within windows, then the feed-forward network with its shortcut.

    Args:
        config: The configuration.
        stage: The block's stage.
        index: The block's index in the stage.
        mlp: The feed-forward network, on [B, L, C].
        shortcut: Whether to add a shortcut around ``mlp``; False if ``mlp`` includes it.
        deployed: Whether norm1's affine and the scores' divisor are folded into qkv.
        qkv_bias: Whether ``attn.qkv`` has a bias; that of a deployed block has one.
    """

    attn_mask: Tensor | None

    def __init__(
        self,
        config: SwinConfig,
        stage: int,
        index: int,
        mlp: nn.Module,
        *,
        shortcut: bool,
        deployed: bool,
        qkv_bias: bool = True,
    ) -> None:
        super().__init__()
        width, window = config.widths[stage], config.clipped(stage)
        self.side, self.window, self.shift = config.side(stage), window, config.shift(stage, index)
        self.norm1 = nn.LayerNorm(width, config.eps, elementwise_affine=not deployed)
        self.attn = WindowAttention(width, config.heads[stage], window, scaled=not deployed, bias=qkv_bias)
        self.mlp, self.shortcut = mlp, shortcut
        windows = (self.side // window) ** 2
        self.register_buffer("attn_mask", torch.zeros(windows, window**2, window**2) if self.shift else None)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, C] -> [B, L, C]."""
        batch, tokens, width = x.shape
        side, window, count = self.side, self.window, self.side // self.window
        grid = self.norm1(x).view(batch, side, side, width)
        if self.shift:
            grid = torch.roll(grid, (-self.shift, -self.shift), (1, 2))
        windows = grid.view(batch, count, window, count, window, width).transpose(2, 3)
        mixed = self.attn(windows.reshape(-1, window * window, width), self.attn_mask)
        grid = mixed.view(batch, count, count, window, window, width).transpose(2, 3).reshape(batch, side, side, width)
        if self.shift:
            grid = torch.roll(grid, (self.shift, self.shift), (1, 2))
        x = x + grid.reshape(batch, tokens, width)
        y: Tensor = self.mlp(x)
        return x + y if self.shortcut else y


class PatchMerging(nn.Module):
    """Merge four neighboring tokens into one of twice the width: norm, then ``reduction``.

    In the deploy form the norm's affine is folded into ``reduction``.
    """

    def __init__(self, side: int, width: int, eps: float, *, deployed: bool) -> None:
        super().__init__()
        self.side = side
        self.norm = nn.LayerNorm(4 * width, eps, elementwise_affine=not deployed)
        self.reduction = nn.Linear(4 * width, 2 * width, bias=deployed)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, C] -> [B, L / 4, 2C]."""
        batch, tokens, width = x.shape
        half = self.side // 2
        # channels in the official order: (row, column) = (0,0), (1,0), (0,1), (1,1)
        grid = x.view(batch, half, 2, half, 2, width).permute(0, 1, 3, 4, 2, 5)
        out: Tensor = self.reduction(self.norm(grid.reshape(batch, tokens // 4, 4 * width)))
        return out


class Stage(nn.Module):
    """The blocks of one stage, then the merging of patches before the next stage."""

    def __init__(self, config: SwinConfig, stage: int, block: BlockFactory, *, deployed: bool) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(block(config, stage, index) for index in range(len(config.ffn[stage]))))
        last = stage == len(config.widths) - 1
        self.downsample = (
            nn.Identity()
            if last
            else PatchMerging(config.side(stage), config.widths[stage], config.eps, deployed=deployed)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, C] -> [B, L', C']."""
        out: Tensor = self.downsample(self.blocks(x))
        return out


class PatchEmbed(nn.Module):
    """Embed patches as tokens, with or without a norm, whose affine cannot be folded: a shortcut follows it."""

    def __init__(self, config: SwinConfig) -> None:
        super().__init__()
        self.proj = nn.Conv2d(config.in_channels, config.widths[0], config.patch, stride=config.patch)
        self.norm = nn.LayerNorm(config.widths[0], config.eps) if config.patch_norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, L, C']."""
        out: Tensor = self.norm(self.proj(x).flatten(2).transpose(1, 2))
        return out


def deploy_block(config: SwinConfig, stage: int, index: int) -> nn.Module:
    """Build a block of the deploy form."""
    spec = config.ffn[stage][index]
    shortcut = not isinstance(spec, IdleMlpSpec)
    return SwinBlock(config, stage, index, spec.build(config.widths[stage]), shortcut=shortcut, deployed=True)


class Swin(nn.Module):
    """A Swin transformer: images [B, C, H, W] of one size to logits [B, classes], or to features.

    Args:
        config: The configuration.
        block: Builds training blocks; if None, the deploy form is built.
    """

    def __init__(self, config: SwinConfig, block: BlockFactory | None = None) -> None:
        super().__init__()
        deployed = block is None
        self.patch_embed = PatchEmbed(config)
        tokens = torch.zeros(1, config.side(0) ** 2, config.widths[0])
        self.absolute_pos_embed = nn.Parameter(tokens) if config.positions else None
        self.layers = nn.Sequential(
            *(Stage(config, stage, block or deploy_block, deployed=deployed) for stage in range(len(config.widths)))
        )
        affine = not deployed or not config.classes
        self.norm = nn.LayerNorm(config.widths[-1], config.eps, elementwise_affine=affine)
        self.head = nn.Linear(config.widths[-1], config.classes) if config.classes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, classes]."""
        x = self.patch_embed(x)
        if self.absolute_pos_embed is not None:
            x = x + self.absolute_pos_embed
        out: Tensor = self.head(self.norm(self.layers(x)).mean(1))
        return out


class SwinBackbone(Backbone):
    """The registered backbone, of square images."""

    def image_size(self, config: SwinConfig, preferred: ImageSize) -> ImageSize:
        """The (height, width) that the network requires."""
        return config.image_size, config.image_size


BACKBONE = SwinBackbone("swin", SwinConfig, Swin)


POSITIONS = "absolute_pos_embed"

# Swin around its FFNs. Shapes show windows and heads; the masks of shifted windows show the image size.


@dataclass(frozen=True)
class SwinFfnReplacement:
    """A Swin transformer whose FFNs are replaced; see `FfnReplacement`.

    Attributes:
        frame: The configuration; its FFNs are placeholders.
        hidden: Channels inside each FFN as trained, by stage.
        qkv_bias: Whether ``attn.qkv`` of the blocks as trained has a bias.
    """

    frame: SwinConfig
    hidden: tuple[tuple[int, ...], ...]
    qkv_bias: bool = True

    @property
    def image_size(self) -> ImageSize:
        return self.frame.image_size, self.frame.image_size

    def _place(self, index: int) -> tuple[int, int]:
        return stage_and_index(index, [len(hidden) for hidden in self.hidden])

    def config(self, active: Sequence[int], act: ActivationKind = "GELU") -> SwinConfig:
        remaining = iter(active)
        return replace(
            self.frame, ffn=tuple(tuple(deploy_ffn(h, next(remaining), act) for h in stage) for stage in self.hidden)
        )

    def build_training(self, config: SwinConfig, mlp: MlpFactory) -> nn.Module:
        first = [sum(len(hidden) for hidden in self.hidden[:stage]) for stage in range(len(self.hidden))]
        return Swin(config, lambda config, stage, index: self._block(config, stage, index, mlp(first[stage] + index)))

    def _block(self, config: SwinConfig, stage: int, index: int, mlp: nn.Module) -> nn.Module:
        return SwinBlock(config, stage, index, mlp, shortcut=True, deployed=False, qkv_bias=self.qkv_bias)

    def block_pair(
        self, config: SwinConfig, index: int, mlp: MlpFactory
    ) -> tuple[nn.Module, nn.Module, tuple[int, ...]]:
        stage, place = self._place(index)
        trained = self._block(config, stage, place, mlp(index))
        return trained, deploy_block(config, stage, place), (1, config.side(stage) ** 2, config.widths[stage])

    def fold_other_parts(
        self, block: Mapping[str, Tensor], index: int
    ) -> tuple[dict[str, Tensor], tuple[str, ...], Affine]:
        stage, _ = self._place(index)
        width = self.frame.widths[stage]
        norm = NormTraits("layer", self.frame.eps).affine(block, "norm1", width)
        folded = named_tensors(fold_attention(block, self.frame.heads[stage], norm, Affine.eye(width)))
        kept = ("attn.relative_position_bias_table", "attn.relative_position_index", "attn_mask")
        folded |= {name: block[name] for name in kept if name in block}
        return folded, ("norm1's affine -> attn.qkv", "1 / sqrt(dh) -> q"), Affine.eye(width)

    def fold_outside_blocks(self, config: SwinConfig, tensors: Mapping[str, Tensor]) -> Iterator[FoldedPart]:
        first = ("patch_embed.", POSITIONS)
        yield FoldedPart({n: w.double() for n, w in tensors.items() if n.startswith(first)})
        for stage in range(len(config.widths) - 1):
            place = f"layers.{stage}.downsample"
            norm = Affine.diagonal(tensors[f"{place}.norm.weight"], tensors[f"{place}.norm.bias"])
            reduction = linear_of(tensors, f"{place}.reduction")
            yield affine_into_linear(norm, reduction, place, f"{place}.reduction", "norm's affine -> reduction")
        yield from norm_and_head(tensors, config.classes)


def read_swin(
    tensors: dict[str, Tensor], ffns: Sequence[Ffn], reader: SettingsReader, args: Mapping[str, Any]
) -> SwinFfnReplacement:
    """Read a Swin transformer around its FFNs.

    Window and heads follow from shapes, and so does the image size if windows are shifted.

    Raises:
        Refused: If a tensor is missing or has a wrong shape, or windows and image size do not fit.
        SettingNeeded: If no window is shifted, the tokens have no position embeddings and the image size is not given.
    """
    kernel = weight_of(tensors, "patch_embed.proj.weight", 4)
    depths = stage_depths(ffns, r"layers\.(\d+)\.blocks\.(\d+)\.")
    tables = [
        weight_of(tensors, f"layers.{s}.blocks.0.attn.relative_position_bias_table", 2) for s in range(len(depths))
    ]
    windows = [(math.isqrt(len(table)) + 1) // 2 for table in tables]
    patch, window = kernel.shape[2], max(windows)
    masked = _masked(tensors, patch, windows)
    stored = args.get("input_size") if isinstance(args.get("input_size"), int) else None
    placed = math.isqrt(weight_of(tensors, POSITIONS, 3).shape[1]) * patch if POSITIONS in tensors else None
    found, source = next((each for each in ((masked, "attn_mask"), (placed, POSITIONS)) if each[0]), (stored, "args"))
    if found is None:
        size = reader.need("image_size", parse_image_size, "224", "no window is shifted, so no mask tells the size")
    else:
        size = reader.take("image_size", parse_image_size, (found, found), (found, found), source, free=True)
    hidden, remaining = [], iter(ffns)
    for depth in depths:
        hidden.append(tuple(next(remaining).hidden for _ in range(depth)))
    frame = SwinConfig(
        image_size=size[0],
        patch=patch,
        widths=tuple(weight_of(tensors, f"layers.{s}.blocks.0.norm1.weight", 1).shape[0] for s in range(len(depths))),
        heads=tuple(table.shape[1] for table in tables),
        window=window,
        ffn=tuple((IdleMlpSpec(0),) * depth for depth in depths),
        classes=classes_of(tensors),
        in_channels=kernel.shape[1],
        eps=reader.take("norm_eps", small, 1e-5),
        patch_norm="patch_embed.norm.weight" in tensors,
        positions=POSITIONS in tensors,
    )
    _require_windows(frame, windows, size, masked)
    _require_indices(tensors, tables)
    known = {"depths": depths, "widths": frame.widths, "heads": frame.heads, "window": window, "patch": patch}
    reader.facts += [
        Fact(name=name, value=list(v) if isinstance(v, tuple | list) else v, source="shapes")
        for name, v in known.items()
    ]
    return SwinFfnReplacement(frame, tuple(hidden), "layers.0.blocks.0.attn.qkv.bias" in tensors)


def _masked(tensors: Mapping[str, Tensor], patch: int, windows: Sequence[int]) -> int | None:
    for name, mask in tensors.items():
        if match := re.match(r"layers\.(\d+)\.blocks\.\d+\.attn_mask$", name):
            stage = int(match[1])
            if mask.ndim == 3 and stage < len(windows):
                return windows[stage] * math.isqrt(len(mask)) * patch * (1 << stage)
    return None


def _require_indices(tensors: Mapping[str, Tensor], tables: Sequence[Tensor]) -> None:
    """Refuse a relative_position_index outside its table; models on the meta device have no values to check."""
    for name, index in tensors.items():
        match = re.match(r"layers\.(\d+)\.blocks\.\d+\.attn\.relative_position_index$", name)
        known = match and int(match[1]) < len(tables) and index.numel() and not index.is_meta
        rows = len(tables[int(match[1])]) if match and known else 0
        if rows and not 0 <= int(index.min()) <= int(index.max()) < rows:
            raise Refused(
                f"{name} has indices from {int(index.min())} to {int(index.max())}, but its table has {rows} rows.",
                hint="The file is damaged, or it was changed after training.",
                code="checkpoint.index",
            )


def _require_windows(frame: SwinConfig, windows: Sequence[int], size: ImageSize, masked: int | None) -> None:
    stages = range(len(windows))
    odd_grid = any(frame.side(s) % 2 for s in stages[:-1]) or size[0] % frame.patch
    misfit = any(windows[s] != frame.clipped(s) or frame.side(s) % max(frame.clipped(s), 1) for s in stages)
    heads = any(width % heads for width, heads in zip(frame.widths, frame.heads, strict=True))
    if size[0] != size[1] or (masked and masked != size[0]) or odd_grid or misfit or heads:
        raise Refused(
            f"images of {size[0]} x {size[1]} pixels do not fit windows of {', '.join(map(str, windows))} tokens"
            + (f"; the masks are for {masked} x {masked}." if masked else "."),
            hint="Give the size that it was trained at: --set image_size=N.",
            code="swin.image-size",
        )
