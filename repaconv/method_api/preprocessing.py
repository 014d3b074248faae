"""How large a network's images are and what happens to them before it, each with its source: one rule for all doors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from repaconv.core.errors import Refused
from repaconv.method_api.mmengine_pipelines import are_numbers, as_size, of_pipeline
from repaconv.method_api.settings import Knobs, one_of, positive
from repaconv.results import Fact, ImageSize, Preprocessing, parse_image_size

MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
INCEPTION = (127.5, 127.5, 127.5)
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")
# Evaluations on ImageNet resize to 256 and cut 224 out; on small images they take them whole.
CROP_RATIO, SMALL = 0.875, 160
# DeiT's main.py resizes no images of up to this size, whatever its eval_crop_ratio.
DEIT_WHOLE = 32
IMAGENET = "ImageNet's, as in the official configuration"
MADE_BY = ("mean", "std", "resize_edge", "keep_ratio", "interpolation", "channel_order")
"""Fields of `Preprocessing`, by the names that --set has for them."""
PREPROCESSING = "preprocessing"
"""The fact of a fold that says why it has none."""


class Told(NamedTuple):
    """What one part of the file says: fields of `Preprocessing`, and what else it says."""

    where: str
    values: dict[str, Any]
    odd: list[str]


def preprocessing_of(
    record: Mapping[str, Any], config: Mapping[str, Any], knobs: Knobs, fixed: ImageSize | None = None
) -> Preprocessing:
    """Sizes, interpolation, mean and std: of --set, of mmengine's configuration or a trainer's args, else ImageNet's.

    Takes the knobs ``image_size``, ``mean``, ``std``, ``resize_edge``, ``keep_ratio``, ``interpolation`` and
    ``channel_order``; with ``fixed``, the size that the network is for, no other is taken. ``source`` says of each part
    where it is from, and names what the file says and is not taken.

    Raises:
        Refused: If another size than ``fixed`` is asked for.
    """
    args = record.get("args") if isinstance(record.get("args"), Mapping) else {}
    assert isinstance(args, Mapping)
    of_config = Told("meta.cfg", *of_pipeline(config, INTERPOLATIONS))
    sizes = _sizes(args)
    image_size = _image_size(sizes, of_config, knobs, fixed)
    of_args = _of_args(args, image_size)
    told = [Told("args", of_args.values, [*sizes.odd, *of_args.odd]), of_config]
    said = {name: (value, part.where) for part in told for name, value in part.values.items()}
    found: dict[str, Any] = {"mean": MEAN, "std": STD, "resize_edge": usual_edge(image_size)}
    found |= {name: value for name, (value, _) in said.items()}
    given = _asked(knobs, said)
    source = f"--set {', '.join(given)}; else {_source(told)}" if given else _source(told)
    whole = {**found, **given, "image_size": image_size, "source": source}
    return Preprocessing(**whole, assumed=_assumed({*said, *given}))


class Sized(NamedTuple):
    """The size of a network's images, and what says it.

    ``assumed`` if nothing does, ``fixed`` if the network takes no other.
    """

    size: ImageSize
    source: str
    assumed: bool = False
    fixed: bool = False


class Images(NamedTuple):
    """How large a network's images are and how they are made (None where nothing says all of it), with the facts."""

    size: ImageSize
    preprocessing: Preprocessing | None
    facts: tuple[Fact, ...]


def images_by(own: Told, knobs: Knobs, usual: Sized) -> Images:
    """The one rule for networks of no method and for graphs: --set, else what a library says, else what is assumed.

    What the library says is taken whole or not at all: of a preprocessing that is not done alike here nothing is. Mean
    and std are never assumed.

    Args:
        own: What it says, in fields of `Preprocessing`.
        knobs: See `preprocessing_of`.
        usual: Of the network's images; another --set image_size is resized to in proportion.

    Raises:
        Refused: If another size than a fixed one is asked for.
    """
    said = {} if own.odd else own.values
    asked = _asked_size(knobs, usual.size) if usual.fixed else knobs.asked("image_size", parse_image_size)
    sized = Sized(asked, "--set image_size") if asked else usual
    facts = [Fact(name="image_size", value=sized.size, source=sized.source, assumed=sized.assumed)]
    if own.odd:
        against = "; ".join(own.odd)
        facts.append(Fact(name=PREPROCESSING, value="not taken", source=own.where, against=against))
    return Images(sized.size, _preprocessing_by(own, said, _asked(knobs, {}), sized.size), tuple(facts))


def _preprocessing_by(own: Told, said: dict[str, Any], given: dict[str, Any], size: ImageSize) -> Preprocessing | None:
    found = {"resize_edge": usual_edge(size), **said}
    if (edge := said.get("resize_edge")) is not None:
        found["resize_edge"] = edge * max(size) // max(said["image_size"])
    whole = {**found, **given, "image_size": size}
    if not {"mean", "std"} <= whole.keys():
        return None
    source = f"--set {', '.join(given)}" if given else own.where
    if given and said:
        source += f"; else {own.where}"
    if own.odd:
        source += f"; not taken from {own.where}: {', '.join(own.odd)}"
    # a library's own words leave out what they cannot be otherwise
    convention = {"channel_order", "keep_ratio"} if said else set()
    return Preprocessing(**whole, source=source, assumed=_assumed({*said, *given, *convention}))


def at_size(wanted: Preprocessing, size: ImageSize) -> Preprocessing:
    """The same for images of another size: resized to in proportion, or by the same rule where that was assumed."""
    edge = wanted.resize_edge
    if size == wanted.image_size:
        return wanted
    if "resize_edge" in wanted.assumed:
        edge = usual_edge(size)
    elif edge is not None:
        edge = edge * max(size) // max(wanted.image_size)
    return wanted.model_copy(update={"image_size": size, "resize_edge": edge})


