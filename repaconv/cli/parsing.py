"""Words of the command line as values, each refused in one sentence."""

from __future__ import annotations

from repaconv.errors import UsageProblem


def pairs(given: list[str] | None, option: str, separator: str = "=") -> dict[str, str]:
    """``name=value`` words as a dict.

    Raises:
        UsageProblem: If one has no separator or no name.
    """
    found = {}
    for word in given or []:
        name, mark, value = word.partition(separator)
        if not name or not mark:
            raise UsageProblem(
                f"{option} {word} is not NAME{separator}VALUE.",
                hint=f"E.g. {option} {'eps=1e-6' if separator == '=' else 'onnx:1e-6'}.",
                code="usage.pair",
            )
        found[name] = value
    return found


def number(text: str, option: str, example: str = "1e-6") -> float:
    """A float above zero, or a `UsageProblem`."""
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


def size(text: str | None) -> tuple[int, int] | None:
    """N or HEIGHTxWIDTH in pixels."""
    from repaconv.artefacts import parse_image_size

    try:
        return None if text is None else parse_image_size(text)
    except ValueError as error:
        raise UsageProblem(
            f"--image-size {text} is {error}.", hint="E.g. --image-size 224.", code="usage.image-size"
        ) from None


def whole(text: str, option: str) -> int:
    """A whole number above zero, or a `UsageProblem`."""
    if not text.isdigit() or int(text) == 0:
        raise UsageProblem(
            f"{option}: {text!r} is neither dynamic nor a whole number above zero.",
            hint=f"{option} dynamic or {option} 8.",
            code="usage.number",
        )
    return int(text)


def expand_onnx(arguments: list[str]) -> list[str]:
    """Typer has no option with an optional value: turn a lone ``--onnx`` into ``--onnx=``."""
    expanded = []
    for position, word in enumerate(arguments):
        following = arguments[position + 1 : position + 2]
        lone = word == "--onnx" and (not following or following[0].startswith("-"))
        expanded.append("--onnx=" if lone else word)
    return expanded
