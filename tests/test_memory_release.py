"""Freed memory is kept for the next arrays of a verification, and returned after it."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import numpy as np
import pytest

from repaconv.core.memory_release import freed_memory_kept, release_freed_memory


def resident() -> int:
    """Bytes of memory that this process has from the system."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(not hasattr(ctypes.pythonapi, "mallopt"), reason="a C library other than glibc")
def test_freed_memory_is_kept_within_and_returned_after():
    release_freed_memory()
    before = resident()
    with freed_memory_kept():
        array = np.ones(2**23)
        del array
        within = resident() - before
    assert within > 2**25 > resident() - before


def test_an_error_is_raised_as_it_is():
    with pytest.raises(ValueError, match="none"), freed_memory_kept():
        raise ValueError("none")
