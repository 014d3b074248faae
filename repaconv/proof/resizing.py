"""ONNX's Resize and Upsample in float64, an axis after the other; onnx's own go from number to number, a cubic one in
float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Places: TypeAlias = NDArray[np.float64]

PLACES: dict[str, Callable[[Places, float, float], Places]] = {
    "asymmetric": lambda at, old, new: at * old / new,
    "half_pixel": lambda at, old, new: (at + 0.5) * old / new - 0.5,
    "pytorch_half_pixel": lambda at, old, new: (at + 0.5) * old / new - 0.5,
    "align_corners": lambda at, old, new: at * (old - 1) / (new - 1),
}
"""Where a pixel of the new axis lies on the old one; of how many, a scale may say in parts of a pixel.
Multiplied first: whole places stay whole."""
NEAREST: dict[str, Callable[[Places], Places]] = {
    "floor": np.floor,
    "ceil": np.ceil,
    "round_prefer_floor": lambda at: np.ceil(at - 0.5),
    "round_prefer_ceil": lambda at: np.floor(at + 0.5),
}
OLD, CORNERS = "asymmetric", "align_corners"
"""Where pixels lie before opset 11, which has no attribute for it; and where a part of a pixel has no meaning."""


def resized(x: NDArray[Any], scales: Any, sizes: Any, how: Mapping[str, Any]) -> NDArray[Any] | None:
    """Pixels repeated, or interpolated between two or four; None where the result is not of these.

    Args:
        x: Of any shape.
        scales: Of every axis, or none.
        sizes: Of every axis, where there are no scales.
        how: The operator's attributes.
    """
    plain = not any(how.get(name) for name in ("antialias", "axes", "exclude_outside"))
    mode, by = how.get("mode") or "nearest", how.get("coordinate_transformation_mode") or "half_pixel"
    nearest = how.get("nearest_mode") or "round_prefer_floor"
    if not plain or mode not in ("nearest", "linear", "cubic") or by not in PLACES or nearest not in NEAREST:
        return None
    if how.get("keep_aspect_ratio_policy") not in (None, "stretch"):
        return None
    if scales is not None and len(scales):
        ends = [size * float(scale) for size, scale in zip(x.shape, scales, strict=True)]
        wanted = [int(np.float32(size) * np.float32(scale)) for size, scale in zip(x.shape, scales, strict=True)]
    else:
        wanted = ends = [int(size) for size in sizes]
    changed = [axis for axis, size in enumerate(x.shape) if size != ends[axis]]
    if any(wanted[axis] < 2 or (by == CORNERS and wanted[axis] != ends[axis]) for axis in changed):
        return None
    curve = -0.75 if how.get("cubic_coeff_a") is None else float(how["cubic_coeff_a"])
    for axis in changed:
        places = PLACES[by](np.arange(wanted[axis], dtype=np.float64), x.shape[axis], ends[axis])
        whole = NEAREST[nearest] if mode == "nearest" else None
        x = _cubic(x, axis, places, curve) if mode == "cubic" else _taken(x, axis, places, whole)
    return x


def _taken(x: NDArray[Any], axis: int, places: Places, whole: Callable[[Places], Places] | None) -> NDArray[Any]:
    """Its pixels at these places of an axis: the whole ones that are nearest, or what lies between two."""
    last = x.shape[axis] - 1
    if whole:
        return np.asarray(x.take(whole(places).clip(0, last).astype(int), axis))
    places = places.clip(0, last)
    below = np.floor(places).astype(int)
    share = (places - below).reshape(-1, *[1] * (x.ndim - 1 - axis))
    return np.asarray(x.take(below, axis) * (1 - share) + x.take(np.minimum(below + 1, last), axis) * share)


def _cubic(x: NDArray[Any], axis: int, places: Places, curve: float) -> NDArray[Any]:
    """What lies between the four pixels around each place of an axis; beyond its ends they are the last one.

    Source: Keys 1981, "Cubic convolution interpolation"; ``curve`` is his a.
    """
    last, below = x.shape[axis] - 1, np.floor(places)
    found = np.zeros((*x.shape[:axis], len(places), *x.shape[axis + 1 :]))
    for step in (-1, 0, 1, 2):
        far = np.abs(places - below - step)
        near = ((curve + 2) * far - (curve + 3)) * far**2 + 1
        weight = np.where(far <= 1, near, (((far - 5) * far + 8) * far - 4) * curve)
        pixels = x.take((below + step).clip(0, last).astype(int), axis)
        found += pixels * weight.reshape(-1, *[1] * (x.ndim - 1 - axis))
    return found.astype(x.dtype)


def before_places(x: NDArray[Any], scales: Any, mode: str | None) -> NDArray[Any] | None:
    """Upsample, or Resize of opset 10: the nearest pixel is that before, of an axis that becomes shorter that behind.

    Source: ONNX Runtime's kernel; the operator's text does not say.
    """
    for axis, scale in enumerate(scales):
        one = [scale if each == axis else 1.0 for each in range(x.ndim)]
        how = {"mode": mode, "coordinate_transformation_mode": OLD, "nearest_mode": "ceil" if scale < 1 else "floor"}
        found = resized(x, one, None, how)
        if found is None:
            return None
        x = found
    return x
