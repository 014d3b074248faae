"""Read the preprocessing of a published network from timm, torchvision, Ultralytics or a Hugging Face folder.

What repaconv does not support is reported by name and never guessed.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repaconv.method_api.mmengine_pipelines import are_numbers, as_size, is_whole
from repaconv.method_api.preprocessing import INTERPOLATIONS, FoundPreprocessing
from repaconv.results import ImageSize

if TYPE_CHECKING:
    from torch import nn

    from repaconv.sources.named_architectures import Architecture

PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""Files of a Hugging Face folder with the preprocessing; the second has it under the key ``image_processor``."""
PILLOW = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
"""Names of Pillow's resampling filters, in the order of their numbers."""
KINDS: dict[str, dict[str, Any]] = {
    **{name: {"square": True} for name in ("ViT", "Beit", "Segformer", "DINOv3ViT")},
    "DeiT": {"square": True, "do_center_crop": True},
    **{name: {"do_center_crop": True} for name in ("CLIP", "Bit", "MobileNetV1", "MobileNetV2")},
    "Siglip": {},
    "MobileViT": {"do_center_crop": True, "do_normalize": False, "do_flip_channel_order": True},
    "Levit": {"do_center_crop": True, "ratio": 224 / 256},
    "PoolFormer": {"do_center_crop": True, "crop_pct": 0.9},
    "ConvNext": {"crop_pct": 224 / 256},
}
"""Image processors of transformers with the defaults for keys that their file lacks. ``square``: a size of one number
is the side of a square, not the shorter edge. Source: transformers 5.23, models/*/image_processing_*.py."""
READ = {"do_resize", "size", "resample", "do_center_crop", "crop_size", "do_rescale", "rescale_factor", "do_normalize"}
READ |= {"image_mean", "image_std", "do_flip_channel_order", "rescale_offset", "crop_pct", "square", "ratio"}
IDLE = {"image_processor_type", "feature_extractor_type", "processor_class", "_processor_class", "do_convert_rgb"}
IDLE |= {"do_reduce_labels", "reduce_labels", "_valid_processor_keys", "default_to_square", "data_format", "backend"}
IDLE |= {"return_tensors", "input_data_format", "device", "disable_grouping"}
"""Keys that do not affect the pixels."""
WARPED_FROM = 384
"""From this size on, ConvNeXt's images are resized to a square and not cropped."""


def pixels_of(arch: Architecture, module: nn.Module, folder: Path | None) -> FoundPreprocessing:
    """Read a network's preprocessing from its library: fields of `Preprocessing`, and ``odd``, what is unsupported.

    Args:
        arch: The network's architecture.
        module: The network.
        folder: The Hugging Face folder, if the network came from one.
    """
    if arch.library == "timm":
        cfg = {**(getattr(module, "pretrained_cfg", None) or {}), **(arch.config.get("pretrained_cfg") or {})}
        return of_timm(cfg)
    if arch.library == "torchvision":
        return _from_torchvision(arch.name.partition(":")[2])
    if arch.library == "ultralytics":
        return of_ultralytics(arch.config)
    return of_processor(folder, own_size(arch.config)) if folder else FoundPreprocessing("", {}, [])


def of_ultralytics(config: Mapping[str, Any]) -> FoundPreprocessing:
    """Read the image size in a file of Ultralytics, and add what the package does with the images of its tasks.

    Classifiers resize the shorter edge and crop the center (``classify_transforms``). All other networks get the whole
    image with a gray border (``LetterBox``). Pixels are divided by 255.
    """
    size = as_size(config.get("imgsz"))
    where = "ultralytics, imgsz of the file's training" if size else "ultralytics' defaults"
    size = size or (2 * (224,) if config.get("task") == "classify" else 2 * (640,))
    values: dict[str, Any] = {"mean": (0.0,) * 3, "std": (255.0,) * 3, "interpolation": "bilinear", "image_size": size}
    if config.get("task") == "classify":
        return FoundPreprocessing(
            where, {**values, "resize_edge": min(size)}, [] if size[0] == size[1] else [f"imgsz={size}"]
        )
    letterbox = f"letterbox to {size[0]} x {size[1]} (the whole image with a gray border), RGB, 0 to 1"
    return FoundPreprocessing(where, values, [letterbox])


