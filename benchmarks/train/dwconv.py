"""Drop-in depthwise convolution: gates learn in which blocks a depthwise convolution may replace attention."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import digits
import torch
from torch import Tensor, nn
from training_loop import HEADS, HIDDEN, PATCH, WIDTH, config, fit, initialise

from repaconv.backbones.convolution_mixers import to_grid, to_tokens
from repaconv.backbones.vit import ViT, ViTConfig
from repaconv.backbones.vit_layers import MlpSpec
from repaconv.backbones.vit_training_blocks import BlockTraits, PlainBlock
from repaconv.backbones.vit_training_norms import NormTraits
from repaconv.methods.dwconv.token_mixer_reading import FORMAT

DEPTH, CONVOLVING, KERNEL, EPOCHS, EPS = 4, 2, 3, 45, 1e-6
SETTLED = 0.5
"""Share of the epochs after which the gates are hard; the rest trains what will be folded."""


class GatedMixer(nn.Module):
    """proj((1 - g) attention + g convolution of the values), eq. 18."""

    def __init__(self, grid: tuple[int, int]) -> None:
        super().__init__()
        self.grid, self.gate = grid, torch.tensor(0.5)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dw = nn.Conv2d(WIDTH, WIDTH, KERNEL, padding=KERNEL // 2, groups=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, d] -> [B, N, d]."""
        q, k, v = self.qkv(x).chunk(3, -1)
        by_head = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (q, k, v))
        attended = nn.functional.scaled_dot_product_attention(*by_head).transpose(1, 2).flatten(2)
        convolved = to_tokens(self.dw(to_grid(v, self.grid)))
        mixed: Tensor = self.proj((1 - self.gate) * attended + self.gate * convolved)
        return mixed


def block(sizes: ViTConfig, index: int) -> nn.Module:
    """One training block."""
    norm = NormTraits("layer", EPS)
    traits = BlockTraits(norm, norm, scale1=False, scale2=False)
    return PlainBlock(sizes, GatedMixer(sizes.grid), MlpSpec(HIDDEN).build(WIDTH), traits)


class GatedViT(ViT):
    """A ViT whose blocks are gated; ``gate.weight`` is what they learn."""

    def __init__(self) -> None:
        super().__init__(config(DEPTH, tokens=(), prefix_positions=False, pool="avg"), block)
        self.gate = nn.ParameterDict({"weight": torch.zeros(DEPTH)})
        self.sharpness: float | None = 1.0

    def settle(self, share: float) -> None:
        """Gates sharpen, from a half for both sides to a choice; None stands for the hard one."""
        self.sharpness = None if share >= SETTLED else 1 + 9 * share / SETTLED

    def forward(self, x: Tensor) -> Tensor:
        """[B, 1, H, W] -> [B, classes]."""
        gates = self.gate["weight"]
        if self.sharpness is None:
            chosen = gates.argsort(descending=True)[:CONVOLVING]
            values = torch.zeros(DEPTH).index_fill(0, chosen, 1.0)
        else:
            values = (self.sharpness * gates).sigmoid()
        for part, value in zip(self.blocks, values, strict=True):
            part.attn.gate = value
        return super().forward(x)


def train(data: digits.Digits, seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """The net, and its checkpoint in the layout dwconv-v1."""
    torch.manual_seed(seed)
    net = GatedViT()
    initialise(net)
    fit(net, data, epochs=EPOCHS, seed=seed, before=net.settle)
    net.settle(1.0)
    arch = {
        "img_size": digits.SIDE,
        "patch_size": PATCH,
        "in_chans": 1,
        "num_classes": digits.CLASSES,
        "embed_dim": WIDTH,
        "depth": DEPTH,
        "num_heads": HEADS,
        "mlp_hidden": HIDDEN,
        "ffn": "mlp",
        "layer_scale": False,
        "class_token": False,
        "global_pool": "avg",
        "norm_eps": EPS,
        "act": "gelu",
    }
    gate = {"unit": "block", "p": CONVOLVING, "mode": "hard-topk"}
    return net, {
        "model": net.state_dict(),
        "meta": {"format": FORMAT, "method": "dwconv", "arch": arch, "gate": gate},
        "args": Namespace(epochs=EPOCHS, seed=seed, **digits.facts()),
    }
