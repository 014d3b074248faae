"""The only place that prints: results to stdout as text or JSON, everything else to stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repaconv.errors import RepaconvError
from repaconv.files import finite

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from repaconv.artefacts import Record

SCHEMA_VERSION = 1


def out() -> Console:
    """Where results go."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=not sys.stdout.isatty(), width=None if sys.stdout.isatty() else 200)


def err() -> Console:
    """Where everything else goes."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


def envelope(command: str, exit_code: int, data: Any, errors: Iterable[RepaconvError] = ()) -> None:
    """Print the JSON envelope, the same for success and for every failure."""
    statuses = {0: "ok", 1: "failed", 5: "inconclusive"}
    found = [{"code": error.code, "message": error.message, "hint": error.hint} for error in errors]
    whole = {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "status": statuses.get(exit_code, "error"),
        "exit_code": exit_code,
        "data": data,
        "errors": found,
    }
    sys.stdout.write(json.dumps(finite(whole), indent=2, sort_keys=True, allow_nan=False) + "\n")


def error(problem: RepaconvError) -> None:
    """One sentence, and what to do about it."""
    console = err()
    console.print(f"[bold red]error:[/] {plain(problem.message)} [dim]({problem.code})[/]")
    if problem.hint:
        console.print(f"[bold]hint:[/] {plain(problem.hint)}")


def plain_data(record: Record) -> dict[str, Any]:
    """An artefact for the envelope, with the files it took and wrote."""
    data: dict[str, Any] = record.model_dump(mode="json")
    for name in ("took", "wrote"):
        if hasattr(record, name):
            data[name] = list(getattr(record, name))
    return data


@contextmanager
def progress(*, quiet: bool) -> Iterator[Any]:
    """A function (what, done, in all) that draws on a terminal and does nothing elsewhere."""
    if quiet or not sys.stderr.isatty() or os.environ.get("CI"):
        yield lambda what, done, total: None
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err(), transient=True) as bars:
        task = bars.add_task("", total=None)
        yield lambda what, done, total: bars.update(task, description=what, completed=done, total=total or None)


def files(took: Iterable[str], wrote: Iterable[str], *, quiet: bool) -> None:
    """Which files a stage took and wrote, to stderr."""
    if quiet:
        return
    console = err()
    for verb, names in (("took", took), ("wrote", wrote)):
        for name in names:
            console.print(f"[dim]{verb:>5}[/] {plain(_short(name))}")


def overridden(unverified: Iterable[str]) -> None:
    """What was not proved, or contradicts the checkpoint, and was taken all the same."""
    for told in unverified:
        out().print(f"[bold yellow]taken all the same:[/] {plain(told)}")


def told(sentence: str) -> None:
    """One line to stderr, of what goes on."""
    err().print(plain(sentence))


def rows(header: tuple[str, ...], lines: Iterable[tuple[str, ...]]) -> None:
    """A plain table."""
    whole = table(*header)
    for line in lines:
        whole.add_row(*map(plain, line))
    out().print(whole)


def table(*header: str) -> Table:
    """An empty table with that header; long words are folded."""
    from rich import box
    from rich.table import Table

    empty = Table(*header, box=box.SIMPLE_HEAD, pad_edge=False, show_header=any(header))
    for column in empty.columns:
        column.overflow = "fold"
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


def _short(name: str) -> str:
    path = Path(name)
    return str(path.relative_to(Path.cwd())) if path.is_absolute() and path.is_relative_to(Path.cwd()) else name
