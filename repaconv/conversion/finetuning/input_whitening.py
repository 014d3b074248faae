"""Layers that learn in coordinates in which what they read is alike in all directions.

What W^O of a conversion reads is nearly the same in most directions, and it tells small differences by large weights: a
step that is small for every weight is large for the output, and a rate that is not lost on it teaches nothing else. So
W = U A, where A is the inverse root of the second moments of what a layer reads at the start: U learns, W is used.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

SEEN = 256
"""Images whose second moments are taken."""
LEAST = 1e-4
"""Of the moments' mean: what is below in a direction counts as much, or noise would be learnt from."""


class Whitened(NamedTuple):
    """A layer's weight W [o, i], the U [o, i] that learns in its place, and A [i, i]."""

    weight: nn.Parameter
    inner: nn.Parameter
    root: Tensor

    def heed(self) -> None:
        """Hand W's gradient on to U."""
        assert self.weight.grad is not None
        self.inner.grad = self.weight.grad @ self.root

    @torch.no_grad()
    def renew(self) -> None:
        """W by U as it is now."""
        self.weight.copy_(self.inner @ self.root)


@torch.no_grad()
def whitened(net: nn.Module, images: Tensor, at_once: int) -> tuple[Whitened, ...]:
    """All linear layers that the net runs on images [N, C, H, W]."""
    sums: dict[nn.Linear, Tensor] = {}

    def add(layer: nn.Linear, given: tuple[Tensor, ...]) -> None:
        rows = given[0].flatten(0, -2).double()
        sums[layer] = sums.get(layer, torch.zeros((), dtype=torch.float64)) + rows.mT @ rows

    hooks = [module.register_forward_pre_hook(add) for module in net.modules() if isinstance(module, nn.Linear)]
    for some in torch.split(images[:SEEN], at_once):
        net(some)
    for hook in hooks:
        hook.remove()
    return tuple(_whitened(layer, total) for layer, total in sums.items())


def _whitened(layer: nn.Linear, moments: Tensor) -> Whitened:
    values, vectors = torch.linalg.eigh(moments / moments.diagonal().mean())
    roots = (values.clamp_min(0) + LEAST).sqrt()
    inner = layer.weight.detach().double() @ (vectors * roots) @ vectors.mT
    assert isinstance(layer.weight, nn.Parameter)
    return Whitened(layer.weight, nn.Parameter(inner.float()), ((vectors / roots) @ vectors.mT).float())
