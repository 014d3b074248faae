"""What ``gate`` leaves: checks by recipe."""

from __future__ import annotations

from typing import ClassVar, Literal

from repaconv.artefacts.records import SCHEMA_VERSION, Record
from repaconv.artefacts.results import Result


class Check(Record):
    """One thing that the gate looked at: a link of the chain, a latency, or a stage that could not be finished.

    ``line`` and ``column`` are those of the recipe which asked for it, or of ``file``, which it extends; ``module`` is
    where it fails, if that is known.
    """

    stage: str
    name: str
    verdict: Literal["passed", "failed", "not verified", "inconclusive", "error"]
    message: str
    line: int
    column: int = 1
    file: str = ""
    module: str = ""
    code: str = ""
    hint: str = ""


class GatedRecipe(Record):
    """What the gate found for one recipe."""

    recipe: str
    run: str
    exit_code: int
    checks: tuple[Check, ...]


class GateReport(Result):
    """All recipes of one call; the result of ``gate``. ``exit_code`` is that of the worst."""

    SHOWN: ClassVar[tuple[str, ...]] = ("exit_code",)

    schema_version: int = SCHEMA_VERSION
    stage: str = "gate"
    exit_code: int
    recipes: tuple[GatedRecipe, ...]
