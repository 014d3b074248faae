"""Swin transformer (arXiv 2103.14030): windows of tokens attend to themselves, every second block shifted.

Names are the official ones: ``patch_embed.{proj,norm}``, ``layers.<s>.blocks.<i>.{norm1,attn,mlp}``,
``layers.<s>.downsample``, ``norm``, ``head``; ``relative_position_index`` and ``attn_mask`` are buffers of the
state dict. A method gives the training blocks; without one the skeleton builds the deploy form, in which norms
have no affine and the scores' divisor is in q.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from repaconv.backbones.tokens import IdleMlpSpec, MlpSpec


@dataclass(frozen=True)
class SwinConfig:
    """Sizes; one entry a stage in the tuples.

    Attributes:
        image_size: Side in pixels; masks are for this size alone.
        window: Side of a window in tokens, before it is clipped to the stage.
        ffn: The deploy blocks' feed-forward networks, stage by stage.
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

    def side(self, stage: int) -> int:
        """Tokens along a side in this stage."""
        return self.image_size // self.patch // (1 << stage)

    def clipped(self, stage: int) -> int:
        """Side of the windows in this stage."""
        return min(self.window, self.side(stage))

    def shift(self, stage: int, index: int) -> int:
        """By how many tokens a block's windows are shifted: every second block, where there are several windows."""
        return self.window // 2 if index % 2 and self.side(stage) > self.window else 0


BlockFactory = Callable[[SwinConfig, int, int], nn.Module]
"""Builds one block: (config, stage, index) -> [B, L, C] -> [B, L, C]."""


class WindowAttention(nn.Module):
    """Softmax attention within windows, with a bias by relative position and, shifted, a mask.

    Args:
        scaled: Whether q still has to be divided by sqrt(dh).
    """

    relative_position_index: Tensor

    def __init__(self, width: int, heads: int, window: int, *, scaled: bool) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5 if scaled else None
        tokens = window * window
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
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
    """x += attn(norm1(x)) in windows, then the feed-forward network with its shortcut.

    Args:
        mlp: On [B, L, C].
        shortcut: Whether the shortcut around ``mlp`` is still to be added.
        deployed: Whether norm1's affine and the scores' divisor are in qkv.
    """

    attn_mask: Tensor | None

    def __init__(
        self, config: SwinConfig, stage: int, index: int, mlp: nn.Module, *, shortcut: bool, deployed: bool
    ) -> None:
        super().__init__()
        width, window = config.widths[stage], config.clipped(stage)
        self.side, self.window, self.shift = config.side(stage), window, config.shift(stage, index)
        self.norm1 = nn.LayerNorm(width, config.eps, elementwise_affine=not deployed)
        self.attn = WindowAttention(width, config.heads[stage], window, scaled=not deployed)
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
    """Four neighbours into one token of twice the width: norm, then ``reduction``, which may have taken its affine."""

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
    """Blocks, then the merging of patches before the next stage."""

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
    """Patches as tokens, and a norm with affine: it stands before a shortcut."""

    def __init__(self, config: SwinConfig) -> None:
        super().__init__()
        self.proj = nn.Conv2d(config.in_channels, config.widths[0], config.patch, stride=config.patch)
        self.norm = nn.LayerNorm(config.widths[0], config.eps)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, L, C']."""
        out: Tensor = self.norm(self.proj(x).flatten(2).transpose(1, 2))
        return out


def deploy_block(config: SwinConfig, stage: int, index: int) -> nn.Module:
    """The block of the deploy form."""
    spec = config.ffn[stage][index]
    shortcut = not isinstance(spec, IdleMlpSpec)
    return SwinBlock(config, stage, index, spec.build(config.widths[stage]), shortcut=shortcut, deployed=True)


class Swin(nn.Module):
    """Images [B, C, H, W] of one size to logits [B, classes], or to features.

    Args:
        config: Sizes.
        block: Builds training blocks; the deploy form when None.
    """

    def __init__(self, config: SwinConfig, block: BlockFactory | None = None) -> None:
        super().__init__()
        deployed = block is None
        self.patch_embed = PatchEmbed(config)
        self.layers = nn.Sequential(
            *(Stage(config, stage, block or deploy_block, deployed=deployed) for stage in range(len(config.widths)))
        )
        affine = not deployed or not config.classes
        self.norm = nn.LayerNorm(config.widths[-1], config.eps, elementwise_affine=affine)
        self.head = nn.Linear(config.widths[-1], config.classes) if config.classes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, classes]."""
        out: Tensor = self.head(self.norm(self.layers(self.patch_embed(x))).mean(1))
        return out


_CONFIG = TypeAdapter(SwinConfig)


class SwinBackbone:
    """How later stages rebuild the deploy form from ``fold.json``, with no method at hand."""

    name = "swin"
    any_image_size = False

    def to_json(self, config: SwinConfig) -> dict[str, Any]:
        """The config as plain values."""
        return asdict(config)

    def from_json(self, plain: dict[str, Any]) -> SwinConfig:
        """The inverse of `to_json`."""
        return _CONFIG.validate_python(plain)

    def image_size(self, config: SwinConfig, preferred: tuple[int, int]) -> tuple[int, int]:
        """(height, width) that the network takes."""
        return config.image_size, config.image_size

    def takes(self, config: SwinConfig, height: int, width: int) -> bool:
        """Whether images of this size fit the windows."""
        return height == width == config.image_size

    def deploy(self, config: SwinConfig) -> nn.Module:
        """The deploy form, weights not yet set."""
        return Swin(config).eval()


BACKBONE = SwinBackbone()
