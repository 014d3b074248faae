"""A folder for timm or transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from repaconv.cli.render import out, plain
from repaconv.cli.showing.parts import links

if TYPE_CHECKING:
    from repaconv.artefacts import SaveArtefact


def show(done: SaveArtefact) -> None:
    """What holds it, and the proof."""
    out().print(f"{plain(done.payload.path)}, config.json and README.md of {plain(done.arch)}")
    out().print(links(done.links))
