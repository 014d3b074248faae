"""Determine a network's image size and preprocessing, and record the source of each value.

`preprocessing_of` is for checkpoints of a method, `images_by` for other networks and for ONNX graphs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv.core.errors import Refused, UsageProblem
from repaconv.deprecation import former_names, renamed_argument
from repaconv.method_api.mmengine_pipelines import are_numbers, as_size, of_pipeline
from repaconv.method_api.settings import SettingsReader, one_of, positive, yes_or_no
from repaconv.results import Fact, ImageSize, Preprocessing, parse_image_size

MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
INCEPTION = (127.5, 127.5, 127.5)
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")
# Evaluations on ImageNet resize to 256 and crop 224 from the center; small images are not cropped.
CROP_RATIO, SMALL_IMAGE = 0.875, 160
# DeiT's main.py does not resize images up to this size, whatever its eval_crop_ratio.
DEIT_WHOLE = 32
IMAGENET = "ImageNet's, as in the official configuration"
MADE_BY = ("mean", "std", "resize_edge", "keep_ratio", "interpolation", "channel_order")
"""The fields of `Preprocessing` that --set accepts, under the same names."""
PREPROCESSING = "preprocessing"
"""Name of the fact that says why a library's preprocessing was not used."""


class FoundPreprocessing(NamedTuple):
    """The preprocessing found in one source: its name, the fields of `Preprocessing`, and what is not supported."""

    where: str
    values: dict[str, Any]
    odd: list[str]


if not TYPE_CHECKING:
    __getattr__ = former_names(__name__, {"Told": FoundPreprocessing}, removed_in="0.3.0")


@renamed_argument("knobs", "reader", removed_in="0.3.0")
def preprocessing_of(
    record: Mapping[str, Any], config: Mapping[str, Any], reader: SettingsReader, fixed: ImageSize | None = None
) -> Preprocessing:
    """Determine the preprocessing of a method's checkpoint: from --set, else from the file, else ImageNet's.

    Reads the settings ``image_size``, ``mean``, ``std``, ``resize_edge``, ``keep_ratio``, ``interpolation`` and
    ``channel_order``. The result's ``source`` names the source of each part, and what in the file is not supported.

    Args:
        record: Everything in the checkpoint except its tensors; a trainer's ``args`` are read.
        config: mmengine's configuration of the run, {} without one.
        reader: The user's settings.
        fixed: The (height, width) that the network requires; None if it accepts several sizes.

    Raises:
        Refused: If the user asks for another size than ``fixed``.
    """
    args = record.get("args") if isinstance(record.get("args"), Mapping) else {}
    assert isinstance(args, Mapping)
    config_source = FoundPreprocessing("meta.cfg", *of_pipeline(config, INTERPOLATIONS))
    sizes = _size_from_args(args)
    image_size = _image_size(sizes, config_source, reader, fixed)
    args_source = _from_args(args, image_size)
    sources = [FoundPreprocessing("args", args_source.values, [*sizes.odd, *args_source.odd]), config_source]
    from_file = {name: (value, part.where) for part in sources for name, value in part.values.items()}
    found: dict[str, Any] = {"mean": MEAN, "std": STD, "resize_edge": usual_edge(image_size)}
    found |= {name: value for name, (value, _) in from_file.items()}
    given = _user_values(reader, from_file)
    source = f"--set {', '.join(given)}; else {_source(sources)}" if given else _source(sources)
    fields = {**found, **given, "image_size": image_size, "source": source}
    _require_as_many(fields, given)
    return Preprocessing(**fields, assumed=_assumed({*from_file, *given}))


class Sized(NamedTuple):
    """The size (height, width) of a network's images, and its source.

    ``assumed`` if no source gives it, ``fixed`` if the network accepts no other size.
    """

    size: ImageSize
    source: str
    assumed: bool = False
    fixed: bool = False


class Images(NamedTuple):
    """A network's image size and preprocessing, with the facts; no preprocessing if mean or std are unknown."""

    size: ImageSize
    preprocessing: Preprocessing | None
    facts: tuple[Fact, ...]


@renamed_argument("knobs", "reader", removed_in="0.3.0")
def images_by(own: FoundPreprocessing, reader: SettingsReader, usual: Sized) -> Images:
    """Determine image size and preprocessing of a network without a method or of a graph.

    Values come from --set, else from the model's library, else from the defaults. The library's preprocessing is used
    entirely or not at all: if any part of it is not supported here, none of it is used. Mean and std have no default.

    Args:
        own: The library's preprocessing, in fields of `Preprocessing`.
        reader: The user's settings; see `preprocessing_of`.
        usual: The network's image size. If --set image_size differs, ``resize_edge`` is scaled in proportion.

    Raises:
        Refused: If the user asks for another size than a fixed one.
        UsageProblem: If the user sets mean or std alone, and the library does not give the other.
    """
    library_values = {} if own.odd else own.values
    asked = _user_size(reader, usual.size) if usual.fixed else reader.user_value("image_size", parse_image_size)
    sized = Sized(asked, "--set image_size") if asked else usual
    facts = [Fact(name="image_size", value=sized.size, source=sized.source, assumed=sized.assumed)]
    if own.odd:
        against = "; ".join(own.odd)
        facts.append(Fact(name=PREPROCESSING, value="not taken", source=own.where, against=against))
    return Images(
        sized.size, _library_preprocessing(own, library_values, _user_values(reader, {}), sized.size), tuple(facts)
    )


