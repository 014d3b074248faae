"""Printing of all commands: results to stdout as text or JSON, everything else to stderr."""

from __future__ import annotations

import io
import json
import logging
import os
import shlex
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repaconv.core.errors import RepaconvError, escape_control_characters
from repaconv.core.progress import LOGGER
from repaconv.core.terminal import as_wide_as_terminal, discard, plain, relative_path, stderr, stdout

if TYPE_CHECKING:
    from rich.console import Console

    from repaconv.core.run_folder import Run
    from repaconv.results import Record

SCHEMA_VERSION = 1
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
    "open-recipe": "edit {recipe}, then repaconv run {recipe}",
}
"""The command that usually follows each stage. ``{run}`` is empty if the next command uses that run by default."""


def print_json(command: str, exit_code: int, data: Any, errors: Iterable[RepaconvError] = ()) -> None:
    """Print the JSON envelope, the same for success and for every failure."""
    from repaconv.core.files import json_safe  # imports pydantic, which is too slow for completion and --help

    statuses = {0: "ok", 1: "failed", 5: "inconclusive"}
    found = [{"code": problem.code, "message": problem.message, "hint": problem.hint} for problem in errors]
    whole = {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "status": statuses.get(exit_code, "error"),
        "exit_code": exit_code,
        "data": data,
        "errors": found,
    }
    sys.stdout.write(json.dumps(json_safe(whole), indent=2, sort_keys=True, allow_nan=False) + "\n")


def print_error(problem: RepaconvError) -> None:
    """Print an error message and its hint to stderr."""
    console = stderr()
    console.print(f"[bold red]error:[/] {plain(problem.message)} [dim]({problem.code})[/]")
    if problem.hint:
        console.print(f"[bold]hint:[/] {plain(problem.hint)}")


TEXTS = {
    "BenchArtefact": "stages.bench.text.show_bench",
    "BuildArtefact": "stages.build.text.show_build",
    "BundleArtefact": "stages.bundle.text.show_bundle_and_collect",
    "CollectArtefact": "stages.bundle.text.show_bundle_and_collect",
    "CompareArtefact": "stages.bench.text.show_compare",
    "ConvertArtefact": "stages.convert.text.show_convert",
    "EstimateArtefact": "stages.bench.text.show_estimate",
    "ExportArtefact": "stages.export.text.show_export",
    "Fetched": "stages.fetch.text.show_fetch",
    "FileInspection": "stages.inspect.text.show_inspect",
    "FinetuneArtefact": "stages.convert.text.show_finetune",
    "FoldArtefact": "stages.fold.text.show_fold",
    "GateReport": "stages.recipe.text.show_gate",
    "Inspection": "stages.inspect.text.show_inspect",
    "NewRecipe": "stages.recipe.text.show_recipe_run",
    "PaperTable": "stages.paper_table.text.show_paper_table",
    "RecipeRun": "stages.recipe.text.show_recipe_run",
    "Report": "stages.report.text.show_report",
    "RunsReport": "stages.report.text.show_report",
    "SaveArtefact": "stages.save.text.show_save",
    "ScoreArtefact": "stages.convert.text.show_score",
    "ThroughputArtefact": "stages.bench.text.show_throughput",
    "TuneArtefact": "stages.tune.text.show_tune",
    "VerifyArtefact": "stages.verify.text.show_verify",
    "SweepArtefact": "distributed.sweep_text.show_sweep",
}
"""The function that prints a result as text, by the name of the result's class or of one of its base classes."""


def print_result(done: Record) -> None:
    """Print a result to stdout as text."""
    printed_by = next(TEXTS[kind.__name__] for kind in type(done).__mro__ if kind.__name__ in TEXTS)
    module, _, function = printed_by.rpartition(".")
    getattr(import_module(f"repaconv.{module}"), function)(done)


def printed_text(done: Record) -> str:
    """Return what `print_result` prints, as wide as the terminal if there is one; empty if it prints no such result."""
    if not any(kind.__name__ in TEXTS for kind in type(done).__mro__):
        return ""
    from rich.text import Text

    with as_wide_as_terminal(), redirect_stdout(io.StringIO()) as text:
        print_result(done)
    plain_text = Text.from_ansi(text.getvalue()).plain  # with FORCE_COLOR, redirected output has color codes, too
    return "\n".join(line.rstrip() for line in plain_text.splitlines()).strip("\n")