def of_timm(cfg: Mapping[str, Any]) -> FoundPreprocessing:
    """Read timm's ``pretrained_cfg``, whose mean and std are for pixels from 0 to 1."""
    where = "timm's pretrained_cfg"
    size = as_size(cfg.get("input_size"))
    if size is None or not (are_numbers(cfg.get("mean")) and are_numbers(cfg.get("std"))):
        return FoundPreprocessing(where, {}, [])
    values: dict[str, Any] = {name: tuple(255 * float(value) for value in cfg[name]) for name in ("mean", "std")}
    ratio, mode = float(cfg.get("crop_pct") or 1), cfg.get("crop_mode") or "center"
    interpolation = str(cfg.get("interpolation") or "bicubic")
    square = size[0] == size[1]
    values |= {"image_size": size, "interpolation": interpolation, "keep_ratio": mode != "squash"}
    values["resize_edge"] = int(max(size) / ratio) if square else None
    odd = [f"crop_mode={mode}"] if mode not in ("center", "squash") else []
    odd += [f"interpolation={interpolation}"] if interpolation not in INTERPOLATIONS else []
    odd += [f"a crop of {size[0]} x {size[1]}"] if not square and (mode != "squash" or ratio != 1) else []
    return FoundPreprocessing(where, values, odd)


def _from_torchvision(name: str) -> FoundPreprocessing:
    """Read the transforms of the named weights (``resnet50.IMAGENET1K_V2``), or of the architecture's first weights.

    Other weights with different transforms are mentioned in the source.
    """
    models = importlib.import_module("torchvision.models")
    architecture, _, tag = name.partition(".")
    every = {each.name: each.transforms() for each in models.get_model_weights(architecture)}
    found = {weights: of_preset(preset) for weights, preset in every.items()}
    first = tag or next(iter(found), "")
    if first not in found:
        return FoundPreprocessing("torchvision", {}, [])
    others = [weights for weights in found if found[weights] != found[first] and not tag]
    also = f" ({', '.join(others)} say other: --arch torchvision:{architecture}.{others[0]})" if others else ""
    return FoundPreprocessing(f"torchvision's {first}{also}", found[first].values, found[first].odd)


def of_preset(preset: Any) -> FoundPreprocessing:
    """Read torchvision's ``ImageClassification`` transforms; transforms of other tasks, without a crop, are ``odd``."""
    lacking = [name for name in ("crop_size", "resize_size", "mean", "std") if not hasattr(preset, name)]
    if lacking:
        return FoundPreprocessing("torchvision", {}, [f"its transforms have no {lacking[0]}"])
    size, edge = as_size(preset.crop_size), as_size(preset.resize_size)
    assert size is not None
    assert edge is not None
    values: dict[str, Any] = {"image_size": size, "resize_edge": edge[0], "interpolation": preset.interpolation.value}
    values |= {name: tuple(255 * value for value in getattr(preset, name)) for name in ("mean", "std")}
    odd = [] if edge[0] == edge[1] else [f"resize_size={preset.resize_size}"]
    return FoundPreprocessing("torchvision", values, odd)


