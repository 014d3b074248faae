"""Numbers smaller than the normal ones, flushed to zero: a mode of a thread, which ONNX Runtime turns on and leaves on.

Whatever else that thread computes would flush from then on: other sessions, which are measured beside that one, and
proofs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

SMALLEST, HALF = np.finfo(np.float32).tiny, np.float32(0.5)


def flushes() -> bool:
    """Whether this thread does."""
    return not SMALLEST * HALF


@contextmanager
def unchanged() -> Iterator[None]:
    """Afterwards this thread flushes if it did before."""
    before = flushes()
    try:
        yield
    finally:
        if flushes() != before:
            _flush(before)


@contextmanager
def flushing() -> Iterator[None]:
    """What runs within flushes."""
    with unchanged():
        _flush(True)
        yield


def _flush(wanted: bool) -> None:
    import torch

    torch.set_flush_denormal(wanted)
