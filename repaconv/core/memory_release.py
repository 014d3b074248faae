"""Return freed memory to the operating system: otherwise several copies of a large network's weights stay allocated."""

from __future__ import annotations

import ctypes
from contextlib import suppress


def release_freed_memory() -> None:
    """Return memory that was freed but is kept by glibc to the system; does nothing with other C libraries."""
    with suppress(AttributeError):
        ctypes.pythonapi.malloc_trim(0)
