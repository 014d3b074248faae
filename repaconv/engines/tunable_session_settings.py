"""Runtime settings that the tuner may try, and the check for concurrent inferences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from repaconv.core.errors import EnvironmentProblem, UsageProblem
from repaconv.engines.contract import SessionSpec


@runtime_checkable
class Tunable(Protocol):
    """Additional method of an engine with settings worth tuning."""

    def tries(self, precision: str) -> tuple[tuple[str, ...], ...]:
        """Return the `SessionSpec.settings` to measure against the defaults for a graph of this precision."""


def parse_settings(engine: str, given: Sequence[str], known: Iterable[Sequence[str]]) -> dict[str, str]:
    """Parse NAME=VALUE settings; only those listed for tuning are allowed, since they may come from a file.

    Raises:
        UsageProblem: If a setting is not in the list.
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
    """Refuse concurrent inferences.

    Raises:
        EnvironmentProblem: If more than one stream is requested.
    """
    if spec.streams > 1:
        raise EnvironmentProblem(
            f"{engine} runs one inference at a time here.", hint="Leave --streams out.", code="runtime.streams"
        )
