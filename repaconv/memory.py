"""Memory that nobody needs any more, given back: a large network's weights are there several times otherwise."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress


def give_back(*, collect: bool = False) -> None:
    """Give freed memory back to the system, which glibc keeps for itself; elsewhere nothing happens.

    Args:
        collect: Also free what names itself, as graphs that were rewritten do.
    """
    if collect:
        gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
