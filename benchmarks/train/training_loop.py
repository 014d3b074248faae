"""What the trainings of the five networks share: a small vision transformer, the training loop, the accuracy."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from digits import CLASSES, SIDE, Digits
from torch import Tensor, nn
from torch.nn import functional

from repaconv.backbones.vit import BlockSpec, ViTConfig
from repaconv.backbones.vit_layers import AttentionSpec, LayerNormSpec, MlpSpec

WIDTH, HEADS, HIDDEN, PATCH = 48, 4, 192, 4
BATCH, WEIGHT_DECAY, SMOOTHING, WARMUP = 32, 0.05, 0.1, 0.1

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(images, labels, logits) -> a number."""


def config(depth: int, **changes: object) -> ViTConfig:
    """A vision transformer for the digits; of the blocks a training form takes only the number from here."""
    norm = LayerNormSpec(1e-6)
    block = BlockSpec(AttentionSpec(HEADS, WIDTH // HEADS, WIDTH // HEADS), MlpSpec(HIDDEN), norm, norm)
    sizes = {"image_size": (SIDE, SIDE), "patch": PATCH, "width": WIDTH, "classes": CLASSES, "in_channels": 1}
    return ViTConfig(**sizes, blocks=(block,) * depth, **changes)


def initialise(net: nn.Module) -> None:
    """DeiT's: truncated normal weights; positions start as sines, which so few images do not teach."""
    for name, parameter in net.named_parameters():
        if name.endswith("pos_embed"):
            parameter.data[:, -((SIDE // PATCH) ** 2) :] = sines()
        elif parameter.ndim > 1:
            nn.init.trunc_normal_(parameter, std=0.02 if "token" in name else parameter[0].numel() ** -0.5)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)


def sines() -> Tensor:
    """Sines and cosines of row and column, [patches, WIDTH]."""
    rate = 10 ** (-torch.arange(WIDTH // 4) / (WIDTH // 4))
    phase = torch.arange(SIDE // PATCH)[:, None] * rate
    waves = torch.cat([phase.sin(), phase.cos()], 1)
    rows, columns = waves[:, None].expand(-1, len(waves), -1), waves[None].expand(len(waves), -1, -1)
    return 0.5 * torch.cat([rows, columns], 2).flatten(0, 1)


def smoothed(images: Tensor, labels: Tensor, logits: Tensor) -> Tensor:
    """Cross entropy with some of the weight on the other classes."""
    return functional.cross_entropy(logits, labels, label_smoothing=SMOOTHING)


def fit(
    net: nn.Module,
    data: Digits,
    *,
    epochs: int,
    seed: int,
    rate: float = 2e-3,
    loss: Loss = smoothed,
    before: Callable[[float], object] = lambda share: None,
    kept: Path | None = None,
) -> None:
    """Train what wants a gradient: AdamW, a warm-up, then a cosine down to nothing.

    Args:
        net: In place.
        data: The training split.
        epochs: How often each image is seen.
        seed: Of order and augmentation.
        rate: The largest learning rate.
        loss: See `Loss`.
        before: Told before every epoch which share of them is done.
        kept: A file that has all of it after every epoch; if it is there, the training goes on from it, to the same
            bits.
    """
    random = torch.Generator().manual_seed(seed)
    wanted = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(wanted, rate, weight_decay=WEIGHT_DECAY)
    steps = epochs * math.ceil(len(data.labels) / BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, steps, pct_start=WARMUP, final_div_factor=1e4)
    several: dict[str, Any] = {"net": net, "optimiser": optimiser, "schedule": schedule}
    begun = _taken_up(kept, several, random) if kept and kept.is_file() else 0
    net.train()
    for epoch in range(begun, epochs):
        before(epoch / epochs)
        for images, labels in data.batches(BATCH, random):
            optimiser.zero_grad()
            loss(images, labels, net(images)).backward()
            nn.utils.clip_grad_norm_(wanted, 1.0)
            optimiser.step()
            schedule.step()
        if kept:
            states = {name: each.state_dict() for name, each in several.items()}
            torch.save({**states, "random": random.get_state(), "epochs": epoch + 1}, aside := kept.with_suffix(".new"))
            aside.replace(kept)
    net.eval()


def _taken_up(kept: Path, several: dict[str, Any], random: torch.Generator) -> int:
    """Everything as it was, and how many epochs are done."""
    found = torch.load(kept, weights_only=True)
    for name, each in several.items():
        each.load_state_dict(found[name])
    random.set_state(found["random"])
    return int(found["epochs"])


@torch.no_grad()
def accuracy(net: nn.Module, data: Digits) -> float:
    """Share of images whose first class is right."""
    right = [(net(images).argmax(1) == labels).sum() for images, labels in zip(*map(_hundreds, data), strict=True)]
    return float(sum(right)) / len(data.labels)


def _hundreds(rows: Tensor) -> tuple[Tensor, ...]:
    return rows.split(100)
