"""Results of `run`, `gate` and `new-recipe` as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from repaconv.core.terminal import colored, is_verbose, plain, print_table, relative_path, stdout, table

if TYPE_CHECKING:
    from repaconv.results import Check, GateReport, NewRecipe, RecipeRun


def show_gate(done: GateReport) -> None:
    """Print every check of every recipe, and the verdict."""
    from repaconv.stages.recipe.gate_report_formats import outcome, sentence

    for recipe in done.recipes:
        print_table = table("stage", "check", "verdict", "")
        for check in recipe.checks:
            print_table.add_row(check.stage, check.name, colored(check.verdict), plain(sentence(check)))
        stdout().print(f"[bold]{plain(recipe.recipe)}[/]")
        stdout().print(print_table)
    count = f"{len(done.recipes)} recipe{'s' if len(done.recipes) > 1 else ''}"
    stdout().print(f"{colored(outcome(done.exit_code))}: {count}")
    for recipe in done.recipes if done.exit_code else ():
        for check in recipe.checks:
            if check.verdict not in ("passed", "not verified"):
                what = check.stage if check.name == check.stage else f"{check.stage} {check.name}"
                stdout().print(plain(f"{recipe.recipe}: {what}: {sentence(check)}"))


def checks_summary(checks: Sequence[Check]) -> str:
    """Summary of the checks: how many passed, which did not, and why some are not verified."""
    parts = [f"{sum(each.verdict == 'passed' for each in checks)} of {len(checks)} checks passed"]
    for each in checks:
        why = f" ({each.message.rstrip('.')})" if each.verdict == "not verified" else ""
        parts += [] if each.verdict == "passed" else [f"{each.stage}: {each.name} {each.verdict}{why}"]
    return "; ".join(parts)


def show_recipe_run(done: RecipeRun | NewRecipe) -> None:
    """Print the steps and checks of a recipe's run, or the recipe that was written."""
    from repaconv.results import RecipeRun

    if isinstance(done, RecipeRun):
        _recipe_run(done)
        return
    stdout().print(f"recipe written: {plain(done.recipe)}")
    for problem in done.problems:
        stdout().print(f"[yellow]to be corrected:[/] {plain(problem)}")


def _recipe_run(done: RecipeRun) -> None:
    """Print each step with its reason, the checks that did not pass (all with -v), and the path of the report."""
    from repaconv.stages.recipe.gate_report_formats import outcome, sentence

    if done.steps:
        print_table(("step", "status", "reason"), [(each.name, each.did, each.why) for each in done.steps])
    shown = [check for check in done.checks if is_verbose() or check.verdict not in ("passed", "not verified")]
    found = table("stage", "check", "verdict", "")
    for check in shown:
        found.add_row(check.stage, check.name, colored(check.verdict), plain(sentence(check)))
    if shown:
        stdout().print(found)
    for name, value in done.reference.items():
        stdout().print(f"[dim]{name}:[/] {plain(value)}")
    if done.checks:
        stdout().print(f"{colored(outcome(done.exit_code))}: {plain(checks_summary(done.checks))}")
    for check in done.checks:
        if (check.stage, check.verdict) == ("bundle", "passed"):  # the rest is done on the board
            stdout().print(plain(f"{relative_path(done.run)}/{check.message}"))
            stdout().print(plain(check.hint))
    if done.page:
        stdout().print(f"{plain(relative_path(done.page))}")
