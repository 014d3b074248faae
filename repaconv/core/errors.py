"""Exception classes. Each has a message, a hint, a stable error code and the exit code of the command."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from errno import EACCES
from importlib import import_module
from pathlib import Path
from signal import Signals
from typing import Any

MAX_MESSAGE_LENGTH = 1000
"""Maximum length of a message in characters. Names read from a file can have any length."""
TELEMETRY = "openvino_telemetry"
CPP_PLACE = re.compile(r"\s*[^\s:]*/onnxruntime/\S+\.\w+:\d+ (?:[^()]*::[^\s()]+\([^()]*\)(?: const)? )?")
"""Source file and line, and the signature of the function, with which ONNX Runtime's messages begin."""


def in_one_line(text: str) -> str:
    """Return the text on one line, shortened if it is very long. Names in files may contain newlines and escapes."""
    short = (
        text
        if len(text) <= MAX_MESSAGE_LENGTH
        else f"{text[: MAX_MESSAGE_LENGTH // 2]} ... {text[-MAX_MESSAGE_LENGTH // 4 :]}"
    )
    return escape_control_characters(short, but="")


def escape_control_characters(text: str, but: str = "\n") -> str:
    """Return the text with control characters escaped, except those in ``but``."""
    return "".join(each if each.isprintable() or each in but else ascii(each)[1:-1] for each in text)


def describe_exception(error: BaseException) -> str:
    """Describe an exception of another library as part of a sentence: its class and the first line of its message."""
    first = first_line(error)
    return f"{type(error).__name__}: {first}" if first != type(error).__name__ else first


def root_cause(error: BaseException) -> BaseException:
    """Return the innermost cause of an exception, e.g. the error that a library wrapped in one of its own."""
    return root_cause(error.__cause__) if error.__cause__ else error


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its class name if the message is empty.

    The reason of an error of ONNX Runtime may come after hundreds of characters about the place in its source code,
    which are left out.
    """
    return CPP_PLACE.sub(" ", str(error)).strip().partition("\n")[0].rstrip(".")[:300] or type(error).__name__


class RepaconvError(Exception):
    """Base class of all errors whose message is written for users.

    Args:
        message: One sentence that describes what is wrong and where.
        hint: What to do about it.
        code: Stable, dotted name that scripts may match, e.g. ``checkpoint.truncated``.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "", code: str) -> None:
        super().__init__(message)
        self.message = in_one_line(message)
        self.hint = "\n".join(map(in_one_line, hint.split("\n")))  # commands to copy are on lines of their own
        self.code = code
        if self.hint:
            self.__notes__ = [f"hint: {self.hint}"]  # from Python 3.11 on, tracebacks print notes after the message


class GateFailed(RepaconvError):
    """A verification or a measurement did not meet its limit (exit 1).

    Args:
        module: Name of the module where it failed, if known.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "", code: str, module: str = "") -> None:
        super().__init__(message, hint=hint, code=code)
        self.module = module


class UsageProblem(RepaconvError):
    """The command line or the configuration is invalid (exit 2)."""

    exit_code = 2


class EnvironmentProblem(RepaconvError):
    """Something is missing on this machine: a runtime, a target, disk space (exit 3)."""

    exit_code = 3


class Refused(RepaconvError):
    """The input is unsafe, corrupt, ambiguous or not foldable (exit 4)."""

    exit_code = 4


def unreadable(path: Path | str) -> Refused:
    """Return the error for a file or folder that this user may not read."""
    return Refused(
        f"{path} cannot be read: {os.strerror(EACCES)}.",
        hint="Check its permissions, and those of the folders that it is in.",
        code="file.unreadable",
    )


class SettingNeeded(Refused):
    """A required model setting is missing from the checkpoint and was not given by the user (exit 4).

    Args:
        name: Name of the setting.
        example: An example value.
        instead: A setting that was given and is probably a misspelling of this one.
    """

    def __init__(self, message: str, name: str, example: str, instead: str = "") -> None:
        misspelt = f", in place of --set {instead}" if instead else ""
        super().__init__(
            message, hint=f"Give it with --set {name}=..., e.g. {example}{misspelt}.", code="setting.needed"
        )
        self.name, self.example = name, example


class Inconclusive(RepaconvError):
    """The measurement does not allow a verdict, e.g. because of too much noise (exit 5)."""

    exit_code = 5


class Interrupted(RepaconvError):
    """The user pressed Ctrl-C (exit 130), or another signal ended the command: SIGTERM (143) or SIGHUP (129)."""

    exit_code = 130

    def __init__(self, received: Signals = Signals.SIGINT) -> None:
        by = "" if received == Signals.SIGINT else f" by {received.name}"
        message = f"interrupted{by}: complete files were kept, and no half-written file is left."
        super().__init__(message, hint="Run the same command again to complete it.", code="interrupted")
        self.exit_code = 128 + received


def memory_problem(error: BaseException) -> EnvironmentProblem | None:
    """Return the error to raise if this one says that there is no memory, by its class or by torch's message."""
    if not isinstance(error, MemoryError) and "allocate memory" not in str(error):
        return None
    return EnvironmentProblem(
        "not enough memory; existing results are unchanged.",
        hint="Free memory, or run it on a machine with more.",
        code="environment.memory",
    )


def require_module(module: str, called: str, hint: str) -> Any:
    """Import an optional dependency, with OpenVINO's telemetry disabled.

    OpenVINO and NNCF report every import and write an identifier to the home folder, unless their telemetry package
    cannot be imported at that moment.

    Args:
        module: Name of the module.
        called: Name of the library in the error message.
        hint: How to install it.

    Raises:
        EnvironmentProblem: If it cannot be imported.
    """
    before = sys.modules.get(TELEMETRY)
    sys.modules[TELEMETRY] = None  # type: ignore[assignment]  # an import of it now fails, as if it were not installed
    try:
        return import_module(module)
    except Exception as error:  # a package that is broken, or of another version's, may raise anything
        why = str(error) if isinstance(error, ImportError) else describe_exception(error)
        raise EnvironmentProblem(f"{called} cannot be imported: {why}.", hint=hint, code="runtime.missing") from error
    finally:
        sys.modules.pop(TELEMETRY)
        if before is not None:
            sys.modules[TELEMETRY] = before


def first_names(names: Sequence[str], most: int, separator: str = ", ") -> str:
    """Return the first names as one text, which ends in how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "Did you mean X? " for the most similar known name, as the start of a hint; empty if none is similar."""
    near = nearest_name(name, known)
    return f"Did you mean {near}? " if near else ""


def nearest_name(name: str, known: Iterable[str]) -> str:
    """Return the most similar known name, first the same one in other capitals; empty if none is similar."""
    names = list(known)
    lowered = {each.lower(): each for each in reversed(names)}
    if same := lowered.get(name.lower()):
        return same
    near = get_close_matches(name, names, 1) or get_close_matches(name.lower(), list(lowered), 1)
    return lowered.get(near[0], near[0]) if near else ""
