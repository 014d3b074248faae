"""The measurement: warm-up, then rounds in which every subject runs once, in an order drawn anew each time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

Tick = Callable[[int, int], None]
"""Told after every round: (done, in all)."""


@contextmanager
def pinned(threads: int) -> Iterator[Sequence[int]]:
    """Hold this process, and the threads it starts inside, on as many cores as threads are used.

    Yields the cores, or () where the system has no affinity to set. Restores what was before.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield ()
        return
    before = os.sched_getaffinity(0)
    # The last cores: interrupts and other people's work tend to sit on the first.
    cores = sorted(before)[-threads:]
    os.sched_setaffinity(0, cores)
    try:
        yield tuple(cores)
    finally:
        os.sched_setaffinity(0, before)


def interleaved(
    subjects: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup_rounds: int,
    seed: int,
    tick: Tick | None = None,
) -> dict[str, NDArray[np.float64]]:
    """Wall time in milliseconds of every call, by subject, one entry a round."""
    random = np.random.default_rng(seed)
    names = list(subjects)
    samples = {name: np.zeros(rounds) for name in names}
    total = warmup_rounds + rounds
    for count in range(total):
        for position in random.permutation(len(names)):
            name = names[position]
            begin = time.perf_counter_ns()
            subjects[name]()
            spent = time.perf_counter_ns() - begin
            if count >= warmup_rounds:
                samples[name][count - warmup_rounds] = spent / 1e6
        if tick:
            tick(count + 1, total)
    return samples
