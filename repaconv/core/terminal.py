"""Terminal output: the consoles for stdout and stderr, tables, colors, and escaping of markup."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from repaconv.core.errors import in_letters

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


_WHOLE = ContextVar("whole", default=False)
ROWS = 10
"""Number of rows printed of a long table, unless -v asks for all."""
PIPED_WIDTH = 200
"""Width of tables in characters where stdout is not a terminal and COLUMNS is not set."""


def whole() -> bool:
    """Return whether -v was given: tables are printed with every row and column."""
    return _WHOLE.get()


def show_all(wanted: bool) -> None:
    """Set whether tables are printed in full, for this command (-v)."""
    _WHOLE.set(wanted)


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
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

        def render_str(self, text: str, **how: Any) -> Text:
            """Markup where it is sound, and no control characters."""
            letters = in_letters(text)
            try:
                return super().render_str(letters, **how)
            except MarkupError:
                return super().render_str(letters, **{**how, "markup": False})

    return Output


def out() -> Console:
    """Return the console for results (stdout)."""
    piped = not sys.stdout.isatty()
    told = 0 if whole() else int(os.environ.get("COLUMNS") or 0)
    width = told or PIPED_WIDTH if piped else None
    return _console()(highlight=False, emoji=False, soft_wrap=piped, width=width, color_system=_colours())


def err() -> Console:
    """Return the console for everything else (stderr)."""
    return _console()(stderr=True, highlight=False, emoji=False, soft_wrap=True, color_system=_colours())


def _colours() -> Literal["auto"] | None:
    """Return None if the user disabled colors; bold text is then off as well. https://no-color.org"""
    return None if os.environ.get("NO_COLOR") else "auto"


def told(sentence: str) -> None:
    """Print one line about the progress of a command to stderr."""
    err().print(plain(sentence))


def rows(header: tuple[str, ...], lines: Iterable[tuple[str, ...]]) -> None:
    """Print a plain table to stdout."""
    told = list(lines)
    whole = table(*header, figures=[n for n, column in enumerate(zip(*told, strict=True)) if _are_figures(column)])
    for line in told:
        whole.add_row(*map(plain, line))
    out().print(whole)


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


def coloured(verdict: str) -> str:
    """Return a verdict with color markup."""
    colour = {"passed": "green", "trusted": "green", "failed": "bold red"}.get(verdict, "yellow")
    return f"[{colour}]{verdict}[/]"


def value(value: Any) -> str:
    """Return the value of a fact on one line."""
    return plain(", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value))


def plain(text: str) -> str:
    """Return the text with its markup escaped."""
    from rich.markup import escape

    return escape(text)


def short(name: str) -> str:
    """Return a path relative to the current folder if it is inside of it."""
    path = Path(name)
    return str(path.relative_to(Path.cwd())) if path.is_absolute() and path.is_relative_to(Path.cwd()) else name
