"""Whole ways: a recipe's, and that to a target; and any two models beside each other."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from repaconv.cli.options import FoldArgument, Format, FormatOption, Quiet, app, finish
from repaconv.cli.panels import STEPS, WORKFLOWS
from repaconv.orders.deploying import CompareOrder, DeployOrder
from repaconv.orders.stages import RunOrder

if TYPE_CHECKING:
    from repaconv.artefacts import RecipeRun


@app.command(rich_help_panel=WORKFLOWS, epilog="Example: repaconv run recipe.toml")
def run(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe: a TOML file, see `repaconv new-recipe`.")],
    order: RunOrder = RunOrder(),
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Run all steps of a recipe and write its report. Steps that are up to date are skipped.

    An interrupted run resumes. The exit code is that of the worst check, as with `gate`.
    """
    from repaconv.cli import render
    from repaconv.pipeline.running import run_by

    with render.progress(quiet=quiet or format is Format.json) as progress:
        done = run_by(order, recipe, progress=progress)
    leave("run", format, done)


@app.command(rich_help_panel=WORKFLOWS, epilog="Example: repaconv new-recipe ckpt.pth")
def new_recipe(
    checkpoint: FoldArgument,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            help="Recipe file to write.",
            show_default="<stem>.toml",
        ),
    ] = None,
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Write a commented recipe for a checkpoint: its method, the settings that its file lacks, and all options."""
    from repaconv.pipeline.recipe_writing import new_recipe as stage

    finish("new-recipe", format, quiet, partial(stage, checkpoint, out=out))


@app.command(
    rich_help_panel=WORKFLOWS, epilog="Example: repaconv deploy ckpt.pth --target x86-64 --precision int8 --images val/"
)
def deploy(
    checkpoint: FoldArgument,
    order: DeployOrder = DeployOrder(target="x86-64"),
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Do everything for one target: fold, export, verify, build or bundle, bench, report.

    The results are in one folder, with one verdict. Steps that are up to date are skipped.
    """
    from repaconv.cli import render
    from repaconv.pipeline.deploying import deploy_by

    with render.progress(quiet=quiet or format is Format.json) as progress:
        done = deploy_by(order, checkpoint, progress=progress)
    leave("deploy", format, done)


@app.command(rich_help_panel=STEPS, epilog="Example: repaconv compare repaconv-out/ckpt other.onnx --speed")
def compare(
    reference: Annotated[
        Path, typer.Argument(metavar="A", help="The reference: run folder, ONNX model, engine or folded checkpoint.")
    ],
    candidate: Annotated[Path, typer.Argument(metavar="B", help="The candidate: the same kinds of file.")],
    order: CompareOrder = CompareOrder(),
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Compare two models on the same inputs: outputs, sizes, and with --speed latencies."""
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
