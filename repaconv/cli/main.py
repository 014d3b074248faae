"""The command line: options to a stage, its artefact to the renderer, its verdict to the exit code."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from repaconv.errors import RepaconvError, UsageProblem

if TYPE_CHECKING:
    from repaconv.artefact import Record

app = typer.Typer(
    name="repaconv",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Fold a trained vision model exactly into its fastest deploy form, prove it, export it, measure it.",
    epilog="Exit codes: 0 done and verified, 1 a gate failed, 2 usage, 3 environment, 4 input refused, "
    "5 inconclusive, 130 interrupted.",
)


class Format(str, Enum):
    """How results are printed."""

    text = "text"
    json = "json"


class GateFormat(str, Enum):
    """How the gate's results are printed."""

    text = "text"
    json = "json"
    junit = "junit"
    github = "github"
    markdown = "markdown"


FormatOption = Annotated[Format, typer.Option("--format", help="How results are printed to stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Results only: no progress, no list of files.")]
RunArgument = Annotated[Path | None, typer.Argument(metavar="[RUN]", help="A run's folder; the newest if left out.")]
CheckpointArgument = Annotated[Path, typer.Argument(metavar="CKPT", help=".pth, .pt, .bin or .safetensors.")]
InspectArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="A checkpoint, an .onnx or an engine; nothing in it is run.")
]
Weights = Annotated[str | None, typer.Option("--weights", help="Which set of the file, e.g. model_ema.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="What the file does not tell.")
]
Unverified = Annotated[bool, typer.Option("--unverified", help="Go on behind a failed verdict, and record it.")]
Images = Annotated[Path | None, typer.Option("--images", help="A folder of images, or of one folder a class.")]
Scheduler = Annotated[
    str | None,
    typer.Option("--scheduler", metavar="tcp://HOST:PORT", help="Of a Dask cluster with workers of the target."),
]
TlsCa = Annotated[Path | None, typer.Option("--tls-ca", help="The cluster's certificate authority.")]
TlsCert = Annotated[Path | None, typer.Option("--tls-cert", help="This machine's certificate.")]
TlsKey = Annotated[Path | None, typer.Option("--tls-key", help="Its key.")]
Wait = Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for a worker of the target.")]
Target = Annotated[str, typer.Option("--target", help="A target's name, or the path of a .toml.")]


def finish(
    command: str, format: Format, quiet: bool, stage: Callable[[Any], Record], show: Callable[[Any], None]
) -> None:
    """Run a stage, show its artefact, leave with its verdict."""
    from repaconv.cli import render

    with render.progress(quiet=quiet or format is Format.json) as progress:
        done = stage(progress)
    code = 1 if getattr(done, "verdict", "passed") == "failed" else 0
    if not code and getattr(getattr(done, "quality", None), "verdict", "") == "inconclusive":
        code = 5
    if format is Format.json:
        render.envelope(command, code, render.plain_data(done))
    else:
        render.files(getattr(done, "took", ()), getattr(done, "wrote", ()), quiet=quiet)
        show(done)
    raise typer.Exit(code)


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
    from repaconv.cli import render
    from repaconv.files import write_artefact
    from repaconv.pipeline import inspect as stage
    from repaconv.pipeline.file_inspection import NOT_CHECKPOINTS, inspect_file

    other = checkpoint.suffix in NOT_CHECKPOINTS

    def run(_progress: Any) -> Record:
        seen: Record = inspect_file(checkpoint) if other else stage(checkpoint, weights=weights, settings=settings)
        if out:
            write_artefact(out, seen)
        return seen

    settings = pairs(set_, "--set")
    finish("inspect", format, quiet, run, render.file_inspection if other else render.inspection)


@app.command(epilog="Example: repaconv fold ckpt.pth --method riformer")
def fold(
    checkpoint: CheckpointArgument,
    method: Annotated[str, typer.Option("--method", help="The method, or auto.")] = "auto",
    set_: SetOption = None,
    weights: Weights = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="The run's folder; repaconv-out/<stem> if left out.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace another checkpoint's run.")] = False,
    allow_deployed: Annotated[
        bool, typer.Option("--allow-deployed", help="Take a checkpoint in the official deploy form.")
    ] = False,
    identify: Annotated[
        Path | None, typer.Option("--identify", help="A recorded pair (.npz) that settles what the file does not tell.")
    ] = None,
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Fold a checkpoint exactly into its deploy form: model.safetensors and fold.json."""
    from repaconv.cli import render
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
            progress=progress,
        ),
        render.folding,
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
    from repaconv.cli import render
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
        render.verification,
    )


@app.command(epilog="Example: repaconv table repavit")
def table(
    method: Annotated[str, typer.Argument(help="Whose paper's tables.")],
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Count parameters and MACs of the paper's models in our forms, beside the paper's own figures."""
    from repaconv.cli import render
    from repaconv.pipeline import table as stage

    finish("table", format, quiet, lambda progress: stage(method, progress=progress), render.paper_table)


