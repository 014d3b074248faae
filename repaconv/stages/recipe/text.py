"""Results of `run`, `gate` and `new-recipe` as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from repaconv.core.terminal import coloured, out, plain, rows, short, table, whole

if TYPE_CHECKING:
    from repaconv.results import Check, GateReport, NewRecipe, RecipeRun


def show_gate(done: GateReport) -> None:
    """Print every check of every recipe, and the verdict."""
    from repaconv.stages.recipe.gate_report_formats import sentence

    for recipe in done.recipes:
        rows = table("stage", "check", "verdict", "")
        for check in recipe.checks:
            rows.add_row(check.stage, check.name, coloured(check.verdict), plain(sentence(check)))
        out().print(f"[bold]{plain(recipe.recipe)}[/]")
        out().print(rows)
    verdict = "passed" if not done.exit_code else "failed" if done.exit_code == 1 else f"exit {done.exit_code}"
    count = f"{len(done.recipes)} recipe{'s' if len(done.recipes) > 1 else ''}"
    out().print(f"{coloured(verdict)}: {count}{', with mistakes' if done.exit_code == 2 else ''}")


def counted(checks: Sequence[Check]) -> str:
    """Summary of the checks: how many passed, which did not, and why some are not verified."""
    told = [f"{sum(each.verdict == 'passed' for each in checks)} of {len(checks)} checks passed"]
    for each in checks:
        why = f" ({each.message.rstrip('.')})" if each.verdict == "not verified" else ""
        told += [] if each.verdict == "passed" else [f"{each.stage}: {each.name} {each.verdict}{why}"]
    return "; ".join(told)


def show_recipe_run(done: RecipeRun | NewRecipe) -> None:
    """Print the steps and checks of a recipe's run, or the recipe that was written."""
    from repaconv.results import RecipeRun

    if isinstance(done, RecipeRun):
        _way(done)
        return
    out().print(plain(done.recipe))
    for problem in done.problems:
        out().print(f"[yellow]to be corrected:[/] {plain(problem)}")


def _way(done: RecipeRun) -> None:
    """Print each step with its reason, the checks that did not pass (all with -v), and the path of the report."""
    from repaconv.stages.recipe.gate_report_formats import sentence

    if done.steps:
        rows(("step", "status", "reason"), [(each.name, each.did, each.why) for each in done.steps])
    shown = [check for check in done.checks if whole() or check.verdict not in ("passed", "not verified")]
    found = table("stage", "check", "verdict", "")
    for check in shown:
        found.add_row(check.stage, check.name, coloured(check.verdict), plain(sentence(check)))
    if shown:
        out().print(found)
    for name, value in done.reference.items():
        out().print(f"[dim]{name}:[/] {plain(value)}")
    if done.checks:
        verdict = "passed" if not done.exit_code else "failed" if done.exit_code == 1 else f"exit {done.exit_code}"
        out().print(f"{coloured(verdict)}: {plain(counted(done.checks))}")
    if done.page:
        out().print(f"{plain(short(done.page))}")
