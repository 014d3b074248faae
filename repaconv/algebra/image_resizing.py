"""Images resized in float64 as ONNX Runtime's Resize and Upsample do it: coordinates, nearest pixels, interpolation.

One axis is resized after the other. Each is a linear map of its pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Places: TypeAlias = NDArray[np.floating[Any]]

PLACES: dict[str, Callable[[Places, Any, Any, Any], Places]] = {
    "asymmetric": lambda at, scale, old, new: at / scale,
    "half_pixel": lambda at, scale, old, new: (at + 0.5) / scale - 0.5,
    "pytorch_half_pixel": lambda at, scale, old, new: (at + 0.5) / scale - 0.5 if new > 1 else at * 0,
    "half_pixel_symmetric": lambda at, scale, old, new: old / 2 * (1 - new / (scale * old)) + (at + 0.5) / scale - 0.5,
    "align_corners": lambda at, scale, old, new: at * (old - 1) / (new - 1) if new > 1 else at * 0,
}
"""Coordinate on the old axis of pixel ``at`` of the new axis, for axes of ``old`` and ``new`` pixels; ``scale`` is
new / old if sizes are given. Source: ONNX Runtime's kernel, where ``new`` is a whole number of pixels and a single
pixel has coordinate 0; the operator's specification has a fractional ``new`` for align_corners, and -0.5."""
NEAREST: dict[str, Callable[[Places], Places]] = {
    "floor": np.floor,
    "ceil": np.ceil,
    "round_prefer_floor": lambda at: np.ceil(at - 0.5),
    "round_prefer_ceil": lambda at: np.floor(at + 0.5),
}
OLD_COORDINATES, SYMMETRIC_COORDINATES = "asymmetric", "half_pixel_symmetric"
"""The coordinate mode of opsets before 11, which have no attribute for it; and the one with an offset."""


def resized(x: NDArray[Any], scales: Any, sizes: Any, how: Mapping[str, Any]) -> NDArray[Any] | None:
    """Resize an array with nearest, linear or cubic interpolation; None for attributes that are not supported here.

    One that keeps its size is copied, whatever the scales are.

    Args:
        x: The array, of any shape.
        scales: Scale of every axis, or None.
        sizes: New size of every axis, if there are no scales.
        how: Attributes of the operator.

    Returns:
        The array in its own dtype, with the sizes that scales or sizes give.
    """
    return _copied_if_as_large(x, resized_by_axis(x, scales, sizes, how))


def _copied_if_as_large(x: NDArray[Any], done: NDArray[Any] | None) -> NDArray[Any] | None:
    return x if done is not None and done.shape == x.shape else done


def resized_by_axis(x: NDArray[Any], scales: Any, sizes: Any, how: Mapping[str, Any]) -> NDArray[Any] | None:
    """Resize each axis whose scale is not 1, also where all sizes stay; see `resized`."""
    if not _is_supported(how):
        return None
    antialias, excludes_outside = (bool(how.get(name)) for name in ("antialias", "exclude_outside"))
    mode, by, nearest = _modes(how)
    by_axis, wanted = _scales_and_sizes(x.shape, scales, sizes, how.get("axes") or range(x.ndim))
    changed = [axis for axis, scale in enumerate(by_axis) if scale != 1]
    if antialias:  # ONNX Runtime copies an axis that keeps its size, whatever its scale is
        changed = [axis for axis in changed if wanted[axis] != x.shape[axis]]
    # nearest of half_pixel_symmetric: the offset puts pixels on ties that ONNX Runtime rounds in another way
    sides = zip(wanted, x.shape, by_axis, strict=True)
    fractional = _is_given(scales) and any(size != old * scale for size, old, scale in sides)
    if any(wanted[axis] < 1 for axis in changed) or (by == SYMMETRIC_COORDINATES and mode == "nearest" and fractional):
        return None
    curve = -0.75 if how.get("cubic_coeff_a") is None else float(how["cubic_coeff_a"])
    kernel = Kernel(partial(_cubic, curve), 2) if mode == "cubic" else Kernel(_linear, 1)
    # which pixel is nearest depends on the coordinate's rounding at ties, and ONNX Runtime computes it in float32
    kind: type[np.floating[Any]] = np.float32 if mode == "nearest" else np.float64
    for axis in changed:
        given = (kind(number) for number in (by_axis[axis], x.shape[axis], wanted[axis]))
        places = PLACES[by](np.arange(wanted[axis], dtype=kind), *given)
        if mode == "cubic" or antialias:
            stretch = max(1.0, 1 / by_axis[axis]) if antialias else 1.0
            x = _weighted(x, axis, places, kernel, stretch, excludes_outside=excludes_outside)
        else:
            x = _nearest_or_linear(x, axis, places, NEAREST[nearest] if mode == "nearest" else None)
    return x


def _modes(how: Mapping[str, Any]) -> tuple[str, str, str]:
    """The interpolation, the coordinates and the rounding of Resize, with the operator's defaults."""
    mode, by = how.get("mode") or "nearest", how.get("coordinate_transformation_mode") or "half_pixel"
    return mode, by, how.get("nearest_mode") or "round_prefer_floor"


