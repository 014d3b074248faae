"""The stages, in the order in which data flows."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from repaconv.cli.options import (
    FoldArgument,
    Format,
    FormatOption,
    InspectArgument,
    ModelArgument,
    Quiet,
    RunArgument,
    app,
    finish,
)
from repaconv.errors import UsageProblem
from repaconv.orders.stages import (
    OBJECTIVES,
    THROUGHPUT,
    BenchOrder,
    BuildOrder,
    ClusterOrder,
    EstimateOrder,
    ExportOrder,
    FoldOrder,
    InspectOrder,
    VerifyOrder,
)
from repaconv.orders.throughput import ThroughputOrder

if TYPE_CHECKING:
    from repaconv.artefacts import Record


@app.command(epilog="Example: repaconv inspect ckpt.pth")
def inspect(
    checkpoint: InspectArgument,
    order: InspectOrder = InspectOrder(),
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Also write the result here, as JSON.")] = None,
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Say what a checkpoint, a graph or an engine holds: container, method, backbone, sizes. Runs nothing in it."""
    from repaconv.files import write_artefact
    from repaconv.pipeline.file_inspection import NOT_CHECKPOINTS, inspect_file
    from repaconv.pipeline.inspection import inspect as stage
    from repaconv.replacing import require_ours

    def run(*, progress: Any) -> Record:
        if out:
            require_ours(out, "inspect")
        other = checkpoint.suffix in NOT_CHECKPOINTS
        seen: Record = inspect_file(checkpoint, order.sha256) if other else stage(checkpoint, **vars(order))
        if out:
            write_artefact(out, seen)
        return seen

    finish("inspect", format, quiet, run)


@app.command(epilog="Example: repaconv fold ckpt.pth --method riformer, or repaconv fold model.onnx")
def fold(
    checkpoint: FoldArgument,
    order: FoldOrder = FoldOrder(),
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Fold a checkpoint exactly into its deploy form, or any network or ONNX graph into a smaller one."""
    from repaconv.cli import render
    from repaconv.pipeline.folding import fold as stage

    if (order.arch or "").partition(":")[0].endswith(".py") and not quiet:
        render.told(f"running {order.arch}, as --arch asks")
    if order.form != "default" and not quiet:
        render.told(f"--form moves to export, where the target is known: repaconv export --onnx --form {order.form}")
    finish("fold", format, quiet, lambda progress: stage(checkpoint, **vars(order), progress=progress))


@app.command(epilog="Example: repaconv verify --inputs recorded.npz")
def verify(
    run: RunArgument = None,
    order: VerifyOrder = VerifyOrder(),
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Prove the folded model, and its ONNX model, against the float64 training form. Exit 0 or 1."""
    from repaconv.pipeline.verification import verify_by

    finish("verify", format, quiet, partial(verify_by, order, run))


@app.command(epilog="Example: repaconv export")
def export(
    run: RunArgument = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The file, in place of the run's own.")] = None,
    onnx: Annotated[bool, typer.Option("--onnx", help="Write ONNX, which is the only choice.")] = True,
    order: ExportOrder = ExportOrder(),
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Export the folded model to ONNX, simplified and compared under ONNX Runtime."""
    from repaconv.pipeline.exporting import export_by

    if run is not None and run.suffix == ".onnx":
        raise UsageProblem(
            f"{run} is no run's folder.", hint=f"The file to write is -o: repaconv export -o {run}", code="usage.export"
        )
    finish("export", format, quiet, partial(export_by, order, run, onnx=out or ""))


@app.command(epilog="Example: repaconv build --target rtx-40")
def build(
    run: ModelArgument = None,
    order: BuildOrder = BuildOrder(target="x86-64"),
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Build an engine from the ONNX model, and prove in what precision it computes."""
    from repaconv.pipeline.building import build_by

    finish("build", format, quiet, partial(build_by, order, run))


@app.command(epilog="Example: repaconv bench --target x86-64")
def bench(
    model: Annotated[
        Path | None, typer.Argument(metavar="[RUN|MODEL.onnx|ENGINE]", help="What to measure; the newest run.")
    ] = None,
    order: BenchOrder = BenchOrder(),
    cluster: ClusterOrder = ClusterOrder(),
    host: Annotated[
        str | None, typer.Option("--host", help="Send the bundle to this board by ssh, and bring its result back.")
    ] = None,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Calculate what it would take on a target, which need not be here.")
    ] = False,
    objective: Annotated[
        str, typer.Option("--objective", help="latency of a call, or throughput: images a second of several at once.")
    ] = "latency",
    streams: Annotated[
        int | None, typer.Option("--streams", min=1, help="Of throughput: calls at once; one a core if left out.")
    ] = None,
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Measure the ONNX model's latency here, and the training form beside it in the same run.

    Exit 5 if the measurement is inconclusive, as on a machine that others use.
    """
    if objective not in OBJECTIVES:
        known = ", ".join(OBJECTIVES)
        raise UsageProblem(f"there is no objective {objective!r}.", hint=f"Known: {known}.", code="objective")
    by = _estimated(model, order) if estimate else _bench_where(model, order, cluster, host)
    finish("bench", format, quiet, _throughput(model, order, streams) if objective == THROUGHPUT else by)


def _estimated(model: Path | None, order: BenchOrder) -> Any:
    """Nowhere."""
    from repaconv.pipeline.estimating import estimate_by

    return partial(estimate_by, EstimateOrder.of(order), model)


def _throughput(model: Path | None, order: BenchOrder, streams: int | None) -> Any:
    """Several calls at once, here."""
    from repaconv.pipeline.streaming import throughput_by

    return partial(throughput_by, ThroughputOrder.of(order, streams=streams), model)


def _bench_where(model: Path | None, order: BenchOrder, cluster: ClusterOrder, host: str | None) -> Any:
    """On a board, on a worker, or here."""
    if host:
        from repaconv.farm.remote import bench_by_ssh

        return partial(bench_by_ssh, host, order, model)
    if cluster.scheduler:
        from repaconv.farm.remote import bench_on

        return partial(bench_on, cluster, order, model)
    from repaconv.pipeline.measuring import bench_by

    return partial(bench_by, order, model)