@app.command(epilog="Example: repaconv export --onnx")
def export(
    run: RunArgument = None,
    onnx: Annotated[
        str | None, typer.Option("--onnx", metavar="[PATH]", help="Write ONNX; to model.onnx of the run without PATH.")
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The same as --onnx PATH.")] = None,
    target: Target = "x86-64",
    precision: Annotated[
        str, typer.Option("--precision", help="fp32, fp16, bf16 or int8; all but the first are lossy.")
    ] = "fp32",
    batch: Annotated[str, typer.Option("--batch", metavar="dynamic|N", help="Images a call.")] = "dynamic",
    image_size: Annotated[
        str | None, typer.Option("--image-size", help="Fix them: N or HEIGHTxWIDTH; free if the network allows it.")
    ] = None,
    simplify: Annotated[bool, typer.Option(help="Simplify, and keep that graph if it computes the same.")] = True,
    simplifier: Annotated[
        str, typer.Option("--simplifier", help="onnxsim, onnxslim, or auto: the first that runs.")
    ] = "auto",
    with_preprocessing: Annotated[
        bool, typer.Option("--with-preprocessing", help="Take pixels (uint8, NHWC, RGB); normalise in the graph.")
    ] = False,
    inputs: Annotated[Path | None, typer.Option("--inputs", help=".npz to measure a lower precision on.")] = None,
    images: Images = None,
    unverified: Unverified = False,
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Export the folded model to ONNX, simplified and compared under ONNX Runtime."""
    from repaconv.cli import render
    from repaconv.pipeline import export as stage

    if onnx is None and out is None:
        raise UsageProblem("say what to export to.", hint="repaconv export --onnx", code="usage.export")
    fixed = None if batch == "dynamic" else whole(batch, "--batch")
    finish(
        "export",
        format,
        quiet,
        lambda progress: stage(
            run,
            onnx=onnx or out,
            target=target,
            precision=precision,
            batch=fixed,
            image_size=size(image_size),
            simplify=simplify,
            simplifier=simplifier,
            with_preprocessing=with_preprocessing,
            inputs=inputs,
            images=images,
            unverified=unverified,
            progress=progress,
        ),
        render.exporting,
    )


@app.command(epilog="Example: repaconv build --target rtx-40")
def build(
    run: RunArgument = None,
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
    from repaconv.cli import render
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
        render.building,
    )


@app.command(epilog="Example: repaconv bundle --target orin-nano --precision fp16")
def bundle(
    run: RunArgument = None,
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
    from repaconv.cli import render
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
        render.bundling,
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
    from repaconv.cli import render
    from repaconv.pipeline import collect as stage

    finish("collect", format, quiet, lambda progress: stage(result, run, out=out, progress=progress), render.collecting)


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
    precision: Annotated[str, typer.Option("--precision", help="Of the model, with --host.")] = "fp32",
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Measure the ONNX model's latency here, and the training form beside it in the same run.

    Exit 5 if the measurement is inconclusive, as on a machine that others use.
    """
    from repaconv.cli import render
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
            render.collecting,
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
            render.measuring,
        )
    finish(
        "bench",
        format,
        quiet,
        lambda progress: stage(
            model,
            target=target,
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
            seed=seed,
            unverified=unverified,
            out=out,
            progress=progress,
        ),
        render.measuring,
    )


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
    from repaconv.cli import render
    from repaconv.farm.cluster import Tls
    from repaconv.farm.sweep import sweep as stage

    tls = Tls(tls_ca, tls_cert, tls_key)
    finish(
        "sweep",
        format,
        quiet,
        lambda progress: stage(matrix, scheduler=scheduler, tls=tls, wait_s=wait, out=out, progress=progress),
        render.sweeping,
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
    from repaconv.pipeline.common import load_target

    device = load_target(target)
    work(device.name, scheduler, name=name, tls=Tls(tls_ca, tls_cert, tls_key), started=render.told)


@app.command(epilog="Example: repaconv gate recipes/*.toml --format junit > gate.xml")
def gate(
    recipes: Annotated[list[Path], typer.Argument(metavar="RECIPE...", help="TOML files.")],
    update_baseline: Annotated[
        bool, typer.Option("--update-baseline", help="Write the latencies as the new baseline instead of judging them.")
    ] = False,
    also: Annotated[
        list[str] | None, typer.Option("--also", metavar="FORMAT:PATH", help="Write them there, too: junit:gate.xml.")
    ] = None,
    format: Annotated[
        GateFormat, typer.Option("--format", help="How results are printed to stdout.")
    ] = GateFormat.text,
    quiet: Quiet = False,
) -> None:
    """Fold, export, verify and bench what recipes name, and judge all of it, for CI. Exit 0, or that of the worst."""
    from repaconv.cli import render, reports
    from repaconv.files import write_text
    from repaconv.pipeline import gate as stage

    written = {name: Path(path) for name, path in pairs(also, "--also", ":").items()}
    for name in written:
        if name not in reports.FORMATS:
            raise UsageProblem(
                f"--also {name}: there is no such format.",
                hint=f"Known: {', '.join(reports.FORMATS)}.",
                code="usage.also",
            )
    with render.progress(quiet=quiet or format is not GateFormat.text) as progress:
        done = stage(recipes, update_baseline=update_baseline, progress=progress)
    for name, path in written.items():
        write_text(path, reports.FORMATS[name](done))
    if format is GateFormat.json:
        render.envelope("gate", done.exit_code, render.plain_data(done))
    elif format is GateFormat.text:
        render.gating(done)
    else:
        sys.stdout.write(reports.FORMATS[format.value](done))
    raise typer.Exit(done.exit_code)


class ReportFormat(str, Enum):
    """How a report is written."""

    html = "html"
    markdown = "markdown"
    json = "json"


@app.command(epilog="Example: repaconv report")
def report(
    run: RunArgument = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The file; report.html of the run.")] = None,
    paper: Annotated[bool, typer.Option(help="The paper's own figures beside ours.")] = True,
    format: Annotated[ReportFormat, typer.Option("--format", help="What is written.")] = ReportFormat.html,
    quiet: Quiet = False,
) -> None:
    """Put a run on one page: proof, savings, latency, where the time goes, and how to make every figure again."""
    from repaconv.cli import render
    from repaconv.pipeline import report as stage

    finish(
        "report",
        Format.json if format is ReportFormat.json else Format.text,
        quiet,
        lambda progress: stage(run, format=format.value, out=out, paper=paper, progress=progress),
        render.reporting,
    )


@app.command(epilog="Example: repaconv targets")
def targets(format: FormatOption = Format.text) -> None:
    """List the devices that are known."""
    from repaconv import registry
    from repaconv.cli import render

    found = [registry.load(registry.TARGETS, name) for name in registry.registered(registry.TARGETS)]
    if format is Format.json:
        render.envelope("targets", 0, [target.model_dump(mode="json") for target in found])
    else:
        each = [target.variant(name) for target in found for name in target.variants]
        every = sorted([*found, *each], key=lambda target: target.name)
        lines = [
            (t.name, f"{t.runtime} {t.runtime_version}".strip(), str(t.opset), ", ".join(t.precisions), t.about)
            for t in every
        ]
        render.rows(("target", "runtime", "opset", "precisions", ""), lines)


@app.command(epilog="Example: repaconv doctor")
def doctor(
    target: Annotated[str | None, typer.Option("--target", help="What of this target works on this machine.")] = None,
    format: FormatOption = Format.text,
) -> None:
    """Say what of repaconv works on this machine: plug-ins and runtimes. Exit 3 if something does not."""
    from repaconv import registry
    from repaconv.cli import render

    if target is None:
        found = registry.rows()
    else:
        from repaconv.pipeline.building import what_works

        found = what_works(target)
    code = 3 if any(row.problem for row in found) else 0
    if format is Format.json:
        render.envelope("doctor", code, [row._asdict() for row in found])
    else:
        lines = [(row.group, row.name, row.value, row.problem or row.note or "works") for row in found]
        render.rows(("group", "name", "plug-in", ""), lines)
    raise typer.Exit(code)


@app.command(epilog="Example: repaconv demo --arch s12")
def demo(
    arch: Annotated[str, typer.Option("--arch", help="s12, s24, s36, m36 or m48.")] = "s12",
    out: Annotated[Path, typer.Option("-o", "--out", help="The demo's folder.")] = Path("demo-out"),
    rounds: Annotated[int | None, typer.Option("--rounds", min=2, help="Measured rounds.")] = None,
    quiet: Quiet = False,
) -> None:
    """Walk the whole way on a checkpoint that repaconv makes itself: inspect, fold, verify, export, bench."""
    from repaconv.cli.demo import run_demo

    raise typer.Exit(run_demo(arch, out, rounds, quiet=quiet))


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.", is_eager=True)] = False,
) -> None:
    """Fold a trained vision model exactly into its fastest deploy form, prove it, export it, measure it."""
    if version:
        from importlib.metadata import version as installed

        sys.stdout.write(f"repaconv {installed('repaconv')}\n")
        raise typer.Exit(0)


def pairs(given: list[str] | None, option: str, separator: str = "=") -> dict[str, str]:
    """``name=value`` words as a dict.

    Raises:
        UsageProblem: If one has no separator or no name.
    """
    found = {}
    for word in given or []:
        name, mark, value = word.partition(separator)
        if not name or not mark:
            raise UsageProblem(
                f"{option} {word} is not NAME{separator}VALUE.",
                hint=f"E.g. {option} {'eps=1e-6' if separator == '=' else 'onnx:1e-6'}.",
                code="usage.pair",
            )
        found[name] = value
    return found


def number(text: str, option: str) -> float:
    """A float above zero, or a `UsageProblem`."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not value > 0:
        raise UsageProblem(f"{option}: {text!r} is not a number above zero.", hint="E.g. 1e-6.", code="usage.number")
    return value


def share(text: str, option: str) -> float:
    """``5%`` or ``0.05``."""
    return number(text.removesuffix("%"), option) / (100 if text.endswith("%") else 1)


def size(text: str | None) -> tuple[int, int] | None:
    """N or HEIGHTxWIDTH in pixels."""
    from repaconv.artefact import parse_image_size

    try:
        return None if text is None else parse_image_size(text)
    except ValueError as error:
        raise UsageProblem(
            f"--image-size {text} is {error}.", hint="E.g. --image-size 224.", code="usage.image-size"
        ) from None


def whole(text: str, option: str) -> int:
    """A whole number above zero, or a `UsageProblem`."""
    if not text.isdigit() or int(text) == 0:
        raise UsageProblem(
            f"{option}: {text!r} is neither dynamic nor a whole number above zero.",
            hint=f"{option} dynamic or {option} 8.",
            code="usage.number",
        )
    return int(text)


def expand_onnx(arguments: list[str]) -> list[str]:
    """Typer has no option with an optional value: turn a lone ``--onnx`` into ``--onnx=``."""
    expanded = []
    for position, word in enumerate(arguments):
        following = arguments[position + 1 : position + 2]
        lone = word == "--onnx" and (not following or following[0].startswith("-"))
        expanded.append("--onnx=" if lone else word)
    return expanded


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and leave the process with its exit code; no traceback for what a user can mend."""
    own_process = arguments is None
    if own_process:
        gc.set_threshold(100_000)  # a quarter off the time that importing torch takes
    given = sys.argv[1:] if arguments is None else arguments
    command = next((word for word in given if not word.startswith("-")), "")
    usage_error: type[Exception] = typer.BadParameter.__bases__[0]  # Typer exports only this one of its kind
    try:
        code = app(args=expand_onnx(given), prog_name="repaconv", standalone_mode=False)
    except RepaconvError as problem:
        code = _report(problem, command, given)
    except usage_error as problem:
        code = _report(_usage(problem, command), command, given)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    if own_process and "onnxsim" not in sys.modules:  # which complains where its objects are not freed
        gc.freeze()  # leaving would search all that torch imported for garbage, for most of a second
    sys.exit(code if isinstance(code, int) else 0)


def _usage(problem: BaseException, command: str) -> UsageProblem:
    message = problem.format_message() if hasattr(problem, "format_message") else str(problem)
    help_command = (
        f"repaconv {command} --help"
        if command in {c.name or _name(c) for c in app.registered_commands}
        else ("repaconv --help")
    )
    return UsageProblem(message.rstrip(".") + ".", hint=f"See `{help_command}`.", code="usage.arguments")


def _name(command: Any) -> str:
    return str(command.callback.__name__) if command.callback else ""


def _report(problem: RepaconvError, command: str, given: list[str]) -> int:
    from repaconv.cli import render

    as_json = "--format=json" in given or ("--format", "json") in pairwise(given)
    if as_json:
        render.envelope(command, problem.exit_code, None, [problem])
    else:
        render.error(problem)
    return problem.exit_code
