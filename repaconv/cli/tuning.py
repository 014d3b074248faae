"""The search for the fastest form."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from repaconv.cli.options import Format, FormatOption, Quiet, app, finish
from repaconv.cli.panels import SEARCH
from repaconv.orders.stages import ClusterOrder, TuneOrder

if TYPE_CHECKING:
    from repaconv.artefacts import Record


@app.command(rich_help_panel=SEARCH, epilog="Example: repaconv tune ckpt.pth --target x86-64")
def tune(
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CKPT|RUN]",
            help="Checkpoint or run folder to tune.",
            show_default="the newest run",
        ),
    ] = None,
    order: TuneOrder = TuneOrder(),
    cluster: ClusterOrder = ClusterOrder(),
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Search for the fastest runtime, rewrites, precision and settings on the target by measuring them.

    Only exact FP32 configurations are tried unless a loss is allowed. The result is cached per machine and network
    shape; an interrupted search resumes.
    """

    def run(*, progress: Any) -> Record:
        from repaconv.pipeline.tuning import tune_by

        if not cluster.scheduler:
            return tune_by(order, source, progress=progress)
        from repaconv.farm.tuning import on_workers

        there = on_workers(cluster, order, progress=progress)
        return tune_by(order, source, measurer=there, where=cluster.scheduler, progress=progress)

    finish("tune", format, quiet, run)