def usual_edge(size: ImageSize) -> int | None:
    """To what the shorter edge is resized where nothing says it; None is the image size itself."""
    return _edge(CROP_RATIO, size) if max(size) >= SMALL else None


def _assumed(said: Collection[str]) -> tuple[str, ...]:
    """What is not said of how images are made."""
    return tuple(name for name in MADE_BY if name not in said)


def _asked(knobs: Knobs, said: Mapping[str, tuple[Any, str]]) -> dict[str, Any]:
    """What the user says of it, beside what the file does."""
    asked = {
        "mean": knobs.asked("mean", _numbers, *said.get("mean", ())),
        "std": knobs.asked("std", _numbers, *said.get("std", ())),
        "resize_edge": knobs.asked("resize_edge", positive),
        "keep_ratio": knobs.asked("keep_ratio", _yes_or_no),
        "interpolation": knobs.asked("interpolation", one_of(*INTERPOLATIONS)),
        "channel_order": knobs.asked("channel_order", one_of("RGB", "BGR"), *said.get("channel_order", ())),
    }
    return {name: value for name, value in asked.items() if value is not None}


def _source(told: list[Told]) -> str:
    """Where what is taken is from: the file's parts by name, ImageNet's for the rest, and what is not understood."""
    said = _said(told)
    odd = [f"not taken from {part.where}: {', '.join(part.odd)}" for part in told if part.odd]
    if not said:
        return "; ".join([IMAGENET, *(odd or ["not in the file"])])
    whole = {"mean", "std", "resize_edge"} <= {name for part in told for name in part.values}
    return "; ".join([*said, *([] if whole else [f"else {IMAGENET}"]), *odd])


def _said(told: list[Told]) -> list[str]:
    """What each part of a file says of how images are made, by name."""
    taken = [(part.where, [name for name in part.values if name != "image_size"]) for part in told]
    return [f"{where}: {', '.join(names)}" for where, names in taken if names]


def _sizes(args: Mapping[str, Any]) -> Told:
    """A trainer's image size; timm takes input_size [C, H, W] before img_size."""
    found: dict[str, Any] = {}
    odd = []
    for name in ("input_size", "img_size"):
        if (value := args.get(name)) is not None:
            size = as_size(value)
            if size is None or found.setdefault("image_size", size) != size:
                odd.append(f"{name}={value}")
    return Told("args", found, odd)


def _image_size(sizes: Told, of_config: Told, knobs: Knobs, fixed: ImageSize | None) -> ImageSize:
    if fixed is None:
        said = sizes if sizes.values else of_config
        found: ImageSize | None = said.values.get("image_size")
        return knobs.take("image_size", parse_image_size, (224, 224), found, said.where, free=True)
    _asked_size(knobs, fixed)
    knobs.facts.append(Fact(name="image_size", value=fixed, source="the network, which takes no other"))
    return fixed


def _asked_size(knobs: Knobs, fixed: ImageSize) -> ImageSize | None:
    """The user's size of images where there is one and the network takes no other."""
    if (asked := knobs.asked("image_size", parse_image_size)) in (None, fixed):
        return asked
    assert asked is not None
    raise Refused(
        f"this network takes images of {fixed[0]} x {fixed[1]} pixels, not {asked[0]} x {asked[1]}.",
        hint="Leave --set image_size out.",
        code="image-size",
    )


def _of_args(args: Mapping[str, Any], size: ImageSize) -> Told:
    """What timm's, DeiT's and PYRA's trainers say of their evaluation, in the names of their own options."""
    found: dict[str, Any] = {}
    odd = []
    if are_numbers(args.get("mean")) and are_numbers(args.get("std")):  # timm's: on the 0..1 scale
        found |= {name: tuple(255 * value for value in args[name]) for name in ("mean", "std")}
    else:
        odd += [f"{name}={args[name]}" for name in ("mean", "std") if args.get(name) is not None]
    if isinstance(args.get("inception"), bool) and isinstance(args.get("direct_resize"), bool):  # PYRA's datasets.py
        found |= {"mean": INCEPTION, "std": INCEPTION} if args["inception"] else {"mean": MEAN, "std": STD}
        found |= {"resize_edge": int((1 if args["direct_resize"] else 256 / 224) * max(size)), "keep_ratio": False}
    for name, whole in (("crop_pct", 0), ("eval_crop_ratio", DEIT_WHOLE)):
        if (ratio := args.get(name)) is not None:
            known = isinstance(ratio, (int, float)) and 0 < ratio <= 1
            edge = _edge(ratio, size) if known and max(size) > whole else None
            if not known or found.setdefault("resize_edge", edge) != edge:
                odd.append(f"{name}={ratio}")
    if (mode := args.get("crop_mode")) == "squash" and size[0] == size[1]:
        found["keep_ratio"] = False
    elif mode not in (None, "center"):
        odd.append(f"crop_mode={mode}")
    if (interpolation := args.get("interpolation")) in INTERPOLATIONS:
        found["interpolation"] = interpolation
    elif interpolation is not None:
        odd.append(f"interpolation={interpolation}")
    return Told("args", found, odd)


def _edge(ratio: float, size: ImageSize) -> int:
    return int(max(size) / ratio)


def _numbers(text: str) -> tuple[float, ...]:
    """A parser for numbers with commas between them."""
    return tuple(float(word) for word in text.split(","))


def _yes_or_no(text: str) -> bool:
    return one_of("yes", "no")(text) == "yes"


USUAL = preprocessing_of({}, {}, Knobs({}))
"""Where nobody says anything."""
