"""What needs images and no training: how near a network is to a convolution, and making it one."""

from __future__ import annotations

from repaconv.cli.options import FoldArgument, Format, FormatOption, Quiet, app, finish
from repaconv.orders.converting import ConvertOrder, ScoreOrder


@app.command(epilog="Example: repaconv score vit.pth --images calibration/")
def score(
    checkpoint: FoldArgument,
    order: ScoreOrder = ScoreOrder(),
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Say how near each attention head of a plain vision transformer is to a convolution, over images."""
    from repaconv.pipeline.scoring import score_by

    finish("score", format, quiet, lambda progress: score_by(order, checkpoint, progress=progress))


@app.command(epilog="Example: repaconv convert vit.pth --images calibration/ --blocks 6")
def convert(
    checkpoint: FoldArgument,
    order: ConvertOrder = ConvertOrder(),
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Convert a plain vision transformer without training, attention to convolution or by merging tokens: lossy.

    What it costs is measured on images that neither fitted nor chose. Exit 1 if that is more than the budget.
    """
    from repaconv.pipeline.converting import convert_by

    finish("convert", format, quiet, lambda progress: convert_by(order, checkpoint, progress=progress))
