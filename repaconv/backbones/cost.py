"""What a network costs, from its shapes alone: parameters and multiply-accumulates."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from repaconv.artefact import Cost


def cost_of(build: Callable[[], nn.Module], input_shape: tuple[int, int, int]) -> Cost:
    """Count for one image [C, H, W], on the meta device, so that size costs no memory.

    MACs are those of convolutions and matrix products, as torch's FlopCounterMode counts them (2 FLOPs
    each); norms, activations and sums are not counted.
    """
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"), torch.no_grad():
        module = build().eval()
        with FlopCounterMode(display=False) as counter:
            module(torch.empty(1, *input_shape))
    parameters = sum(parameter.numel() for parameter in module.parameters())
    return Cost(parameters=parameters, macs=counter.get_total_flops() // 2)
