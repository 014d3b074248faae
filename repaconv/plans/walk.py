"""Execute a plan: skip steps that are up to date, run the others, remove the files of steps no longer in the plan."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from repaconv.plans.journal import Journal, Kept
from repaconv.plans.step import Step
from repaconv.replacing import remove_written

Did = Literal["ran", "up to date", "stopped", "skipped", "would run", "removed", "would be removed"]


class Turn(NamedTuple):
    """A step when it is its turn; ``why`` is empty where it is up to date. ``left_s`` is how long the remaining steps
    may take, by how long they took before; None where one of them has not run here."""

    step: Step
    why: str
    number: int
    in_all: int
    left_s: float | None


class Made(NamedTuple):
    """What a step wrote, the first by which it is known, and whether that is sound: else it runs again next time."""

    wrote: Sequence[Path]
    sound: bool


class Done(NamedTuple):
    """What became of a step."""

    name: str
    did: Did
    why: str


def walk(
    steps: Sequence[Step],
    journal: Journal,
    do: Callable[[Turn], Made | None],
    *,
    again: bool = False,
    others: Iterable[str] = (),
) -> list[Done]:
    """Take the steps in their order.

    Args:
        steps: Each after those that it names.
        journal: Of the folder where they write.
        do: Does a step, or reads the result of one that is up to date; None where it was stopped.
        again: Run all of them.
        others: Steps that are asked for, and not now; what they wrote stays.
    """
    found = [_let_go(journal, name) for name in _idle(steps, journal, others)]
    pace, undone = _Pace(steps, foretold(steps, journal, again=again), journal), set[str]()
    for number, step in enumerate(steps, 1):
        if lacking := [name for name in step.needs if name in undone]:
            undone.add(step.name)
            found.append(Done(step.name, "skipped", f"it needs {lacking[0]}"))
            continue
        why = journal.why(step) or ("rerun requested" if again else "")
        made_of, begun = journal.made_of(step), time.monotonic()
        made = do(Turn(step, why, number, len(steps), pace.left(step)))
        if why and made is not None:
            _keep(journal, step, made_of, made, time.monotonic() - begun)
        undone |= {step.name} if made is None else set()
        pace.passed(step, time.monotonic() - begun)
        found.append(Done(step.name, "stopped" if made is None else "ran" if why else "up to date", why))
    return found


def foretold(steps: Sequence[Step], journal: Journal, *, again: bool = False) -> dict[str, str]:
    """Which steps would run and why, as far as that is known before any of them has."""
    found: dict[str, str] = {}
    for step in steps:
        before = [name for name in (*step.needs, *step.after) if name in found]
        why = journal.why(step) or (f"{before[0]} runs before it" if before else "rerun requested" if again else "")
        found |= {step.name: why} if why else {}
    return found


def dry(steps: Sequence[Step], journal: Journal, *, again: bool = False, others: Iterable[str] = ()) -> list[Done]:
    """What `walk` would do."""
    would = foretold(steps, journal, again=again)
    found = [Done(name, "would be removed", "it is no longer in the plan") for name in _idle(steps, journal, others)]
    return found + [
        Done(each.name, "would run" if each.name in would else "up to date", would.get(each.name, "")) for each in steps
    ]


def _idle(steps: Sequence[Step], journal: Journal, others: Iterable[str]) -> list[str]:
    planned = {*(step.name for step in steps), *others}
    return [name for name in journal.steps if name not in planned]


def _let_go(journal: Journal, name: str) -> Done:
    """Remove what a step wrote that the plan has no more."""
    remove_written({journal.folder / at: sha256 for at, sha256 in journal.steps[name].outputs.items()})
    journal.keep(name, None)
    return Done(name, "removed", "it is no longer in the plan")


def _keep(journal: Journal, step: Step, made_of: Mapping[str, str], made: Made, seconds: float) -> None:
    """Note what was made; what it wrote before under other names goes."""
    wrote = {os.path.relpath(path, journal.folder): journal.digests.of(path) for path in made.wrote}
    before = journal.steps[step.name].outputs if step.name in journal.steps else {}
    remove_written({journal.folder / at: sha256 for at, sha256 in before.items() if at not in wrote})
    journal.keep(step.name, Kept(inputs=dict(made_of), outputs=wrote, passed=made.sound, seconds=round(seconds, 3)))


class _Pace:
    """How long what is left may take: by the last time, and by how fast it went up to here."""

    def __init__(self, steps: Sequence[Step], running: Mapping[str, str], journal: Journal) -> None:
        known = {name: kept.seconds for name, kept in journal.steps.items()}
        self.expected = {step.name: known.get(step.name) for step in steps if step.name in running}
        self.took = self.meant = 0.0

    def left(self, step: Step) -> float | None:
        """Seconds from the beginning of a step on; a step that never ran here may take any time."""
        names = list(self.expected)
        ahead = names[names.index(step.name) :] if step.name in names else names[len(names) :]
        seconds = [self.expected[name] for name in ahead]
        if not seconds or None in seconds:
            return None
        return sum(filter(None, seconds)) * (self.took / self.meant if self.meant else 1.0)

    def passed(self, step: Step, seconds: float) -> None:
        """Note a step that is over."""
        if expected := self.expected.get(step.name):
            self.took, self.meant = self.took + seconds, self.meant + expected
