"""Small valid checkpoints of every method, and their settings that the files do not contain."""

from __future__ import annotations

from functools import cache
from math import sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from repaconv.backbones.metaformer import MetaFormerConfig
from repaconv.core import plugins
from repaconv.methods.nondeep.published_models import example_meta

HEADS = {"num_heads": "3"}
TINY = MetaFormerConfig(layers=(1, 2), widths=(8, 12), hidden=(16, 30), classes=5)
METHODS: dict[str, tuple[str, Any, dict[str, Any], dict[str, str]]] = {
    "repavit": ("repavit", "tiny", {}, {**HEADS, "idle_ratio": "0.75"}),
    "repavit-swin": ("repavit", "tiny-swin", {}, {}),
    "repavit-poolformer": ("repavit", "tiny-poolformer", {}, {}),
    "repavit-mixer": ("repavit", "tiny-mixer", {}, {}),
    "nondeep": ("nondeep", "tiny", {"meta": example_meta()}, {}),
    "riformer": ("riformer", TINY, {"args": {"img_size": 32}}, {}),
    "dwconv": ("dwconv", "tiny", {}, HEADS),
    "pyra": ("pyra", "tiny", {}, HEADS),
    "repvgg": ("repconv", "tiny-repvgg", {"args": {"img_size": 32}}, {}),
    "mobileone": ("repconv", "tiny-mobileone", {"args": {"img_size": 32}}, {}),
}


class Net(NamedTuple):
    """A training form's weights, what trainers put beside them, and the settings that it needs."""

    name: str
    weights: dict[str, Tensor]
    beside: dict[str, Any]
    settings: dict[str, str]

    @property
    def whole(self) -> dict[str, Any]:
        """As a trainer saves it."""
        return {"state_dict": self.weights, "epoch": 3, "optimizer": {"state": {}}, **self.beside}


@cache
def net(name: str) -> Net:
    """One of `METHODS`."""
    method, arch, beside, settings = METHODS[name]
    return Net(name, dict(plugins.load(plugins.METHODS, method).example(arch, 1)), beside, settings)


def plain(width: int = 12, depth: int = 2) -> dict[str, Tensor]:
    """A plain vision transformer of three heads, on 4 x 4 patches of 2 pixels, as `convert` takes it."""
    torch.manual_seed(0)

    def linear(name: str, out: int, taken: int) -> dict[str, Tensor]:
        return {f"{name}.weight": torch.randn(out, taken) / sqrt(taken), f"{name}.bias": torch.zeros(out)}

    found = {"pos_embed": torch.randn(1, 17, width), "patch_embed.proj.weight": torch.randn(width, 3, 2, 2)}
    found |= {"cls_token": torch.randn(1, 1, width)}
    for index in range(depth):
        block = linear("attn.qkv", 3 * width, width) | linear("attn.proj", width, width)
        block |= linear("mlp.fc1", 20, width) | linear("mlp.fc2", width, 20)
        block |= {f"norm{n}.{what}": torch.ones(width) for n in (1, 2) for what in ("weight", "bias")}
        found |= {f"blocks.{index}.{name}": tensor for name, tensor in block.items()}
    return found | {"norm.weight": torch.ones(width), "norm.bias": torch.zeros(width)} | linear("head", 5, width)
