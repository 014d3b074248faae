"""When freed memory returns to the operating system: at once between large networks, late between the arrays of one.

Also how often Python looks for reference cycles.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's ``mallopt``: free bytes at the end of the heap above which they are returned, and the size from
which an array is mapped for itself, which returns it as soon as it is freed."""
USUAL_BYTES = {MMAP_THRESHOLD: 2**25, TRIM_THRESHOLD: 2**26}
"""The values that glibc itself comes to at most, for a program that frees large arrays."""
KEPT_BYTES = {MMAP_THRESHOLD: 2**27, TRIM_THRESHOLD: 2**28}
"""The values within `freed_memory_kept`."""


def release_freed_memory() -> None:
    """Return memory that was freed but is kept by glibc to the system; does nothing with other C libraries.

    Otherwise several copies of a large network's weights stay allocated.
    """
    with suppress(AttributeError):
        ctypes.pythonapi.malloc_trim(0)


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Within it, glibc keeps freed memory for the next arrays; does nothing with other C libraries.

    The evaluation of a network allocates and frees arrays of many megabytes, node by node. If each is returned, the
    system fills the memory of the next one with zeros, page by page: measured, up to 20% of a verification's CPU time.
    """
    _set(KEPT_BYTES)
    try:
        yield
    finally:
        _set(USUAL_BYTES)
        release_freed_memory()


RARE_COLLECTIONS = (20_000, 20, 100)
"""See `gc.set_threshold`; Python's own values are 700, 10 and 10."""


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Within it, Python looks for reference cycles less often.

    A fold makes many objects that stay: nodes, values and shapes. Looking through all of them again and again takes up
    to 7% of its CPU time (measured), and finds little.
    """
    before = gc.get_threshold()
    gc.set_threshold(*(RARE_COLLECTIONS if before[0] else before))  # 0: there are no collections
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _set(values: dict[int, int]) -> None:
    with suppress(AttributeError):
        for parameter, value in values.items():
            if not ctypes.pythonapi.mallopt(parameter, value):  # before glibc 2.35, 2**25 is the largest MMAP_THRESHOLD
                ctypes.pythonapi.mallopt(parameter, USUAL_BYTES[parameter])
