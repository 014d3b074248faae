"""The links of the chain, what labels say, and where a link fails."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from repaconv.cli.render import coloured, out, plain
from repaconv.cli.showing.parts import accuracy_told, links, locations

if TYPE_CHECKING:
    from repaconv.artefacts import Link, VerifyArtefact


def show(done: VerifyArtefact) -> None:
    """Every link with its verdict, what labels say, and where a link fails."""
    out().print(links(done.links, for_scale=done.for_scale))
    _print_accuracies(done.links)
    if any(link.accuracy for link in done.links):
        for claim in done.claims:
            out().print(f"claimed: accuracy {claim.value:.2%} by {plain(claim.source)}")
    locations(done.links)
    if done.preprocessing:
        out().print(f"[dim]images: {plain(done.preprocessing)}[/]")
    if done.labels:
        out().print(f"[dim]classes: {plain(done.labels)}[/]")
    out().print(f"{coloured(done.verdict)} on {plain(done.inputs)}, policy {done.policy}")


def _print_accuracies(links: Iterable[Link]) -> None:
    for link in links:
        if found := link.accuracy:
            out().print(accuracy_told(link.name, found))
