"""Whole ways: a recipe's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from repaconv.cli.options import Format, FormatOption, Quiet, app
from repaconv.orders.stages import RunOrder

if TYPE_CHECKING:
    from repaconv.artefacts import RecipeRun


@app.command(epilog="Example: repaconv run recipe.toml")
def run(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A TOML file.")],
    order: RunOrder = RunOrder(),
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Do all that a recipe asks for and end in its report. What nothing has changed of stands, and is not run again.

    What was broken off goes on where it was. Exit 0, or that of the worst check, as `gate` has it.
    """
    from repaconv.cli import render
    from repaconv.pipeline.running import run_by

    with render.progress(quiet=quiet or format is Format.json) as progress:
        done = run_by(order, recipe, progress=progress)
    leave("run", format, done)


def leave(command: str, format: Format, done: RecipeRun) -> None:
    """Show a recipe's way, and leave with its exit code."""
    from repaconv.cli import render
    from repaconv.cli.showing import show

    if format is Format.json:
        render.envelope(command, done.exit_code, render.plain_data(done))
    else:
        show(done)
    raise typer.Exit(done.exit_code)
