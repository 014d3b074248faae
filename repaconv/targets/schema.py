"""A target is a device as data; this is what its file may say."""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from repaconv.artefact import Record
from repaconv.errors import UsageProblem


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
        UsageProblem: If it cannot be read or is not a target.
    """
    try:
        return parse(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageProblem(
            f"the target file {path} cannot be read: {error}.", hint="Check its path.", code="target.unreadable"
        ) from error


def parse(text: str, where: str) -> Target:
    """Read a target's TOML text.

    Raises:
        UsageProblem: Naming the field that is missing or wrong.
    """
    try:
        return Target.model_validate(_toml(text))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise UsageProblem(
            f"{where}: {field}: {first['msg']}.", hint="See repaconv/targets/x86-64.toml.", code="target.invalid"
        ) from error
    except ValueError as error:
        raise UsageProblem(
            f"{where} is not TOML: {error}.", hint="See repaconv/targets/x86-64.toml.", code="target.invalid"
        ) from error


def _toml(text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    table: dict[str, Any] = tomllib.loads(text)
    return table
