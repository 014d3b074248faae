"""Terminal output: the consoles for stdout and stderr, tables, colors, and escaping of markup."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from repaconv.core.errors import escape_control_characters

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.segment import Segment
    from rich.table import Table
    from rich.text import Text


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
    printed = table(*header)
    for row in lines:
        printed.add_row(*map(plain, row))
    stdout().print(printed)


def _are_figures(column: Iterable[str]) -> bool:
    """Return whether a column contains only numbers."""
    words = [word for cell in column for word in cell.split()]
    return bool(words) and all(word[0] in "0123456789-(" for word in words if word != "to")


LEAST_TEXT_WIDTH = 12
"""A column of text is at least as wide, or as its longest word; in less, one row takes many lines."""


def table(*header: str) -> Table:
    """Return an empty table with that header.

    Columns of numbers are never wrapped or cut. Where the table does not fit, each row is printed as lines, with one
    column each.
    """
    from rich import box

    empty = _table_class()(*header, box=box.SIMPLE_HEAD, pad_edge=False, show_header=any(header))
    for column in empty.columns:
        column.overflow = "fold"
    return empty


@cache
def _table_class() -> type[Table]:
    from rich.padding import Padding
    from rich.segment import Segment
    from rich.table import Table

    class FittingTable(Table):
        def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
            cells = [[console.render_str(str(cell)) for cell in column.cells] for column in self.columns]
            for column, texts in zip(self.columns, cells, strict=True):
                column.no_wrap = column.no_wrap or _are_figures(text.plain for text in texts)
            widths = [
                _least_width(str(column.header), [text.plain for text in texts], whole=column.no_wrap)
                for column, texts in zip(self.columns, cells, strict=True)
            ]
            if sum(widths) + 3 * len(widths) - 1 <= options.max_width:  # 3 spaces between columns, 1 on each side
                yield from without_trailing_spaces(super().__rich_console__(console, options))
                return
            for number, row in enumerate(self.rows):
                lines = Table.grid(padding=(0, 2))
                lines.add_column(no_wrap=True)
                lines.add_column(overflow="fold")
                for column, texts in zip(self.columns, cells, strict=True):
                    if texts[number].plain:
                        lines.add_row(str(column.header), texts[number])
                spaced = Padding(lines, (1 if number == 0 else 0, 0, 1, 1), style=row.style or "none", expand=False)
                yield from without_trailing_spaces(console.render(spaced, options))

    def without_trailing_spaces(rendered: Iterable[Any]) -> Iterator[Segment]:
        """Lines end with their last letter: rich fills each one up to the width of the table."""
        for line in Segment.split_lines(rendered):
            while line and not line[-1].text.strip():
                line.pop()
            if line:
                yield from line[:-1]
                yield Segment(line[-1].text.rstrip(), line[-1].style)
            yield Segment.line()

    return FittingTable


def _least_width(header: str, cells: Sequence[str], *, whole: bool) -> int:
    """The width that a column needs: of its longest line if it is not wrapped, else of its longest word, up to 12."""
    if whole:
        return max(map(len, (header, *(line for cell in cells for line in cell.splitlines()))))
    longest = max((len(word) for text in (header, *cells) for word in text.split()), default=0)
    return min(longest, LEAST_TEXT_WIDTH)


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
