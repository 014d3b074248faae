"""Read an mmengine configuration's test pipeline and data preprocessor as fields of `Preprocessing`.

Every step that is not supported is reported, never skipped.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from repaconv.results import ImageSize

# Steps that change no pixel.
NO_PIXEL_CHANGE = ("LoadImageFromFile", "PackInputs", "PackClsInputs", "ImageToTensor", "ToTensor", "Collect")
# The supported arguments of each other step; a step with any other argument is not supported.
SUPPORTED_ARGUMENTS = {
    "Normalize": ("mean", "std", "to_rgb"),
    "ResizeEdge": ("scale", "edge", "interpolation", "backend"),
    "Resize": ("scale", "size", "interpolation", "backend"),
    "CenterCrop": ("crop_size",),
}
RESIZED, CROP = {"resize_edge", "exact"}, {"image_size"}
Values = dict[str, Any]


def of_pipeline(config: Mapping[str, Any], interpolations: Collection[str]) -> tuple[Values, list[str]]:
    """Read the fields of `Preprocessing` from an mmengine configuration, and list what in it is not supported.

    Args:
        config: The configuration of the training run.
        interpolations: The names of the supported interpolations.
    """
    values, unsupported = _data_preprocessor_values(config)
    steps = _test_steps(config)
    dropped = []
    for step in steps:
        read = _step_values(step) if isinstance(step, Mapping) else None
        if read is None or read.keys() & values.keys() or (read.keys() & RESIZED and values.keys() & {*RESIZED, *CROP}):
            dropped.append(_description(step))  # an evaluation normalizes once, resizes once, then crops once
            continue
        for name, supported in (("interpolation", interpolations), ("backend", ("pillow",))):
            if name in read and read[name] not in supported:
                unsupported.append(f"{name}={read.pop(name)}")
        values |= {name: value for name, value in read.items() if name != "backend"}
    exact = values.pop("exact", None)
    if exact and "image_size" not in values:
        values |= {"image_size": exact, "resize_edge": None, "keep_ratio": False}
    elif exact and exact[0] == exact[1]:
        values |= {"resize_edge": exact[0], "keep_ratio": False}
    elif exact:
        dropped.append(f"Resize to {exact[0]} x {exact[1]} before a crop")
    if steps and not dropped:  # no step that resizes
        values.setdefault("resize_edge", None)
    return values, [*unsupported, *dropped]


def _test_steps(config: Mapping[str, Any]) -> list[Any]:
    loader = config.get("test_dataloader")
    dataset = loader.get("dataset") if isinstance(loader, Mapping) else None
    steps = config.get("test_pipeline") or (dataset.get("pipeline") if isinstance(dataset, Mapping) else None)
    return steps if isinstance(steps, list) else []


def _data_preprocessor_values(config: Mapping[str, Any]) -> tuple[Values, list[str]]:
    model = config.get("model")
    data = config.get("data_preprocessor") or (model.get("data_preprocessor") if isinstance(model, Mapping) else None)
    if not isinstance(data, Mapping):
        return {}, []
    read = _normalization(data, to_rgb=False)
    unsupported = [f"data_preprocessor.{name}" for name in ("mean", "std") if name in data] if read is None else []
    return read or {}, unsupported


def _normalization(config: Mapping[str, Any], *, to_rgb: bool) -> Values | None:
    """Read mean, std and the channel order of a normalization; None if mean or std are not lists of numbers.

    Args:
        config: The configuration of the step.
        to_rgb: The default of the step's own ``to_rgb``.
    """
    if not are_numbers(config.get("mean")) or not are_numbers(config.get("std")):
        return None
    channel_order = "RGB" if config.get("to_rgb", to_rgb) else "BGR"
    return {"mean": tuple(config["mean"]), "std": tuple(config["std"]), "channel_order": channel_order}


def _step_values(step: Mapping[str, Any]) -> Values | None:
    """The fields that one pipeline step sets; None if the step or one of its arguments is not supported.

    ``exact`` is a (height, width) to resize to, whatever the aspect ratio. mmcv's sizes are (width, height), and its
    default interpolation is OpenCV's bilinear.
    """
    kind = str(step.get("type")).rpartition(".")[2]
    if kind in NO_PIXEL_CHANGE:
        return {}
    arguments = {name for name, value in step.items() if name != "type" and value not in (None, False)}
    if kind not in SUPPORTED_ARGUMENTS or arguments - {*SUPPORTED_ARGUMENTS[kind]}:
        return None
    resizing = {"interpolation": step.get("interpolation", "bilinear"), "backend": step.get("backend", "cv2")}
    if kind == "Normalize":
        return _normalization(step, to_rgb=True)
    if kind == "ResizeEdge":
        scale, edge = step.get("scale"), step.get("edge", "short")
        return {"resize_edge": scale, **resizing} if is_whole(scale) and edge == "short" else None
    if kind == "Resize":
        size, scale = step.get("size"), as_size(step.get("scale"))
        if isinstance(size, list) and len(size) == 2 and is_whole(size[0]) and size[1] == -1:  # mmcls: the shorter edge
            return {"resize_edge": size[0], **resizing}
        exact = as_size(size) or (scale and scale[::-1])
        return {"exact": exact, **resizing} if exact else None
    crop = as_size(step.get("crop_size"))
    return {"image_size": crop[::-1]} if crop else None


def _description(step: Any) -> str:
    if not isinstance(step, Mapping):
        return "a step of the pipeline"
    return f"{step.get('type')}({', '.join(f'{name}={value}' for name, value in step.items() if name != 'type')})"


def as_size(value: Any) -> ImageSize | None:
    """Read an image size: one side, two sides in their order, or timm's [C, H, W]; None if it is none of these."""
    sides = value if isinstance(value, (list, tuple)) else [value]
    if not 1 <= len(sides) <= 3 or not all(is_whole(side) for side in sides):
        return None
    return (sides[-2], sides[-1]) if len(sides) > 1 else (sides[0], sides[0])


def is_whole(value: Any) -> bool:
    """Whether the value is a whole number above zero."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def are_numbers(value: Any) -> bool:
    """Whether the value is a nonempty list of numbers."""
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(entry, (int, float)) for entry in value)
