"""How long work tells how far it is, and what a library tells on the way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, int, int], None]
"""Told (what, done, in all); 0 in all means that the end is not known."""


def silent(_what: str, _done: int, _total: int) -> None:
    """Progress for nobody."""


@contextmanager
def only_errors(logger: str = "") -> Iterator[None]:
    """Nothing less is told by that logger, or by the root: what it would say is not the user's."""
    found = logging.getLogger(logger)
    level = found.level
    found.setLevel(logging.ERROR)
    try:
        yield
    finally:
        found.setLevel(level)
