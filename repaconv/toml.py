"""TOML with line numbers: the reader gives values, this adds where each key stands."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repaconv.errors import UsageProblem

if TYPE_CHECKING:
    from pydantic import ValidationError

_HEADER = re.compile(r"\s*\[\[?\s*([^\]]+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r"""\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")

Lines = dict[tuple[str, ...], int]


def read_toml(path: Path, what: str) -> tuple[dict[str, Any], Lines]:
    """A file's table, and the line of each of its keys.

    Raises:
        UsageProblem: If it cannot be read or is no TOML.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageProblem(
            f"the {what} {path} cannot be read: {why_unreadable(error)}.",
            hint="Check its path.",
            code=f"{what}.unreadable",
        ) from error
    return parse_toml(text, str(path), what)


def parse_toml(text: str, where: str, what: str) -> tuple[dict[str, Any], Lines]:
    """The same from text; ``where`` names it.

    Raises:
        UsageProblem: If it is no TOML.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(text), key_lines(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageProblem(f"{where} is not TOML: {error}.", hint="Mend that line.", code=f"{what}.invalid") from error


def key_lines(text: str) -> Lines:
    """The line, from 1, of each table and of each key in it; of keys in inline tables that of the table."""
    found: Lines = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            table = _parts(header[1])
            found.setdefault(table, number)
        elif key := _KEY.match(line):
            found.setdefault((*table, *_parts(key[1])), number)
    return found


def line_of(lines: Lines, keys: tuple[str, ...]) -> int:
    """The line of a key, else of what holds it, else 1."""
    while keys:
        if keys in lines:
            return lines[keys]
        keys = keys[:-1]
    return 1


def first_problem(error: ValidationError, where: str, lines: Lines | None) -> str:
    """What is wrong first, as ``file:line: key: what is expected there.``; without lines, without the line."""
    return problems(error, where, lines)[0][1]


def problems(error: ValidationError, where: str, lines: Lines | None) -> list[tuple[int, str]]:
    """All that is wrong, each with its line."""
    found = []
    for each in error.errors():
        keys = tuple(map(str, each["loc"]))
        at = line_of(lines or {}, keys)
        expected = each["msg"].replace("valid tuple", "valid list").rstrip(".")  # a file has lists
        line = f":{at}" if lines is not None else ""
        found.append((at, f"{where}{line}: {'.'.join(keys)}: {expected[:1].lower()}{expected[1:]}."))
    return found


def why_unreadable(error: OSError | UnicodeDecodeError) -> str:
    """The system's words, without its number and the path."""
    return str(getattr(error, "strerror", None) or "it is not text")


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in re.findall(r"\"[^\"]*\"|'[^']*'|[^.]+", dotted))
