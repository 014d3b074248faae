"""Execute a plan: skip steps that are up to date, run the others, remove the files of steps no longer in the plan."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from repaconv.core.errors import Refused
from repaconv.core.file_replacement import remove_written
from repaconv.core.files import canonical_json, read_artefact, sha256_of_bytes, write_artefact
from repaconv.core.run_folder import PLAN
from repaconv.results import SCHEMA_VERSION, Record
from repaconv.stages.recipe.file_digests import GONE, Digests, Seen

# --- A step of a plan, and what it is made of.


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


# --- ``plan.json`` of a folder: which steps made what is in it, and of what.


class Kept(Record):
    """A step that ran: of what, what it wrote by hash, whether that is sound, and how long it took."""

    FORMER: ClassVar[Mapping[str, str]] = {"wrote": "outputs", "made_of": "inputs", "sound": "passed"}

    inputs: dict[str, str]
    outputs: dict[str, str]
    passed: bool
    seconds: float

    @property
    def key(self) -> str:
        """The same for the same step of the same things."""
        return key_of(self.inputs)


class _Page(Record):
    schema_version: int = SCHEMA_VERSION
    stage: str = "plan"
    owner: str
    steps: dict[str, Kept] = Field(default={})
    seen: dict[str, Seen] = Field(default={})


def key_of(made_of: Mapping[str, str]) -> str:
    """Of what a step is made."""
    return sha256_of_bytes(canonical_json(dict(made_of)).encode())[:16]


class Journal:
    """What earlier walks left in a folder; nothing where they were another's, or cannot be read.

    Args:
        folder: Whose.
        owner: Whose plan it is.
    """

    def __init__(self, folder: Path, owner: str) -> None:
        self.folder, self.owner = folder, owner
        try:
            page = read_artefact(folder / PLAN, _Page)
        except Refused:
            page = _Page(owner=owner)
        mine = page.owner == owner
        self.steps = dict(page.steps) if mine else {}
        self.digests = Digests(dict(page.seen) if mine else {})

    def made_of(self, step: Step) -> dict[str, str]:
        """All that bears on its result, as it is now."""
        files = {f"{name}": self.digests.of(path) for name, path in step.reads().items()}
        results = {f"the result of {name}": self._result(name) for name in step.after}
        return {**step.told(), **files, **results}

    def why(self, step: Step) -> str:
        """Why it must run; empty if it is up to date."""
        kept = self.steps.get(step.name)
        if kept is None:
            return "it has not run yet"
        if not kept.passed:
            return "it did not pass last time"
        now = self.made_of(step)
        if changed := [name for name in {**kept.inputs, **now} if kept.inputs.get(name) != now.get(name)]:
            return f"changed: {', '.join(changed)}"
        touched = [name for name, sha256 in kept.outputs.items() if self.digests.of(self.folder / name) != sha256]
        gone = [name for name in touched if self.digests.of(self.folder / name) == GONE]
        return f"{gone[0]} is missing" if gone else f"{touched[0]} was changed" if touched else ""

    def owns(self, name: str) -> bool:
        """Whether a step is of this plan, and what it wrote is as it was."""
        kept = self.steps.get(name)
        return kept is not None and all(self.digests.of(self.folder / at) == sha for at, sha in kept.outputs.items())

    def files(self, name: str) -> list[Path]:
        """What a step wrote."""
        return [self.folder / each for each in self.steps[name].outputs] if name in self.steps else []

    def keep(self, name: str, kept: Kept | None) -> None:
        """Note a step that ran, or forget one; the page is written at once, so that an interrupted run resumes here."""
        self.steps.pop(name, None)
        if kept is not None:
            self.steps[name] = kept
        write_artefact(self.folder / PLAN, _Page(owner=self.owner, steps=self.steps, seen=self.digests.seen))

    def _result(self, name: str) -> str:
        """What a step left, as it lies there now."""
        kept = self.steps.get(name)
        return key_of({at: self.digests.of(self.folder / at) for at in kept.outputs}) if kept else GONE


# --- Execute a plan: skip steps that are up to date, run the others, remove the files of steps no longer in the plan.

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
