"""PYRA: a frozen ViT adapted by LoRA while most of its tokens are merged, with learned modulation weights."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import digits
import torch
from torch import nn
from training_loop import HEADS, HIDDEN, WIDTH, config, fit, initialise

from repaconv.backbones.vit import ViT, ViTConfig
from repaconv.backbones.vit_training_blocks import BlockTraits
from repaconv.backbones.vit_training_norms import NormTraits
from repaconv.methods.lora import LoraLinear
from repaconv.methods.pyra.paper_equations import MergedBlock, PyraBlock

SCHEDULE = (10, 8, 6, 4)
"""Tokens that go, block by block, of 37."""
RANK, EPS, PYRA_EPS = 4, 1e-6, 1e-5
EPOCHS_BEFORE, EPOCHS = 35, 25
"""Of the whole backbone, then of what adapts it."""


def build(schedule: tuple[int, ...]) -> ViT:
    """A ViT that merges by that schedule, and is plain where nothing goes."""
    norm = NormTraits("layer", EPS)
    traits = BlockTraits(norm, norm, scale1=False, scale2=False)

    def block(sizes: ViTConfig, index: int) -> nn.Module:
        r, tokens = schedule[index], sizes.sequence - sum(schedule[:index])
        return MergedBlock(traits, HEADS, HIDDEN, True, tokens, r, r > 0, eps=PYRA_EPS).build(sizes)

    return ViT(config(len(schedule)), block)


def adapted(backbone: nn.Module) -> ViT:
    """The backbone, frozen but for its head, with LoRA beside every qkv and PYRA in every block."""
    net = build(SCHEDULE)
    net.load_state_dict(backbone.state_dict(), strict=False)
    net.requires_grad_(False)
    net.head.requires_grad_(True)
    for part in net.blocks:
        assert isinstance(part, PyraBlock)
        lora = LoraLinear(WIDTH, 3 * WIDTH, RANK, 1.0, bias=True)
        lora.load_state_dict(part.attn.qkv.state_dict(), strict=False)
        lora.weight.requires_grad_(False)
        lora.bias.requires_grad_(False)
        part.attn.qkv = lora
        nn.init.kaiming_uniform_(lora.lora_a, a=5**0.5)
        nn.init.kaiming_uniform_(part.pyra_a, a=5**0.5)
        for learnt in (part.pyra_a, part.pyra_b, *part.pyra_norm.parameters()):
            learnt.requires_grad_(True)
    return net


def train(data: digits.Digits, seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """The net, and its checkpoint as the official train.py writes one: the rows of pyra_a are the schedule.

    That one's args name a file for the model, which tells the heads; here they stand in args themselves.
    """
    torch.manual_seed(seed)
    backbone = build((0,) * len(SCHEDULE))
    initialise(backbone)
    fit(backbone, data, epochs=EPOCHS_BEFORE, seed=seed)
    net = adapted(backbone)
    fit(net, data, epochs=EPOCHS, seed=seed + 1)
    official = {".qkv.lora_a": ".LoRA_a.weight", ".qkv.lora_b": ".LoRA_b.weight"}
    weights = {}
    for name, tensor in net.state_dict().items():
        ours = next((end for end in official if name.endswith(end)), "")
        weights[name.removesuffix(ours) + official.get(ours, "")] = tensor
    args = Namespace(token_merging=True, pyra=True, num_heads=HEADS, epochs=EPOCHS, seed=seed, **digits.facts())
    return net, {"model": weights, "args": args}
