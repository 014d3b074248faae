"""Freed memory is kept for the next arrays of a verification, and returned after it."""

from __future__ import annotations

import ctypes
import gc
import mmap
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from repaconv.core.memory_release import (
    RARE_COLLECTIONS,
    freed_memory_kept,
    rare_garbage_collection,
    release_freed_memory,
)


def resident() -> int:
    """Bytes of memory that this process has from the system."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def kept_and_returned() -> tuple[int, int]:
    """Bytes of a freed array that the process still holds within `freed_memory_kept`, and after it."""
    release_freed_memory()
    before = resident()
    with freed_memory_kept():
        array = np.ones(2**23)
        del array
        within = resident() - before
    return within, resident() - before


@pytest.mark.skipif(not hasattr(ctypes.pythonapi, "mallopt"), reason="a C library other than glibc")
def test_freed_memory_is_kept_within_and_returned_after():
    # In a process that has used much memory, glibc may have no room to extend its heap, and maps each array for itself.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        within, after = pool.submit(kept_and_returned).result()
    assert within > 2**25 > after


def test_an_error_is_raised_as_it_is():
    with pytest.raises(ValueError, match="none"), freed_memory_kept():
        raise ValueError("none")


@pytest.mark.parametrize("usual", [(700, 10, 10), (0, 10, 10)])
def test_collections_are_rare_within_and_as_before_after_it(usual):
    before = gc.get_threshold()
    gc.set_threshold(*usual)
    try:
        with rare_garbage_collection():
            assert gc.get_threshold() == (RARE_COLLECTIONS if usual[0] else usual)  # 0: there are none
        assert gc.get_threshold() == usual
    finally:
        gc.set_threshold(*before)
