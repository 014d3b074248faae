"""The paper's models, and synthetic checkpoints of the same sizes."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from repaconv.backbones.metaformer import MetaFormer, MetaFormerConfig
from repaconv.method_api.contract import Published
from repaconv.methods.riformer.paper_equations import RIFormerBlock

_WIDTHS = {"s": (64, 128, 320, 512), "m": (96, 192, 384, 768)}
ARCHS = {
    f"{size}{depth}": MetaFormerConfig(
        layers=(depth // 6, depth // 6, depth // 2, depth // 6),
        widths=_WIDTHS[size],
        hidden=tuple(4 * width for width in _WIDTHS[size]),
        classes=1000,
    )
    for size, depth in (("s", 12), ("s", 24), ("s", 36), ("m", 36), ("m", 48))
}


def published(arch: str) -> Published:
    """Build the paper's model of that name: ``s12`` for 224 pixels, ``m36@384`` for 384."""
    name, _, size = arch.partition("@")
    config, side = ARCHS[name], int(size or 224)
    block = partial(RIFormerBlock, layer_scale=True, deployed=False)
    return Published(
        training=lambda: MetaFormer(config, block, final_affine=True),
        deploy=lambda: MetaFormer(config, final_affine=False),
        input_shape=(3, side, side),
    )


def example(arch: str | MetaFormerConfig, seed: int) -> dict[str, Tensor]:
    """Make a synthetic checkpoint with mmpretrain's key names; affines, LayerScales and biases are not trivial."""
    config = ARCHS[arch] if isinstance(arch, str) else arch
    random = torch.Generator().manual_seed(seed)
    block = partial(RIFormerBlock, layer_scale=True, deployed=False)
    with torch.device("meta"):
        shapes = MetaFormer(config, block, final_affine=True).state_dict()
    last = 2 * len(config.layers) - 2
    return {
        _mmpretrain_name(name, last): _example_tensor(name, tuple(meta.shape), random) for name, meta in shapes.items()
    }


def _mmpretrain_name(name: str, last: int) -> str:
    if name.startswith("head."):
        return name.replace("head.", "head.fc.")
    return f"backbone.{name.replace('norm.', f'norm{last}.') if name.startswith('norm.') else name}"


def _example_tensor(name: str, shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    """Random values. Weights preserve the scale of activations; no scale is near 1 and no shift near 0."""
    noise = torch.randn(shape, generator=random)
    if "layer_scale" in name:
        return 0.3 + 0.1 * noise
    if name.endswith("token_mixer.affine.weight"):
        return 1 + 0.5 * noise
    if name.endswith("bias"):
        return 0.1 * noise
    if len(shape) > 1:
        return noise / math.sqrt(math.prod(shape[1:]))
    return 1 + 0.2 * noise
