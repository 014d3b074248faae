"""Commands for whole workflows (run, deploy, gate, tune, ...), and for reports and comparisons."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from repaconv.cli.command_options import (
    ENVIRONMENT,
    SEARCH,
    STEPS,
    WORKFLOWS,
    FoldArgument,
    Format,
    FormatOption,
    Quiet,
    RunArgument,
    app,
    out_option,
    readers_may_stop,
    run_and_exit,
)
from repaconv.core.errors import UsageProblem, did_you_mean
from repaconv.distributed.options import ClusterOptions
from repaconv.stages.bench.options import CompareOptions
from repaconv.stages.deploy.options import DeployOptions
from repaconv.stages.recipe.options import GateOptions, RunOptions
from repaconv.stages.save.options import SaveOptions
from repaconv.stages.shared.option_dataclasses import pairs
from repaconv.stages.tune.options import TuneOptions

if TYPE_CHECKING:
    from repaconv.core.progress import Progress
    from repaconv.results import RecipeRun, Record


@app.command(rich_help_panel=WORKFLOWS, epilog="Example: repaconv run recipe.toml")
def run(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe: a TOML file, see `repaconv new-recipe`.")],
    options: RunOptions = RunOptions(),
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Run all steps of a recipe and write its report. Steps that are up to date are skipped.

    An interrupted run resumes. The exit code is that of the worst check, as with `gate`.
    """
    from repaconv.stages.recipe.run import run_by

    run_steps_and_exit("run", format, quiet, partial(run_by, options, recipe))


@app.command(rich_help_panel=WORKFLOWS, epilog="Example: repaconv new-recipe ckpt.pth")
def new_recipe(
    checkpoint: FoldArgument,
    out: Annotated[Path | None, out_option("Recipe file to write.", "<stem>.toml")] = None,
    target: Annotated[
        str,
        typer.Option(
            help="The device: a name listed by `repaconv targets`, or the path of a target's TOML file. For a board "
            "that builds its own engine, the recipe makes a bundle."
        ),
    ] = "x86-64",
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Write a commented recipe for a checkpoint: its method, the settings that its file lacks, and all options."""
    from repaconv.stages.recipe.new_recipe import new_recipe as stage

    run_and_exit("new-recipe", format, quiet, partial(stage, checkpoint, out=out, target=target))


@app.command(
    rich_help_panel=WORKFLOWS, epilog="Example: repaconv deploy ckpt.pth --target x86-64 --precision int8 --images val/"
)
def deploy(
    checkpoint: FoldArgument,
    options: DeployOptions = DeployOptions(target="x86-64"),
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Do everything for one target: fold, export, verify, build or bundle, bench, report.

    The results are in one folder, with one verdict. Steps that are up to date are skipped.
    """
    from repaconv.stages.deploy.stage import deploy_by

    run_steps_and_exit("deploy", format, quiet, partial(deploy_by, options, checkpoint))


@app.command(rich_help_panel=STEPS, epilog="Example: repaconv compare a.onnx b.onnx --speed")
def compare(
    reference: Annotated[
        Path, typer.Argument(metavar="A", help="The reference: run folder, ONNX model, engine or folded checkpoint.")
    ],
    candidate: Annotated[Path, typer.Argument(metavar="B", help="The candidate: the same kinds of file.")],
    options: CompareOptions = CompareOptions(),
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Compare two models on the same inputs: outputs, sizes, and with --speed latencies."""
    from repaconv.stages.bench.compare import compare_by

    run_and_exit("compare", format, quiet, partial(compare_by, options, reference, candidate))


def run_steps_and_exit(command: str, format: Format, quiet: bool, work: Callable[..., RecipeRun]) -> None:
    """Run the steps of a recipe, print its result, and exit with its code."""
    from repaconv.cli import text_and_json_output
    from repaconv.cli.text_and_json_output import print_result

    with text_and_json_output.progress(quiet=quiet or format is Format.json) as progress:
        done = work(progress=progress)
    with readers_may_stop():
        if format is Format.json:
            text_and_json_output.print_json(command, done.exit_code, text_and_json_output.plain_data(done))
        else:
            print_result(done)
    raise typer.Exit(done.exit_code)


# Commands that evaluate whole runs: gate, report, save, table


class GateFormat(str, Enum):
    """The format of the gate's results."""

    text = "text"
    json = "json"
    junit = "junit"
    github = "github"
    markdown = "markdown"


@app.command(rich_help_panel=WORKFLOWS, epilog="Example: repaconv gate recipes/*.toml --format junit > gate.xml")
def gate(
    recipes: Annotated[
        list[Path],
        typer.Argument(
            metavar="RECIPE",
            help="Recipes: TOML files, see `repaconv new-recipe`.",
        ),
    ],
    options: GateOptions = GateOptions(),
    report: Annotated[
        list[str] | None,
        typer.Option(
            "--report",
            metavar="FORMAT:PATH",
            help="Also write the results to a file, e.g. junit:gate.xml; repeatable.",
        ),
    ] = None,
    format: Annotated[
        GateFormat,
        typer.Option(
            "--format", metavar="FORMAT", help="Format of the results on stdout: text, json, junit, github or markdown."
        ),
    ] = GateFormat.text,
    quiet: Quiet = False,
) -> None:
    """Fold, export, verify and benchmark what recipes name, for CI. The exit code is that of the worst check."""
    from repaconv.cli import text_and_json_output
    from repaconv.cli.text_and_json_output import print_result
    from repaconv.core.files import require_writable, write_text
    from repaconv.stages.recipe import gate_report_formats
    from repaconv.stages.recipe.gate import gate_by

    written = {name: Path(path) for name, path in pairs(report or [], "--report", ":", "junit:gate.xml").items()}
    for name, path in written.items():
        if name not in gate_report_formats.FORMATS:
            raise UsageProblem(
                f"--report {name}: unknown format.",
                hint=f"{did_you_mean(name, gate_report_formats.FORMATS)}Known formats: "
                f"{', '.join(gate_report_formats.FORMATS)}.",
                code="usage.also",
            )
        require_writable(path)
    with text_and_json_output.progress(quiet=quiet or format is not GateFormat.text) as progress:
        done = gate_by(options, recipes, progress=progress)
    for name, path in written.items():
        write_text(path, gate_report_formats.FORMATS[name](done))
    with readers_may_stop():
        if format is GateFormat.json:
            text_and_json_output.print_json("gate", done.exit_code, text_and_json_output.plain_data(done))
        elif format is GateFormat.text:
            print_result(done)
        else:
            sys.stdout.write(gate_report_formats.FORMATS[format.value](done))
    raise typer.Exit(done.exit_code)


class ReportFormat(str, Enum):
    """The format of a report."""

    html = "html"
    markdown = "markdown"
    json = "json"
    card = "card"


@app.command(rich_help_panel=STEPS, epilog="Example: repaconv report")
def report(
    run: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN",
            help="Run folder made by `fold`; several are compared in one table.",
            show_default="the newest run",
        ),
    ] = None,
    out: Annotated[
        Path | None, out_option("File to write.", "report.html in the run folder; runs.html for several runs")
    ] = None,
    paper: Annotated[bool, typer.Option(help="Include the figures of the method's paper.")] = True,
    format: Annotated[
        ReportFormat,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="What to write: html, markdown, json, or card, a model card (README.md) for model hubs.",
        ),
    ] = ReportFormat.html,
    quiet: Quiet = False,
) -> None:
    """Summarize a run on one page: verification, savings, latency, profile, and the command behind every figure.

    Several runs are compared in one table: verification, size, accuracy, speed, with a link to each page.
    """
    from repaconv.stages.report.runs_comparison import compare_runs
    from repaconv.stages.report.stage import report as stage

    def page(progress: Progress) -> Record:
        if run and len(run) > 1:
            return compare_runs(run, format=format.value, out=out, progress=progress)
        return stage(run[0] if run else None, format=format.value, out=out, paper=paper, progress=progress)

    def printed(done: Any) -> None:
        sys.stdout.write(Path(done.output_files[0]).read_text("utf-8"))

    shown = printed if format is ReportFormat.markdown and out is None else None
    run_and_exit("report", Format.json if format is ReportFormat.json else Format.text, quiet, page, shown)


