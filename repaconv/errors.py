"""What can go wrong: a sentence, what to do about it, a stable code and the exit code of the command."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module
from typing import Any


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
        self.message = message
        self.hint = hint
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


class Inconclusive(RepaconvError):
    """The measurement does not allow a verdict (exit 5)."""

    exit_code = 5


def require_module(module: str, called: str, hint: str) -> Any:
    """Import what an extra or a device brings.

    Raises:
        EnvironmentProblem: If it cannot be imported; ``hint`` is what mends that.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise EnvironmentProblem(f"{called} cannot be imported: {error}.", hint=hint, code="runtime.missing") from error


def nearest(name: str, known: Iterable[str]) -> str:
    """What was probably meant, as the beginning of a hint; empty if nothing is near."""
    near = get_close_matches(name, list(known), 1)
    return f"Did you mean {near[0]}? " if near else ""
