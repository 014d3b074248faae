"""``plan.json`` of a folder: which steps made what is in it, and of what."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from repaconv.artefacts import SCHEMA_VERSION, Record
from repaconv.errors import Refused
from repaconv.files import canonical_json, read_artefact, sha256_of_bytes, write_artefact
from repaconv.plans.digests import GONE, Digests, Seen
from repaconv.plans.step import Step
from repaconv.runs import PLAN


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
