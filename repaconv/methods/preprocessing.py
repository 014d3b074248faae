"""What happens to an image before the network: by the user, by the file, else ImageNet's usual."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from repaconv.artefact import ImageSize, Preprocessing, parse_image_size
from repaconv.checkpoint import find_typed
from repaconv.errors import Refused
from repaconv.methods.reading import Knobs, one_of, positive

MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")
# Evaluations on ImageNet resize to 256 and cut 224 out; on small images they take them whole.
CROP_RATIO, SMALL = 0.875, 160


def preprocessing_of(
    record: Mapping[str, Any], config: Mapping[str, Any], knobs: Knobs, fixed: ImageSize | None = None
) -> Preprocessing:
    """Sizes, interpolation, mean and std: of --set, of mmengine's configuration or a trainer's args, else ImageNet's.

    Takes the knobs ``image_size``, ``mean``, ``std``, ``resize_edge``, ``interpolation`` and ``channel_order``; with
    ``fixed``, the size that the network is for, no other is taken.

    Raises:
        Refused: If another size than ``fixed`` is asked for.
    """
    args = record.get("args") if isinstance(record.get("args"), Mapping) else {}
    assert isinstance(args, Mapping)
    image_size = _image_size(args, config, knobs, fixed)
    found, source = _of_file(args, config, image_size)
    told = found if source in ("args", "meta.cfg") else {}
    asked = {
        "mean": knobs.asked("mean", _numbers, told.get("mean"), source),
        "std": knobs.asked("std", _numbers, told.get("std"), source),
        "resize_edge": knobs.asked("resize_edge", positive),
        "interpolation": knobs.asked("interpolation", one_of(*INTERPOLATIONS)),
        "channel_order": knobs.asked("channel_order", one_of("RGB", "BGR"), told.get("channel_order"), source),
    }
    given = {name: value for name, value in asked.items() if value is not None}
    source = f"--set {', '.join(given)}; else {source}" if given else source
    return Preprocessing(**{**found, **given, "image_size": image_size, "source": source})


def _image_size(args: Mapping[str, Any], config: Mapping[str, Any], knobs: Knobs, fixed: ImageSize | None) -> ImageSize:
    size, source = _number(args.get("img_size") or args.get("input_size")), "args"
    if size is None:
        pipeline = config.get("test_pipeline")
        size, source = _number((find_typed(pipeline, "CenterCrop") or {}).get("crop_size")), "meta.cfg"
    if fixed is None:
        return knobs.take("image_size", parse_image_size, (224, 224), (size, size) if size else None, source, free=True)
    if (asked := knobs.asked("image_size", parse_image_size)) in (None, fixed):
        return fixed
    raise Refused(
        f"this network is for images of {fixed[0]} x {fixed[1]} pixels, not of {asked}.",
        hint="Leave --set image_size out.",
        code="image-size",
    )


def _of_file(args: Mapping[str, Any], config: Mapping[str, Any], size: ImageSize) -> tuple[dict[str, Any], str]:
    """What the file says, and where."""
    resize = find_typed(config.get("test_pipeline"), "ResizeEdge") or {}
    data = config.get("data_preprocessor")
    if isinstance(data, Mapping) and _are_numbers(data.get("mean")) and _are_numbers(data.get("std")):
        return {
            "mean": tuple(data["mean"]),
            "std": tuple(data["std"]),
            "channel_order": "RGB" if data.get("to_rgb") else "BGR",
            "resize_edge": _number(resize.get("scale")),
            "interpolation": str(resize.get("interpolation", "bilinear")),
        }, "meta.cfg"
    usual = {"mean": MEAN, "std": STD, "resize_edge": _edge(CROP_RATIO, size) if max(size) >= SMALL else None}
    if _are_numbers(args.get("mean")) and _are_numbers(args.get("std")):  # timm's train.py: on the 0..1 scale
        for name in ("mean", "std"):
            usual[name] = tuple(255 * value for value in args[name])
        if isinstance(ratio := args.get("crop_pct"), (int, float)) and 0 < ratio <= 1:
            usual["resize_edge"] = _edge(ratio, size)
        if args.get("interpolation") in INTERPOLATIONS:
            usual["interpolation"] = args["interpolation"]
        return usual, "args"
    return usual, "ImageNet's, as in the official configuration; the file does not tell"


def _edge(ratio: float, size: ImageSize) -> int:
    return int(max(size) / ratio)


def _numbers(text: str) -> tuple[float, ...]:
    """A parser for numbers with commas between them."""
    return tuple(float(word) for word in text.split(","))


def _are_numbers(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple)) and len(value) > 0 and all(isinstance(entry, (int, float)) for entry in value)
    )


def _number(value: Any) -> int | None:
    if isinstance(value, list):  # timm's input_size is [C, H, W]
        value = value[-1] if value else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
