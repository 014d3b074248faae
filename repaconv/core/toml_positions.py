"""TOML with places: the reader gives values, this adds at which line and column each key stands."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv.core.errors import UsageProblem

if TYPE_CHECKING:
    from pydantic import ValidationError

_NAME = r"""(?:[\w-]+|"[^"]*"|'[^']*')"""
_HEADER = re.compile(r"\s*\[\[?\s*([^\]]+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(rf"\s*({_NAME}(?:\s*\.\s*{_NAME})*)\s*=")
_INLINE = re.compile(rf"(?<=[{{,])\s*({_NAME})\s*=")
_TEXT = re.compile(r""""(?:[^"\\]|\\.)*"|'[^']*'""")
_LONG = re.compile(r"""\"{3}|'{3}""")


class At(NamedTuple):
    """A place in a file, from 1; the file is empty where that is understood."""

    line: int
    column: int
    file: str = ""

    def __str__(self) -> str:
        """As editors take it."""
        return f"{self.file}:{self.line}:{self.column}"


Lines = dict[tuple[str, ...], At]


class NoToml(UsageProblem):
    """A text that is no TOML, and where it is not."""

    def __init__(self, told: str, at: At, code: str) -> None:
        super().__init__(f"{at}: this is not TOML: {told}.", hint="Mend that line.", code=code)
        self.at = at


def read_toml(path: Path, what: str) -> tuple[dict[str, Any], Lines]:
    """A file's table, and the place of each of its keys.

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
        NoToml: If it is no TOML.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(text), key_lines(text, where)
    except tomllib.TOMLDecodeError as error:
        told, _, _ = str(error).partition(" (at ")
        found = re.search(r"line (\d+), column (\d+)", str(error))
        last = len(text.splitlines()) or 1
        at = At(int(found[1]), int(found[2]), where) if found else At(last, 1, where)
        raise NoToml(told[:1].lower() + told[1:], at, f"{what}.invalid") from error


def key_lines(text: str, where: str = "") -> Lines:
    """The place of each table and of each key in it, those of inline tables that stand on one line too."""
    found: Lines = {}
    table: tuple[str, ...] = ()
    inside = False  # a text of several lines
    for number, line in enumerate(text.splitlines(), 1):
        turns = len(_LONG.findall(line)) % 2 == 1
        if inside or line.lstrip().startswith("#"):
            inside ^= turns
            continue
        inside = turns
        if header := _HEADER.match(line):
            table = _parts(header[1])
            found.setdefault(table, At(number, header.start(1) + 1, where))
        elif key := _KEY.match(line):
            named = (*table, *_parts(key[1]))
            found.setdefault(named, At(number, key.start(1) + 1, where))
            for name, start in _inline(line, key.end()):
                found.setdefault((*named, name), At(number, start + 1, where))
    return found


def _inline(line: str, start: int) -> Iterator[tuple[str, int]]:
    """Keys of an inline table, and where they begin."""
    if not line[start:].lstrip().startswith("{"):
        return
    bare = _TEXT.sub(lambda text: text[0] if line[text.end() :].lstrip()[:1] == "=" else "_" * len(text[0]), line)
    for key in _INLINE.finditer(bare, start):
        yield _parts(key[1])[0], key.start(1)


def place_of(lines: Lines, keys: tuple[str, ...], where: str = "") -> At:
    """The place of a key, else of what holds it, else where that file begins."""
    while keys:
        if keys in lines:
            return lines[keys]
        keys = keys[:-1]
    return At(1, 1, where)


_PLAIN = {
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "greater_than": "must be more than {gt}",
    "less_than": "must be less than {lt}",
    "extra_forbidden": "unknown key",
    "unexpected_keyword_argument": "unknown key",
}
"""In plain words, by pydantic's type of an error."""


def _in_plain_words(error: Mapping[str, Any]) -> str:
    """What is expected; other errors in pydantic's words."""
    known = _PLAIN.get(error["type"])
    return str(error["msg"]) if known is None else known.format(**error.get("ctx", {}))


class Problem(NamedTuple):
    """What pydantic found wrong, where, and in which key; ``error`` is its own account of it."""

    at: At
    keys: tuple[str, ...]
    told: str
    error: Mapping[str, Any]


def first_problem(error: ValidationError, where: str, lines: Lines | None) -> str:
    """What is wrong first, as ``file:line:column: key: what is expected there.``; without lines, without those."""
    first = problems(error, where, lines or {})[0]
    return f"{where if lines is None else first.at}: {first.told}"


def problems(error: ValidationError, where: str, lines: Lines) -> list[Problem]:
    """All that is wrong, each value once: of several types that it might have, the first counts."""
    found: dict[tuple[str, ...], Problem] = {}
    for each in error.errors():
        keys = tuple(map(str, each["loc"]))
        known = keys if each["type"] == "missing" else _known(keys, lines)
        expected = _in_plain_words(each).replace("valid tuple", "valid list").rstrip(".")  # a file has lists
        told = f"{'.'.join(known)}: {expected[:1].lower()}{expected[1:]}."
        found.setdefault(known, Problem(place_of(lines, keys, where), known, told, dict(each)))
    return list(found.values())


def _known(keys: tuple[str, ...], lines: Lines) -> tuple[str, ...]:
    """As much of it as stands in the file: the rest says which type was tried."""
    return next((keys[:n] for n in range(len(keys), 0, -1) if keys[:n] in lines), keys)


def why_unreadable(error: OSError | UnicodeDecodeError) -> str:
    """The system's words, without its number and the path."""
    return str(getattr(error, "strerror", None) or "it is not text")


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in re.findall(r"\"[^\"]*\"|'[^']*'|[^.]+", dotted))
