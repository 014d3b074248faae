"""Progress callbacks, and suppressing the log messages of libraries."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, int, int], None]
"""Called with (step, number done, total); a total of 0 means that it is unknown."""


def silent(_what: str, _done: int, _total: int) -> None:
    """Progress callback that does nothing."""


def prefixed(name: str, progress: Progress) -> Progress:
    """The progress callback with a name in front of each step that does not begin with it."""
    return lambda what, done, total: progress(what if what.startswith(f"{name}:") else f"{name}: {what}", done, total)


@contextmanager
def only_errors(logger: str = "") -> Iterator[None]:
    """Suppress all messages below errors of that logger (default: the root), which do not concern the user."""
    found = logging.getLogger(logger)
    level = found.level
    found.setLevel(logging.ERROR)
    try:
        yield
    finally:
        found.setLevel(level)


# --- The logger for notices to the user: which run is used, which files were removed.
#
# It is the logger ``repaconv``. A removed file is a warning, everything else is information. The command line
# prints both to stderr, also with ``-q``.

LOGGER = logging.getLogger("repaconv")
