"""Give a built network the numbers that a pickled module of it has in addition to its weights.

Weights do not show the eps of a norm, the stride of a convolution or the activation between two layers. A pickled
module has them as attributes. Loading the pickle would set them, and so does this, without loading it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from repaconv.core.errors import Refused, first_names

if TYPE_CHECKING:
    from torch import nn

    from repaconv.checkpoints.pickled_modules import PickledModule

TRAINING_ONLY = frozenset(["inplace", "momentum", "p", "np", "export", "dynamic", "max_det", "agnostic_nms"])
"""Attributes that inference does not read, and those of a detection head that its exporter sets."""
TORCH = "torch.nn."
MOST_NAMED = 3
"""Maximum number of differences that an error message lists."""


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


def _is_number(value: object) -> bool:
    return isinstance(value, (bool, int, float))


def _is_plain(value: object) -> bool:
    """Whether it is a number, a text, None, or a list of them."""
    return value is None or _is_number(value) or isinstance(value, str) or _is_list(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(each is None or _is_number(each) for each in value)


def _comparable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
