"""Images with a border in a trace: `pad`, and whatever is written into what it gave, as Diverse Branch Block does."""

from __future__ import annotations

from typing import Any

import torch

from repaconv.folds.maps import Vector
from repaconv.live.trace import Step, Value


def border_of(step: Step) -> tuple[Value, list[int], Vector] | None:
    """What a step gives as an image in a border of one number a channel.

    Returns:
        The image [B, C, ...], the places before and behind every axis as ONNX has them, the numbers [C]; None where it
        is no such thing.
    """
    written: list[Step] = []
    while step.name == "setitem":
        before = step.args[0]
        if not isinstance(before, Value) or before.step is None or not _plain(step.args[1]):
            return None
        written.append(step)
        step = before.step
    x, output = step.given(0, "input"), step.output
    pads = _pads(step) if step.name == "pad" and isinstance(x, Value) and output is not None else None
    if pads is None or output is None:
        return None
    axes, image = len(pads) // 2, torch.full(output.shape, float(step.given(3, "value") or 0.0), dtype=torch.float64)
    sizes = output.shape[2:]
    inner: Any = (..., *(slice(pads[i], sizes[i] - pads[i + axes]) for i in range(axes)))
    image[inner] = torch.nan
    for each in reversed(written):
        numbers = each.args[2]
        if isinstance(numbers, Value) and not numbers.constant:
            return None
        image[each.args[1]] = numbers.tensor.detach().cpu().double() if isinstance(numbers, Value) else numbers
    rest = torch.ones(sizes, dtype=torch.bool)
    rest[inner] = False
    border = image[..., rest].double()
    own = bool(image[inner].isnan().all()) and bool((border == border[:1, :, :1]).all())
    return (x, pads, border[0, :, 0].numpy()) if own else None


def _plain(index: Any) -> bool:
    """Whether it names places by numbers alone."""
    several = index if isinstance(index, tuple) else (index,)
    return all(one is None or one is ... or isinstance(one, (int, slice)) for one in several)


def _pads(step: Step) -> list[int] | None:
    """Of a `pad` with one number, of axes behind the channels."""
    given = step.given(1, "pad")
    x = step.given(0, "input")
    if step.given(2, "mode", "constant") != "constant" or not all(type(n) is int and n >= 0 for n in given):
        return None
    axes = len(x.shape) - 2
    whole = [*given, *[0] * (2 * axes - len(given))]
    if axes < 1 or len(whole) != 2 * axes or not any(whole):
        return None
    return [*whole[::2][::-1], *whole[1::2][::-1]]
