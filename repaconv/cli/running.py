"""Whole ways: a recipe's, and that to a target; and any two models beside each other."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from repaconv.cli.options import FoldArgument, Format, FormatOption, Quiet, app, finish
from repaconv.orders.deploying import CompareOrder, DeployOrder
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


@app.command(epilog="Example: repaconv new-recipe ckpt.pth")
def new_recipe(
    checkpoint: FoldArgument,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The file; <stem>.toml here.")] = None,
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Write a commented recipe for a checkpoint: what it is, what its file does not tell, what may be asked for."""
    from repaconv.pipeline.recipe_writing import new_recipe as stage

    finish("new-recipe", format, quiet, partial(stage, checkpoint, out=out))


@app.command(epilog="Example: repaconv deploy ckpt.pth --target x86-64 --precision int8 --images val/")
def deploy(
    checkpoint: FoldArgument,
    order: DeployOrder = DeployOrder(target="x86-64"),
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Take a checkpoint to all that a target needs of it: fold, export, verify, build or bundle, bench, report.

    One folder and one verdict; what nothing has changed of stands, as with `run`.
    """
    from repaconv.cli import render
    from repaconv.pipeline.deploying import deploy_by

    with render.progress(quiet=quiet or format is Format.json) as progress:
        done = deploy_by(order, checkpoint, progress=progress)
    leave("deploy", format, done)


@app.command(epilog="Example: repaconv compare repaconv-out/ckpt other.onnx --speed")
def compare(
    reference: Annotated[
        Path, typer.Argument(metavar="A", help="What is right: a run, an .onnx, an engine, a folded checkpoint.")
    ],
    candidate: Annotated[Path, typer.Argument(metavar="B", help="What is judged by it: the same kinds.")],
    order: CompareOrder = CompareOrder(),
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Hold two models against each other on the same inputs: outputs, sizes, and with --speed their latencies."""
    from repaconv.pipeline.comparing import compare_by

    finish("compare", format, quiet, partial(compare_by, order, reference, candidate))


def leave(command: str, format: Format, done: RecipeRun) -> None:
    """Show a recipe's way, and leave with its exit code."""
    from repaconv.cli import render
    from repaconv.cli.showing import show

    if format is Format.json:
        render.envelope(command, done.exit_code, render.plain_data(done))
    else:
        show(done)
    raise typer.Exit(done.exit_code)
