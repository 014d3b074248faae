"""What a stage was asked for, as it would be typed: artefacts record it, so that the report can say it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

NAMES = {"settings": "set", "workspace_mib": "workspace"}
"""Where the command line calls an argument otherwise."""


def as_typed(stage: Callable[..., Any], **given: Any) -> tuple[str, ...]:
    """Options of a command; what is a stage's default, or empty, is left out.

    Args:
        stage: The function, which knows the defaults.
        given: Its arguments: numbers, texts, paths, flags, (height, width) as ``image_size``, several links, settings
            by name, or tolerances by link.
    """
    usual = {name: argument.default for name, argument in signature(stage).parameters.items()}
    words: list[str] = []
    for name, value in given.items():
        if value not in (usual[name], None, (), [], {}):
            words += _option(NAMES.get(name, name).replace("_", "-"), value)
    return tuple(words)


def _option(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if name == "image-size" and not isinstance(value, int):
        return [f"--{name}", "x".join(map(str, value))]
    if isinstance(value, Mapping):
        mark = "=" if name == "set" else ":"
        return [word for key, each in value.items() for word in (f"--{name}", f"{key}{mark}{each}")]
    several = value if isinstance(value, (list, tuple)) else [value]
    return [word for each in several for word in (f"--{name}", str(each))]
