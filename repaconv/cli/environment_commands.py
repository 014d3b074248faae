"""Commands about the installation: fetch, targets, doctor; and the demo."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from repaconv.cli.command_options import ENVIRONMENT, WORKFLOWS, Format, FormatOption, Quiet, app, run_and_exit

if TYPE_CHECKING:
    from repaconv.core.plugins import PluginRow

MANY = 20
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
    elif target is None:
        terminal.print_table(("", "", ""), summary(found))
    else:
        lines = [(row.group, row.name, row.value, row.problem or row.note or "works") for row in found]
        terminal.print_table(("group", "name", "plug-in", ""), lines)
    raise typer.Exit(code)


def summary(found: list[PluginRow]) -> Iterator[tuple[str, str, str]]:
    """Return the rows of `doctor`: one per group for repaconv's own plug-ins; one each for engines, broken plug-ins,
    plug-ins of other packages, and extras."""
    from repaconv.core import plugins

    for group in plugins.GROUPS:
        rows = [row for row in found if row.group == group]
        single = group == plugins.ENGINES
        single_rows = [row for row in rows if single or row.problem or not row.value.startswith("repaconv.")]
        ours = [row.name for row in rows if row not in single_rows]
        kind = group.rpartition(".")[2]
        if ours:
            yield kind, f"{len(ours)} work", ", ".join(ours) if len(ours) < MANY else ""
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
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder to write.")] = Path("demo-out"),
    rounds: Annotated[
        int | None,
        typer.Option(
            "--rounds",
            min=2,
            help="Number of measured rounds.",
            show_default="from the target",
        ),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Fold, export, verify and benchmark five trained networks, one per method, and compare them in a report."""
    from repaconv.cli.demo import run_demo, run_trained_networks

    raise typer.Exit(
        run_demo(arch, out, rounds, quiet=quiet) if arch else run_trained_networks(out, rounds, quiet=quiet)
    )
