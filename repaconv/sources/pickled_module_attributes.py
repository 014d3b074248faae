"""Give a built network the numbers that a pickled module of it has in addition to its weights.

Weights do not show the eps of a norm, the stride of a convolution or the activation between two layers. A pickled
module has them as attributes. Loading the pickle would set them, and so does this, without loading it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from repaconv.core.errors import Refused, first_names

if TYPE_CHECKING:
    from torch import nn

    from repaconv.checkpoints import Checkpoint
    from repaconv.checkpoints.pickled_modules import PickledModule
    from repaconv.method_api.contract import Reading

TRAINING_ONLY = frozenset(["inplace", "momentum", "p", "np", "export", "dynamic", "max_det", "agnostic_nms"])
"""Attributes that inference does not read, and those of a detection head that its exporter sets."""
TORCH = "torch.nn."
MOST_NAMED = 3
"""Maximum number of differences that an error message lists."""
SETTINGS_OF_LAYERS = ("stride", "padding", "dilation", "groups", "padding_mode", "eps", "num_heads")
"""Attributes of layers and of attention that change outputs and that no tensor shows, or groups, which shapes show."""
OWN_NAMES = {"num_heads": "heads"}
"""Their names in the networks of this project, where they differ."""
ACTIVATIONS = ("ReLU", "ReLU6", "GELU", "SiLU", "Mish", "Hardswish", "LeakyReLU", "ELU", "SELU", "PReLU", "Softplus")
"""torch's activations that a network has between its layers."""


def take_attributes(module: nn.Module, pickled: Mapping[str, PickledModule], arch: str) -> tuple[str, ...]:
    """Set the plain numbers of a pickled module on the network that was built for it, in place.

    Numbers of the network's own classes are set as they are in the file, and so is the eps of a norm. What torch's
    layers are and how they are set up (kernel sizes, strides, modes) must be the same.

    Args:
        module: The network, before anything in it is changed for an export.
        pickled: The modules in the file, by their names in the network.
        arch: What built the network, for the error message.

    Returns:
        What was set, e.g. ``stem.bn.eps=0.001``.

    Raises:
        Refused: If a layer of torch is of another class or set up otherwise than in the file.
    """
    taken, different = [], []
    for name, part in module.named_modules():
        if (found := pickled.get(name)) is None:
            continue
        own, theirs = type(part).__name__, found.kind.rpartition(".")[2]
        if found.kind.startswith(TORCH) and own != theirs:
            different.append(f"{name} is {own}, in the file {theirs}")
            continue
        for key, value in found.attributes.items():
            mine = vars(part).get(key)
            if key in TRAINING_ONLY or key not in vars(part) or not _is_plain(mine) or not _is_plain(value):
                continue
            if _comparable(mine) == _comparable(value):
                continue
            if found.kind.startswith(TORCH) and not isinstance(mine, float):
                different.append(f"{name}.{key} is {mine}, in the file {value}")
            elif _is_number(mine) and _is_number(value):
                setattr(part, key, type(mine)(value) if isinstance(mine, float) else value)
                taken.append(f"{name}.{key}={value}")
    if different:
        raise Refused(
            f"{arch} builds another network than was saved: {first_names(different, MOST_NAMED, '; ')}.",
            hint="Let --arch build the network with the settings of its training.",
            code="arch.attributes",
        )
    return tuple(taken)


def require_same_settings(reading: Reading, found: Checkpoint) -> None:
    """Refuse a pickled module that computes something else than the network that a method read from its tensors.

    A method takes strides, eps or the activation from the user, or from the official code. The module in the file has
    them as attributes.

    Args:
        reading: What the method read.
        found: The checkpoint. Nothing is required of one without a pickled module.

    Raises:
        Refused: ``checkpoint.attributes`` if they differ; the message names layers, and the hint a setting.
    """
    import torch

    if not found.modules:
        return
    with torch.device("meta"):
        network = reading.module()
    parts = dict(network.named_modules())
    different = {
        f"{theirs}.{key} is {value}, but was read as {mine}": (key, _values_of(value))
        for own, theirs in _paired(parts, reading, found).items()
        for key, value, mine in _different_settings(parts[own], found.modules[theirs])
    }
    for kind, of_ours, of_theirs in (
        ("act", _activations_of(parts.values()), _pickled_activations(found.modules.values())),
        ("pool_size", _pools_of(parts.values()), _pickled_pools(found.modules.values())),
    ):
        if of_ours and of_theirs and of_ours != of_theirs:
            texts = [", ".join(sorted(map(str, values))) for values in (of_theirs, of_ours)]
            what = "activation" if kind == "act" else "side of the pooling window"
            different[f"the {what} is {texts[0]}, but was read as {texts[1]}"] = kind, of_theirs
    if different:
        raise Refused(
            f"the pickled module in {found.path} is another network than the one that was read from its tensors: "
            f"{first_names([*different], MOST_NAMED, '; ')}.",
            hint=_setting_hint(reading, *next(iter(different.values()))),
            code="checkpoint.attributes",
        )


