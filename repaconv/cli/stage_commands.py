"""Commands of the main stages, in the order in which data flows: inspect, fold, verify, export, build, bench."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from repaconv.cli.command_options import (
    STEPS,
    FoldArgument,
    Format,
    FormatOption,
    InspectArgument,
    ModelArgument,
    Quiet,
    RunArgument,
    app,
    out_option,
    run_and_exit,
)
from repaconv.core.errors import UsageProblem, did_you_mean
from repaconv.distributed.options import ClusterOptions
from repaconv.stages.bench.options import OBJECTIVES, THROUGHPUT, BenchOptions, EstimateOptions, ThroughputOptions
from repaconv.stages.build.options import BuildOptions
from repaconv.stages.export.options import ExportOptions
from repaconv.stages.fold.options import FoldOptions
from repaconv.stages.inspect.options import InspectOptions
from repaconv.stages.shared import option_dataclasses
from repaconv.stages.verify.options import VerifyOptions

if TYPE_CHECKING:
    from repaconv.results import Record


@app.command(rich_help_panel=STEPS, epilog="Example: repaconv inspect ckpt.pth")
def inspect(
    checkpoint: InspectArgument,
    options: InspectOptions = InspectOptions(),
    out: Annotated[
        Path | None, out_option("Also write the result to this file (JSON).", panel=option_dataclasses.OUTPUT)
    ] = None,
    svg: Annotated[
        Path | None,
        typer.Option(
            "--svg",
            help="Also draw the layers before and after the fold to this SVG file; this computes the fold.",
            rich_help_panel=option_dataclasses.OUTPUT,
        ),
    ] = None,
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Describe a checkpoint, an ONNX model or an engine: file type, method, architecture, sizes. Runs no code in it."""
    from repaconv.core.file_replacement import require_replaceable, require_replaceable_page, write_page
    from repaconv.core.files import write_artefact
    from repaconv.stages.inspect.stage import NOT_CHECKPOINTS, draw_fold, inspect_file
    from repaconv.stages.inspect.stage import inspect as stage

    def run(*, progress: Any) -> Record:
        if out:
            require_replaceable(out, "inspect")
        if svg:
            require_replaceable_page(svg)
        other = checkpoint.suffix in NOT_CHECKPOINTS
        seen: Record = inspect_file(checkpoint, options.sha256) if other else stage(checkpoint, **vars(options))
        if svg:
            write_page(svg, draw_fold(checkpoint, **vars(options)))
        if out:
            write_artefact(out, seen)
        return seen

    run_and_exit("inspect", format, quiet, run)


