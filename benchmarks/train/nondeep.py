"""Rethinking ViT Depth: three layers of two branches each, merged during training while lambda goes from 0 to 1."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import digits
import torch
from torch import nn
from training_loop import HEADS, HIDDEN, PATCH, WIDTH, config, fit, initialise

from repaconv.backbones.vit import ViT, ViTConfig
from repaconv.backbones.vit_training_blocks import BlockTraits, PlainBlock
from repaconv.backbones.vit_training_norms import NormTraits
from repaconv.methods.nondeep.checkpoint_reading import FORMAT
from repaconv.methods.nondeep.paper_equations import BranchAttention, BranchMlp, Join

DEPTH, BRANCHES, EPOCHS, EPS = 3, 2, 45, 1e-6
JOINED = 0.6
"""Share of the epochs after which lambda is 1; the rest trains what will be folded."""
VALUE, SCALE = "value-sum", "sqrt"


def block(sizes: ViTConfig, index: int) -> nn.Module:
    """One training block, its branches still apart."""
    apart = Join(VALUE, SCALE, 0.0)
    attn = BranchAttention(WIDTH, HEADS, BRANCHES, apart, qkv_bias=True)
    norm = NormTraits("layer", EPS)
    mlp = BranchMlp(WIDTH, HIDDEN, BRANCHES, apart, "GELU")
    return PlainBlock(sizes, attn, mlp, BlockTraits(norm, norm, scale1=False, scale2=False))


def set_lambda(net: nn.Module, factor: float) -> None:
    """The joining factor of every block."""
    join = Join(VALUE, SCALE, factor)
    for part in net.modules():
        if isinstance(part, (BranchAttention, BranchMlp)):
            part.join = join
        if isinstance(part, BranchAttention):
            part.divisor = join.divisor(BRANCHES, WIDTH // HEADS)


def train(data: digits.Digits, seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """The net, and its checkpoint in the layout nondeep-branches-v1."""
    torch.manual_seed(seed)
    net = ViT(config(DEPTH), block)
    initialise(net)
    fit(net, data, epochs=EPOCHS, seed=seed, before=lambda share: set_lambda(net, min(1.0, share / JOINED)))
    set_lambda(net, 1.0)
    arch = {
        "img_size": digits.SIDE,
        "patch_size": PATCH,
        "in_chans": 1,
        "num_classes": digits.CLASSES,
        "embed_dim": WIDTH,
        "depth": DEPTH,
        "num_heads": HEADS,
        "mlp_hidden": HIDDEN,
        "num_branches": BRANCHES,
        "qkv_bias": True,
        "class_token": True,
        "global_pool": "cls",
        "norm_eps": EPS,
        "act": "gelu",
    }
    join = {"lambda": 1.0, "attn_value": VALUE, "score_scale": SCALE, "ffn": "pre-activation", "branch_reduce": "sum"}
    return net, {
        "state_dict": {**net.state_dict(), "join_lambda": torch.tensor(1.0)},
        "meta": {"format": FORMAT, "method": "nondeep", "arch": arch, "join": join},
        "args": Namespace(epochs=EPOCHS, seed=seed, **digits.facts()),
    }
