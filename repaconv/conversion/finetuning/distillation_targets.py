"""Distillation from the original network: losses on outputs and on intermediate features, and image augmentation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

MAX_SHIFT, MAX_ROTATION, MAX_SCALING = 0.1, 0.15, 0.1
"""Maximum shift (fraction of half the image side), rotation (radians) and scaling of an image. The teacher sees the
same image, so no label becomes wrong."""
MAX_POSITIONS = 28 * 28
"""Maximum number of positions of a feature map for the relation loss. The relation matrix of larger maps is too
expensive."""


def augment(images: Tensor, random: torch.Generator) -> Tensor:
    """Augment images [B, C, H, W]: rotate, scale and shift each one a little."""
    limits = torch.tensor([[MAX_ROTATION], [MAX_SCALING], [MAX_SHIFT], [MAX_SHIFT]])
    turn, grow, right, down = (2 * torch.rand(4, len(images), generator=random) - 1) * limits
    cosine, sine = (1 + grow) * turn.cos(), (1 + grow) * turn.sin()
    maps = torch.stack([torch.stack([cosine, -sine, right], 1), torch.stack([sine, cosine, down], 1)], 1)
    grid = functional.affine_grid(maps, list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, padding_mode="border", align_corners=False)


@contextmanager
def recorded_outputs(net: nn.Module, names: Iterable[str]) -> Iterator[dict[str, Tensor]]:
    """Record the outputs of modules of a network by name while it runs."""
    heard: dict[str, Tensor] = {}

    def kept_as(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda _module, _inputs, output: heard.update({name: output})

    hooks = [net.get_submodule(name).register_forward_hook(kept_as(name)) for name in set(names)]
    try:
        yield heard
    finally:
        for hook in hooks:
            hook.remove()


def output_loss(found: Tensor, wanted: Tensor, *, logits: bool) -> Tensor:
    """Return the loss of outputs against the teacher's: KL divergence of logits [B, K], else relative squared error of
    features."""
    if not logits:
        return relative_error(found, wanted)
    wanted, found = wanted.float().log_softmax(-1), found.float().log_softmax(-1)
    return functional.kl_div(found, wanted, reduction="batchmean", log_target=True)


def relative_error(found: Tensor, wanted: Tensor) -> Tensor:
    """Return the mean squared error relative to the mean square of the target (eqs. 6 and 8 of RIFormer's paper,
    without a scale)."""
    return functional.mse_loss(found.float(), wanted.float()) / wanted.float().square().mean().clamp_min(1e-12)


def relation_loss(found: Tensor, wanted: Tensor) -> Tensor:
    """Return the relation loss: the squared error of similarities between positions of maps [B, C, H, W] (eq. 7 of
    RIFormer's paper); 0 for large maps."""
    if wanted.shape[2] * wanted.shape[3] > MAX_POSITIONS:
        return found.new_zeros(())
    near, right = (functional.normalize(maps.float().flatten(2), dim=1) for maps in (found, wanted))
    return functional.mse_loss(near.mT @ near, right.mT @ right)
