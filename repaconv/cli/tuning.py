"""The search for the fastest form."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from repaconv.cli.options import Format, FormatOption, Quiet, app, finish
from repaconv.orders.stages import ClusterOrder, TuneOrder

if TYPE_CHECKING:
    from repaconv.artefacts import Record


@app.command(epilog="Example: repaconv tune ckpt.pth --target x86-64")
def tune(
    source: Annotated[Path | None, typer.Argument(metavar="[CKPT|RUN]", help="What to tune; the newest run.")] = None,
    order: TuneOrder = TuneOrder(),
    cluster: ClusterOrder = ClusterOrder(),
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Search the fastest runtime, form, precision and settings on the target, measured, for `export --form`.

    Exact, in float32, unless a loss is allowed.
    Searching again for the same shapes on the same machine costs nothing; a search that was broken off goes on.
    """

    def run(*, progress: Any) -> Record:
        from repaconv.pipeline.tuning import tune_by

        if not cluster.scheduler:
            return tune_by(order, source, progress=progress)
        from repaconv.farm.tuning import on_workers

        there = on_workers(cluster, order, progress=progress)
        return tune_by(order, source, measurer=there, where=cluster.scheduler, progress=progress)

    finish("tune", format, quiet, run)
