"""The only place that prints: results to stdout as text or JSON, everything else to stderr."""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from repaconv.core.errors import RepaconvError, in_letters
from repaconv.core.notices import LOGGER

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from repaconv.results import Record

SCHEMA_VERSION = 1
_WHOLE = ContextVar("whole", default=False)
ROWS = 10
"""Of a long table, where -v does not ask for all."""
PIPED_WIDTH = 200
"""Of a table that nobody's terminal holds, where COLUMNS says nothing."""
NEXT = {
    "inspect": "repaconv fold {took}",
    "fetch": "repaconv fold {address}",
    "fold": "repaconv export{run}",
    "convert": "repaconv export{run}",
    "form": "repaconv finetune{run} --images DIR",
    "finetune": "repaconv verify{run}",
    "verify": "repaconv export{run}",
    "export": "repaconv verify{run}",
    "build": "repaconv bench {wrote}",
    "bench": "repaconv report{run}",
    "new-recipe": "repaconv run {recipe}",
}
"""What usually comes after a stage; ``{run}`` is empty where the next command would take that run by itself."""


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


def envelope(command: str, exit_code: int, data: Any, errors: Iterable[RepaconvError] = ()) -> None:
    """Print the JSON envelope, the same for success and for every failure."""
    from repaconv.core.files import finite  # brings pydantic, which Tab and --help do without

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
    for name in ("input_files", "output_files"):
        if hasattr(record, name):
            data[name] = list(getattr(record, name))
    return data


@contextmanager
def progress(*, quiet: bool) -> Iterator[Any]:
    """A function (what, done, in all) that draws on a terminal, and elsewhere tells each step by a line on stderr.

    Meanwhile, notices are printed to stderr, each once, even if ``quiet``.
    """
    if quiet:
        with _notices(err()):
            yield lambda what, done, total: None
        return
    if not sys.stderr.isatty() or os.environ.get("CI"):
        with _notices(err()):
            yield _by_line()
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err(), transient=True) as bars, _notices(bars.console):
        task = bars.add_task("", total=None)
        yield lambda what, done, total: bars.update(task, description=plain(what), completed=done, total=total or None)


@contextmanager
def _notices(console: Console) -> Iterator[None]:
    """Print what `repaconv.core.notices` has, each sentence once."""
    printed: set[str] = set()

    class Printer(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            sentence = record.getMessage()
            if sentence not in printed:
                printed.add(sentence)
                console.print(plain(sentence))

    printer = Printer()
    LOGGER.addHandler(printer)
    LOGGER.propagate = False  # libraries add handlers to the root logger
    try:
        yield
    finally:
        LOGGER.propagate = True
        LOGGER.removeHandler(printer)


def _by_line() -> Any:
    """A line where a step begins, with the seconds until then."""
    begun, last = time.monotonic(), ""

    def told(what: str, _done: int, _total: int) -> None:
        nonlocal last
        if what != last:
            last = what
            sys.stderr.write(f"{time.monotonic() - begun:7.1f} s  {in_letters(what)}\n")
            sys.stderr.flush()

    return told


def next_step(command: str, done: Record) -> None:
    """The command that usually follows, to stderr."""
    command = "form" if getattr(done, "kind", "") == "training-form" else command
    if command not in NEXT:
        return
    wrote = [short(name) for name in getattr(done, "output_files", ())]
    took = short(str(getattr(getattr(done, "origin", None), "path", "")))
    if "{took}" in NEXT[command] and not took:
        return
    lacks: dict[str, str] = getattr(done, "missing_settings", {})
    problems: tuple[str, ...] = getattr(done, "problems", ())
    if command == "inspect" and problems and not lacks:
        return  # they say what to do
    if command == "build" and _not_here(done):
        return  # the engine is for another machine
    named = {name: getattr(done, name, "") for name in ("recipe", "address")}
    if "{run}" in NEXT[command]:
        words = _words_of_run(command, done)
    else:
        words = NEXT[command].format(took=took, wrote=wrote[0] if wrote else "", **named)
    if not words:
        return
    words = " ".join([words, *(f"--set {name}=N" for name in lacks), *_arch(done)])
    err().print(f"[dim] next[/] {plain(words)}")


def _words_of_run(command: str, done: Record) -> str:
    """What follows on a run, named where it is not the one that is taken by itself; empty where nothing does."""
    from repaconv.core import run_folder
    from repaconv.stages.shared.remote_targets import measured_by
    from repaconv.stages.shared.run_exports import exports_of

    run = run_folder.run_of([*getattr(done, "output_files", ()), *getattr(done, "input_files", ())])
    if run is None:
        return ""
    home = None if run_folder.is_newest(run) else Path(short(str(run.folder)))
    exports = exports_of(run, run_folder.fold_of(run)) if command == "verify" else []
    if not exports:
        return NEXT[command].format(run=f" {shlex.quote(str(home))}" if home else "")
    newest = max(exports, key=lambda each: each.path.stat().st_mtime_ns)
    try:
        return f"repaconv {measured_by(newest.artefact, home)}"
    except RepaconvError:  # the file of the user's own target is not there any more
        return ""


def _not_here(done: Record) -> bool:
    """Whether a result is for a target that is not this machine."""
    from repaconv.stages.shared.remote_targets import target_of, why_not_here

    return bool(why_not_here(target_of(done)[1]))  # type: ignore[arg-type]


def _arch(done: Record) -> tuple[str, ...]:
    """What ``fold`` asks of a checkpoint that no method knows and that is not of one published network alone."""
    if getattr(done, "method", "") is not None:
        return ()
    exact = sum(one.exact for one in getattr(done, "networks", ()))
    return () if exact == 1 else ("--arch NAME" if exact else "--arch ./net.py:build",)


def files(took: Iterable[str], wrote: Iterable[str], *, quiet: bool) -> None:
    """Which files a stage took and wrote, to stderr."""
    if quiet:
        return
    console = err()
    for verb, names in (("took", took), ("wrote", wrote)):
        for name in names:
            console.print(f"[dim]{verb:>5}[/] {plain(short(name))}")


def overridden(unverified: Iterable[str]) -> None:
    """Failed checks and contradicting settings that the user overrode."""
    for told in unverified:
        out().print(f"[bold yellow]overridden:[/] {plain(told)}")


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
