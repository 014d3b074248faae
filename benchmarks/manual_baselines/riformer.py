"""Manual baseline of RIFormer: the official switch_to_deploy folds the mixer's affine into the norm before it (eq. 4).

LayerScales and the affines of the second and the final norm remain. Names are mmpretrain's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manual_baselines.shared_layers import with_weights, without_initialized_weights


class ConvMlp(nn.Module):
    """The MLP as 1x1 convolutions."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(width, hidden, 1), nn.Conv2d(hidden, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm_reparam, self.norm2 = nn.GroupNorm(1, width), nn.GroupNorm(1, width)
        self.mlp = ConvMlp(width, hidden)
        self.layer_scale_1, self.layer_scale_2 = (nn.Parameter(torch.zeros(width)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.layer_scale_1.unsqueeze(-1).unsqueeze(-1) * self.norm_reparam(x)
        return x + self.layer_scale_2.unsqueeze(-1).unsqueeze(-1) * self.mlp(self.norm2(x))


class Embed(nn.Module):
    """The stem, or the downsampling layer between two stages."""

    def __init__(self, weight: Tensor, stride: int, padding: int) -> None:
        super().__init__()
        out, channels, kernel, _ = weight.shape
        self.proj = nn.Conv2d(channels, out, kernel, stride=stride, padding=padding)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)


class RIFormer(nn.Module):
    def __init__(self, weights: dict[str, Tensor], stride: int) -> None:
        super().__init__()
        self.patch_embed = Embed(weights["patch_embed.proj.weight"], stride, 2)
        parts: list[nn.Module] = []
        while any(name.startswith(f"network.{len(parts)}.") for name in weights):
            prefix = f"network.{len(parts)}."
            down = weights.get(f"{prefix}proj.weight")
            parts.append(_stage(weights, prefix) if down is None else Embed(down, 2, 1))
        self.network = nn.ModuleList(parts)
        classes, width = weights["head.weight"].shape
        self.norm, self.head = nn.GroupNorm(1, width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        for part in self.network:
            x = part(x)
        return self.head(F.adaptive_avg_pool2d(self.norm(x), 1).flatten(1))


def _stage(weights: dict[str, Tensor], prefix: str) -> nn.Module:
    first = [w for name, w in weights.items() if name.startswith(prefix) and name.endswith(".fc1.weight")]
    return nn.Sequential(*[Block(w.shape[1], w.shape[0]) for w in first])


def switch_to_deploy(trained: dict[str, Tensor]) -> dict[str, Tensor]:
    """Apply eq. 4 to every block."""
    weights = {name: w for name, w in trained.items() if ".norm1." not in name and ".token_mixer." not in name}
    for name in [name for name in trained if name.endswith("token_mixer.affine.weight")]:
        block = name.removesuffix("token_mixer.affine.weight")
        s, t = trained[name].flatten(), trained[f"{block}token_mixer.affine.bias"]
        weights[f"{block}norm_reparam.weight"] = trained[f"{block}norm1.weight"] * (s - 1)
        weights[f"{block}norm_reparam.bias"] = trained[f"{block}norm1.bias"] * (s - 1) + t
    return weights


def deployed(checkpoint: dict[str, Any], stride: int = 4) -> nn.Module:
    """The network after the official switch_to_deploy; the stem's stride is an argument, as no weight has it."""
    weights = {}
    for name, weight in switch_to_deploy(checkpoint["model"]).items():
        parts = name.removeprefix("backbone.").replace("head.fc.", "head.").split(".")
        # the final norm is called after the last stage: norm6 of four stages
        weights[".".join(["norm" if parts[0].startswith("norm") else parts[0], *parts[1:]])] = weight
    return with_weights(without_initialized_weights(RIFormer, weights, stride), weights)
