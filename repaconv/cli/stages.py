"""The stages, in the order in which data flows."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from repaconv.cli.options import (
    AcceptInconclusive,
    FoldArgument,
    Format,
    FormatOption,
    Images,
    InspectArgument,
    ModelArgument,
    Quiet,
    RunArgument,
    Scheduler,
    SetOption,
    Target,
    TlsCa,
    TlsCert,
    TlsKey,
    Unverified,
    Wait,
    Weights,
    app,
    finish,
)
from repaconv.cli.parsing import number, pairs, share, size
from repaconv.errors import UsageProblem
from repaconv.orders.stages import ExportOrder

if TYPE_CHECKING:
    from repaconv.artefacts import Record


@app.command(epilog="Example: repaconv inspect ckpt.pth")
def inspect(
    checkpoint: InspectArgument,
    weights: Weights = None,
    set_: SetOption = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Also write the result here, as JSON.")] = None,
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Say what a checkpoint, a graph or an engine holds: container, method, backbone, sizes. Runs nothing in it."""
    from repaconv.files import write_artefact
    from repaconv.pipeline import inspect as stage
    from repaconv.pipeline.file_inspection import NOT_CHECKPOINTS, inspect_file
    from repaconv.replacing import require_ours

    other = checkpoint.suffix in NOT_CHECKPOINTS

    def run(*, progress: Any) -> Record:
        if out:
            require_ours(out, "inspect")
        seen: Record = inspect_file(checkpoint) if other else stage(checkpoint, weights=weights, settings=settings)
        if out:
            write_artefact(out, seen)
        return seen

    settings = pairs(set_, "--set")
    finish("inspect", format, quiet, run)


@app.command(epilog="Example: repaconv fold ckpt.pth --method riformer, or repaconv fold model.onnx")
def fold(
    checkpoint: FoldArgument,
    method: Annotated[str, typer.Option("--method", help="The method, or auto.")] = "auto",
    set_: SetOption = None,
    weights: Weights = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            help="The run's folder, repaconv-out/<stem> if left out; of a graph the file, beside it if left out.",
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Replace another checkpoint's run; take settings that contradict the checkpoint."),
    ] = False,
    allow_deployed: Annotated[
        bool, typer.Option("--allow-deployed", help="Take a checkpoint in the official deploy form.")
    ] = False,
    identify: Annotated[
        Path | None, typer.Option("--identify", help="A recorded pair (.npz) that settles what the file does not tell.")
    ] = None,
    form: Annotated[
        str, typer.Option("--form", help="How graphs are written: default, official, fastest-known or tune's file.")
    ] = "default",
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Fold a checkpoint exactly into its deploy form, or an ONNX graph into a smaller one that computes the same."""
    from repaconv.pipeline import fold as stage

    finish(
        "fold",
        format,
        quiet,
        lambda progress: stage(
            checkpoint,
            method=method,
            settings=pairs(set_, "--set"),
            weights=weights,
            out=out,
            force=force,
            allow_deployed=allow_deployed,
            identify=identify,
            form=form,
            progress=progress,
        ),
    )


@app.command(epilog="Example: repaconv verify --inputs recorded.npz")
def verify(
    run: RunArgument = None,
    inputs: Annotated[
        Path | None, typer.Option("--inputs", help=".npz with 'input' [N, C, H, W] and the official output, if any.")
    ] = None,
    checkpoint: Annotated[Path | None, typer.Option("--checkpoint", help="Where the checkpoint is now.")] = None,
    images: Images = None,
    classes: Annotated[
        Path | None, typer.Option("--classes", help="Class names, one a line, where the folders' order is another.")
    ] = None,
    count: Annotated[
        int | None, typer.Option("--count", min=1, help="How many random images (4), or images of the folder (all).")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the random images.")] = 0,
    rtol: Annotated[
        list[str] | None, typer.Option("--rtol", metavar="LINK:VALUE", help="A link's tolerance, e.g. onnx:1e-6.")
    ] = None,
    atol: Annotated[
        list[str] | None, typer.Option("--atol", metavar="LINK:VALUE", help="An absolute one; either suffices.")
    ] = None,
    require: Annotated[
        list[str] | None,
        typer.Option("--require", metavar="LINK", help="Fail if this link cannot be run, e.g. engine."),
    ] = None,
    engine: Annotated[
        Path | None, typer.Option("--engine", help="An engine built from the ONNX model; it is loaded and run.")
    ] = None,
    drift: Annotated[bool, typer.Option("--drift", help="Follow the drift through links that pass, too.")] = False,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The result; verify.json of the run.")] = None,
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Prove the folded model, and its ONNX model, against the float64 training form. Exit 0 or 1."""
    from repaconv.pipeline import verify as stage

    relative, absolute = (
        {name: number(value, option) for name, value in pairs(given, option, ":").items()}
        for given, option in ((rtol, "--rtol"), (atol, "--atol"))
    )
    finish(
        "verify",
        format,
        quiet,
        lambda progress: stage(
            run,
            inputs=inputs,
            checkpoint=checkpoint,
            images=images,
            classes=classes,
            count=count,
            seed=seed,
            rtol=relative,
            atol=absolute,
            require=require or (),
            engine=engine,
            drift=drift,
            out=out,
            progress=progress,
        ),
    )


