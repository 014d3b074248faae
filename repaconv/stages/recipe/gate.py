"""`gate`: run recipes one after the other, check everything that must hold, and return one exit code for CI."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from repaconv.core.errors import UsageProblem
from repaconv.core.progress import Progress, silent
from repaconv.results import GatedRecipe, GateReport
from repaconv.stages.recipe.gate_checks import worst_exit_code
from repaconv.stages.recipe.options import GateOptions
from repaconv.stages.recipe.recipe_file import read_recipe
from repaconv.stages.recipe.run import RecipeExecution, read_placed
from repaconv.stages.shared.option_dataclasses import by_name


def gate_by(
    options: GateOptions, recipes: str | Path | Sequence[str | Path], *, progress: Progress = silent
) -> GateReport:
    """Fold, export and verify what the recipes name, build and bench where they say so, and check all results.

    It is `repaconv.run` of each recipe without a report. A step of which nothing has changed is not run again, and its
    result is checked again. A recipe that cannot be finished is reported as an error, and the others are still run.
    Each recipe has its own run folder, ``repaconv-out/<stem>`` next to it unless it names another.

    Args:
        recipes: The path of a TOML file, or several.
        options: The options.
        progress: A function that is called with each step's name, the units done and their total.

    Returns:
        All checks, by recipe, and the exit code of the command. An error in a recipe or a step is a failed check.

    Raises:
        UsageProblem: If no recipe is given, or ``update_baseline`` is, and no recipe names a file of baselines.
    """
    recipes = [recipes] if isinstance(recipes, (str, Path)) else recipes
    if not recipes:
        raise UsageProblem("no recipe was given.", hint="repaconv gate recipe.toml", code="usage.gate")
    if options.update_baseline and not any(map(_keeps_baseline, recipes)):
        raise UsageProblem(
            "--update-baseline would do nothing here: no recipe names a file of baselines.",
            hint='Give one in the recipe: [bench] baseline = "baselines.json".',
            code="usage.idle",
        )
    taken: dict[Path, Path] = {}
    done = tuple(_gated(Path(path), options, progress, taken) for path in recipes)
    return GateReport(exit_code=worst_exit_code(recipe.exit_code for recipe in done), recipes=done)


gate = by_name(gate_by, GateOptions)


def _gated(path: Path, options: GateOptions, progress: Progress, taken: dict[Path, Path]) -> GatedRecipe:
    """Run one recipe without its report."""
    done = RecipeExecution(path, options, progress, taken).execute(partial(read_placed, path), page=False)
    return GatedRecipe(recipe=done.recipe, run=done.run, exit_code=done.exit_code, checks=done.checks)


def _keeps_baseline(path: str | Path) -> bool:
    """Whether a recipe names a baseline file; True for one that cannot be read, which is reported later."""
    try:
        section = read_recipe(Path(path))[0].bench
    except UsageProblem:
        return True
    return section is not None and section.baseline is not None
