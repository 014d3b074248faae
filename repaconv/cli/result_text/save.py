"""A folder for timm or transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from repaconv.cli.result_text.common_tables import links
from repaconv.cli.text_and_json_output import out, plain

if TYPE_CHECKING:
    from repaconv.results import SaveArtefact


def show(done: SaveArtefact) -> None:
    """What holds it, and the proof."""
    out().print(f"{plain(done.payload.path)}, config.json and README.md of {plain(done.arch)}")
    out().print(links(done.links))
