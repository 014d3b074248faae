"""Commands about the installation: fetch, targets, doctor; and the demo."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from repaconv.cli import text_and_json_output
from repaconv.cli.command_options import (
    ENVIRONMENT,
    WORKFLOWS,
    Format,
    FormatOption,
    Quiet,
    app,
    out_option,
    run_and_exit,
)
from repaconv.core import terminal
from repaconv.core.errors import UsageProblem
from repaconv.core.progress import Progress, prefixed
from repaconv.stages.shared.common_options import MOST_ROUNDS

if TYPE_CHECKING:
    from repaconv.core.plugins import PluginRow

COUNTED_FROM = 20
"""From this number on, names are counted and not listed."""


@app.command(rich_help_panel=ENVIRONMENT, epilog="Example: repaconv fetch hf://OWNER/NAME@REVISION")
def fetch(
    address: Annotated[
        str,
        typer.Argument(
            metavar="ADDRESS",
            help="hf://OWNER/NAME[@REVISION], or any address that fsspec can read.",
        ),
    ],
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Download a model and record the hashes of its files. No other command downloads anything."""
    from repaconv.stages.fetch.stage import fetch as stage

    run_and_exit("fetch", format, quiet, lambda progress: stage(address, progress=progress))


@app.command(rich_help_panel=ENVIRONMENT, epilog="Example: repaconv targets")
def targets(format: FormatOption = Format.text) -> None:
    """List the target devices with their runtime, opset and precisions."""
    from repaconv.cli import text_and_json_output
    from repaconv.core import plugins, terminal

    found = [plugins.load(plugins.TARGETS, name) for name in plugins.registered(plugins.TARGETS)]
    if format is Format.json:
        text_and_json_output.print_json("targets", 0, [target.model_dump(mode="json") for target in found])
    else:
        each = [target.variant(name) for target in found for name in target.variants]
        every = sorted([*found, *each], key=lambda target: target.name)
        lines = [
            (
                t.name,
                f"{t.runtime} {t.runtime_version}".strip(),
                str(t.newest),
                ", ".join(t.precisions),
                t.about,
            )
            for t in every
        ]
        terminal.print_table(("target", "runtime", "opset", "precisions", ""), lines)


@app.command(rich_help_panel=ENVIRONMENT, epilog="Example: repaconv doctor")
def doctor(
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            help="Check what works for this target on this machine.",
        ),
    ] = None,
    verbose: Annotated[
        bool,
        typer.Option("-v", "--verbose", help="List every plug-in and every extra, with what it is for."),
    ] = False,
    format: FormatOption = Format.text,
) -> None:
    """Check this installation: what works, what does not, and how to install it. Exit code 3 if a plug-in is broken."""
    from repaconv.cli import text_and_json_output
    from repaconv.core import plugins, terminal

    if target is None:
        found = plugins.plugin_rows()
    else:
        from repaconv.stages.build.stage import target_support

        found = target_support(target)
    code = 3 if any(row.problem for row in found) else 0
    if format is Format.json:
        text_and_json_output.print_json("doctor", code, [row._asdict() for row in found])
    elif target is not None:
        lines = [(row.group, row.name, row.value, row.problem or row.note or "works") for row in found]
        terminal.print_table(("group", "name", "plug-in", ""), lines)
    elif verbose:
        terminal.print_table(("", "", ""), listed(found))
    else:
        terminal.print_table(("", ""), summary(found))
    raise typer.Exit(code)


