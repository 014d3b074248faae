"""What a session may be opened with beside its runtime's defaults: settings worth measuring, several calls at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from repaconv.core.errors import EnvironmentProblem, UsageProblem
from repaconv.engines.contract import SessionSpec


@runtime_checkable
class Tunable(Protocol):
    """What an engine besides is whose settings may be worth another value than the default."""

    def tries(self, precision: str) -> tuple[tuple[str, ...], ...]:
        """Of `SessionSpec.settings`, those to measure beside the defaults for a graph of that precision."""


def own_settings(engine: str, given: Sequence[str], known: Iterable[Sequence[str]]) -> dict[str, str]:
    """Settings by name, of those that an engine is tuned by: a file that came along sets nothing else.

    Raises:
        UsageProblem: If one is none of them.
    """
    allowed = {word for words in known for word in words}
    for word in given:
        if word not in allowed:
            raise UsageProblem(
                f"{engine} has no setting {word}.",
                hint=f"Its settings: {', '.join(sorted(allowed))}." if allowed else "It has no settings.",
                code="runtime.settings",
            )
    return {name: value for name, _, value in (word.partition("=") for word in given)}


def require_one_stream(engine: str, spec: SessionSpec) -> None:
    """Refuse several calls at once.

    Raises:
        EnvironmentProblem: If they are asked for.
    """
    if spec.streams > 1:
        raise EnvironmentProblem(
            f"{engine} runs one inference at a time here.", hint="Leave --streams out.", code="runtime.streams"
        )
