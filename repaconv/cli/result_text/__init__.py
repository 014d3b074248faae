"""How results are shown as text: for a record of `repaconv.results.<room>`, ``show`` of the file ``<room>`` here."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from repaconv.results import Record


def show(done: Record) -> None:
    """Print a result to stdout."""
    room = type(done).__module__.rpartition(".")[2]
    import_module(f"repaconv.cli.result_text.{room}").show(done)