def summary(found: list[PluginRow]) -> Iterator[tuple[str, str]]:
    """Return the rows of `doctor`: versions, what works here, what is broken, and what is not installed. They fit a
    screen of 80 x 24."""
    from repaconv.benchmark.machine_fingerprint import cpu_model, version_of
    from repaconv.core import plugins
    from repaconv.stages.build.stage import work_possible

    packages = [f"{name} {version_of(name) or 'not installed'}" for name in ("repaconv", "torch", "onnx")]
    yield "versions", ", ".join([*packages, f"Python {platform.python_version()}"])
    yield "machine", f"{cpu_model() or platform.machine()}, {os.cpu_count()} cores"
    works = [row for row in found if not row.problem]
    for group in (plugins.METHODS, plugins.BACKBONES):
        yield group.rpartition(".")[2], ", ".join(_with_package(row) for row in works if row.group == group)
    runtimes = {row.name: plugins.runtime_version(row.name) for row in works if row.group == plugins.ENGINES}
    yield "runtimes", ", ".join(f"{name} {installed}" for name, installed in runtimes.items() if installed)
    possible: dict[str, list[str]] = {}
    for row in works:
        if row.group == plugins.TARGETS:
            possible.setdefault(work_possible(row.name), []).append(row.name)
    for work, targets in sorted(possible.items()):
        yield f"{work} for", ", ".join(targets)
    for row in found:
        if row.problem:
            yield "broken", f"{_with_package(row)}: {row.problem}"
    missing = [extra.name for extra in plugins.EXTRAS if extra.missing()]
    if missing:
        yield "not installed", ", ".join(missing)
        yield "to install", f"{plugins.Extra('EXTRA', (), '').line}; repaconv doctor -v says what each is for"


def _with_package(row: PluginRow) -> str:
    """Name a plug-in; one of another package with its entry point."""
    return row.name if row.value.startswith("repaconv.") else f"{row.name} ({row.value})"


def listed(found: list[PluginRow]) -> Iterator[tuple[str, str, str]]:
    """Return the rows of `doctor -v`: one per group for repaconv's own plug-ins; one each for engines, broken plug-ins,
    plug-ins of other packages, and extras."""
    from repaconv.core import plugins

    for group in plugins.GROUPS:
        rows = [row for row in found if row.group == group]
        single = group == plugins.ENGINES
        single_rows = [row for row in rows if single or row.problem or not row.value.startswith("repaconv.")]
        ours = [row.name for row in rows if row not in single_rows]
        kind = group.rpartition(".")[2]
        if ours:
            yield kind, f"{len(ours)} work", ", ".join(ours) if len(ours) < COUNTED_FROM else ""
        for row in single_rows:
            own = "" if row.value.startswith("repaconv.") else f" ({row.value})"
            yield kind, row.name, f"{row.problem or row.note or 'works'}{own}"
    for row in found:
        if row.group == plugins.EXTRAS_GROUP:
            yield "extras", row.name, row.note


