"""Other machines: bundles for boards, matrices over a cluster, and its workers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from repaconv.cli.options import Format, FormatOption, ModelArgument, Quiet, RunArgument, app, finish
from repaconv.orders.stages import BundleOrder, ClusterOrder, WorkerOrder


@app.command(epilog="Example: repaconv bundle --target orin-nano --precision fp16")
def bundle(
    run: ModelArgument = None,
    order: BundleOrder = BundleOrder(target="orin-nano"),
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Pack the ONNX model, images and their float64 outputs, and a script that needs the board's trtexec alone."""
    from repaconv.pipeline.bundling import bundle_by

    finish("bundle", format, quiet, partial(bundle_by, order, run))


@app.command(epilog="Example: repaconv collect result.tar.gz")
def collect(
    result: Annotated[Path, typer.Argument(metavar="RESULT", help="The board's result.tar.gz.")],
    run: RunArgument = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The artefact; beside the run's engines.")] = None,
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Read what a board made of a bundle, judge it, and join it to the run. Exit 0 or 1."""
    from repaconv.pipeline.collecting import collect as stage

    finish("collect", format, quiet, partial(stage, result, run, out=out))


@app.command(epilog="Example: repaconv sweep matrix.yaml --scheduler tcp://desk:8786")
def sweep(
    matrix: Annotated[
        Path, typer.Argument(metavar="MATRIX", help=".toml or .yaml: models, targets, precisions, batches.")
    ],
    cluster: ClusterOrder = ClusterOrder(),
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The folder; repaconv-out/sweep-<matrix>.")] = None,
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Measure a matrix of models, targets, precisions and batches, here or on a cluster; resumes where it stopped."""
    from repaconv.farm.sweep import sweep_by

    finish("sweep", format, quiet, partial(sweep_by, cluster, matrix, out=out))


@app.command(epilog="Example: repaconv worker --target orin-nano --scheduler tcp://desk:8786")
def worker(order: WorkerOrder) -> None:
    """Serve a cluster as a machine of this target, one measurement at a time, until stopped."""
    from repaconv.cli import render
    from repaconv.farm.cluster import work

    work(order, started=render.told)
