"""The measurement: warm-up until it rests, then rounds in which every subject runs once, in an order drawn anew."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from repaconv.measure.card import Moment, look
from repaconv.measure.watch import Watched, between, state

Tick = Callable[[int, int], None]
"""Told after every round: (done, in all)."""

# The warm-up rests when the medians of two windows of this many rounds differ by no more than this.
WINDOW, RESTING = 5, 0.03
LONGEST_WARMUP = 5
"""Times the rounds that were asked for."""
PRIORITY = 99
LOOKED = 10
"""Rounds from one look at the card to the next."""


class Measured(NamedTuple):
    """Samples in milliseconds by subject, one a round; how many rounds of warm-up it took, and what else went on."""

    samples_ms: dict[str, NDArray[np.float64]]
    warmup_rounds: int
    stable: bool
    watched: Watched


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


@contextmanager
def first_in_line(wanted: bool) -> Iterator[str]:
    """Before all other processes, as ``chrt -f 99`` has it; yields why not, empty if it is so or was not wanted."""
    if not wanted or not hasattr(os, "sched_setscheduler"):
        yield "this system has no such scheduling" if wanted else ""
        return
    policy, parameter = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
    except OSError as error:
        yield f"not permitted here ({error.strerror}), so it ran as any other process does"
        return
    try:
        yield ""
    finally:
        os.sched_setscheduler(0, policy, parameter)


def measure(
    subjects: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    warmup_rounds: int,
    seed: int,
    cores: Sequence[int] = (),
    clocked: Collection[str] = (),
    tick: Tick | None = None,
) -> Measured:
    """Time of every call, interleaved: by this machine's clock, or by the card's own where a call returns that.

    Args:
        subjects: What is called, by name.
        rounds: Measured ones.
        warmup_rounds: At least so many before; up to `LONGEST_WARMUP` times as many until the times come to rest.
        seed: Of the order.
        cores: That are used, to tell others' work on them.
        clocked: Names of those that return the milliseconds that a card took; the card is watched meanwhile.
        tick: See `Tick`.
    """
    names, total = list(subjects), warmup_rounds + rounds
    one_round = _round_of(subjects, clocked, np.random.default_rng(seed))

    def at_card() -> list[Moment]:
        return [seen] if clocked and (seen := look()) else []

    warmup: list[list[float]] = []
    while len(warmup) < warmup_rounds or not (stable := _rests(warmup)):
        if len(warmup) >= LONGEST_WARMUP * max(warmup_rounds, 1):
            stable = False
            break
        warmup.append(one_round())
        if tick:
            tick(min(len(warmup), warmup_rounds), total)
    before, card = state(), at_card()
    measured = np.zeros((rounds, len(names)))
    for count in range(rounds):
        measured[count] = one_round()
        card += at_card() if count % LOOKED == 0 else []
        if tick:
            tick(warmup_rounds + count + 1, total)
    after, card = state(), card + at_card()
    samples = {name: measured[:, position].copy() for position, name in enumerate(names)}
    return Measured(samples, len(warmup), stable, between(before, after, cores, card))


def _round_of(
    subjects: Mapping[str, Callable[[], Any]], clocked: Collection[str], random: np.random.Generator
) -> Callable[[], list[float]]:
    """Every subject once, in an order drawn anew: their milliseconds, in their own order."""
    names = list(subjects)

    def one_round() -> list[float]:
        spent = [0.0] * len(names)
        for position in random.permutation(len(names)):
            begin = time.perf_counter_ns()
            found = subjects[names[position]]()
            taken = (time.perf_counter_ns() - begin) / 1e6
            spent[position] = found if names[position] in clocked else taken
        return spent

    return one_round


def _rests(warmup: list[list[float]]) -> bool:
    """Whether the last two windows agree; a warm-up too short for two is taken as it was asked for."""
    if len(warmup) < 2 * WINDOW:
        return True
    earlier, later = (np.median(part, axis=0) for part in (warmup[-2 * WINDOW : -WINDOW], warmup[-WINDOW:]))
    return bool((np.abs(later / earlier - 1) <= RESTING).all())
