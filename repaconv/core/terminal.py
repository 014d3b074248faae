"""Printing to a terminal: the consoles of stdout and stderr, tables, colors, and text without markup."""

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
"""Of a long table, where -v does not ask for all."""
PIPED_WIDTH = 200
"""Of a table that nobody's terminal holds, where COLUMNS says nothing."""


def whole() -> bool:
    """Whether -v asks for every row and column."""
    return _WHOLE.get()


def show_all(wanted: bool) -> None:
    """What -v says, for this command."""
    _WHOLE.set(wanted)


@cache
def _console() -> type[Console]:
    """What writes: names of a file are letters on a terminal, whatever they are made of."""
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
    """Where results go."""
    piped = not sys.stdout.isatty()
    told = 0 if whole() else int(os.environ.get("COLUMNS") or 0)
    width = told or PIPED_WIDTH if piped else None
    return _console()(highlight=False, emoji=False, soft_wrap=piped, width=width, color_system=_colours())


def err() -> Console:
    """Where everything else goes."""
    return _console()(stderr=True, highlight=False, emoji=False, soft_wrap=True, color_system=_colours())


def _colours() -> Literal["auto"] | None:
    """None where the user wants none: bold is none, too. https://no-color.org"""
    return None if os.environ.get("NO_COLOR") else "auto"


def told(sentence: str) -> None:
    """One line to stderr, of what goes on."""
    err().print(plain(sentence))


def rows(header: tuple[str, ...], lines: Iterable[tuple[str, ...]]) -> None:
    """A plain table."""
    told = list(lines)
    whole = table(*header, figures=[n for n, column in enumerate(zip(*told, strict=True)) if _are_figures(column)])
    for line in told:
        whole.add_row(*map(plain, line))
    out().print(whole)


def _are_figures(column: Iterable[str]) -> bool:
    """Whether it has numbers alone, which mean nothing where they are broken."""
    words = [word for cell in column for word in cell.split()]
    return bool(words) and all(word[0] in "0123456789-(" for word in words if word != "to")


def table(*header: str, figures: Collection[int] = ()) -> Table:
    """An empty table with that header; long words are folded, but in columns of figures."""
    from rich import box
    from rich.table import Table

    empty = Table(*header, box=box.SIMPLE_HEAD, pad_edge=False, show_header=any(header))
    for n, column in enumerate(empty.columns):
        column.overflow, column.no_wrap = "fold", n in figures
    return empty


def coloured(verdict: str) -> str:
    """A verdict in its colour."""
    colour = {"passed": "green", "trusted": "green", "failed": "bold red"}.get(verdict, "yellow")
    return f"[{colour}]{verdict}[/]"


def value(value: Any) -> str:
    """A fact's value on one line."""
    return plain(", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value))


def plain(text: str) -> str:
    """Text in which nothing is markup."""
    from rich.markup import escape

    return escape(text)


def short(name: str) -> str:
    """A path as it is seen from here."""
    path = Path(name)
    return str(path.relative_to(Path.cwd())) if path.is_absolute() and path.is_relative_to(Path.cwd()) else name
