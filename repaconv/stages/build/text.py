"""Results of `build` as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from repaconv.core.terminal import colored, plain, stdout
from repaconv.stages.shared.result_tables import links

if TYPE_CHECKING:
    from repaconv.results import BuildArtefact


def show_build(done: BuildArtefact) -> None:
    """Print the engine, the types of its layers, and its comparison with the model if it runs here."""
    if done.links:
        stdout().print(links(done.links))
    types = ", ".join(f"{count} {name}" for name, count in done.layer_types.items())
    gpu = f", compute capability {done.compute_capability}" if done.compute_capability else ""
    size = f"{done.payload.bytes:,} bytes, {done.runtime}{gpu}"
    names = dict.fromkeys(link.name for link in done.links if link.verdict == "not verified")
    unverified = f"; not verified: {', '.join(names)}" if names and done.verdict == "passed" else ""
    stdout().print(f"{colored(done.verdict)}: {plain(done.payload.path)}, {size}{unverified}")
    stdout().print(f"types of the layers, {done.precision} requested: {plain(types)}")
    stdout().print(f"[yellow]{plain(done.note)}[/]")
