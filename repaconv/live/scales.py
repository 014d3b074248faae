"""Where a scale and a shift a channel can go in a trace: into the layer that makes a value, or all that read it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_map

from repaconv.folds.maps import Vector
from repaconv.live.changes import Places, Weights
from repaconv.live.forms import CONVOLUTIONS, IMAGE, LAST, convolution, linear, numbers
from repaconv.live.trace import SAME, Step, Value

MOVES = (
    *(
        "reshape",
        "view",
        "reshape_as",
        "view_as",
        "flatten",
        "unflatten",
        "permute",
        "transpose",
        "swapaxes",
        "movedim",
    ),
    *("squeeze", "unsqueeze", "roll", "getitem", "expand", "clone", *SAME),
)
"""Functions that only move numbers, or choose some."""
TRANSPOSED = ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
LAYERS = (*CONVOLUTIONS, *TRANSPOSED, "linear")
"""Functions of layers that may hold a scale and a shift."""
NORMS = {"layer_norm": (2, 3), "rms_norm": (2, None), "group_norm": (2, 3), "instance_norm": (3, 4)}
"""Where their weight and bias stand among their arguments."""


class Scale(NamedTuple):
    """A factor and perhaps a term a channel along an axis."""

    axis: int
    factor: Vector
    shift: Vector | None


class Held(NamedTuple):
    """A layer's parameters where they may be changed, and the axis of its output's channels."""

    name: str
    weight: np.ndarray
    bias: np.ndarray | None
    axis: int


def into_producer(places: Places, value: Value, scale: Scale) -> tuple[str, Weights] | None:
    """The layer that makes a value for the scale alone, and its parameters with that."""
    path: list[Step] = []
    while (step := value.step) is not None and step.name in MOVES and value.only_read and step.output is value:
        path.append(step)
        value = step.inputs[0]
    held = layer_of(places, step) if step is not None and value.only_read and step.output is value else None
    if step is None or held is None or not _reaches(path, held.axis, scale.axis):
        return None
    if scale.shift is not None and step.name == "rms_norm":
        return None
    new: Weights = {f"{held.name}.weight": held.weight * _outwards(step, held.weight, scale.factor)}
    if held.bias is not None or scale.shift is not None:
        bias = np.zeros(len(scale.factor)) if held.bias is None else held.bias * scale.factor
        new[f"{held.name}.bias"] = bias if scale.shift is None else bias + scale.shift
    return held.name, new


def layer_of(places: Places, step: Step) -> Held | None:
    """A layer or a norm with parameters of its own."""
    at = NORMS.get(step.name, (1, 2))
    weight, bias = step.given(at[0], "weight"), step.given(at[1], "bias") if at[1] is not None else None
    if not isinstance(weight, Value) or step.name not in (*LAYERS, *NORMS):
        return None
    name, arrays = places.owner(step, weight, bias), (numbers(weight), numbers(bias))
    if name is None or arrays[0] is None or arrays[1] is None or {weight.name, bias and bias.name} - _usual(name):
        return None
    if step.name in ("layer_norm", "rms_norm") and arrays[0].ndim != 1:
        return None
    axis = LAST if step.name in ("linear", "layer_norm", "rms_norm") else IMAGE
    return Held(name, arrays[0], arrays[1] if arrays[1].size else None, axis)


def _usual(name: str) -> set[str | None]:
    return {f"{name}.weight", f"{name}.bias", None}


def _outwards(step: Step, weight: np.ndarray, factor: Vector) -> np.ndarray:
    """A factor a channel of the output, in the shape of the weight."""
    if step.name in TRANSPOSED:  # [in, out / groups, ...]
        groups = int(step.given(6, "groups", 1))
        whole = np.repeat(factor.reshape(groups, -1), len(weight) // groups, axis=0)
        return whole.reshape(*weight.shape[:2], *[1] * (weight.ndim - 2))
    return factor.reshape(-1, *[1] * (weight.ndim - 1))


def _reaches(path: list[Step], axis: int, wanted: int) -> bool:
    """Whether channels along an axis of what a path starts from, last step first, are along that of its end."""
    found: int | None = axis
    for step in reversed(path):
        found = moved(step, found) if found is not None else None
    if found is None or not path:
        return found == wanted
    assert path[0].output is not None
    return (found - wanted) % len(path[0].output.shape) == 0


def moved(step: Step, axis: int) -> int | None:
    """Where the channels along an axis of a value are behind a step that only moves numbers, if along one still."""
    x = step.inputs[0]
    width = x.shape[axis]
    index = torch.arange(width, dtype=torch.float64)

    def along(shape: tuple[int, ...], place: int) -> torch.Tensor:
        column = [1] * len(shape)
        column[place] = width
        return index.reshape(column).expand(shape)

    whole = along(x.shape, axis).to(x.tensor.dtype).contiguous()
    args, kwargs = tree_map(
        lambda leaf: (whole if leaf is x else leaf.tensor) if isinstance(leaf, Value) else leaf,
        (step.args, dict(step.kwargs)),
    )
    out = step.function(*args, **kwargs).double()
    places = [place for place in range(out.ndim) if out.shape[place] == width]
    return next((place for place in places if torch.equal(out, along(tuple(out.shape), place))), None)


def into_readers(places: Places, value: Value, scale: Scale) -> tuple[str, Weights] | None:
    """The layers that read a value, and their parameters with the scale before them; None if one cannot take it."""
    found = list(_readers(value, scale.axis))
    new: Weights = {}
    names = []
    for step in found:
        taken = _taken(places, step, scale) if step is not None else None
        if taken is None or taken[0] in names:
            return None
        names.append(taken[0])
        new |= taken[1]
    return (", ".join(names), new) if names else None


def _readers(value: Value, axis: int) -> Iterator[Step | None]:
    """The layers along whose input channels a value's lie, through what moves them; None for any other reader."""
    if value.result or not value.reads:
        yield None
    for step in value.reads:
        behind = moved(step, axis) if step.name in MOVES and step.inputs[0] is value and step.output else None
        if behind is not None and step.output is not None:
            yield from _readers(step.output, behind)
        elif step.name in (*CONVOLUTIONS, "linear") and step.given(0, "input") is value:
            own = LAST if step.name == "linear" else IMAGE
            yield step if (axis - own) % len(value.shape) == 0 else None
        else:
            yield None


def _taken(places: Places, step: Step, scale: Scale) -> tuple[str, Weights] | None:
    """A layer's parameters with a scale before it."""
    held, kernel = layer_of(places, step), linear(step) or convolution(step)
    if held is None or kernel is None or (kernel.is_padded and scale.shift is not None and scale.shift.any()):
        return None
    inside = kernel.weight.shape[1]
    factor = np.repeat(scale.factor.reshape(kernel.groups, inside), len(kernel.weight) // kernel.groups, axis=0)
    new: Weights = {f"{held.name}.weight": held.weight * factor.reshape(*factor.shape, *[1] * (held.weight.ndim - 2))}
    if scale.shift is not None and scale.shift.any():
        shift = np.repeat(scale.shift.reshape(kernel.groups, inside), len(kernel.weight) // kernel.groups, axis=0)
        summed = held.weight.reshape(*factor.shape, -1).sum(-1)
        new[f"{held.name}.bias"] = (summed * shift).sum(1) + (0 if held.bias is None else held.bias)
    return held.name, new
