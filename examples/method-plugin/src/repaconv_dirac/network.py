"""The network: at training time with Dirac convolutions and BatchNorms, at inference time with plain convolutions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class DiracConfig:
    """Sizes of the network. repaconv reads ``in_channels`` and ``classes``; the rest is the network's own.

    Attributes:
        depth: Number of blocks.
        width: Channels of every block.
        classes: Number of logits.
        in_channels: Channels of the image.
    """

    depth: int
    width: int
    classes: int
    in_channels: int


class DiracConv(nn.Conv2d):
    """A 3x3 convolution whose kernel is alpha * delta + beta * W / |W|: the shortcut is a part of the kernel."""

    delta: Tensor

    def __init__(self, width: int) -> None:
        super().__init__(width, width, 3, padding=1, bias=False)
        self.alpha = nn.Parameter(torch.ones(width))
        self.beta = nn.Parameter(torch.full((width,), 0.1))
        self.register_buffer("delta", nn.init.dirac_(torch.empty(width, width, 3, 3)))

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W] -> [N, C, H, W]."""
        return F.conv2d(x, dirac_kernel(self.alpha, self.beta, self.delta, self.weight), padding=1)


def dirac_kernel(alpha: Tensor, beta: Tensor, delta: Tensor, weight: Tensor) -> Tensor:
    """The kernel alpha * delta + beta * W / |W|, with the norm over each filter.

    Args:
        alpha: [out].
        beta: [out].
        delta: The identity as a kernel, [out, in, 3, 3].
        weight: W, [out, in, 3, 3].
    """
    normalized = F.normalize(weight.flatten(1)).view_as(weight)
    return alpha.view(-1, 1, 1, 1) * delta + beta.view(-1, 1, 1, 1) * normalized


class DiracBlock(nn.Module):
    """At training time: a Dirac convolution and its BatchNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = DiracConv(width)
        self.bn = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W] -> [N, C, H, W]."""
        return self.bn(self.conv(x))  # type: ignore[no-any-return]


def plain_block(width: int) -> nn.Conv2d:
    """At inference time: one convolution."""
    return nn.Conv2d(width, width, 3, padding=1)


class DiracNet(nn.Module):
    """Images to logits: [N, in_channels, H, W] -> [N, classes]."""

    def __init__(self, config: DiracConfig, *, trained: bool) -> None:
        super().__init__()
        block = DiracBlock if trained else plain_block
        self.stem = nn.Conv2d(config.in_channels, config.width, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(block(config.width) for _ in range(config.depth))
        self.head = nn.Linear(config.width, config.classes)

    def forward(self, x: Tensor) -> Tensor:
        """[N, in_channels, H, W] -> [N, classes]."""
        x = torch.relu(self.stem(x))
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


class DiracBackbone:
    """How repaconv builds the inference-time network again from what a run folder holds."""

    name = "dirac"
    any_image_size = True

    def to_json(self, config: DiracConfig) -> dict[str, Any]:
        """The sizes as JSON."""
        return asdict(config)

    def from_json(self, plain: Mapping[str, Any]) -> DiracConfig:
        """The sizes from JSON."""
        return DiracConfig(**plain)

    def image_size(self, config: DiracConfig, preferred: tuple[int, int]) -> tuple[int, int]:
        """The image size (height, width) to export with."""
        return preferred

    def takes(self, config: DiracConfig, height: int, width: int) -> bool:
        """Whether the network takes images of this size."""
        return True

    def deploy(self, config: DiracConfig) -> nn.Module:
        """The inference-time network in eval mode, without weights."""
        return DiracNet(config, trained=False).eval()
