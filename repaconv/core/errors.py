"""What can go wrong: a sentence, what to do about it, a stable code and the exit code of the command."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module
from typing import Any

LONGEST = 1000
"""Characters of a message: names that a file brings may be of any length."""
TELEMETRY = "openvino_telemetry"


def in_one_line(text: str) -> str:
    """The text in one line, and not without end: names of a file may have newlines and escapes."""
    short = text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[-LONGEST // 4 :]}"
    return in_letters(short, but="")


def in_letters(text: str, but: str = "\n") -> str:
    """The text without what a terminal takes for more than a letter, ``but`` for newlines."""
    return "".join(each if each.isprintable() or each in but else ascii(each)[1:-1] for each in text)


def said_by(error: BaseException) -> str:
    """What somebody else's exception says, as part of a sentence: its kind, and its first line."""
    first = first_line(error)
    return f"{type(error).__name__}: {first}" if first != type(error).__name__ else first


def first_line(error: BaseException) -> str:
    """The first line of it, or its kind where it says nothing."""
    return str(error).strip().partition("\n")[0].rstrip(".")[:300] or type(error).__name__


class RepaconvError(Exception):
    """Base of every error that a user is meant to read.

    Args:
        message: One sentence that says what is wrong and where.
        hint: What to do about it.
        code: Stable, dotted name that scripts may match, e.g. ``checkpoint.truncated``.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "", code: str) -> None:
        super().__init__(message)
        self.message = in_one_line(message)
        self.hint = "\n".join(map(in_one_line, hint.split("\n")))  # commands to copy stand in lines of their own
        self.code = code


class GateFailed(RepaconvError):
    """A proof or a measurement did not meet its bound (exit 1).

    Args:
        module: Where it failed, if that is known.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "", code: str, module: str = "") -> None:
        super().__init__(message, hint=hint, code=code)
        self.module = module


class UsageProblem(RepaconvError):
    """The command or the configuration does not make sense (exit 2)."""

    exit_code = 2


class EnvironmentProblem(RepaconvError):
    """This machine lacks something: a runtime, a target, disk space (exit 3)."""

    exit_code = 3


class Refused(RepaconvError):
    """The input is unsafe, corrupt, ambiguous or not foldable (exit 4)."""

    exit_code = 4


class SettingNeeded(Refused):
    """What only the user can tell was not told (exit 4).

    Args:
        name: The setting.
        example: A value that it might have.
        instead: A setting that was given and is probably it, misspelt.
    """

    def __init__(self, message: str, name: str, example: str, instead: str = "") -> None:
        misspelt = f", in place of --set {instead}" if instead else ""
        hint = f"Give it with --set {name}=..., e.g. {example}{misspelt}."
        super().__init__(message, hint=hint, code="setting.needed")
        self.name, self.example = name, example


class Inconclusive(RepaconvError):
    """The measurement does not allow a verdict (exit 5)."""

    exit_code = 5


class Interrupted(RepaconvError):
    """The user's Ctrl-C (exit 130)."""

    exit_code = 130

    def __init__(self) -> None:
        told = "interrupted: what was whole before is whole, and nothing half-written is left."
        super().__init__(told, hint="The same command again does what is left.", code="interrupted")


def require_module(module: str, called: str, hint: str) -> Any:
    """Import what an extra or a device brings, without OpenVINO's telemetry.

    OpenVINO and NNCF report that they were imported, and leave an identifier in the home folder, unless their package
    for it is missing at that moment.

    Raises:
        EnvironmentProblem: If it cannot be imported; ``hint`` is what mends that.
    """
    before = sys.modules.get(TELEMETRY)
    sys.modules[TELEMETRY] = None  # type: ignore[assignment]  # as where it is not installed
    try:
        return import_module(module)
    except ImportError as error:
        raise EnvironmentProblem(f"{called} cannot be imported: {error}.", hint=hint, code="runtime.missing") from error
    finally:
        sys.modules.pop(TELEMETRY)
        if before is not None:
            sys.modules[TELEMETRY] = before


def nearest(name: str, known: Iterable[str]) -> str:
    """What was probably meant, as the beginning of a hint; empty if nothing is near."""
    near = near_to(name, known)
    return f"Did you mean {near}? " if near else ""


def near_to(name: str, known: Iterable[str]) -> str:
    """The one of them that is nearest, if any is near."""
    return next(iter(get_close_matches(name, list(known), 1)), "")