def _paired(parts: Mapping[str, nn.Module], reading: Reading, found: Checkpoint) -> dict[str, str]:
    """The names of the pickled modules by those of the modules that hold the same tensors, and of what holds these."""
    pairs = {}
    for official, saved in reading.names.items():
        own, theirs = official, saved.removeprefix(found.prefix)
        while own.rpartition(".")[2] == theirs.rpartition(".")[2] and own.rpartition(".")[0] not in pairs:
            own, theirs = own.rpartition(".")[0], theirs.rpartition(".")[0]
            if own not in parts or theirs not in found.modules:
                break
            pairs[own] = theirs
    return pairs


def _different_settings(own: nn.Module, theirs: PickledModule) -> list[tuple[str, Any, Any]]:
    """The settings of one layer that differ: name, value in the file, value as read."""
    different = []
    for key in SETTINGS_OF_LAYERS:
        mine, value = getattr(own, OWN_NAMES.get(key, key), None), theirs.attributes.get(key)
        if not all(_is_number(each) or isinstance(each, str) or _is_list(each) for each in (mine, value)):
            continue
        one, other = _values_of(mine), _values_of(value)
        if key == "padding" and isinstance(value, str):  # "same" and "valid": these have no numbers to compare
            continue
        if one != other and not (len(one) == len(other) == 1 and _close(*one, *other)):
            different.append((key, value, mine))
    return different


def _values_of(setting: Any) -> set[Any]:
    """The values along the axes; one value stands for all of them."""
    return set(setting) if _is_list(setting) else {setting}


def _close(one: Any, other: Any) -> bool:
    return _is_number(one) and _is_number(other) and math.isclose(one, other, rel_tol=1e-6)


def _activations_of(modules: Iterable[nn.Module]) -> set[str]:
    return {_activation(type(part).__name__, vars(part)) for part in modules if type(part).__name__ in ACTIVATIONS}


def _pickled_activations(modules: Iterable[PickledModule]) -> set[str]:
    kinds = ((part.kind.rpartition(".")[2], part) for part in modules if part.kind.startswith(TORCH))
    return {_activation(kind, part.attributes) for kind, part in kinds if kind in ACTIVATIONS}


def _activation(kind: str, attributes: Mapping[str, Any]) -> str:
    return "GELU-tanh" if kind == "GELU" and attributes.get("approximate") == "tanh" else kind


def _pools_of(modules: Iterable[nn.Module]) -> set[int]:
    return {_side(vars(part)) for part in modules if type(part).__name__ == "AvgPool2d"}


def _pickled_pools(modules: Iterable[PickledModule]) -> set[int]:
    pools = (part for part in modules if part.kind.startswith(TORCH) and part.kind.endswith(".AvgPool2d"))
    return {_side(part.attributes) for part in pools}


def _side(attributes: Mapping[str, Any]) -> int:
    """The side of a pooling window; 0 if it is no number."""
    side = attributes.get("kernel_size")
    side = side[0] if _is_list(side) and side else side
    return side if isinstance(side, int) else 0


def _setting_hint(reading: Reading, key: str, values: Collection[Any]) -> str:
    """How to read the network with the file's values: by the settings whose names end with the attribute's."""
    from repaconv.backbones.activation_setting import activation_kind

    names = [fact.name for fact in reading.facts if fact.name.removesuffix("s").endswith(key.removesuffix("s"))]
    if not names or len(values) > 1 or (key == "act" and not activation_kind(*values)):
        return "The method has no setting for this, so it cannot fold this network; fold --arch may build it."
    complete = len(names) == 1 and names[0].endswith(key)
    given = f"{names[0]}={next(iter(values))}" if complete else " or ".join(f"{name}=..." for name in names)
    return f"Read it as in the file: --set {given}."


def _is_number(value: object) -> bool:
    return isinstance(value, (bool, int, float))


def _is_plain(value: object) -> bool:
    """Whether it is a number, a text, None, or a list of them."""
    return value is None or _is_number(value) or isinstance(value, str) or _is_list(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(each is None or _is_number(each) for each in value)


def _comparable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
