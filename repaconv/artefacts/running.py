"""What ``run`` leaves: what became of each step of a recipe, and what was found."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from repaconv.artefacts.gating import Check
from repaconv.artefacts.records import SCHEMA_VERSION, Record
from repaconv.artefacts.results import Result


class StepDone(Record):
    """A step of the plan: whether it ran or is up to date, and why it ran."""

    name: str
    did: Literal["ran", "up to date", "stopped", "skipped", "would run", "removed", "would be removed"]
    why: str = ""


class RecipeRun(Result):
    """A recipe's way; the result of ``run``. ``page`` is the report, empty where there is none."""

    SHOWN: ClassVar[tuple[str, ...]] = ("recipe", "exit_code")

    schema_version: int = SCHEMA_VERSION
    stage: str = "run"
    recipe: str
    run: str
    exit_code: int
    steps: tuple[StepDone, ...] = ()
    checks: tuple[Check, ...] = ()
    page: str = ""
    reference: dict[str, str] = Field(default={})


class NewRecipe(Result):
    """A recipe that was written; the result of ``new-recipe``. ``problems`` say what must be mended in it."""

    SHOWN: ClassVar[tuple[str, ...]] = ("recipe", "method")

    schema_version: int = SCHEMA_VERSION
    stage: str = "new-recipe"
    recipe: str
    method: str
    problems: tuple[str, ...] = ()