def _library_preprocessing(
    own: FoundPreprocessing, library_values: dict[str, Any], given: dict[str, Any], size: ImageSize
) -> Preprocessing | None:
    found = {"resize_edge": usual_edge(size), **library_values}
    if (edge := library_values.get("resize_edge")) is not None:
        found["resize_edge"] = edge * max(size) // max(library_values["image_size"])
    fields = {**found, **given, "image_size": size}
    if lacking := {"mean", "std"} - fields.keys():
        if len(lacking) == 1:
            (name,) = lacking
            raise UsageProblem(
                f"--set gives only one of mean and std, and {name} is not known otherwise.",
                hint=f"Give --set {name}=..., too: on the scale of 0 to 255, one number, or one for each channel.",
                code="setting.value",
            )
        return None
    _require_as_many(fields, given)
    source = f"--set {', '.join(given)}" if given else own.where
    if given and library_values:
        source += f"; else {own.where}"
    if own.odd:
        source += f"; not taken from {own.where}: {', '.join(own.odd)}"
    # a library's configuration does not state channel order and aspect ratio, as it knows only one value of each
    convention = {"channel_order", "keep_ratio"} if library_values else set()
    return Preprocessing(**fields, source=source, assumed=_assumed({*library_values, *given, *convention}))


def at_size(wanted: Preprocessing, size: ImageSize) -> Preprocessing:
    """The same preprocessing for another image size.

    ``resize_edge`` is scaled in proportion; if it was assumed, it is the default for the new size.
    """
    edge = wanted.resize_edge
    if size == wanted.image_size:
        return wanted
    if "resize_edge" in wanted.assumed:
        edge = usual_edge(size)
    elif edge is not None:
        edge = edge * max(size) // max(wanted.image_size)
    return wanted.model_copy(update={"image_size": size, "resize_edge": edge})


def usual_edge(size: ImageSize) -> int | None:
    """The default length to which the shorter edge is resized before the crop; None for the image size itself."""
    return _edge(CROP_RATIO, size) if max(size) >= SMALL_IMAGE else None


def _assumed(known: Collection[str]) -> tuple[str, ...]:
    """The fields of the preprocessing that no source gives."""
    return tuple(name for name in MADE_BY if name not in known)


def _user_values(reader: SettingsReader, from_file: Mapping[str, tuple[Any, str]]) -> dict[str, Any]:
    """The fields of the preprocessing that the user sets, recorded together with the file's values."""
    asked = {
        "mean": reader.user_value("mean", _finite_numbers, *from_file.get("mean", ())),
        "std": reader.user_value("std", _numbers_above_zero, *from_file.get("std", ())),
        "resize_edge": reader.user_value("resize_edge", positive),
        "keep_ratio": reader.user_value("keep_ratio", yes_or_no),
        "interpolation": reader.user_value("interpolation", one_of(*INTERPOLATIONS)),
        "channel_order": reader.user_value("channel_order", one_of("RGB", "BGR"), *from_file.get("channel_order", ())),
    }
    return {name: value for name, value in asked.items() if value is not None}


def _source(sources: list[FoundPreprocessing]) -> str:
    """Describe the sources: the fields that each part of the file gives, ImageNet's, and what is not supported."""
    named = _field_names(sources)
    unsupported = [f"not taken from {part.where}: {', '.join(part.odd)}" for part in sources if part.odd]
    if not named:
        return "; ".join([IMAGENET, *(unsupported or ["not in the file"])])
    complete = {"mean", "std", "resize_edge"} <= {name for part in sources for name in part.values}
    return "; ".join([*named, *([] if complete else [f"else {IMAGENET}"]), *unsupported])


def _field_names(sources: list[FoundPreprocessing]) -> list[str]:
    """The names of the preprocessing fields that each part of the file gives."""
    taken = [(part.where, [name for name in part.values if name != "image_size"]) for part in sources]
    return [f"{where}: {', '.join(names)}" for where, names in taken if names]


def _size_from_args(args: Mapping[str, Any]) -> FoundPreprocessing:
    """Read a trainer's image size from its args; timm's input_size [C, H, W] takes precedence over img_size."""
    found: dict[str, Any] = {}
    unsupported = []
    for name in ("input_size", "img_size"):
        if (value := args.get(name)) is not None:
            size = as_size(value)
            if size is None or found.setdefault("image_size", size) != size:
                unsupported.append(f"{name}={value}")
    return FoundPreprocessing("args", found, unsupported)


