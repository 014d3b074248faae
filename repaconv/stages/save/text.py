"""Results of `save` as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from repaconv.core.terminal import plain, stdout
from repaconv.stages.shared.result_tables import links

if TYPE_CHECKING:
    from repaconv.results import SaveArtefact


def show_save(done: SaveArtefact) -> None:
    """Print the folder and its comparisons."""
    stdout().print(f"{plain(done.payload.path)}, config.json and README.md of {plain(done.arch)}")
    stdout().print(links(done.links))
