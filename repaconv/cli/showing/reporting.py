"""What is on a report's page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from repaconv.cli.render import coloured, out, plain

if TYPE_CHECKING:
    from repaconv.artefacts import Report


def show(done: Report) -> None:
    """What is on the page."""
    proved = sum(link.verdict == "passed" for link in done.links)
    out().print(
        f"{coloured(done.verdict)}: {proved} of {len(done.links)} links passed, {len(done.benches)} measurements"
    )
    for sentence in done.open:
        out().print(f"[yellow]not shown:[/] {plain(sentence)}")
