"""The paper's models, and synthetic checkpoints of the same sizes."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from torch import Tensor

from repaconv.backbones.blockwise_vit import deploy_config, example_weights, published_net
from repaconv.backbones.vit import ViTConfig
from repaconv.backbones.vit_training_blocks import BlockTraits
from repaconv.backbones.vit_training_norms import NormTraits
from repaconv.method_api.contract import Published
from repaconv.methods.pyra.merging_schedules import official_schedule
from repaconv.methods.pyra.paper_equations import MergedBlock

PAPERS = {
    "vit-base": (768, 12, 12, 224, 16),
    "vit-large": (1024, 16, 24, 224, 16),
    "deit-base": (768, 12, 12, 224, 16),
}
"""Width, heads, depth, image side, patch."""
_SIZES = {**PAPERS, "tiny": (24, 3, 3, 32, 8)}
ARCHS = (*(f"{size}{rate}" for size in PAPERS for rate in ("", "/low", "/high")), "tiny")


def published(arch: str) -> Published:
    """Build the model of that name: ``vit-base``, ``vit-large`` or ``deit-base``, with schedule ``/low`` or ``/high``.

    Images have 224 x 224 pixels, patches 16 x 16. Without a schedule no tokens merge.
    """
    name, _, rate = arch.partition("/")
    width, heads, depth, side, patch = _SIZES[name]
    distilled = name.startswith("deit")
    schedule = (4, 3, 2) if name == "tiny" else official_schedule(rate, (width, depth, distilled)) or (0,) * depth
    sizes: dict[str, Any] = {
        "image_size": (side, side),
        "patch": patch,
        "width": width,
        "classes": 5 if name == "tiny" else 100,
    }
    if distilled:
        sizes |= {"tokens": ("cls_token", "dist_token"), "pool": "distilled"}
    norm = NormTraits("layer", 1e-6)
    traits = BlockTraits(norm, norm, scale1=False, scale2=False)
    gone = accumulate(schedule, initial=0)
    tokens = ViTConfig(**sizes, blocks=()).sequence
    blocks = tuple(
        MergedBlock(traits, heads, 4 * width, True, tokens - before, r, r > 0)
        for r, before in zip(schedule, gone, strict=False)
    )
    return published_net(deploy_config(sizes, blocks), blocks)


def example(arch: str, seed: int) -> dict[str, Tensor]:
    """Make a synthetic checkpoint with seeded, non-trivial weights and official keys, without LoRA."""
    ends = ("bias", "cls_token", "pos_embed", "pyra_a", "pyra_b")
    return example_weights(published(arch), seed, dict.fromkeys(ends, 0.4))
