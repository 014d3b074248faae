"""How long work tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Told (what, done, in all); 0 in all means that the end is not known."""


def silent(_what: str, _done: int, _total: int) -> None:
    """Progress for nobody."""
