"""What looks at whole runs: the gate, the report, the papers' tables."""

from __future__ import annotations

import sys
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from repaconv.cli.options import (
    Format,
    FormatOption,
    Quiet,
    RunArgument,
    app,
    finish,
)
from repaconv.cli.panels import ENVIRONMENT, STEPS, WORKFLOWS
from repaconv.errors import UsageProblem
from repaconv.orders.saving import SaveOrder
from repaconv.orders.stages import GateOrder
from repaconv.orders.texts import pairs

if TYPE_CHECKING:
    from repaconv.artefacts import Record
    from repaconv.progress import Progress


class GateFormat(str, Enum):
    """How the gate's results are printed."""

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
            metavar="RECIPE...",
            help="Recipes: TOML files, see `repaconv new-recipe`.",
        ),
    ],
    order: GateOrder = GateOrder(),
    report: Annotated[
        list[str] | None,
        typer.Option(
            "--report",
            metavar="FORMAT:PATH",
            help="Also write the results to a file, e.g. junit:gate.xml; repeatable.",
        ),
    ] = None,
    format: Annotated[GateFormat, typer.Option("--format", help="Format of the results on stdout.")] = GateFormat.text,
    quiet: Quiet = False,
) -> None:
    """Fold, export, verify and benchmark what recipes name, for CI. The exit code is that of the worst check."""
    from repaconv.cli import render, reports
    from repaconv.cli.showing import show
    from repaconv.files import write_text
    from repaconv.pipeline.gating import gate_by

    written = {name: Path(path) for name, path in pairs(report or [], "--report", ":").items()}
    for name in written:
        if name not in reports.FORMATS:
            raise UsageProblem(
                f"--report {name}: unknown format.",
                hint=f"Known formats: {', '.join(reports.FORMATS)}.",
                code="usage.also",
            )
    with render.progress(quiet=quiet or format is not GateFormat.text) as progress:
        done = gate_by(order, recipes, progress=progress)
    for name, path in written.items():
        write_text(path, reports.FORMATS[name](done))
    if format is GateFormat.json:
        render.envelope("gate", done.exit_code, render.plain_data(done))
    elif format is GateFormat.text:
        show(done)
    else:
        sys.stdout.write(reports.FORMATS[format.value](done))
    raise typer.Exit(done.exit_code)


class ReportFormat(str, Enum):
    """How a report is written."""

    html = "html"
    markdown = "markdown"
    json = "json"
    card = "card"


@app.command(rich_help_panel=STEPS, epilog="Example: repaconv report")
def report(
    run: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUN]...",
            help="Run folder made by `fold`; several are compared in one table.",
            show_default="the newest run",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            help="File to write.",
            show_default="report.html in the run folder; runs.html for several runs",
        ),
    ] = None,
    paper: Annotated[bool, typer.Option(help="Include the figures of the method's paper.")] = True,
    format: Annotated[
        ReportFormat, typer.Option("--format", help="What to write; card is a model card (README.md) for model hubs.")
    ] = ReportFormat.html,
    quiet: Quiet = False,
) -> None:
    """Summarize a run on one page: verification, savings, latency, profile, and the command behind every figure.

    Several runs are compared in one table: verification, size, accuracy, speed, with a link to each page.
    """
    from repaconv.pipeline.comparing_runs import compare_runs
    from repaconv.pipeline.reporting import report as stage

    def page(progress: Progress) -> Record:
        if run and len(run) > 1:
            return compare_runs(run, format=format.value, out=out, progress=progress)
        return stage(run[0] if run else None, format=format.value, out=out, paper=paper, progress=progress)

    def printed(done: Any) -> None:
        sys.stdout.write(Path(done.output_files[0]).read_text())

    shown = printed if format is ReportFormat.markdown and out is None else None
    finish("report", Format.json if format is ReportFormat.json else Format.text, quiet, page, shown)


@app.command(rich_help_panel=STEPS, epilog="Example: repaconv save -o my-network")
def save(
    run: RunArgument = None,
    order: SaveOrder = SaveOrder(),
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Save a folded network as a folder that timm or transformers loads, with a model card."""
    from repaconv.pipeline.saving import save_by

    finish("save", format, quiet, partial(save_by, order, run))


@app.command(rich_help_panel=ENVIRONMENT, epilog="Example: repaconv table repavit")
def table(
    method: Annotated[str, typer.Argument(help="The method whose paper to compare with.")],
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Compare parameters and MACs of a paper's models, as counted here, with the figures in the paper."""
    from repaconv.pipeline.tables import table as stage

    finish("table", format, quiet, lambda progress: stage(method, progress=progress))
