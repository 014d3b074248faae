"""Terminal output: the consoles for stdout and stderr, tables, colors, and escaping of markup."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from repaconv.core.errors import escape_control_characters

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


_WIDTH: ContextVar[int | None] = ContextVar("width", default=None)
_VERBOSE = ContextVar("whole", default=False)
PRINTED_ROWS = 10
"""Number of rows printed of a long table, unless -v asks for all."""
PIPED_WIDTH = 200
"""Width of tables in characters where stdout is not a terminal and COLUMNS is not set."""


def is_verbose() -> bool:
    """Return whether -v was given: tables are printed with every row and column."""
    return _VERBOSE.get()


def set_verbose(wanted: bool) -> None:
    """Set whether tables are printed in full, for this command (-v)."""
    _VERBOSE.set(wanted)


@cache
def _console() -> type[Console]:
    """Return the console class. It prints control characters in file names as escape sequences."""
    from rich.console import Console
    from rich.errors import MarkupError
    from rich.text import Text

    class Output(Console):
        def on_broken_pipe(self) -> None:
            """A reader that has seen enough, as `head`, leaves the verdict's exit code as it is."""
            self.quiet = True
            discard(self.file)

        def render_str(self, text: str, **how: Any) -> Text:
            """Markup where it is sound, and no control characters."""
            letters = escape_control_characters(text)
            try:
                return super().render_str(letters, **how)
            except MarkupError:
                return super().render_str(letters, **{**how, "markup": False})

    return Output


def discard(stream: IO[str]) -> None:
    """Discard what was not written to a standard stream and cannot be: Python tries again at exit, and then fails."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def stdout() -> Console:
    """Return the console for results (stdout)."""
    piped = not sys.stdout.isatty()
    columns = "" if is_verbose() else os.environ.get("COLUMNS", "")
    width = (int(columns) if columns.isdecimal() else 0) or _WIDTH.get() or PIPED_WIDTH if piped else None
    return _console()(highlight=False, emoji=False, soft_wrap=piped, width=width, color_system=_color_system())


@contextmanager
def as_wide_as_terminal() -> Iterator[None]:
    """Print no wider than the terminal that stdout is now, also where stdout is redirected meanwhile."""
    before = _WIDTH.set(shutil.get_terminal_size().columns if sys.stdout.isatty() else None)
    try:
        yield
    finally:
        _WIDTH.reset(before)


def stderr() -> Console:
    """Return the console for everything else (stderr)."""
    return _console()(stderr=True, highlight=False, emoji=False, soft_wrap=True, color_system=_color_system())


def _color_system() -> Literal["auto"] | None:
    """Return None if the user disabled colors; bold text is then off as well. https://no-color.org"""
    return None if os.environ.get("NO_COLOR") else "auto"


def print_message(sentence: str) -> None:
    """Print one line about the progress of a command to stderr."""
    stderr().print(plain(sentence))


def print_table(header: tuple[str, ...], lines: Iterable[tuple[str, ...]]) -> None:
    """Print a plain table to stdout."""
    rows = list(lines)
    printed = table(*header, figures=[n for n, column in enumerate(zip(*rows, strict=True)) if _are_figures(column)])
    for row in rows:
        printed.add_row(*map(plain, row))
    stdout().print(printed)


def _are_figures(column: Iterable[str]) -> bool:
    """Return whether a column contains only numbers. Such columns are not wrapped."""
    words = [word for cell in column for word in cell.split()]
    return bool(words) and all(word[0] in "0123456789-(" for word in words if word != "to")


def table(*header: str, figures: Collection[int] = ()) -> Table:
    """Return an empty table with that header. Long words are wrapped, except in the columns ``figures``."""
    from rich import box
    from rich.table import Table

    empty = Table(*header, box=box.SIMPLE_HEAD, pad_edge=False, show_header=any(header))
    for n, column in enumerate(empty.columns):
        column.overflow, column.no_wrap = "fold", n in figures
    return empty


def colored(verdict: str) -> str:
    """Return a verdict with color markup."""
    color = {"passed": "green", "trusted": "green", "failed": "bold red"}.get(verdict, "yellow")
    return f"[{color}]{verdict}[/]"


def value(value: Any) -> str:
    """Return the value of a fact on one line."""
    return plain(", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value))


def plain(text: str) -> str:
    """Return the text with its markup escaped."""
    from rich.markup import escape

    return escape(text)


def relative_path(name: str) -> str:
    """Return a path relative to the current folder if it is inside of it."""
    path = Path(name)
    return str(path.relative_to(Path.cwd())) if path.is_absolute() and path.is_relative_to(Path.cwd()) else name