@app.command(rich_help_panel=WORKFLOWS, epilog="Example: repaconv demo")
def demo(
    arch: Annotated[
        str | None,
        typer.Option("--arch", help="Use one RIFormer with random weights instead: s12, s24, s36, m36 or m48."),
    ] = None,
    out: Annotated[Path, out_option("Folder to write.")] = Path("demo-out"),
    rounds: Annotated[
        int | None,
        typer.Option(
            "--rounds",
            min=2,
            max=MOST_ROUNDS,
            help="Number of measured rounds.",
            show_default="from the target",
        ),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Fold, export, verify and benchmark five trained networks, one per method, and compare them in a report."""

    raise typer.Exit(
        run_demo(arch, out, rounds, quiet=quiet) if arch else run_trained_networks(out, rounds, quiet=quiet)
    )


# --- The demo: run all stages on the trained networks in the package, or on a checkpoint with random weights.

SEED = 0


def run_trained_networks(out: Path, rounds: int | None, *, quiet: bool) -> int:
    """Run all stages on the trained networks of five methods, and compare them in one report.

    Returns:
        The exit code: 1 if any verdict is failed.
    """
    import repaconv
    from repaconv import models
    from repaconv.core.file_replacement import require_replaceable_page

    page = out / "index.html"
    require_replaceable_page(page)
    with text_and_json_output.progress(quiet=quiet) as progress:
        for method in models.METHODS:
            _run_all_stages(models.checkpoint(method), out / method, rounds, prefixed(method, progress))
        runs = [out / method for method in models.METHODS]
        done = repaconv.compare_runs(runs, out=page, progress=progress)
    text_and_json_output.print_files((), done.output_files, quiet=quiet)
    text_and_json_output.print_result(done)
    return 1 if done.verdict == "failed" else 0


def _run_all_stages(checkpoint: Path, run: Path, rounds: int | None, progress: Progress) -> None:
    """Fold, export in FP32 and INT8, verify on labeled images, benchmark and report one checkpoint."""
    import repaconv
    from repaconv import models

    repaconv.fold(checkpoint, out=run, force=True, progress=progress)
    repaconv.export(run, progress=progress)
    repaconv.export(run, precision="int8", inputs=models.CALIBRATION, progress=progress)
    repaconv.verify(run, inputs=models.HELD_OUT, progress=progress)
    repaconv.bench(run, rounds=rounds, profile=True, progress=progress)
    repaconv.report(run, paper=False, progress=progress)


def run_demo(arch: str, out: Path, rounds: int | None, *, quiet: bool) -> int:
    """Write a RIFormer checkpoint with random weights, run all stages on it, and print the results.

    Returns:
        The exit code: 1 if any verdict is failed.
    """
    import repaconv
    from repaconv.core.files import require_writable
    from repaconv.results.link_reasons import limit_in_words
    from repaconv.testing import write_example

    checkpoint = out / f"riformer_{arch}.pth"
    require_writable(checkpoint)
    with text_and_json_output.progress(quiet=quiet) as progress:
        progress("make a checkpoint", 0, 0)
        if not checkpoint.exists():
            write_example("riformer", arch, checkpoint, SEED)
        seen = repaconv.inspect(checkpoint)
        folded = repaconv.fold(checkpoint, out=out / arch, force=True, progress=progress)
        exported = repaconv.export(out / arch, progress=progress)
        verified = repaconv.verify(out / arch, progress=progress)
        measured = repaconv.bench(out / arch, rounds=rounds, profile=True, progress=progress)
        page = repaconv.report(out / arch, progress=progress)
    if seen.training is None or seen.deploy is None or measured.ratio is None:
        raise UsageProblem(
            "the demo's checkpoint was not recognized.",
            hint="This is a defect of repaconv; please report it.",
            code="demo.broken",
        )
    text_and_json_output.print_files(
        (),
        (
            *folded.output_files,
            *exported.output_files,
            *verified.output_files,
            *measured.output_files,
            *page.output_files,
        ),
        quiet=quiet,
    )
    lines = [
        ("method", f"{seen.method}: {seen.reason}", "inspect"),
        ("parameters", f"{seen.training.parameters:,} -> {seen.deploy.parameters:,}", "inspect"),
        ("MACs per image", f"{seen.training.macs:,} -> {seen.deploy.macs:,}", "inspect"),
        *(
            (
                link.name,
                f"{link.metrics.max_rel_error:.1e} of {limit_in_words(link.tolerance.rtol or 0.0)} allowed: "
                f"{link.verdict}",
                "verify",
            )
            for link in verified.links
            if link.metrics is not None and link.tolerance is not None
        ),
        ("ONNX graph", f"opset {exported.opset}, {exported.nodes} nodes", "export"),
        *((f"{row.name}, p50 / p95", f"{row.p50_ms:.2f} / {row.p95_ms:.2f} ms", "bench") for row in measured.latencies),
        ("speedup over the training form", measured.ratio.cell, "bench"),
        *((("share of the peak", f"{measured.profile.share_of_peak:.0%}", "bench"),) if measured.profile else ()),
        ("measurement", "; ".join((measured.quality.verdict, *measured.quality.reasons)), "bench"),
        ("the whole on one page", page.output_files[0], "report"),
    ]
    terminal.print_table(("what", "verified and measured", "by"), lines)
    return 1 if "failed" in (folded.verdict, exported.verdict, verified.verdict, measured.verdict) else 0
