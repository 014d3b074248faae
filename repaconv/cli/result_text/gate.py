"""Every check of every recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from repaconv.cli.text_and_json_output import coloured, out, plain, table

if TYPE_CHECKING:
    from repaconv.results import GateReport


def show(done: GateReport) -> None:
    """Every check of every recipe, and the exit code."""
    from repaconv.cli.gate_report_formats import sentence

    for recipe in done.recipes:
        rows = table("stage", "check", "verdict", "")
        for check in recipe.checks:
            rows.add_row(check.stage, check.name, coloured(check.verdict), plain(sentence(check)))
        out().print(f"[bold]{plain(recipe.recipe)}[/]")
        out().print(rows)
    verdict = "passed" if not done.exit_code else "failed" if done.exit_code == 1 else f"exit {done.exit_code}"
    out().print(f"{coloured(verdict)}: {len(done.recipes)} recipe{'s' if len(done.recipes) > 1 else ''}")