def plain_data(record: Record) -> dict[str, Any]:
    """Return an artifact for the JSON envelope, with its input and output files."""
    data: dict[str, Any] = record.model_dump(mode="json")
    for name in ("input_files", "output_files"):
        if hasattr(record, name):
            data[name] = list(getattr(record, name))
    return data


@contextmanager
def progress(*, quiet: bool) -> Iterator[Any]:
    """Yield a progress callback (step, done, total): a bar on a terminal, otherwise one line per step on stderr.

    Meanwhile, notices are printed to stderr, each once, even if ``quiet``. So is what other code prints to stdout, such
    as the user's own of --arch: stdout is for the result.
    """
    with _callback(quiet=quiet) as callback, redirect_stdout(sys.stderr):
        yield callback


@contextmanager
def _callback(*, quiet: bool) -> Iterator[Any]:
    if quiet:
        with _notices(stderr()):
            yield lambda what, done, total: None
        return
    if not sys.stderr.isatty() or os.environ.get("CI"):
        with _notices(stderr()):
            yield _by_line()
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr(), transient=True) as bars, _notices(bars.console):
        task = bars.add_task("", total=None)
        yield lambda what, done, total: bars.update(task, description=plain(what), completed=done, total=total or None)


@contextmanager
def _notices(console: Console) -> Iterator[None]:
    """Print the messages of `repaconv.core.progress`, each sentence once."""
    printed: set[str] = set()

    class Printer(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            sentence = record.getMessage()
            if sentence not in printed:
                printed.add(sentence)
                console.print(plain(sentence))

    printer = Printer()
    LOGGER.addHandler(printer)
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False  # libraries add handlers to the root logger
    try:
        yield
    finally:
        LOGGER.propagate = True
        LOGGER.setLevel(logging.NOTSET)
        LOGGER.removeHandler(printer)


def _by_line() -> Any:
    """Return a progress callback that prints one line at the start of each step, with the elapsed seconds."""
    begun, last = time.monotonic(), ""

    def print_step(what: str, _done: int, _total: int) -> None:
        nonlocal last
        if what != last:
            last = what
            try:
                sys.stderr.write(f"{time.monotonic() - begun:7.1f} s  {escape_control_characters(what)}\n")
                sys.stderr.flush()
            except BrokenPipeError:  # the work continues although its progress is not read
                discard(sys.stderr)

    return print_step


def print_next_step(command: str, done: Record) -> None:
    """Print the command that usually follows to stderr."""
    problems: tuple[str, ...] = getattr(done, "problems", ())
    command = "form" if getattr(done, "kind", "") == "training-form" else command
    command = "open-recipe" if command == "new-recipe" and problems else command
    if command not in NEXT:
        return
    origin = str(getattr(getattr(done, "origin", None), "path", "")) or _graph_to_fold(done)
    if "{took}" in NEXT[command] and not origin:
        return
    lacks: dict[str, str] = getattr(done, "missing_settings", {})
    if command == "inspect" and problems and not lacks:
        return  # the problems tell the user what to do
    if command == "build" and _is_for_other_machine(done):
        return  # the engine is for another machine
    named = {name: getattr(done, name, "") for name in ("recipe", "address")}
    named |= {"took": relative_path(origin), "wrote": relative_path(next(iter(getattr(done, "output_files", ())), ""))}
    if "{run}" in NEXT[command]:
        words = _next_command_for_run(command, done)
    else:
        words = NEXT[command].format(**{name: shlex.quote(str(value)) for name, value in named.items()})
    if not words:
        return
    words = " ".join([words, *(f"--set {name}=N" for name in lacks), *_arch_option(done)])
    stderr().print(f"[dim] next[/] {plain(words)}")


REMEDIES = {
    "int8": "repaconv tune{run} --max-disagreement 0.5% --inputs FILE.npz finds layers to keep in FP32; "
    "export --keep-fp32 LAYERS keeps those that you name",
    "exact": "repaconv verify{run} --drift shows how the error grows from layer to layer",
    "not verified": "repaconv verify{run} --inputs FILE.npz, with images of the kind that the network is for",
    "inconclusive": "stop other processes and repeat it; --rounds N measures longer",
}
"""What to do about a failed link of an INT8 model, of an exact one, a link that is not verified, a measurement."""


def print_remedy(command: str, done: Record) -> None:
    """Print what to do about a failed check or an inconclusive measurement to stderr, for the steps of a run."""
    if command in ("export", "verify", "build", "bench") and (remedy := _remedy(done)):
        stderr().print(f"[dim] next[/] {plain(REMEDIES[remedy].format(run=_argument(_folder_to_name(_run_of(done)))))}")


def _remedy(done: Record) -> str:
    """The key of `REMEDIES` for a result; empty if there is none."""
    agreement = getattr(done, "agreement", None)
    links = [*getattr(done, "links", ()), *([agreement] if agreement is not None else [])]
    failed = [link for link in links if link.verdict == "failed"]
    if any(link.tolerance is None or link.tolerance.kind == "exact" for link in failed):
        return "" if "--drift" in getattr(done, "options", ()) else "exact"
    if failed:
        return "int8" if any(link.name == "int8" for link in failed) else ""
    regression = getattr(done, "regression", None)
    if regression is not None and regression.verdict == "failed":
        return ""
    if getattr(done, "inconclusive", False):
        return "inconclusive"
    return "not verified" if any(link.verdict == "not verified" for link in links) else ""


def _graph_to_fold(done: Record) -> str:
    """The path of an ONNX model that was inspected; empty if repaconv exported it."""
    facts = getattr(done, "facts", ())
    if getattr(done, "kind", "") != "ONNX graph" or any(fact.name.startswith("repaconv.") for fact in facts):
        return ""
    return str(getattr(done, "path", ""))


def _next_command_for_run(command: str, done: Record) -> str:
    """Return the command that follows for a run; empty if there is none. The default run is not named in it."""
    from repaconv.core import run_folder
    from repaconv.stages.shared.exports_of_run import exports_of
    from repaconv.stages.shared.unavailable_targets import measuring_command

    run = _run_of(done)
    if run is None:
        return ""
    home = _folder_to_name(run)
    exports = exports_of(run, run_folder.fold_of(run)) if command == "verify" else []
    if not exports:
        return NEXT[command].format(run=_argument(home))
    newest = max(exports, key=lambda each: each.path.stat().st_mtime_ns)
    try:
        return f"repaconv {measuring_command(newest.artefact, home)}"
    except RepaconvError:  # the file of a user-defined target was removed
        return ""


def _run_of(done: Record) -> Run | None:
    """The run of a result's files; None if there is none."""
    from repaconv.core import run_folder

    return run_folder.run_of([*getattr(done, "output_files", ()), *getattr(done, "input_files", ())])


def _folder_to_name(run: Run | None) -> Path | None:
    """The folder of a run, relative to the current one; None if commands take that run by default."""
    from repaconv.core import run_folder

    return None if run is None or run_folder.is_newest(run) else Path(relative_path(str(run.folder)))


def _argument(folder: Path | None) -> str:
    return f" {shlex.quote(str(folder))}" if folder else ""


def _is_for_other_machine(done: Record) -> bool:
    """Return whether a result is for a target that is not this machine."""
    from repaconv.stages.shared.unavailable_targets import target_of, why_not_here

    return bool(why_not_here(target_of(done)[1]))  # type: ignore[arg-type]


def _arch_option(done: Record) -> tuple[str, ...]:
    """Return the --arch option to suggest for a checkpoint of which `inspect` does not know what builds it."""
    if not getattr(done, "needs_arch", False):
        return ()
    exact = any(one.exact for one in getattr(done, "networks", ()))
    return ("--arch NAME" if exact else "--arch ./net.py:build",)


def print_files(took: Iterable[str], wrote: Iterable[str], *, quiet: bool) -> None:
    """Print the input and output files of a stage to stderr."""
    if quiet:
        return
    console = stderr()
    for verb, names in (("read", took), ("wrote", wrote)):
        for name in names:
            console.print(f"[dim]{verb:>5}[/] {plain(relative_path(name))}")


def print_overridden(unverified: Iterable[str]) -> None:
    """Print the failed checks and contradicting settings that the user overrode."""
    for description in unverified:
        stdout().print(f"[bold yellow]overridden:[/] {plain(description)}")
