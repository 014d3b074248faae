"""TOML with positions: parses a file and gives the line and column of each key, for error messages."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv.core.errors import UsageProblem, unreadable

if TYPE_CHECKING:
    from pydantic import ValidationError

_NAME = r"""(?:[\w-]+|"[^"]*"|'[^']*')"""
_HEADER = re.compile(r"\s*\[\[?\s*([^\]]+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(rf"\s*({_NAME}(?:\s*\.\s*{_NAME})*)\s*=")
_INLINE = re.compile(rf"(?<=[{{,])\s*({_NAME})\s*=")
_TEXT = re.compile(r""""(?:[^"\\]|\\.)*"|'[^']*'""")
_LONG = re.compile(r"""\"{3}|'{3}""")


class Position(NamedTuple):
    """A position in a file, counted from 1. ``file`` is empty if it is clear from the context."""

    line: int
    column: int
    file: str = ""

    def __str__(self) -> str:
        """Return ``file:line:column``, as editors read it."""
        return f"{self.file}:{self.line}:{self.column}"


Positions = dict[tuple[str, ...], Position]

MOST_NESTED = 50
"""Maximum number of lists and tables in each other."""


class InvalidToml(UsageProblem):
    """A text is not valid TOML; ``at`` is the position of the error."""

    def __init__(self, message: str, at: Position, code: str) -> None:
        super().__init__(f"{at}: this is not TOML: {message}.", hint="Mend that line.", code=code)
        self.at = at


def read_toml(path: Path, what: str) -> tuple[dict[str, Any], Positions]:
    """Read a TOML file: its table, and the position of each key.

    Raises:
        Refused: If this user may not read it.
        UsageProblem: If it cannot be read for another reason, or is not TOML.
    """
    try:
        text = text_of_file(path, "utf-8-sig")  # Windows editors begin a file with a byte order mark
    except PermissionError as error:
        raise unreadable(path) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageProblem(
            f"the {what} {path} cannot be read: {why_unreadable(error)}.",
            hint=f"A {what} is a TOML file."
            if isinstance(error, UnicodeDecodeError | IsADirectoryError)
            else "Check its path.",
            code=f"{what}.unreadable",
        ) from error
    return parse_toml(text, str(path), what)


def parse_toml(text: str, where: str, what: str) -> tuple[dict[str, Any], Positions]:
    """Parse a TOML text: its table, and the position of each key. ``where`` is the file name in messages.

    Raises:
        InvalidToml: If it is not TOML.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        table = tomllib.loads(text)
        if _is_deeper(table, MOST_NESTED):  # dotted keys nest without a recursion of the parser
            raise RecursionError
        return table, key_lines(text, where)
    except tomllib.TOMLDecodeError as error:
        message, _, _ = str(error).partition(" (at ")
        found = re.search(r"line (\d+), column (\d+)", str(error))
        last = len(text.splitlines()) or 1
        at = Position(int(found[1]), int(found[2]), where) if found else Position(last, 1, where)
        raise InvalidToml(message[:1].lower() + message[1:], at, f"{what}.invalid") from error
    except RecursionError as error:
        raise InvalidToml("arrays or tables are nested too deep", Position(1, 1, where), f"{what}.invalid") from error


def _is_deeper(value: Any, depth: int) -> bool:
    """Whether lists and tables are in each other more than ``depth`` times."""
    layer = [value]
    for _ in range(depth + 1):
        inner = [each.values() if isinstance(each, dict) else each for each in layer if isinstance(each, (dict, list))]
        layer = [each for values in inner for each in values]
    return bool(layer)


def key_lines(text: str, where: str = "") -> Positions:
    """Return the position of each table and of each key, including keys of inline tables on one line."""
    found: Positions = {}
    table: tuple[str, ...] = ()
    inside = False  # whether the line is within a multi-line string
    for number, line in enumerate(text.splitlines(), 1):
        turns = len(_LONG.findall(line)) % 2 == 1
        if inside or line.lstrip().startswith("#"):
            inside ^= turns
            continue
        inside = turns
        if header := _HEADER.match(line):
            table = _parts(header[1])
            found.setdefault(table, Position(number, header.start(1) + 1, where))
        elif key := _KEY.match(line):
            named = (*table, *_parts(key[1]))
            found.setdefault(named, Position(number, key.start(1) + 1, where))
            for name, start in _inline(line, key.end()):
                found.setdefault((*named, name), Position(number, start + 1, where))
    return found


def _inline(line: str, start: int) -> Iterator[tuple[str, int]]:
    """Yield the keys of an inline table, with the columns at which they start."""
    if not line[start:].lstrip().startswith("{"):
        return
    bare = _TEXT.sub(lambda text: text[0] if line[text.end() :].lstrip()[:1] == "=" else "_" * len(text[0]), line)
    for key in _INLINE.finditer(bare, start):
        yield _parts(key[1])[0], key.start(1)


def position_of(lines: Positions, keys: tuple[str, ...], where: str = "") -> Position:
    """Return the position of a key, or of the nearest enclosing table, or the start of the file."""
    while keys:
        if keys in lines:
            return lines[keys]
        keys = keys[:-1]
    return Position(1, 1, where)


_PLAIN = {
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "greater_than": "must be more than {gt}",
    "less_than": "must be less than {lt}",
    "extra_forbidden": "unknown key",
    "unexpected_keyword_argument": "unknown key",
}
"""Messages in plain words, by pydantic's error type."""


NOT_NAN = "must be a number, not NaN"
"""Message for NaN, which is neither above nor below a limit."""


def is_nan(value: object) -> bool:
    """Whether a value is NaN or its text."""
    return str(value).strip().lower().lstrip("+-") == "nan" and isinstance(value, (str, float))


def _in_plain_words(error: Mapping[str, Any]) -> str:
    """Return what is expected, in plain words if the error type is known, else pydantic's message."""
    if is_nan(error["input"]):
        return NOT_NAN
    known = _PLAIN.get(error["type"])
    return str(error["msg"]) if known is None else known.format(**error.get("ctx", {}))


class Problem(NamedTuple):
    """A validation error of pydantic: its position, its key and a message. ``error`` is pydantic's own description."""

    at: Position
    keys: tuple[str, ...]
    message: str
    error: Mapping[str, Any]


def first_problem(error: ValidationError, where: str, lines: Positions | None) -> str:
    """Return the first error as ``file:line:column: key: what is expected.``; without ``lines``, without line and
    column."""
    first = problems(error, where, lines or {})[0]
    return f"{where if lines is None else first.at}: {first.message}"


def problems(error: ValidationError, where: str, lines: Positions) -> list[Problem]:
    """Return all errors, one per value: if a value may have several types, the first type counts."""
    found: dict[tuple[str, ...], Problem] = {}
    for each in error.errors():
        keys = tuple(map(str, each["loc"]))
        known = keys if each["type"] == "missing" else _keys_in_file(keys, lines)
        expected = _in_plain_words(each).replace("valid tuple", "valid list").rstrip(".")  # a file has lists
        message = f"{'.'.join(known)}: {expected[:1].lower()}{expected[1:]}."
        found.setdefault(known, Problem(position_of(lines, keys, where), known, message, dict(each)))
    return list(found.values())


def _keys_in_file(keys: tuple[str, ...], lines: Positions) -> tuple[str, ...]:
    """Return the part of the key that is in the file: pydantic appends the name of the type that it tried."""
    return next((keys[:n] for n in range(len(keys), 0, -1) if keys[:n] in lines), keys)


def text_of_file(path: Path, encoding: str = "utf-8") -> str:
    """Return the text of a file, or of a pipe such as /dev/stdin.

    Raises:
        OSError: If it cannot be read, or is a device, of which some never end.
        UnicodeDecodeError: If it is not text.
    """
    if path.is_char_device() or path.is_block_device():
        raise OSError("it is a device, not a regular file")
    return path.read_text(encoding)


def why_unreadable(error: OSError | UnicodeDecodeError) -> str:
    """Return the operating system's message, without its error number and the path."""
    if isinstance(error, IsADirectoryError):
        return "it is a folder"
    return str(getattr(error, "strerror", None) or ("it is not text" if isinstance(error, ValueError) else error))


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in re.findall(r"\"[^\"]*\"|'[^']*'|[^.]+", dotted))
