"""The paper's models and a tiny one, and synthetic checkpoints of the same sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from repaconv.algebra.low_rank_products import cheaper_than_matrices
from repaconv.backbones.blockwise_vit import example_weights, published_net
from repaconv.backbones.vit import ViTConfig
from repaconv.backbones.vit_training_blocks import BlockTraits
from repaconv.backbones.vit_training_norms import NormTraits
from repaconv.method_api.contract import Published
from repaconv.methods.nondeep.checkpoint_reading import FORMAT
from repaconv.methods.nondeep.paper_equations import BranchBlock, Join

ARCHS = ("6x2", "4x3", "3x4", "tiny")
_PAPER: dict[str, Any] = {"image_size": (224, 224), "patch": 16, "width": 192, "classes": 1000}
_TINY: dict[str, Any] = {"image_size": (16, 16), "patch": 4, "width": 24, "classes": 5}


def published(arch: str) -> Published:
    """Build the model of that name. ``6x2``: 6 layers of 2 branches; ``/3``: 3 heads; ``+xwx``: always X W X^T."""
    name, _, form = arch.partition("+")
    layout, _, heads_text = ("2x2/3" if name == "tiny" else name).partition("/")
    depth, branches = map(int, layout.split("x"))
    heads = int(heads_text or 12)
    hidden, sizes = (36, _TINY) if name == "tiny" else (768, _PAPER)
    norm = NormTraits("layer", 1e-6)
    traits = BlockTraits(norm, norm, scale1=False, scale2=False)
    block = BranchBlock(branches, branches, heads, hidden, Join("value-sum", "sqrt"), traits, qkv_bias=True)
    bare = ViTConfig(**sizes, blocks=())
    head = bare.width // heads
    concat = cheaper_than_matrices(branches * head, bare.width, bare.sequence) and form != "xwx"
    spec = block.spec(bare.width, branches * head if concat else None, head)
    return published_net(ViTConfig(**sizes, blocks=(spec,) * depth), (block,) * depth)


def example(arch: str, seed: int) -> dict[str, Tensor]:
    """Make a synthetic checkpoint with seeded, non-trivial weights, in the layout nondeep-branches-v1.

    The metadata of the tiny one is `example_meta`.
    """
    weights = example_weights(published(arch), seed, dict.fromkeys(("bias", "cls_token", "pos_embed"), 0.3))
    return {**weights, "join_lambda": torch.tensor(1.0)}


def example_meta(**changes: Any) -> dict[str, Any]:
    """The metadata of the tiny example (value-sum, sqrt, lambda 1), with these changes."""
    arch = {"img_size": 16, "num_heads": 3, "num_branches": 2, "norm_eps": 1e-6, "global_pool": "cls"}
    join = {"lambda": 1.0, "attn_value": "value-sum", "score_scale": "sqrt", "ffn": "pre-activation"}
    meta: dict[str, Any] = {"format": FORMAT, "method": "nondeep", "arch": arch, "join": join}
    for name, value in changes.items():
        place = arch if name in arch else join
        place[name] = value
    return meta