@app.command(
    rich_help_panel=STEPS,
    epilog="Example: repaconv fold ckpt.pth, repaconv fold net.pth --arch timm:resnet50, or repaconv fold model.onnx",
)
def fold(
    checkpoint: FoldArgument,
    options: FoldOptions = FoldOptions(),
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Fold a checkpoint exactly into its inference-time architecture, or any network or ONNX model to a smaller one."""
    from repaconv.core import terminal
    from repaconv.stages.fold.stage import fold as stage

    if options.preset != "default" and not quiet:
        preset = shlex.quote(options.preset)
        terminal.print_message(
            f"--preset moves to export, where the target is known: repaconv export --preset {preset}"
        )
    run_and_exit("fold", format, quiet, lambda progress: stage(checkpoint, **vars(options), progress=progress))


@app.command(rich_help_panel=STEPS, epilog="Example: repaconv verify --images val/ --count 256")
def verify(
    run: RunArgument = None,
    options: VerifyOptions = VerifyOptions(),
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Verify the folded model and its ONNX models against the training-time network in float64.

    Exit code 1 if a link failed, 5 if none could be verified, otherwise 0. The last line names what is not verified.
    """
    from repaconv.stages.verify.stage import verify_by

    run_and_exit("verify", format, quiet, partial(verify_by, options, run))


@app.command(
    rich_help_panel=STEPS, epilog="Example: repaconv export, or repaconv export --precision int8 --images val/"
)
def export(
    run: RunArgument = None,
    out: Annotated[
        Path | None, out_option("ONNX file to write.", "a file in the run folder", panel=option_dataclasses.OUTPUT)
    ] = None,
    onnx: Annotated[bool, typer.Option("--onnx", hidden=True, help="Write ONNX (the only format).")] = True,
    options: ExportOptions = ExportOptions(),
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Export the folded model to ONNX, simplify it, and compare its outputs under ONNX Runtime."""
    from repaconv.stages.export.stage import export_by

    if run is not None and run.suffix == ".onnx":
        if run.is_file():
            raise UsageProblem(
                f"{run} is not a run folder.",
                hint=f"Fold it first: repaconv fold {shlex.quote(str(run))}. To choose the file to write, use -o.",
                code="usage.export",
            )
        raise UsageProblem(
            f"{run} is not a run folder.",
            hint=f"To choose the file to write, use -o: repaconv export -o {shlex.quote(str(run))}",
            code="usage.export",
        )
    run_and_exit("export", format, quiet, partial(export_by, options, run, onnx=out or ""))


@app.command(rich_help_panel=STEPS, epilog="Example: repaconv build --target rtx-40")
def build(
    run: ModelArgument = None,
    options: BuildOptions = BuildOptions(target="x86-64"),
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Build an engine from the ONNX model, and check in which precision its layers compute."""
    from repaconv.stages.build.stage import build_by

    run_and_exit("build", format, quiet, partial(build_by, options, run))


@app.command(rich_help_panel=STEPS, epilog="Example: repaconv bench, or repaconv bench --precision int8 --threads 4")
def bench(
    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN|MODEL.onnx|ENGINE",
            help="What to measure.",
            show_default="the newest run",
        ),
    ] = None,
    options: BenchOptions = BenchOptions(),
    cluster: ClusterOptions = ClusterOptions(),
    host: Annotated[
        str | None,
        typer.Option(
            "--host",
            rich_help_panel=option_dataclasses.MEASURE,
            metavar="USER@BOARD",
            help="Measure on a board: send a bundle there by ssh and collect the result, e.g. user@orin.",
        ),
    ] = None,
    estimate: Annotated[
        bool,
        typer.Option(
            "--estimate",
            rich_help_panel=option_dataclasses.MEASURE,
            help="Estimate the latency on a target without measuring; the device need not be present.",
        ),
    ] = False,
    objective: Annotated[
        str,
        typer.Option(
            "--objective",
            rich_help_panel=option_dataclasses.MEASURE,
            metavar="|".join(OBJECTIVES),
            help="What to measure: latency (ms per inference) or throughput (images/s of several inferences at once).",
        ),
    ] = "latency",
    streams: Annotated[
        int | None,
        typer.Option(
            "--streams",
            min=1,
            rich_help_panel=option_dataclasses.MEASURE,
            help="For throughput: number of inferences that run at the same time.",
            show_default="one per core",
        ),
    ] = None,
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Measure the latency of the ONNX model, interleaved with the training-time network.

    Exit code 5 if the measurement is inconclusive, e.g. because other processes use the CPU.
    """
    if objective not in OBJECTIVES:
        raise UsageProblem(
            f"unknown objective {objective!r}.",
            hint=f"{did_you_mean(objective, OBJECTIVES)}Known objectives: {', '.join(OBJECTIVES)}.",
            code="objective",
        )
    by = _estimated(model, options) if estimate else _bench_where(model, options, cluster, host)
    run_and_exit("bench", format, quiet, _throughput(model, options, streams) if objective == THROUGHPUT else by)


def _estimated(model: Path | None, options: BenchOptions) -> Any:
    """Return the stage that estimates latency without measuring."""
    from repaconv.stages.bench.estimate import estimate_by

    return partial(estimate_by, EstimateOptions.of(options), model)


def _throughput(model: Path | None, options: BenchOptions, streams: int | None) -> Any:
    """Return the stage that measures throughput, with several inferences at the same time."""
    from repaconv.stages.bench.throughput import throughput_by

    return partial(throughput_by, ThroughputOptions.of(options, streams=streams), model)


def _bench_where(model: Path | None, options: BenchOptions, cluster: ClusterOptions, host: str | None) -> Any:
    """Return the stage that measures latency: on a board, on a cluster worker, or on this machine."""
    if host:
        from repaconv.distributed.remote_bench import bench_by_ssh

        return partial(bench_by_ssh, host, options, model)
    if cluster.scheduler:
        from repaconv.distributed.remote_bench import bench_on_worker

        return partial(bench_on_worker, cluster, options, model)
    from repaconv.stages.bench.stage import bench_by

    return partial(bench_by, options, model)
