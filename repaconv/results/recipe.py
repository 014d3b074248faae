"""The results of ``run``, ``deploy`` and ``new-recipe``."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from repaconv.results.records import SCHEMA_VERSION, Record, Result

# --- The result of ``gate``: checks by recipe.


class Check(Record):
    """One check of a recipe: a link, a latency, an accuracy, or a step that could not be finished.

    Attributes:
        stage: The step that was checked, e.g. ``verify``; ``recipe`` if the recipe itself is wrong.
        name: What was checked: a link such as ``onnx``, or ``certificate``, ``settings``, ``accuracy``, ``claim``,
            ``chain``, ``precision``, ``rules``, ``latency``, ``bundle``, ``evaluation`` (what a conversion lost); else
            the name of the step.
        verdict: ``passed`` or ``failed``; ``not verified`` if it was not compared; ``inconclusive`` if the measurement
            supports no verdict; ``error`` if the step could not be finished.
        message: What was found, in one sentence.
        line: The line of the recipe that asks for the check, from 1.
        column: The column in that line, from 1.
        file: The path of the file of ``line`` if the recipe extends it; empty if the line is in the recipe.
        module: The first module at which a failed check differs; empty if that is not known.
        code: The error code; empty if the check is no error.
        hint: What to do; of a failed link, how ``module`` was found. May be empty.
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
    """What ``gate`` found for one recipe.

    Attributes:
        recipe: The path of the recipe as it was given.
        run: The run folder; empty if the recipe could not be read.
        exit_code: The exit code of the worst check of this recipe.
        checks: All checks of the recipe, in the order of its steps.
    """

    recipe: str
    run: str
    exit_code: int
    checks: tuple[Check, ...]


class GateReport(Result):
    """The result of ``gate``: the checks of all recipes.

    Attributes:
        schema_version: The version of the schema of results.
        stage: The command that wrote this result, ``gate``.
        exit_code: The exit code of the worst recipe; the order from the worst is 1, 4, 3, 2, 5, 0.
        recipes: One entry for each recipe, in the order in which they were given.
    """

    SHOWN: ClassVar[tuple[str, ...]] = ("exit_code",)

    schema_version: int = SCHEMA_VERSION
    stage: str = "gate"
    exit_code: int
    recipes: tuple[GatedRecipe, ...]


# --- The results of ``run``, ``deploy`` and ``new-recipe``.


class StepDone(Record):
    """A step of a recipe: what was done with it, and why.

    Attributes:
        name: The name of the step: its command, and the precision of an export, e.g. ``export int8``.
        did: ``ran``: it was executed; ``up to date``: nothing that it depends on changed; ``stopped``: an error ended
            it; ``skipped``: a step that it needs was stopped; ``removed``: the recipe no longer has it and its files
            were removed. ``would run`` and ``would be removed``: the same under ``--dry-run``.
        why: Why it ran, was skipped or was removed, e.g. which file or option changed; empty if it is up to date.
    """

    name: str
    did: Literal["ran", "up to date", "stopped", "skipped", "would run", "removed", "would be removed"]
    why: str = ""


class RecipeRun(Result):
    """The result of ``run`` and ``deploy``: what was done with each step of a recipe, and what was found.

    Attributes:
        schema_version: The version of the schema of results.
        stage: The command that wrote this result, ``run``.
        recipe: The path of the recipe as it was given; of ``deploy``, which has none, the name of the model with
            ``.deploy``.
        run: The run folder; empty if the recipe could not be read.
        exit_code: The exit code of the worst check; 0 if all passed.
        steps: The steps in the order of their execution; empty if the recipe could not be read.
        checks: What was checked in the steps, and the errors that stopped them.
        page: The path of the report; empty if none was written.
        reference: The ``[reference]`` section of the recipe, its published figures as text, without empty ones.
    """

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
    """The result of ``new-recipe``: a recipe that was written.

    Attributes:
        schema_version: The version of the schema of results.
        stage: The command that wrote this result, ``new-recipe``.
        recipe: The path of the recipe.
        method: The registered name of the method of the checkpoint; empty if there is none, as for an ONNX model or a
            folder.
        problems: What must be corrected in the recipe before it can run, e.g. a setting missing from the checkpoint.
    """

    SHOWN: ClassVar[tuple[str, ...]] = ("recipe", "method")

    schema_version: int = SCHEMA_VERSION
    stage: str = "new-recipe"
    recipe: str
    method: str
    problems: tuple[str, ...] = ()
