"""A folder for timm or transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from repaconv.cli.render import out, plain
from repaconv.cli.showing.parts import links

if TYPE_CHECKING:
    from repaconv.artefacts import SaveArtefact


def show(done: SaveArtefact) -> None:
    """What holds it, and the proof."""
    before, after = done.parameters
    with_form = "".join(f", {name}" for name in done.form)
    out().print(f"{plain(done.arch)}{with_form}: {before:,} -> {after:,} parameters")
    out().print(links(done.links))