def _image_size(
    sizes: FoundPreprocessing, of_config: FoundPreprocessing, reader: SettingsReader, fixed: ImageSize | None
) -> ImageSize:
    if fixed is None:
        source_found = sizes if sizes.values else of_config
        found: ImageSize | None = source_found.values.get("image_size")
        return reader.take("image_size", parse_image_size, (224, 224), found, source_found.where, free=True)
    _user_size(reader, fixed)
    reader.facts.append(Fact(name="image_size", value=fixed, source="the network, which takes no other"))
    return fixed


def _user_size(reader: SettingsReader, fixed: ImageSize) -> ImageSize | None:
    """The image size that the user sets, which must be the only one that the network accepts; None if it is not set."""
    if (asked := reader.user_value("image_size", parse_image_size)) in (None, fixed):
        return asked
    assert asked is not None
    raise Refused(
        f"this network takes images of {fixed[0]} x {fixed[1]} pixels, not {asked[0]} x {asked[1]}.",
        hint="Leave --set image_size out.",
        code="image-size",
    )


def _from_args(args: Mapping[str, Any], size: ImageSize) -> FoundPreprocessing:
    """Read the preprocessing of the evaluation from the args of timm's, DeiT's and PYRA's trainers."""
    found: dict[str, Any] = {}
    unsupported = []
    if are_numbers(args.get("mean")) and are_numbers(args.get("std")):  # timm's: on the 0..1 scale
        found |= {name: tuple(255 * value for value in args[name]) for name in ("mean", "std")}
    else:
        unsupported += [f"{name}={args[name]}" for name in ("mean", "std") if args.get(name) is not None]
    if isinstance(args.get("inception"), bool) and isinstance(args.get("direct_resize"), bool):  # PYRA's datasets.py
        found |= {"mean": INCEPTION, "std": INCEPTION} if args["inception"] else {"mean": MEAN, "std": STD}
        found |= {"resize_edge": int((1 if args["direct_resize"] else 256 / 224) * max(size)), "keep_ratio": False}
    for name, uncropped_up_to in (("crop_pct", 0), ("eval_crop_ratio", DEIT_WHOLE)):
        if (ratio := args.get(name)) is not None:
            known = isinstance(ratio, (int, float)) and 0 < ratio <= 1
            edge = _edge(ratio, size) if known and max(size) > uncropped_up_to else None
            if not known or found.setdefault("resize_edge", edge) != edge:
                unsupported.append(f"{name}={ratio}")
    if (mode := args.get("crop_mode")) == "squash" and size[0] == size[1]:
        found["keep_ratio"] = False
    elif mode not in (None, "center"):
        unsupported.append(f"crop_mode={mode}")
    if (interpolation := args.get("interpolation")) in INTERPOLATIONS:
        found["interpolation"] = interpolation
    elif interpolation is not None:
        unsupported.append(f"interpolation={interpolation}")
    return FoundPreprocessing("args", found, unsupported)


def _edge(ratio: float, size: ImageSize) -> int:
    return int(max(size) / ratio)


def _finite_numbers(text: str) -> tuple[float, ...]:
    """Parse numbers separated by commas."""
    numbers = tuple(float(word) for word in text.split(","))
    if not all(map(math.isfinite, numbers)):
        raise ValueError("not finite")
    return numbers


def _numbers_above_zero(text: str) -> tuple[float, ...]:
    """Parse numbers above zero separated by commas: pixels are divided by them."""
    numbers = _finite_numbers(text)
    if min(numbers) <= 0:
        raise ValueError("not above zero")
    return numbers


def _require_as_many(fields: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse a mean and a std of different numbers of channels, if the user gives one of them.

    Raises:
        UsageProblem: If neither has one number for all channels.
    """
    mean, std = len(fields["mean"]), len(fields["std"])
    if {"mean", "std"} & given.keys() and mean != std and 1 not in (mean, std):
        raise UsageProblem(
            f"mean has {mean} numbers and std has {std}.",
            hint="Give --set mean=... and --set std=..., each with one number for each channel.",
            code="setting.value",
        )


def require_channels(settings: Mapping[str, str], wanted: Preprocessing | None, channels: int) -> None:
    """Refuse a mean or std from the user that has neither one number nor one for each channel of the network's images.

    Raises:
        UsageProblem: If there is one.
    """
    for name in ("mean", "std"):
        count = len(getattr(wanted, name)) if wanted and name in settings else 1
        if count not in (1, channels):
            raise UsageProblem(
                f"--set {name} has {count} numbers, and the images of this network have {channels} "
                f"channel{'s' if channels > 1 else ''}.",
                hint=f"Give --set {name}=... one number for all channels, or one for each.",
                code="preprocessing.channels",
            )


USUAL = preprocessing_of({}, {}, SettingsReader({}))
"""The default preprocessing: ImageNet's, for images of 224 x 224 pixels."""
