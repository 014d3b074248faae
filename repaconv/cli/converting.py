"""What needs images: how near a network is to a convolution, making it one, training where that is not enough."""

from __future__ import annotations

from repaconv.cli.options import FoldArgument, Format, FormatOption, Quiet, RunArgument, app, finish
from repaconv.orders.converting import ConvertOrder, FinetuneOrder, ScoreOrder


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


@app.command(epilog="Example: repaconv finetune repaconv-out/vit-dwconv --images calibration/ --epochs 3")
def finetune(
    run: RunArgument = None,
    order: FinetuneOrder = FinetuneOrder(),
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Train a conversion, or an untrained training form, on images without labels, by the network before conversion.

    The best epoch is kept, the start included, and folded. The same command goes on where it was broken off.
    """
    from repaconv.pipeline.finetuning import finetune_by

    finish("finetune", format, quiet, lambda progress: finetune_by(order, run, progress=progress))
