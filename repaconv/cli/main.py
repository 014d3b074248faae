"""Entry point of the command line: registers the commands, runs one, and turns errors into messages and exit codes."""

from __future__ import annotations

import gc
import io
import os
import re
import shlex
import signal
import sys
from errno import ENAMETOOLONG
from itertools import pairwise
from pathlib import Path
from threading import current_thread, main_thread
from types import FrameType
from typing import Annotated, TextIO

import typer

from repaconv.cli import stage_commands  # the order of `--help`

# isort: split
from repaconv.cli import recipe_and_report_commands

# isort: split
from repaconv.cli import conversion_commands

# isort: split
from repaconv.cli import board_and_cluster_commands

# isort: split
from repaconv.cli import installation_and_demo_commands

# isort: split
from repaconv.cli.command_options import app, readers_may_stop
from repaconv.cli.shell_completion import finished_words
from repaconv.core.changed_input_files import require_none_truncated
from repaconv.core.errors import (
    EnvironmentProblem,
    Interrupted,
    RepaconvError,
    UsageProblem,
    describe_exception,
    did_you_mean,
    memory_problem,
    unreadable,
)
from repaconv.core.onnx_ir_without_sympy import defer_sympy
from repaconv.core.terminal import discard

COMMANDS = (
    stage_commands,
    recipe_and_report_commands,
    conversion_commands,
    board_and_cluster_commands,
    installation_and_demo_commands,
)
"""The modules with the commands. Importing them registers the commands, in the order of `--help`."""
CHOICE = re.compile(r"'([^']*)' is not one of (.*)")
"""A value of an option, and the quoted ones that it may have, in Typer's message."""
NOT_READABLE = re.compile(r"[Pp]ath '(.*)' is not readable")
"""A file or folder that may not be read, in Typer's message."""
UNKNOWN = re.compile(r"No such command '([^']*)'")
OTHER_WORDS = {
    "benchmark": "bench",
    "calibrate": "export --precision int8 --images DIR",
    "diff": "compare",
    "init": "new-recipe",
    "optimize": "fold",
    "profile": "bench --profile",
    "prune": "fold",
    "quantize": "export --precision int8 --images DIR",
    "simplify": "fold",
    "test": "verify",
}
"""What other tools call a command, and how it is typed here."""
COMPLETING = "_REPACONV_COMPLETE"
"""Environment variable set by the script of `repaconv --install-completion`."""


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False,
) -> None:
    """Fold a trained vision network exactly into its fastest inference-time form; verify, export and benchmark it."""
    if version:
        from importlib.metadata import version as installed

        sys.stdout.write(f"repaconv {installed('repaconv')}\n")
        raise typer.Exit(0)
    if context.invoked_subcommand is None:  # without a command, print only the help
        sys.stdout.write(f"{context.get_help()}\n")
        raise typer.Exit(2)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code. Errors that a user can fix are printed without a traceback."""
    own_process = arguments is None
    if own_process:
        gc.set_threshold(100_000)  # makes importing torch a quarter faster
        defer_sympy()
        if current_thread() is main_thread():  # only there Python lets signals be set
            _end_as_by_ctrl_c(signal.SIGTERM, signal.SIGHUP)
        sys.stdout, sys.stderr = (stream or _opened_devnull() for stream in (sys.stdout, sys.stderr))
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # file names may be undecodable
    given = sys.argv[1:] if arguments is None else arguments
    command = next((word for word in given if not word.startswith("-")), "")
    usage_error: type[Exception] = typer.BadParameter.__bases__[0]  # Typer exports only this one of its kind
    code: object = 0
    problem: RepaconvError | None
    try:
        if COMPLETING not in os.environ:
            _require_no_empty_value(given)
        asked = app.only(finished_words(os.environ) if COMPLETING in os.environ else given)
        with readers_may_stop():
            code = asked(args=given, prog_name="repaconv", standalone_mode=False)
        problem = _interruption() if code == Interrupted.exit_code else None
    except (KeyboardInterrupt, typer.Abort):
        problem = _interruption()
    except Exception as raised:
        problem = _error_of(raised, command, usage_error, given)
    code = _print_error(problem, command, given) if problem else code
    try:
        sys.stdout.flush()
    except (KeyboardInterrupt, OSError) as stopped:
        discard(sys.stdout)  # Python would try again at exit and end with code 120
        if not problem and not isinstance(stopped, BrokenPipeError):
            problem = _machine_error(stopped) if isinstance(stopped, OSError) else _interruption()
            code = _print_error(problem, command, given)
    if own_process and "onnxsim" not in sys.modules:  # which prints a warning if its objects are not freed
        gc.freeze()  # the garbage collection at exit takes most of a second after importing torch
    if own_process and current_thread() is main_thread() and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C would print a traceback of what runs at exit
    sys.exit(code if isinstance(code, int) else 0)


def _error_of(problem: Exception, command: str, usage_error: type[Exception], given: list[str]) -> RepaconvError:
    """Return the error that a user can fix.

    Raises:
        Exception: The problem itself if it is a defect, which needs its traceback.
    """
    if _RECEIVED:  # pydantic, e.g., makes an error of its own of the exception of a signal
        return _interruption()
    if isinstance(problem, RepaconvError):
        return _root_cause(problem)
    if isinstance(problem, usage_error):
        return _usage_error(problem, command, given)
    if isinstance(problem, (MemoryError, OSError, RuntimeError)):
        return _machine_error(problem)
    raise problem


_RECEIVED: list[signal.Signals] = []
"""The signal that ends this command."""


class _Signaled(KeyboardInterrupt):
    """A signal as an exception. Python ends a process by SIGINT where a KeyboardInterrupt proper left an `exec`."""


def _end_as_by_ctrl_c(*signals: signal.Signals) -> None:
    """Let signals end the command as Ctrl-C does, so that nothing half-written is left; a second one ends it at once.

    Ctrl-C itself does as in Python again, after `repaconv.__main__`. A signal that whoever started the command ignores,
    as nohup does, remains ignored.
    """

    def interrupt(number: int, _frame: object) -> None:
        for each in ours:
            signal.signal(each, signal.SIG_DFL)
        _RECEIVED.append(signal.Signals(number))
        raise _Signaled

    def ctrl_c(number: int, frame: FrameType | None) -> None:
        _RECEIVED.append(signal.Signals(number))
        signal.default_int_handler(number, frame)

    if signal.getsignal(signal.SIGINT) in (signal.SIG_DFL, signal.default_int_handler):
        signal.signal(signal.SIGINT, ctrl_c)
    ours = [each for each in signals if signal.getsignal(each) is signal.SIG_DFL]
    for each in ours:
        signal.signal(each, interrupt)


def _interruption() -> Interrupted:
    return Interrupted(*_RECEIVED[:1])


def _require_no_empty_value(given: list[str]) -> None:
    """Refuse an empty argument: it would be taken for the current folder, or for an option that was not given.

    Raises:
        UsageProblem: If there is one.
    """
    for before, word in pairwise(["", *given]):
        option = before if before.startswith("-") else ""
        if word.startswith("-") and word.endswith("=") and word.count("=") == 1:
            option, word = word.removesuffix("="), ""
        if not word:
            what = f"the value of {option}" if option else "an argument"
            raise UsageProblem(
                f"{what} is empty.",
                hint="Check whether a shell variable in the command has a value.",
                code="usage.arguments",
            )


def _root_cause(problem: RepaconvError) -> RepaconvError:
    """Return the error that caused this one: if an input file was truncated during reading, that is the cause."""
    try:
        require_none_truncated()
    except RepaconvError as cut:
        return cut
    return problem


def _machine_error(problem: Exception) -> RepaconvError:
    """Return an error about the machine: no memory, or a failed system call.

    Raises:
        Exception: The problem itself if it is anything else: a defect, which needs its traceback.
    """
    if isinstance(problem, OSError):
        if problem.errno == ENAMETOOLONG and problem.filename:
            from repaconv.core.files import require_valid_name  # imports pydantic, which is too slow for --help

            try:
                require_valid_name(Path(os.fsdecode(problem.filename)))
            except RepaconvError as refused:
                return refused
        if isinstance(problem, PermissionError) and problem.filename and not _is_reachable(problem.filename):
            return unreadable(os.fsdecode(problem.filename))
        where = f"{problem.filename}: " if problem.filename else ""
        sentence = f"the operating system refused: {where}{problem.strerror or describe_exception(problem)}."
        return EnvironmentProblem(
            sentence, hint="Check the path, the permissions and the free space.", code="environment.system"
        )
    if (memory := memory_problem(problem)) is not None:
        return memory
    raise problem


def _is_reachable(path: str | bytes) -> bool:
    """Return whether the folders that a file is in may be searched. Errors of writing have their own sentence."""
    try:
        Path(os.fsdecode(path)).stat()
    except PermissionError:
        return False
    except OSError:
        return True
    return True


def _usage_error(problem: BaseException, command: str, given: list[str]) -> RepaconvError:
    from repaconv.core.toml_positions import NOT_NAN, is_nan

    message = problem.format_message() if hasattr(problem, "format_message") else str(problem)
    message = message.replace("Value error, ", "")  # what pydantic puts before the sentence of a parser
    for wrong in getattr(problem.__cause__, "errors", list)():  # pydantic's, of an option
        message = message.replace(wrong["msg"], NOT_NAN) if is_nan(wrong["input"]) else message
    if locked := NOT_READABLE.search(message):  # which says nothing about the command
        return unreadable(locked[1])
    choice = CHOICE.search(message)
    near = did_you_mean(choice[1], re.findall("'([^']*)'", choice[2])) if choice else ""
    if (unknown := UNKNOWN.search(message)) and unknown[1] in OTHER_WORDS:
        message, near = f"{unknown[0]}.", f"Here that is repaconv {OTHER_WORDS[unknown[1]]}. "
    missing = re.match(r"Missing \w+ '(.*?)'", message)
    if missing and (meaning := getattr(getattr(problem, "param", None), "help", None)):
        near = f"{missing[1]}: {meaning.rstrip('.')}. "
    if "No such option" in message and (file := next((each for each in given if _is_dashed_file(each)), "")):
        near = f"If you mean the file, write {shlex.quote(f'./{file}')}. "
    known = command in [each.name for each in app.registered_commands]
    help_command = f"repaconv {command} --help" if known else "repaconv --help"
    sentence = message.rstrip(".").removesuffix("?") + ("?" if message.rstrip(".").endswith("?") else ".")
    return UsageProblem(sentence, hint=f"{near}See `{help_command}`.", code="usage.arguments")


def _is_dashed_file(argument: str) -> bool:
    """Whether an argument that was taken for options is the name of a file or folder."""
    try:
        return argument.startswith("-") and Path(argument).exists()
    except (OSError, ValueError):  # too long, or not valid
        return False


def _print_error(problem: RepaconvError, command: str, given: list[str]) -> int:
    from repaconv.cli import text_and_json_output

    as_json = "--format=json" in given or ("--format", "json") in pairwise(given)
    try:
        if as_json:
            text_and_json_output.print_json(command, problem.exit_code, None, [problem])
            sys.stdout.flush()
            return problem.exit_code
    except OSError:  # its disk is full, or the reader closed the pipe
        discard(sys.stdout)
    try:
        text_and_json_output.print_error(problem)
        sys.stderr.flush()
    except OSError:
        discard(sys.stderr)
    return problem.exit_code


def _opened_devnull() -> TextIO:
    """Open a stream for a standard stream that was closed before the command began, which Python gives as None."""
    return Path(os.devnull).open("w", encoding="utf-8")
