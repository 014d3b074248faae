"""Commands for other machines: bundle, collect, sweep, worker."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from repaconv.cli.command_options import (
    FLEET,
    Format,
    FormatOption,
    ModelArgument,
    Quiet,
    RunArgument,
    app,
    out_option,
    run_and_exit,
)
from repaconv.distributed.options import ClusterOptions, WorkerOptions
from repaconv.stages.bundle.options import BundleOptions


@app.command(rich_help_panel=FLEET, epilog="Example: repaconv bundle --target orin-nano --precision fp16")
def bundle(
    run: ModelArgument = None,
    options: BundleOptions = BundleOptions(target="orin-nano"),
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Pack the ONNX model, inputs with their float64 outputs, and a script for the board, which needs only trtexec."""
    from repaconv.stages.bundle.stage import bundle_by

    run_and_exit("bundle", format, quiet, partial(bundle_by, options, run))


@app.command(rich_help_panel=FLEET, epilog="Example: repaconv collect result.tar.gz")
def collect(
    result: Annotated[Path, typer.Argument(metavar="RESULT", help="The result.tar.gz that the board wrote.")],
    run: RunArgument = None,
    out: Annotated[Path | None, out_option("File for the result (JSON).", "next to the engines of the run")] = None,
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Read the result of a bundle that ran on a board, verify it, and add it to the run. Exit code 0 or 1."""
    from repaconv.stages.bundle.collect import collect as stage

    run_and_exit("collect", format, quiet, partial(stage, result, run, out=out))


@app.command(rich_help_panel=FLEET, epilog="Example: repaconv sweep matrix.yaml --scheduler tcp://desk:8786")
def sweep(
    matrix: Annotated[
        Path,
        typer.Argument(
            metavar="MATRIX",
            help="TOML or YAML file with lists of models, targets, precisions and batch sizes.",
        ),
    ],
    cluster: ClusterOptions = ClusterOptions(),
    out: Annotated[Path | None, out_option("Folder to write.", "repaconv-out/sweep-<matrix>")] = None,
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Benchmark all combinations of models, targets, precisions and batch sizes, here or on a cluster; resumable."""
    from repaconv.distributed.sweep import sweep_by

    run_and_exit("sweep", format, quiet, partial(sweep_by, cluster, matrix, out=out))


@app.command(rich_help_panel=FLEET, epilog="Example: repaconv worker --target orin-nano --scheduler tcp://desk:8786")
def worker(options: WorkerOptions) -> None:
    """Run as a worker of a Dask cluster: measure for this target, one job at a time, until stopped."""
    from repaconv.core import terminal
    from repaconv.distributed.dask_cluster import serve_as_worker

    serve_as_worker(options, started=terminal.print_message)
