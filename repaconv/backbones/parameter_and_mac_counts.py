"""Count the parameters and multiply-accumulates (MACs) of a network, from its shapes only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from repaconv.results import Cost, FoldedLayer

# Operators that multiply by weights. nn.Linear becomes addmm or mm; bmm and attention multiply two activations.
_OF_LAYERS = ("addmm", "mm", "convolution", "_convolution")
# Not counted and of the same shape as their input; on the meta device they would take most of the time.
_SKIPPED = frozenset({F.batch_norm, F.gelu, F.group_norm, F.instance_norm, F.layer_norm, F.relu})


class _Skipping(TorchFunctionMode):
    """Skips operators that are not counted: norms and activations return their input, linear layers omit the bias."""

    def __torch_function__(
        self, function: Callable[..., Any], _types: Any, given: Any = (), named: dict[str, Any] | None = None
    ) -> Any:
        if given and function in _SKIPPED:
            return given[0]
        if function is F.linear and not named:
            return function(*given[:2])
        return function(*given, **(named or {}))


def cost_of(build: Callable[[], nn.Module], input_shape: tuple[int, ...]) -> Cost:
    """Count the parameters and MACs of a network for one input, e.g. an image [C, H, W], on the meta device.

    MACs are those of convolutions and matrix products, as torch's FlopCounterMode counts them (2 FLOPs each). Norms,
    activations and sums are not counted. ``layer_macs`` are those with weights, without products of two activations
    such as attention's scores.
    """
    module, counter = _run(build, input_shape)
    return _counted(counter, module, "Global")


class Norms(NamedTuple):
    """The modules of a network that normalize by statistics of their input, and those that scale or shift after it."""

    names: tuple[str, ...]
    affine: tuple[str, ...]


_OF_THE_INPUT = frozenset({F.group_norm, F.instance_norm, F.layer_norm, F.rms_norm})


class _Watching(TorchFunctionMode):
    """Notes in which module a norm is called, and whether with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[str] = []
        self.names: dict[str, None] = {}
        self.affine: dict[str, None] = {}

    def __torch_function__(
        self, function: Callable[..., Any], _types: Any, given: Any = (), named: dict[str, Any] | None = None
    ) -> Any:
        parameters = any(isinstance(each, nn.Parameter) for each in (*given, *(named or {}).values()))
        if function in _OF_THE_INPUT:
            self.names[self.inside[-1]] = None
        if function in (*_OF_THE_INPUT, F.batch_norm) and parameters:
            self.affine[self.inside[-1]] = None
        return given[0] if given and function in _SKIPPED else function(*given, **(named or {}))


def norms_of(build: Callable[[], nn.Module], input_shape: tuple[int, ...]) -> Norms:
    """The norms that run for one input, by the names of their modules, on the meta device."""
    watching = _Watching()
    with torch.device("meta"), torch.no_grad():
        module = build().eval()
        for name, part in module.named_modules():
            part.register_forward_pre_hook(lambda *_, name=name: watching.inside.append(name))
            part.register_forward_hook(lambda *_: watching.inside.pop() and None)
        with watching:
            module(torch.empty(1, *input_shape))
    return Norms(tuple(watching.names), tuple(watching.affine))


def costs_by_block(build: Callable[[], nn.Module], input_shape: tuple[int, ...]) -> dict[str, Cost]:
    """Count the parameters and MACs of every block, by name.

    Blocks are numbered modules with a feed-forward network (``mlp``), and modules with the attribute ``counted``.
    """
    module, counter = _run(build, input_shape)
    root = type(module).__name__
    return {
        name: _counted(counter, part, f"{root}.{name}")
        for name, part in module.named_modules()
        if getattr(part, "counted", False) or (name.rpartition(".")[2].isdigit() and _holds_mlp(part))
    }


def layers_of(build: Callable[[], nn.Module], input_shape: tuple[int, ...]) -> dict[str, FoldedLayer]:
    """List every layer that has parameters, by name, with its parameters and its MACs for one input.

    Parameters of a module that contains other modules are listed as layers of their own. The MACs of a layer are None
    if it is never called because another module reads its weights.
    """
    called: set[str] = set()

    def watched() -> nn.Module:
        module = build()
        for name, part in module.named_modules():
            part.register_forward_hook(lambda *_, name=name: called.add(name))
        return module

    module, counter = _run(watched, input_shape)
    root, found = type(module).__name__, {}
    for name, part in module.named_modules():
        own = dict(part.named_parameters(recurse=False))
        if own and any(True for _ in part.children()):
            for key, parameter in own.items():
                at = f"{name}.{key}" if name else key
                found[at] = FoldedLayer(name=at, kind=FoldedLayer.PARAMETER, parameters=parameter.numel())
        elif own:
            macs = _counted(counter, part, f"{root}.{name}").macs if name in called else None
            count = sum(parameter.numel() for parameter in own.values())
            found[name] = FoldedLayer(name=name, kind=type(part).__name__, parameters=count, macs=macs)
    return found


def _run(build: Callable[[], nn.Module], input_shape: tuple[int, ...]) -> tuple[nn.Module, Any]:
    """Run the module on one input; return it with torch's FLOP counter."""
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"), torch.no_grad():
        module = build().eval()
        with FlopCounterMode(display=False) as counter, _Skipping():
            module(torch.empty(1, *input_shape))
    return module, counter


def _holds_mlp(part: nn.Module) -> bool:
    return any(child.startswith("mlp") for child, _ in part.named_children())


def _counted(counter: Any, module: nn.Module, place: str) -> Cost:
    parameters = sum(parameter.numel() for parameter in module.parameters())
    by_operator = counter.get_flop_counts().get(place, {})
    layers = sum(flops for operator, flops in by_operator.items() if operator.__name__ in _OF_LAYERS)
    return Cost(parameters=parameters, macs=sum(by_operator.values()) // 2, layer_macs=layers // 2)
