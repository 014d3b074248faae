"""The papers' models, RepVGG A, B (also g2 and g4) and D2se and MobileOne S0 to S4, with synthetic checkpoints."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from repaconv.backbones.repvgg_mobileone import RepBlock, RepConv, RepConvConfig
from repaconv.method_api.contract import Published
from repaconv.methods.repconv.paper_equations import TrainingBlock


class Arch(NamedTuple):
    """The sizes of a network, and the number of parallel full-kernel convolutions in every block after the first."""

    config: RepConvConfig
    convs: int = 1


_WIDTHS = (64, 128, 256, 512)


def repvgg(
    depths: tuple[int, ...], wide: tuple[float, ...], groups: int = 1, *, squeeze: bool = False, classes: int = 1000
) -> Arch:
    """A RepVGG with these width multipliers a, a, a, b; in the g2 and g4 models every second layer has groups."""
    widths = [int(base * factor) for base, factor in zip(_WIDTHS, wide, strict=True)]
    inside = [width // 16 or 1 if squeeze else 0 for width in widths]
    before, layer = min(64, widths[0]), 0
    stages: list[tuple[RepBlock, ...]] = [(RepBlock(3, before, 3, 2, 1, before // 16 or 1 if squeeze else 0),)]
    for width, depth, squeezed in zip(widths, depths, inside, strict=True):
        blocks = []
        for index in range(depth):
            layer += 1
            blocks.append(RepBlock(before, width, 3, 1 if index else 2, 1 if layer % 2 else groups, squeezed))
            before = width
        stages.append(tuple(blocks))
    return Arch(RepConvConfig("repvgg", tuple(stages), classes))


def mobileone(
    wide: tuple[float, ...],
    convs: int = 1,
    *,
    squeeze: bool = False,
    depths: tuple[int, ...] = (2, 8, 10, 1),
    classes: int = 1000,
) -> Arch:
    """A MobileOne with these width multipliers; ``depths`` are the pairs of depthwise and pointwise block per stage."""
    widths = [int(base * factor) for base, factor in zip(_WIDTHS, wide, strict=True)]
    before = min(64, widths[0])
    stages: list[tuple[RepBlock, ...]] = [(RepBlock(3, before, 3, 2),)]
    for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        last = (0, 0, depth // 2, depth)[stage] if squeeze else 0
        blocks = []
        for index in range(depth):
            inside = [w // 16 or 1 if index >= depth - last else 0 for w in (before, width)]
            blocks.append(RepBlock(before, before, 3, 1 if index else 2, before, inside[0]))
            blocks.append(RepBlock(before, width, 1, 1, 1, inside[1]))
            before = width
        stages.append(tuple(blocks))
    return Arch(RepConvConfig("mobileone", tuple(stages), classes), convs)


_A, _B, _D = (2, 4, 14, 1), (4, 6, 16, 1), (8, 14, 24, 1)
ARCHS = {
    "repvgg-a0": repvgg(_A, (0.75, 0.75, 0.75, 2.5)),
    "repvgg-a1": repvgg(_A, (1, 1, 1, 2.5)),
    "repvgg-a2": repvgg(_A, (1.5, 1.5, 1.5, 2.75)),
    "repvgg-b0": repvgg(_B, (1, 1, 1, 2.5)),
    **{
        f"repvgg-b{size}{f'g{groups}' if groups > 1 else ''}": repvgg(_B, (a, a, a, b), groups)
        for size, a, b in ((1, 2, 4), (2, 2.5, 5), (3, 3, 5))
        for groups in (1, 2, 4)
    },
    "repvgg-d2se": repvgg(_D, (2.5, 2.5, 2.5, 5), squeeze=True),
    "mobileone-s0": mobileone((0.75, 1, 1, 2), 4),
    "mobileone-s1": mobileone((1.5, 1.5, 2, 2.5)),
    "mobileone-s2": mobileone((1.5, 2, 2.5, 4)),
    "mobileone-s3": mobileone((2, 2.5, 3, 4)),
    "mobileone-s4": mobileone((3, 3.5, 3.5, 4), squeeze=True),
    "tiny-repvgg": repvgg((2, 2, 1, 1), (0.125, 0.125, 0.125, 0.125), 2, squeeze=True, classes=5),
    "tiny-mobileone": mobileone((0.125, 0.125, 0.125, 0.125), 2, squeeze=True, depths=(1, 2, 2, 1), classes=5),
}


def training_net(arch: Arch) -> RepConv:
    """The network as trained, in eval mode. Its first block has one full-kernel convolution."""

    def block(name: str, part: RepBlock) -> TrainingBlock:
        return TrainingBlock(arch.config.layout, part, 1 if name == "stage0" else arch.convs, 1e-5)

    return RepConv(arch.config, block).eval()


def published(arch: str) -> Published:
    """Build the paper's model of that name, for images of 224 pixels (D2se: 320, as in its reported accuracy)."""
    known = ARCHS[arch]
    side = 320 if arch == "repvgg-d2se" else 224
    return Published(lambda: training_net(known), lambda: RepConv(known.config), (3, side, side))


def example(arch: str | Arch, seed: int) -> dict[str, Tensor]:
    """Make a synthetic checkpoint with official names, with non-trivial norms and branches of similar magnitude."""
    known, random = ARCHS[arch] if isinstance(arch, str) else arch, torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        shapes = training_net(known).state_dict()
    return {name: _example_tensor(name, tuple(meta.shape), known.convs, random) for name, meta in shapes.items()}


def _example_tensor(name: str, shape: tuple[int, ...], convs: int, random: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=random)
    if name.endswith("num_batches_tracked"):
        return torch.zeros((), dtype=torch.int64)
    if name.endswith("running_var"):
        return 0.3 + 0.5 * noise.abs()
    if name.endswith(("bias", "running_mean")):
        return 0.1 * noise
    if len(shape) > 1:
        return noise * math.sqrt(2 / math.prod(shape[1:]))
    return (1 + 0.3 * noise) / math.sqrt(1.3 * (convs + 1))  # the branches' sum has about the input's scale
