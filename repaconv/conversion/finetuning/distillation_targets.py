"""What a net learns from: the outputs of the original, and what its modules make of the same images."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

SHIFT, TURN, GROW = 0.1, 0.15, 0.1
"""How far an image is moved (of a half side), turned (radians) and scaled. The teacher sees the same, so no label can
become wrong."""
RELATED = 28 * 28
"""Positions of a map, above which the matrix of their relations costs more than it teaches."""


def moved(images: Tensor, random: torch.Generator) -> Tensor:
    """Each image [B, C, H, W] turned, scaled and shifted a little."""
    limits = torch.tensor([[TURN], [GROW], [SHIFT], [SHIFT]])
    turn, grow, right, down = (2 * torch.rand(4, len(images), generator=random) - 1) * limits
    cosine, sine = (1 + grow) * turn.cos(), (1 + grow) * turn.sin()
    maps = torch.stack([torch.stack([cosine, -sine, right], 1), torch.stack([sine, cosine, down], 1)], 1)
    grid = functional.affine_grid(maps, list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, padding_mode="border", align_corners=False)


@contextmanager
def overheard(net: nn.Module, names: Iterable[str]) -> Iterator[dict[str, Tensor]]:
    """The outputs of modules of a net, by name, while it runs."""
    heard: dict[str, Tensor] = {}

    def kept_as(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda _module, _inputs, output: heard.update({name: output})

    hooks = [net.get_submodule(name).register_forward_hook(kept_as(name)) for name in set(names)]
    try:
        yield heard
    finally:
        for hook in hooks:
            hook.remove()


def apart(found: Tensor, wanted: Tensor, *, logits: bool) -> Tensor:
    """How far outputs are from the teacher's: KL of logits [B, K], else the relative squared error of features."""
    if not logits:
        return relative(found, wanted)
    wanted, found = wanted.float().log_softmax(-1), found.float().log_softmax(-1)
    return functional.kl_div(found, wanted, reduction="batchmean", log_target=True)


def relative(found: Tensor, wanted: Tensor) -> Tensor:
    """Mean squared error by the mean square of what is wanted (eqs. 6 and 8 of RIFormer's paper, without a scale)."""
    return functional.mse_loss(found.float(), wanted.float()) / wanted.float().square().mean().clamp_min(1e-12)


def relations(found: Tensor, wanted: Tensor) -> Tensor:
    """How else the positions of maps [B, C, H, W] resemble each other (eq. 7 there); 0 for large maps."""
    if wanted.shape[2] * wanted.shape[3] > RELATED:
        return found.new_zeros(())
    near, right = (functional.normalize(maps.float().flatten(2), dim=1) for maps in (found, wanted))
    return functional.mse_loss(near.mT @ near, right.mT @ right)
