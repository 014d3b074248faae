"""Write the weights of a folded network as a state dict of the original architecture.

Layers that the fold removed get neutral weights.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from repaconv.core.errors import Refused

Tensors = dict[str, Tensor]


def standard_state_dict(folded: nn.Module, standard: nn.Module) -> Tensors:
    """A complete state dict of the standard architecture with the weights of the folded network.

    A layer goes to the place of its name; a layer that the fold renamed goes to the first free place with its shapes.
    Norms and scales that the fold removed get neutral weights: a BatchNorm gets mean 0 and variance 1 - eps, and takes
    the bias of a layer before it that has no bias there. The caller has to verify that the outputs are equal.

    Raises:
        Refused: If a layer has no place, or a place has no layer; the message names it.
    """
    given, places = _layers(folded), _layers(standard)
    found: Tensors = {}
    waiting = ""  # a layer whose bias had no place
    bias: Tensor | None = None
    for name, wanted in places.items():
        source = _source(name, wanted, given, places)
        part = standard.get_submodule(name)
        if source is None:
            numbers = _neutral(part, wanted, bias)
            if numbers is None:
                raise no_place_error(f"nothing in it is the layer {name}")
            waiting, bias = ("", None) if isinstance(part, _BatchNorm) else (waiting, bias)
        else:
            numbers = given.pop(source)
            if "bias" in numbers and "bias" not in wanted:
                if bias is not None:
                    break
                waiting, bias = source, numbers["bias"]
        found |= {_joined(name, key): _number(numbers, key, like) for key, like in wanted.items()}
    if bias is not None:
        raise no_place_error(f"the bias of {waiting} has no place in it")
    if given:
        raise no_place_error(f"{next(iter(given))} has no place in it")
    return found


def _layers(module: nn.Module) -> dict[str, Tensors]:
    """The submodules that have tensors of their own, in order."""
    own = {
        name: {key: value.detach() for key, value in part.state_dict().items() if "." not in key}
        for name, part in module.named_modules()
    }
    return {name: tensors for name, tensors in own.items() if tensors}


def _source(name: str, wanted: Tensors, given: dict[str, Tensors], places: dict[str, Tensors]) -> str | None:
    """The name of the folded layer that goes to a place; None if there is none."""
    if name in given and _fits(given[name], wanted):
        return name
    others = (each for each, tensors in given.items() if not (each in places and _fits(tensors, places[each])))
    return next((each for each in others if _fits(given[each], wanted)), None)


def _fits(given: Tensors, wanted: Tensors) -> bool:
    """Whether tensors have the names and shapes of a place, apart from a bias that only one of them has."""
    shapes = ({key: value.shape for key, value in each.items() if key != "bias"} for each in (given, wanted))
    first, second = shapes
    return bool(first) and first == second


def _neutral(part: nn.Module, wanted: Tensors, bias: Tensor | None) -> Tensors | None:
    """Weights with which a norm or scale has no effect, apart from a pending bias; None for any other layer."""
    if any(value.ndim and value.numel() > max(value.shape) for value in wanted.values()):  # more than one a channel
        return None
    numbers = {key: torch.ones_like(value) for key, value in wanted.items()}
    numbers["bias"] = torch.zeros_like(numbers["bias"]) if "bias" in wanted else torch.zeros(())
    if isinstance(part, _BatchNorm) and part.running_var is not None and part.running_mean is not None:
        numbers["running_mean"] = torch.zeros_like(part.running_mean)
        numbers["running_var"] = torch.ones_like(part.running_var) - part.eps
        if bias is not None and "bias" in wanted and bias.shape == wanted["bias"].shape:
            numbers["bias"] = bias
        elif bias is not None:
            return None
    return numbers


def _number(numbers: Tensors, key: str, like: Tensor) -> Tensor:
    """A tensor of the layer, or zeros for a missing bias."""
    return numbers[key] if key in numbers else torch.zeros_like(like)


def _joined(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def no_place_error(why: str) -> Refused:
    """The error that no standard architecture holds the folded network."""
    return Refused(
        f"no standard architecture holds what it folds to: {why}.",
        hint="repaconv export writes it as ONNX, and repaconv.fold(module) gives it as a module.",
        code="save.unheld",
    )
