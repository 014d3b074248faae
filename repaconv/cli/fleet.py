"""Other machines: bundles for boards, matrices over a cluster, and its workers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from repaconv.cli.options import (
    Format,
    FormatOption,
    Images,
    ModelArgument,
    Quiet,
    RunArgument,
    Scheduler,
    TlsCa,
    TlsCert,
    TlsKey,
    Unverified,
    Wait,
    app,
    finish,
)

if TYPE_CHECKING:
    pass


@app.command(epilog="Example: repaconv bundle --target orin-nano --precision fp16")
def bundle(
    run: ModelArgument = None,
    target: Annotated[str, typer.Option("--target", help="A board with TensorRT.")] = "orin-nano",
    precision: Annotated[str, typer.Option("--precision", help="Which of the run's ONNX models.")] = "fp32",
    inputs: Annotated[Path | None, typer.Option("--inputs", help=".npz of images for the board.")] = None,
    images: Images = None,
    count: Annotated[int | None, typer.Option("--count", min=1, help="How many images.")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of random images.")] = 0,
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="Images a call.")] = None,
    workspace: Annotated[
        int | None, typer.Option("--workspace", min=1, help="MiB that TensorRT's kernels may take.")
    ] = None,
    checkpoint: Annotated[Path | None, typer.Option("--checkpoint", help="Where the checkpoint is now.")] = None,
    unverified: Unverified = False,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="The bundle; build/<target>.tar.gz of the run.")
    ] = None,
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Pack the ONNX model, images and their float64 outputs, and a script that needs the board's trtexec alone."""
    from repaconv.pipeline import bundle as stage

    finish(
        "bundle",
        format,
        quiet,
        lambda progress: stage(
            run,
            target=target,
            precision=precision,
            inputs=inputs,
            images=images,
            count=count,
            seed=seed,
            batch=batch,
            workspace_mib=workspace,
            checkpoint=checkpoint,
            unverified=unverified,
            out=out,
            progress=progress,
        ),
    )


@app.command(epilog="Example: repaconv collect result.tar.gz")
def collect(
    result: Annotated[Path, typer.Argument(metavar="RESULT", help="The board's result.tar.gz.")],
    run: RunArgument = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The artefact; beside the run's engines.")] = None,
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Read what a board made of a bundle, judge it, and join it to the run. Exit 0 or 1."""
    from repaconv.pipeline import collect as stage

    finish("collect", format, quiet, lambda progress: stage(result, run, out=out, progress=progress))


@app.command(epilog="Example: repaconv sweep matrix.yaml --scheduler tcp://desk:8786")
def sweep(
    matrix: Annotated[
        Path, typer.Argument(metavar="MATRIX", help=".toml or .yaml: models, targets, precisions, batches.")
    ],
    scheduler: Scheduler = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    wait: Wait = 30,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The folder; repaconv-out/sweep-<matrix>.")] = None,
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Measure a matrix of models, targets, precisions and batches, here or on a cluster; resumes where it stopped."""
    from repaconv.farm.cluster import Tls
    from repaconv.farm.sweep import sweep as stage

    tls = Tls(tls_ca, tls_cert, tls_key)
    finish(
        "sweep",
        format,
        quiet,
        lambda progress: stage(matrix, scheduler=scheduler, tls=tls, wait_s=wait, out=out, progress=progress),
    )


@app.command(epilog="Example: repaconv worker --target orin-nano --scheduler tcp://desk:8786")
def worker(
    target: Annotated[str, typer.Option("--target", help="What this machine is.")],
    scheduler: Annotated[str, typer.Option("--scheduler", metavar="tcp://HOST:PORT", help="Of the Dask cluster.")],
    name: Annotated[str | None, typer.Option("--name", help="What it is called in results.")] = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Serve a cluster as a machine of this target, one measurement at a time, until stopped."""
    from repaconv.cli import render
    from repaconv.farm.cluster import Tls, work
    from repaconv.steps.common import load_target

    device = load_target(target)
    work(device.name, scheduler, name=name, tls=Tls(tls_ca, tls_cert, tls_key), started=render.told)
