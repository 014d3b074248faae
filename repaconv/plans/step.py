"""A step of a plan, and what it is made of."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple


def reads_nothing() -> dict[str, Path]:
    """Of a step that has its orders and the results before it alone."""
    return {}


class Step(NamedTuple):
    """One thing to do, by all that bears on its result.

    Attributes:
        name: Its own within the plan.
        asked: What it is asked for; anything that JSON takes, and paths.
        reads: Files and folders that it reads, by the words that tell them, as they are at that moment.
        versions: Of the programs that bear on its result, and the machine where something is measured.
        after: Steps whose results it reads.
        needs: Steps without which it is left out.
    """

    name: str
    asked: Mapping[str, Any] = {}
    reads: Callable[[], Mapping[str, Path]] = reads_nothing
    versions: Mapping[str, str] = {}
    after: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    def told(self) -> dict[str, str]:
        """What it is asked for and by whom, in words; what says nothing is left out."""
        asked = {f"{key}": value for key, value in self.asked.items() if value not in (None, (), [], {})}
        return {name: json.dumps(value, sort_keys=True, default=str) for name, value in asked.items()} | {
            f"{name}'s version": value for name, value in self.versions.items()
        }
