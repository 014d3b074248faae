"""RepVGG (arXiv 2101.03697) and MobileOne (arXiv 2206.04040): blocks of convolutions and ReLU, pooling and a head.

Both have the same structure: block ``stage0``, stages ``stage1``, ``stage2`` and so on, and ``linear``. Within a block
the two official codes use different names; these are called a layout here. The deploy form keeps them, so that the
official deploy class loads it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from repaconv.backbones.registered_backbone import Backbone

Layout = Literal["repvgg", "mobileone"]


@dataclass(frozen=True)
class Names:
    """The official code's names of a block's parts.

    Attributes:
        conv, scale, identity: The full-kernel, the 1x1 and the identity branch.
        folded: The convolution of the deploy block.
        squeeze, expand: The two layers of the squeeze-and-excitation.
    """

    conv: str
    scale: str
    identity: str
    folded: str
    squeeze: str
    expand: str


NAMES: dict[Layout, Names] = {
    "repvgg": Names("rbr_dense", "rbr_1x1", "rbr_identity", "rbr_reparam", "down", "up"),
    "mobileone": Names("rbr_conv", "rbr_scale", "rbr_skip", "reparam_conv", "reduce", "expand"),
}


@dataclass(frozen=True)
class RepBlock:
    """The sizes of one block: convolution, optional squeeze-and-excitation, ReLU.

    Attributes:
        in_width, width: Channels of input and output.
        kernel: Side of the kernel; odd, with padding kernel // 2.
        stride: Stride of the convolution.
        groups: Groups of the convolution.
        squeezed: Channels inside the squeeze-and-excitation, 0 without one.
        squeezed_last: Whether the squeeze-and-excitation follows the ReLU, as in RepVGGplus.
    """

    in_width: int
    width: int
    kernel: int
    stride: int
    groups: int = 1
    squeezed: int = 0
    squeezed_last: bool = False

    def conv(self, kernel: int, *, bias: bool) -> nn.Conv2d:
        """Build one of the block's convolutions, with this kernel size."""
        return nn.Conv2d(self.in_width, self.width, kernel, self.stride, kernel // 2, groups=self.groups, bias=bias)


@dataclass(frozen=True)
class RepConvConfig:
    """The configuration of a RepVGG or MobileOne.

    Attributes:
        layout: The official code whose names are used.
        stages: The blocks of each stage; the first stage is one block.
        classes: Width of the head, 0 for pooled features.
    """

    layout: Layout
    stages: tuple[tuple[RepBlock, ...], ...]
    classes: int

    @property
    def in_channels(self) -> int:
        """Channels of an image."""
        return self.stages[0][0].in_width

    @property
    def blocks(self) -> dict[str, RepBlock]:
        """All blocks by name."""
        named = {f"stage{s}.{i}": block for s, stage in enumerate(self.stages[1:], 1) for i, block in enumerate(stage)}
        return {"stage0": self.stages[0][0], **named}


class SqueezeExcite(nn.Module):
    """Squeeze-and-excitation: scale each channel by a sigmoid of a two-layer network on all channels' means."""

    def __init__(self, names: Names, width: int, squeezed: int) -> None:
        super().__init__()
        self.names = names
        self.add_module(names.squeeze, nn.Conv2d(width, squeezed, 1))
        self.relu = nn.ReLU()
        self.add_module(names.expand, nn.Conv2d(squeezed, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        squeezed = self.relu(self.get_submodule(self.names.squeeze)(x.mean((2, 3), keepdim=True)))
        out: Tensor = x * self.get_submodule(self.names.expand)(squeezed).sigmoid()
        return out


class Activated(nn.Module):
    """Base class of blocks as trained and in deploy form: squeeze-and-excitation and ReLU after the convolutions."""

    counted = True  # `costs_by_block` counts such modules

    def __init__(self, layout: Layout, block: RepBlock) -> None:
        super().__init__()
        self.block = block
        self.squeeze = "post_se" if block.squeezed_last else "se"
        squeeze = SqueezeExcite(NAMES[layout], block.width, block.squeezed) if block.squeezed else nn.Identity()
        self.add_module(self.squeeze, squeeze)
        self.relu = nn.ReLU()

    def convolved(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C', H', W'], before squeeze-and-excitation."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C', H', W']."""
        squeeze, out = self.get_submodule(self.squeeze), self.convolved(x)
        ended: Tensor = squeeze(self.relu(out)) if self.block.squeezed_last else self.relu(squeeze(out))
        return ended


class DeployBlock(Activated):
    """The deploy block, with one convolution."""

    def __init__(self, layout: Layout, block: RepBlock) -> None:
        super().__init__(layout, block)
        self.name = NAMES[layout].folded
        self.add_module(self.name, block.conv(block.kernel, bias=True))

    def convolved(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C', H', W']."""
        out: Tensor = self.get_submodule(self.name)(x)
        return out


BlockFactory = Callable[[str, RepBlock], nn.Module]
"""Builds one block: (name, sizes) -> [B, C, H, W] -> [B, C', H', W']."""


class RepConv(nn.Module):
    """A RepVGG or MobileOne: images [B, C, H, W] of any size to logits [B, classes], or to pooled features.

    Args:
        config: The configuration.
        block: Builds the blocks; by default deploy blocks.
    """

    def __init__(self, config: RepConvConfig, block: BlockFactory | None = None) -> None:
        super().__init__()
        build = block or (lambda _, part: DeployBlock(config.layout, part))
        self.stage0 = build("stage0", config.stages[0][0])
        for s, stage in enumerate(config.stages[1:], 1):
            parts = (build(f"stage{s}.{i}", part) for i, part in enumerate(stage))
            self.add_module(f"stage{s}", nn.Sequential(*parts))
        self.stages = tuple(f"stage{s}" for s in range(len(config.stages)))
        self.linear = nn.Linear(config.stages[-1][-1].width, config.classes) if config.classes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, classes]."""
        for stage in self.stages:
            x = self.get_submodule(stage)(x)
        out: Tensor = self.linear(x.mean((2, 3)))
        return out


BACKBONE = Backbone("repconv", RepConvConfig, RepConv, any_image_size=True)