@app.command(rich_help_panel=STEPS, epilog="Example: repaconv save -o my-network")
def save(
    run: RunArgument = None,
    options: SaveOptions = SaveOptions(),
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Save a folded network as a folder that timm or transformers loads, with a model card."""
    from repaconv.stages.save.stage import save_by

    run_and_exit("save", format, quiet, partial(save_by, options, run))


@app.command(rich_help_panel=ENVIRONMENT, epilog="Example: repaconv table repavit")
def table(
    method: Annotated[str, typer.Argument(help="The method whose paper to compare with.", metavar="METHOD")],
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Compare parameters and MACs of a paper's models, as counted here, with the figures in the paper."""
    from repaconv.stages.paper_table.stage import table as stage

    run_and_exit("table", format, quiet, lambda progress: stage(method, progress=progress))


# The search for the fastest configuration


@app.command(
    rich_help_panel=SEARCH,
    epilog="Example: repaconv tune model.onnx --budget 300, or with a loss: "
    "repaconv tune ckpt.pth --max-accuracy-drop 0.5% --images val/",
)
def tune(
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN|FILE",
            help="Run folder, checkpoint or ONNX model to tune.",
            show_default="the newest run",
        ),
    ] = None,
    options: TuneOptions = TuneOptions(),
    cluster: ClusterOptions = ClusterOptions(),
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Search for the fastest runtime, rewrites, precision and settings on the target by measuring them.

    Only exact FP32 configurations are tried unless a loss is allowed. The result is cached per machine and network
    shape; an interrupted search resumes.
    """

    def run(*, progress: Any) -> Record:
        from repaconv.stages.tune.stage import tune_by

        if not cluster.scheduler:
            return tune_by(options, source, progress=progress)
        from repaconv.distributed.tune_measurements_on_cluster import measurer_on_workers

        there = measurer_on_workers(cluster, options, progress=progress)
        return tune_by(options, source, measurer=there, where=cluster.scheduler, progress=progress)

    run_and_exit("tune", format, quiet, run)
