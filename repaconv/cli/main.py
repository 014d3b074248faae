"""The command line: options to a stage, its artefact to the renderer, its verdict to the exit code."""

from __future__ import annotations

import gc
import io
import os
import sys
from itertools import pairwise
from typing import Annotated

import typer

from repaconv.cli import stage_commands  # the order of `--help`

# isort: split
from repaconv.cli import workflow_commands

# isort: split
from repaconv.cli import conversion_commands

# isort: split
from repaconv.cli import fleet_commands

# isort: split
from repaconv.cli import environment_commands

# isort: split
from repaconv.cli.command_options import app
from repaconv.cli.shell_completion import name_of, named_alone
from repaconv.core.change_guard import require_none_cut
from repaconv.core.errors import EnvironmentProblem, Interrupted, RepaconvError, UsageProblem, said_by

COMMANDS = (stage_commands, workflow_commands, conversion_commands, fleet_commands, environment_commands)
"""Where the commands are: importing them registers each."""
COMPLETING = "_REPACONV_COMPLETE"
"""Set by the script of `repaconv --install-completion`."""


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
    if context.invoked_subcommand is None:  # no command is no work: the help, and no more words
        sys.stdout.write(f"{context.get_help()}\n")
        raise typer.Exit(2)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and leave the process with its exit code; no traceback for what a user can mend."""
    own_process = arguments is None
    if own_process:
        gc.set_threshold(100_000)  # a quarter off the time that importing torch takes
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # names of files may be no text
    if COMPLETING in os.environ:
        app.registered_commands = named_alone(app.registered_commands, os.environ)
    given = sys.argv[1:] if arguments is None else arguments
    command = next((word for word in given if not word.startswith("-")), "")
    usage_error: type[Exception] = typer.BadParameter.__bases__[0]  # Typer exports only this one of its kind
    try:
        code = app(args=given, prog_name="repaconv", standalone_mode=False)
        sys.stdout.flush()
        code = _report(Interrupted(), command, given) if code == Interrupted.exit_code else code
    except RepaconvError as problem:
        code = _report(_first(problem), command, given)
    except usage_error as problem:
        code = _report(_usage(problem, command), command, given)
    except (KeyboardInterrupt, typer.Abort):
        code = _report(Interrupted(), command, given)
    except BrokenPipeError:  # who read it has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except (MemoryError, OSError, RuntimeError) as problem:
        code = _report(_of_the_machine(problem), command, given)
    if own_process and "onnxsim" not in sys.modules:  # which complains where its objects are not freed
        gc.freeze()  # leaving would search all that torch imported for garbage, for most of a second
    sys.exit(code if isinstance(code, int) else 0)


def _first(problem: RepaconvError) -> RepaconvError:
    """What came before it: a file that was cut while it was read is why all else went wrong."""
    try:
        require_none_cut()
    except RepaconvError as cut:
        return cut
    return problem


def _of_the_machine(problem: Exception) -> EnvironmentProblem:
    """What no stage could foresee: no memory, or something that the system does not do.

    Raises:
        Exception: The problem itself, if it is another: a defect, whose place must be seen.
    """
    if isinstance(problem, OSError):
        where = f"{problem.filename}: " if problem.filename else ""
        told = f"the operating system refused: {where}{problem.strerror or said_by(problem)}."
        return EnvironmentProblem(
            told, hint="Check the path, the permissions and the free space.", code="environment.system"
        )
    if isinstance(problem, MemoryError) or "allocate memory" in str(problem):
        told = "not enough memory; existing results are unchanged."
        return EnvironmentProblem(
            told, hint="Free memory, or run it on a machine with more.", code="environment.memory"
        )
    raise problem


def _usage(problem: BaseException, command: str) -> UsageProblem:
    message = problem.format_message() if hasattr(problem, "format_message") else str(problem)
    help_command = (
        f"repaconv {command} --help" if command in map(name_of, app.registered_commands) else ("repaconv --help")
    )
    told = message.rstrip(".").removesuffix("?") + ("?" if message.rstrip(".").endswith("?") else ".")
    return UsageProblem(told, hint=f"See `{help_command}`.", code="usage.arguments")


def _report(problem: RepaconvError, command: str, given: list[str]) -> int:
    from repaconv.cli import text_and_json_output

    as_json = "--format=json" in given or ("--format", "json") in pairwise(given)
    if as_json:
        text_and_json_output.envelope(command, problem.exit_code, None, [problem])
    else:
        text_and_json_output.error(problem)
    return problem.exit_code
