"""What a network costs, from its shapes alone: parameters and multiply-accumulates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from repaconv.artefacts import Cost

# addmm and mm are what nn.Linear becomes; bmm and the attention operators multiply activations.
_OF_LAYERS = ("addmm", "mm", "convolution", "_convolution")


def cost_of(build: Callable[[], nn.Module], input_shape: tuple[int, ...]) -> Cost:
    """Count for one input, e.g. an image [C, H, W], on the meta device, so that size costs no memory.

    MACs are those of convolutions and matrix products, as torch's FlopCounterMode counts them (2 FLOPs
    each); norms, activations and sums are not counted. A layer's product is one with weights, not of two
    activations as in attention's scores.
    """
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"), torch.no_grad():
        module = build().eval()
        with FlopCounterMode(display=False) as counter:
            module(torch.empty(1, *input_shape))
    return _counted(counter, module, "Global")


def costs_by_block(build: Callable[[], nn.Module], input_shape: tuple[int, ...]) -> dict[str, Cost]:
    """The same for every block alone: numbered modules that hold a feed-forward network (``mlp``), and what says
    that it is ``counted``.
    """
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"), torch.no_grad():
        module = build().eval()
        with FlopCounterMode(display=False) as counter:
            module(torch.empty(1, *input_shape))
    root = type(module).__name__
    return {
        name: _counted(counter, part, f"{root}.{name}")
        for name, part in module.named_modules()
        if getattr(part, "counted", False) or (name.rpartition(".")[2].isdigit() and _holds_mlp(part))
    }


def _holds_mlp(part: nn.Module) -> bool:
    return any(child.startswith("mlp") for child, _ in part.named_children())


def _counted(counter: Any, module: nn.Module, place: str) -> Cost:
    parameters = sum(parameter.numel() for parameter in module.parameters())
    by_operator = counter.get_flop_counts().get(place, {})
    layers = sum(flops for operator, flops in by_operator.items() if operator.__name__ in _OF_LAYERS)
    return Cost(parameters=parameters, macs=sum(by_operator.values()) // 2, layer_macs=layers // 2)
