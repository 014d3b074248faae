"""How a value of an order is typed where its text is no plain number, word or path: read, and told again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from repaconv.errors import UsageProblem


class Text(NamedTuple):
    """How a value is typed.

    Attributes:
        read: The value of (text, option); of (texts, option) where there may be several.
        told: The text of a value; the texts where there may be several.
        several: Whether the option may be given more than once.
    """

    read: Callable[[Any, str], Any]
    told: Callable[[Any], str | list[str]]
    several: bool = False


def image_size(text: str, option: str) -> tuple[int, int]:
    """``224`` or ``140x126`` (height x width) in pixels."""
    from repaconv.artefacts import parse_image_size

    try:
        return parse_image_size(text)
    except ValueError as error:
        raise UsageProblem(
            f"{option} {text} is {error}.", hint=f"E.g. {option} 224.", code="usage.image-size"
        ) from None


def whole(text: str, option: str) -> int | None:
    """A whole number above zero; None for ``dynamic``."""
    if text == "dynamic":
        return None
    if not text.isdigit() or int(text) == 0:
        raise UsageProblem(
            f"{option}: {text!r} is neither dynamic nor a whole number above zero.",
            hint=f"Give {option} dynamic or, for example, {option} 8.",
            code="usage.number",
        )
    return int(text)


def number(text: str, option: str, example: str = "1e-6") -> float:
    """A float above zero."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not value > 0:
        raise UsageProblem(
            f"{option}: {text!r} is not a number above zero.", hint=f"E.g. {option} {example}.", code="usage.number"
        )
    return value


def share(text: str, option: str) -> float:
    """``5%`` or ``0.05``."""
    return number(text.removesuffix("%"), option, "5%") / (100 if text.endswith("%") else 1)


def pairs(words: Sequence[str], option: str, separator: str = "=") -> dict[str, str]:
    """``name=value`` words as a dict."""
    found = {}
    for word in words:
        name, mark, value = word.partition(separator)
        if not name or not mark:
            raise UsageProblem(
                f"{option} {word} is not NAME{separator}VALUE.",
                hint=f"E.g. {option} {'eps=1e-6' if separator == '=' else 'onnx:1e-6'}.",
                code="usage.pair",
            )
        found[name] = value
    return found


def _tolerances(words: Sequence[str], option: str) -> dict[str, float]:
    return {name: number(value, option) for name, value in pairs(words, option, ":").items()}


def _joined(value: Mapping[str, Any], mark: str) -> list[str]:
    return [f"{name}{mark}{each}" for name, each in value.items()]


SIZE = Text(image_size, lambda value: str(value) if isinstance(value, int) else "x".join(map(str, value)))
BATCH = Text(whole, lambda value: "dynamic" if value is None else str(value))
SHARE = Text(share, lambda value: f"{100 * value:.10g}%")
NAMES = Text(lambda text, _: tuple(text.split(",")), ",".join)
LINKS = Text(lambda words, _: tuple(words), list, several=True)
PATTERNS = LINKS
SETTINGS = Text(pairs, lambda value: _joined(value, "="), several=True)
TOLERANCES = Text(_tolerances, lambda value: _joined(value, ":"), several=True)
