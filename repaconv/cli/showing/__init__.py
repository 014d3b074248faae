"""How results are shown as text: for a record of `repaconv.artefacts.<room>`, ``show`` of the file ``<room>`` here."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from repaconv.artefacts import Record


def show(done: Record) -> None:
    """Print a result to stdout."""
    room = type(done).__module__.rpartition(".")[2]
    import_module(f"repaconv.cli.showing.{room}").show(done)