@app.command(epilog="Example: repaconv export --onnx")
def export(
    run: RunArgument = None,
    onnx: Annotated[
        str | None, typer.Option("--onnx", metavar="[PATH]", help="Write ONNX; to model.onnx of the run without PATH.")
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The same as --onnx PATH.")] = None,
    order: ExportOrder = ExportOrder(),
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Export the folded model to ONNX, simplified and compared under ONNX Runtime."""
    from repaconv.pipeline.exporting import export_by

    if onnx is None and out is None:
        raise UsageProblem("say what to export to.", hint="repaconv export --onnx", code="usage.export")
    finish("export", format, quiet, partial(export_by, order, run, onnx=onnx or out))


@app.command(epilog="Example: repaconv build --target rtx-40")
def build(
    run: ModelArgument = None,
    target: Annotated[str, typer.Option("--target", help="A target's name, or the path of a .toml.")] = "x86-64",
    precision: Annotated[
        str, typer.Option("--precision", help="Which of the run's ONNX models: fp32, fp16, bf16 or int8.")
    ] = "fp32",
    workspace: Annotated[
        int | None, typer.Option("--workspace", min=1, help="MiB that TensorRT's kernels may take.")
    ] = None,
    timing_cache: Annotated[
        Path | None, typer.Option("--timing-cache", help="TensorRT's; one a target and version if left out.")
    ] = None,
    replay: Annotated[
        bool, typer.Option("--replay", help="Fail where the timing cache has no answer: the same engine again.")
    ] = False,
    unverified: Unverified = False,
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Build an engine from the ONNX model, and prove in what precision it computes."""
    from repaconv.pipeline import build as stage

    finish(
        "build",
        format,
        quiet,
        lambda progress: stage(
            run,
            target=target,
            precision=precision,
            workspace_mib=workspace,
            timing_cache=timing_cache,
            replay=replay,
            unverified=unverified,
            progress=progress,
        ),
    )


@app.command(epilog="Example: repaconv bench --target x86-64")
def bench(
    model: Annotated[
        Path | None, typer.Argument(metavar="[RUN|MODEL.onnx|ENGINE]", help="What to measure; the newest run.")
    ] = None,
    target: Target = "x86-64",
    against: Annotated[
        Path | None, typer.Option("--against", help="Another .onnx or engine, not the training form.")
    ] = None,
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="Of one inference.")] = None,
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="Images a call.")] = None,
    image_size: Annotated[str | None, typer.Option("--image-size", help="Of the images: N or HEIGHTxWIDTH.")] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", min=2, help="Measured, interleaved rounds.")] = None,
    protocol: Annotated[
        str | None,
        typer.Option("--protocol", help="A paper's: repavit, nondeep, nondeep-throughput, dwconv, riformer."),
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Also say where the time goes, node by node.")] = False,
    baseline: Annotated[
        Path | None, typer.Option("--baseline", help="A committed file of baselines, by machine.")
    ] = None,
    max_regression: Annotated[
        str, typer.Option("--max-regression", help="How much longer than the baseline it may take, e.g. 5%.")
    ] = "5%",
    update_baseline: Annotated[bool, typer.Option("--update-baseline", help="Write the baseline instead.")] = False,
    accept_inconclusive: AcceptInconclusive = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of images, order and bootstrap.")] = 0,
    unverified: Unverified = False,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The result; bench/<target>.json of the run.")] = None,
    scheduler: Scheduler = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    wait: Wait = 30,
    host: Annotated[
        str | None, typer.Option("--host", help="Send the bundle to this board by ssh, and bring its result back.")
    ] = None,
    precision: Annotated[
        str, typer.Option("--precision", help="Which of the run's ONNX models: fp32, fp16, bf16 or int8.")
    ] = "fp32",
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Measure the ONNX model's latency here, and the training form beside it in the same run.

    Exit 5 if the measurement is inconclusive, as on a machine that others use.
    """
    from repaconv.pipeline import bench as stage

    if host:
        from repaconv.farm.remote import bench_by_ssh

        finish(
            "bench",
            format,
            quiet,
            lambda progress: bench_by_ssh(
                host, model, target=target, precision=precision, batch=batch, unverified=unverified, progress=progress
            ),
        )
    if scheduler:
        from repaconv.farm.cluster import Tls
        from repaconv.farm.remote import bench_on

        finish(
            "bench",
            format,
            quiet,
            lambda progress: bench_on(
                scheduler,
                model,
                target=target,
                precision=precision,
                against=against,
                threads=threads,
                batch=batch,
                image_size=size(image_size),
                rounds=rounds,
                protocol=protocol,
                profile=profile,
                seed=seed,
                tls=Tls(tls_ca, tls_cert, tls_key),
                wait_s=wait,
                unverified=unverified,
                progress=progress,
            ),
        )
    finish(
        "bench",
        format,
        quiet,
        lambda progress: stage(
            model,
            target=target,
            precision=precision,
            against=against,
            threads=threads,
            batch=batch,
            image_size=size(image_size),
            rounds=rounds,
            protocol=protocol,
            profile=profile,
            baseline=baseline,
            max_regression=share(max_regression, "--max-regression"),
            update_baseline=update_baseline,
            accept_inconclusive=accept_inconclusive,
            seed=seed,
            unverified=unverified,
            out=out,
            progress=progress,
        ),
    )
