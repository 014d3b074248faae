"""A target is a device as data; this is what its file may say."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from repaconv.artefact import Record
from repaconv.errors import UsageProblem
from repaconv.toml import Lines, line_of, parse_toml, read_toml


class BenchDefaults(Record):
    """The protocol, where a command does not say otherwise."""

    threads: int
    batch: int
    rounds: int
    warmup_rounds: int


class Target(Record):
    """A device: its runtime, what its parser takes, how it is measured."""

    name: str
    about: str
    runtime: str
    opset: int
    precisions: tuple[str, ...]
    bench: BenchDefaults


def packaged(name: str) -> Target:
    """A target of this package, by the stem of its file."""
    return parse(files("repaconv.targets").joinpath(f"{name}.toml").read_text(), f"{name}.toml")


def from_file(path: Path) -> Target:
    """A target of the user's own.

    Raises:
        UsageProblem: If it cannot be read or is not a target, with the line that is wrong.
    """
    return _validated(*read_toml(path, "target"), str(path))


def parse(text: str, where: str) -> Target:
    """Read a target's TOML text.

    Raises:
        UsageProblem: Naming the line and the field that is missing or wrong.
    """
    return _validated(*parse_toml(text, where, "target"), where)


def _validated(table: dict[str, Any], lines: Lines, where: str) -> Target:
    try:
        return Target.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        keys = tuple(map(str, first["loc"]))
        raise UsageProblem(
            f"{where}:{line_of(lines, keys)}: {'.'.join(keys)}: {first['msg']}.",
            hint="See repaconv/targets/x86-64.toml.",
            code="target.invalid",
        ) from error
