"""What methods read beside the tensors: the user's settings, the run's configuration, the preprocessing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from repaconv.artefact import Fact, ImageSize, Preprocessing, parse_image_size
from repaconv.checkpoint import find_typed, read_mmconfig
from repaconv.errors import Refused, UsageProblem

T = TypeVar("T")

CODE_DEFAULT = "default of the official code; neither tensors nor file tell"


class Knobs:
    """Values that no tensor shows, each taken from --set, else from the file, else from the default.

    Every one that was taken leaves a fact with its source and what speaks against it.
    """

    def __init__(self, settings: Mapping[str, str]) -> None:
        """Start with the user's ``--set name=value`` pairs."""
        self._left = dict(settings)
        self._known: list[str] = []
        self.facts: list[Fact] = []

    def take(self, name: str, parse: Callable[[str], T], default: T, found: T | None = None, source: str = "") -> T:
        """One value; ``found`` is what the file says of it, ``source`` where it would say so, if anywhere.

        Raises:
            UsageProblem: If the user's value does not parse.
        """
        self._known.append(name)
        if (text := self._left.pop(name, None)) is not None:
            try:
                value = parse(text)
            except ValueError as error:
                raise UsageProblem(
                    f"--set {name}={text}: {error}.", hint=f"E.g. --set {name}={default}.", code="setting.value"
                ) from None
            against = f"{source} says {found}" if found is not None and found != value else ""
            self.facts.append(Fact(name=name, value=value, source="--set", against=against))
            return value
        value = default if found is None else found
        silent = f"default of the official code, which {source} leaves" if source else CODE_DEFAULT
        self.facts.append(Fact(name=name, value=value, source=silent if found is None else source))
        return value

    def maybe(self, name: str, parse: Callable[[str], T], found: T | None = None, source: str = "") -> T | None:
        """One value that may stay unknown: the user's, else the file's, else None and no fact."""
        if name in self._left or found is not None:
            return self.take(name, parse, found, found, source)
        self._known.append(name)
        return None

    def need(self, name: str, parse: Callable[[str], T], example: str, why: str) -> T:
        """One value that only the user can give.

        Raises:
            Refused: Naming the setting, if it was not given; ``why`` says why it cannot be known.
        """
        if name not in self._left:
            raise Refused(f"{why}.", hint=f"Give it with --set {name}=..., e.g. {example}.", code="setting.needed")
        return self.take(name, parse, parse(example))

    def done(self) -> None:
        """Refuse settings that nobody took.

        Raises:
            UsageProblem: Naming the first of them.
        """
        for name in self._left:
            raise UsageProblem(
                f"there is no setting {name!r} for this method.",
                hint=f"Known: {', '.join(self._known)}." if self._known else "It takes none here.",
                code="setting.unknown",
            )


def one_of(*choices: str) -> Callable[[str], str]:
    """A parser that takes one of these words."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"not one of {', '.join(choices)}")
        return text

    return parse


def positive(text: str) -> int:
    """A parser for whole numbers above zero."""
    if not text.isdigit() or int(text) == 0:
        raise ValueError("not a whole number above zero")
    return int(text)


def natural(text: str) -> int:
    """A parser for whole numbers from zero."""
    if not text.isdigit():
        raise ValueError("not a whole number")
    return int(text)


def small(text: str) -> float:
    """A parser for an epsilon: above 0, below 1."""
    value = float(text)
    if not 0 < value < 1:
        raise ValueError("not between 0 and 1")
    return value


def run_config(record: Mapping[str, Any]) -> dict[str, Any]:
    """mmengine's configuration text, in the places where its Runner puts it; {} without one."""
    places = (record.get("meta"), (record.get("message_hub") or {}).get("runtime_info"))
    for place in places:
        if isinstance(place, Mapping) and isinstance(text := place.get("cfg") or place.get("config"), str):
            return read_mmconfig(text)
    return {}


def preprocessing_of(
    record: Mapping[str, Any], config: Mapping[str, Any], knobs: Knobs, fixed: ImageSize | None = None
) -> Preprocessing:
    """Mean, std and sizes from mmengine's configuration or a trainer's args, else ImageNet's.

    Takes the knob ``image_size``; with ``fixed``, the size that the network is for, no other is taken.

    Raises:
        Refused: If another size than ``fixed`` is asked for.
    """
    args = record.get("args") if isinstance(record.get("args"), Mapping) else {}
    assert isinstance(args, Mapping)
    size, source = _number(args.get("img_size") or args.get("input_size")), "args"
    if size is None:
        pipeline = config.get("test_pipeline")
        size, source = _number((find_typed(pipeline, "CenterCrop") or {}).get("crop_size")), "meta.cfg"
    if fixed is None:
        image_size = knobs.take("image_size", parse_image_size, (224, 224), (size, size) if size else None, source)
    elif (asked := knobs.maybe("image_size", parse_image_size)) in (None, fixed):
        image_size = fixed
    else:
        raise Refused(
            f"this network is for images of {fixed[0]} x {fixed[1]} pixels, not of {asked}.",
            hint="Leave --set image_size out.",
            code="image-size",
        )
    resize = find_typed(config.get("test_pipeline"), "ResizeEdge") or {}
    data = config.get("data_preprocessor")
    if isinstance(data, Mapping) and _triple(data.get("mean")) and _triple(data.get("std")):
        return Preprocessing(
            mean=tuple(data["mean"]),
            std=tuple(data["std"]),
            channel_order="RGB" if data.get("to_rgb") else "BGR",
            image_size=image_size,
            resize_edge=_number(resize.get("scale")),
            interpolation=str(resize.get("interpolation", "bilinear")),
            source="meta.cfg",
        )
    return Preprocessing(
        mean=(123.675, 116.28, 103.53),
        std=(58.395, 57.12, 57.375),
        image_size=image_size,
        source="ImageNet's, as in the official configuration; the file does not tell",
    )


def _triple(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(isinstance(entry, (int, float)) for entry in value)


def _number(value: Any) -> int | None:
    if isinstance(value, list):  # timm's input_size is [C, H, W]
        value = value[-1] if value else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