def _is_supported(how: Mapping[str, Any]) -> bool:
    """Whether `resized_by_axis` computes what ONNX Runtime does for these attributes."""
    mode, by, nearest = _modes(how)
    if mode not in ("nearest", "linear", "cubic") or by not in PLACES or nearest not in NEAREST:
        return False
    if (how.get("antialias") and mode == "nearest") or (how.get("exclude_outside") and mode != "cubic"):
        return False
    return how.get("keep_aspect_ratio_policy") in (None, "stretch")


def _is_given(scales: Any) -> bool:
    """Whether there are scales; an empty input stands for none."""
    return scales is not None and len(scales) > 0


def _scales_and_sizes(
    shape: tuple[int, ...], scales: Any, sizes: Any, axes: Sequence[int]
) -> tuple[list[float], list[int]]:
    """The scale and the new size of every axis; ``axes`` are those that ``scales`` or ``sizes`` are for."""
    by_axis, wanted = [1.0] * len(shape), list(shape)
    if _is_given(scales):
        for axis, scale in zip(axes, scales, strict=True):
            by_axis[axis], wanted[axis] = float(scale), int(np.float32(shape[axis]) * np.float32(scale))
    else:
        for axis, size in zip(axes, sizes, strict=True):
            by_axis[axis], wanted[axis] = int(size) / shape[axis] if shape[axis] else 1.0, int(size)
    return by_axis, wanted


def _nearest_or_linear(
    x: NDArray[Any], axis: int, places: Places, whole: Callable[[Places], Places] | None
) -> NDArray[Any]:
    """Sample an axis at these coordinates, which ``whole`` rounds; with linear interpolation if it is None."""
    last = x.shape[axis] - 1
    if whole:
        return np.asarray(x.take(whole(places).clip(0, last).astype(int), axis))
    places = places.clip(0, last)
    below = np.floor(places).astype(int)
    share = (places - below).reshape(-1, *[1] * (x.ndim - 1 - axis))
    return np.asarray(x.take(below, axis) * (1 - share) + x.take(np.minimum(below + 1, last), axis) * share)


class Kernel(NamedTuple):
    """What a pixel weighs by its distance from a coordinate: nothing from a distance of ``reach`` on."""

    weight: Callable[[Places], Places]
    reach: int


def _linear(far: Places) -> Places:
    return np.maximum(1 - far, 0)


def _cubic(curve: float, far: Places) -> Places:
    """Source: Keys 1981, "Cubic convolution interpolation"; ``curve`` is its parameter a."""
    near = ((curve + 2) * far - (curve + 3)) * far**2 + 1
    return np.where(far <= 1, near, np.where(far < 2, (((far - 5) * far + 8) * far - 4) * curve, 0))


def _weighted(
    x: NDArray[Any], axis: int, places: Places, kernel: Kernel, stretch: float, *, excludes_outside: bool
) -> NDArray[Any]:
    """Sample an axis at these coordinates with the weights of a kernel.

    Args:
        x: The array.
        axis: The axis.
        places: The coordinates.
        kernel: The kernel.
        stretch: A factor of its width, for antialiasing.
        excludes_outside: Whether only pixels of the array have a weight; if not, edge pixels are repeated.
    """
    last, below, reach = x.shape[axis] - 1, np.floor(places), ceil(kernel.reach * stretch)
    each = (-1, *[1] * (x.ndim - 1 - axis))
    found, total = np.zeros((*x.shape[:axis], len(places), *x.shape[axis + 1 :])), np.zeros(len(places))
    for step in range(1 - reach, reach + 1):
        at = below + step
        weight = kernel.weight(np.abs(places - at) / stretch)
        if excludes_outside:
            weight = np.where((at >= 0) & (at <= last), weight, 0)
        total += weight
        found += x.take(at.clip(0, last).astype(int), axis) * weight.reshape(each)
    if stretch > 1 or excludes_outside:  # else the weights sum to 1
        found /= total.reshape(each)
    return found.astype(x.dtype)


def before_places(x: NDArray[Any], scales: Any, mode: str | None) -> NDArray[Any] | None:
    """Evaluate Upsample, or Resize of opset 10; None for modes that are not supported here.

    The nearest pixel is rounded down, and up along an axis that becomes shorter. Source: ONNX Runtime's kernel, since
    the operator's specification does not define it.

    Args:
        x: The array, of any shape.
        scales: Scale of every axis.
        mode: ``nearest``, ``linear`` or ``cubic``; None for nearest.
    """
    done = x
    for axis, scale in enumerate(scales):
        one = [scale if each == axis else 1.0 for each in range(x.ndim)]
        how = {
            "mode": mode,
            "coordinate_transformation_mode": OLD_COORDINATES,
            "nearest_mode": "ceil" if scale < 1 else "floor",
        }
        found = resized_by_axis(done, one, None, how)
        if found is None:
            return None
        done = found
    return _copied_if_as_large(x, done)
