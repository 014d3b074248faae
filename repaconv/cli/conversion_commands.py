"""Commands for lossy conversion with images: score, convert, finetune."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from repaconv.cli.command_options import (
    SEARCH,
    ConvertArgument,
    Format,
    FormatOption,
    Quiet,
    app,
    run_and_exit,
)
from repaconv.stages.convert.options import ConvertOptions, FinetuneOptions, ScoreOptions


@app.command(rich_help_panel=SEARCH, epilog="Example: repaconv score vit.pth --images calibration/")
def score(
    checkpoint: ConvertArgument,
    options: ScoreOptions = ScoreOptions(),
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Score how close each attention head of a plain vision transformer is to a convolution, on your images."""
    from repaconv.stages.convert.score import score_by

    run_and_exit("score", format, quiet, lambda progress: score_by(options, checkpoint, progress=progress))


@app.command(rich_help_panel=SEARCH, epilog="Example: repaconv convert vit.pth --images calibration/ --blocks 6")
def convert(
    checkpoint: ConvertArgument,
    options: ConvertOptions = ConvertOptions(),
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Convert a plain vision transformer without training: attention to convolution, or token merging. Lossy.

    The loss is measured on a test split that was used for nothing else. Exit code 1 if it exceeds the budget.
    """
    from repaconv.stages.convert.stage import convert_by

    run_and_exit("convert", format, quiet, lambda progress: convert_by(options, checkpoint, progress=progress))


@app.command(
    rich_help_panel=SEARCH, epilog="Example: repaconv finetune repaconv-out/vit-dwconv --images calibration/ --epochs 3"
)
def finetune(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="RUN", help="Run folder made by `convert`.", show_default="the newest run"),
    ] = None,
    options: FinetuneOptions = FinetuneOptions(),
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Fine-tune a converted network on unlabeled images, with the network before conversion as the teacher.

    The best epoch (or the start, if none is better) is kept and folded. An interrupted training resumes.
    """
    from repaconv.stages.convert.finetune import finetune_by

    run_and_exit("finetune", format, quiet, lambda progress: finetune_by(options, run, progress=progress))