def of_processor(folder: Path, own: ImageSize | None = None) -> FoundPreprocessing:
    """Read the image processor's file of a Hugging Face folder.

    Args:
        folder: The folder.
        own: The image size according to config.json.
    """
    for name in PROCESSORS:
        try:
            said = json.loads((folder / name).read_text("utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(said, dict) and isinstance(held := said.get("image_processor", said), dict):
            return _from_processor_config(held, name, own)
    return FoundPreprocessing("", {}, [])


def _from_processor_config(said: Mapping[str, Any], where: str, own: ImageSize | None) -> FoundPreprocessing:
    called = str(said.get("image_processor_type") or said.get("feature_extractor_type"))
    kind = (
        called.removesuffix("Pil").removesuffix("Fast").removesuffix("ImageProcessor").removesuffix("FeatureExtractor")
    )
    if kind not in KINDS:
        return FoundPreprocessing(where, {}, [f"what a {called} does"])
    given = {"do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, **KINDS[kind]}
    given |= {name: value for name, value in said.items() if value is not None}
    odd = [f"{name}={value}" for name, value in given.items() if name not in READ | IDLE and value]
    values, more = _color_values(given)
    geometry, lacking = _resize_and_crop(given, warps=kind == "ConvNext")
    if own and geometry and geometry["image_size"] != own:
        lacking.append("{} x {} pixels, where config.json says {} x {}".format(*geometry["image_size"], *own))
    return FoundPreprocessing(where, {**values, **geometry}, [*odd, *more, *lacking])


def _color_values(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return mean, std and channel order, (pixel * factor - offset - mean) / std written as (pixel - mean) / std."""
    factor = float(given["rescale_factor"]) if given["do_rescale"] else 1.0
    offset = 1.0 if given.get("rescale_offset") else 0.0
    mean, std = given.get("image_mean"), given.get("image_std")
    if not given["do_normalize"]:
        mean, std = (0.0,), (1.0,)
    if not are_numbers(mean) or not are_numbers(std):
        return {}, ["no image_mean, no image_std"]
    assert mean is not None
    assert std is not None
    order = "BGR" if given.get("do_flip_channel_order") else "RGB"
    scaled = {"mean": tuple((value + offset) / factor for value in mean), "std": tuple(value / factor for value in std)}
    return {**scaled, "channel_order": order}, []


def _resize_and_crop(given: Mapping[str, Any], *, warps: bool) -> tuple[dict[str, Any], list[str]]:
    """Return image size, interpolation and crop, and what of them is unsupported."""
    size, number = given.get("size"), given.get("resample")
    size = {"shortest_edge": size} if is_whole(size) and not given.get("square") else size
    edge, exact = (
        (size.get("shortest_edge"), _height_and_width(size)) if isinstance(size, Mapping) else (None, as_size(size))
    )
    if not given["do_resize"] or not isinstance(number, int) or not 0 <= number < len(PILLOW):
        return {}, [f"resample={number}" if given["do_resize"] else "do_resize=False"]
    if (is_whole(edge) and set(size) != {"shortest_edge"}) or not (is_whole(edge) or exact):  # type: ignore[arg-type]
        return {}, [f"size={size}"]
    crop = (
        (_height_and_width(given.get("crop_size")) or as_size(given.get("crop_size")))
        if given.get("do_center_crop")
        else exact
    )
    values: dict[str, Any] = {"interpolation": PILLOW[number], "keep_ratio": exact is None, "image_size": crop}
    if exact is not None:
        fits = crop == exact or exact[0] == exact[1]
        return {**values, "resize_edge": None if crop == exact else exact[0]}, [] if fits else [f"size={size}"]
    assert edge is not None
    if warps and edge >= WARPED_FROM:
        return {**values, "image_size": (edge, edge), "resize_edge": None, "keep_ratio": False}, []
    if warps:
        values["image_size"] = (edge, edge)
    if (cut := values["image_size"]) is None:
        return {}, [f"size={size} without a crop"]
    values["resize_edge"] = int(edge / (given.get("ratio") or given.get("crop_pct") or 1))
    return values, [f"a crop of {cut[0]} x {cut[1]} from {edge}"] if values["resize_edge"] < max(cut) else []


def _height_and_width(size: Any) -> ImageSize | None:
    """The image size of a dict such as {"height": 224, "width": 224}; None if it is none."""
    if not isinstance(size, Mapping):
        return None
    sides = size.get("height"), size.get("width")
    return sides if all(map(is_whole, sides)) else None  # type: ignore[return-value]


TOWERS = ("vision_config", "backbone_config")
"""Keys under which a config.json holds the config of the vision part."""


def own_size(config: Mapping[str, Any]) -> ImageSize | None:
    """The image size in a Hugging Face config.json, or in the config of its vision part; None if there is none."""
    return as_size(_config_value(config, "image_size"))


def own_channels(config: Mapping[str, Any]) -> int | None:
    """The number of image channels, from the same places; None if there is none."""
    found = _config_value(config, "num_channels")
    return found if isinstance(found, int) and found > 0 else None


def _config_value(config: Mapping[str, Any], name: str) -> Any:
    towers = (config.get(tower) for tower in TOWERS)
    found = (part[name] for part in (config, *towers) if isinstance(part, Mapping) and part.get(name))
    return next(found, None)
