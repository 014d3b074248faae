"""The measurement: warm-up until it rests, then rounds in which every subject runs once, in an order drawn anew.

Where its memory comes to lie makes a model faster or slower by some percent as long as it is open: all are opened anew
several times, and an interval is of those openings (`repaconv.benchmark.latency_statistics`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from repaconv.benchmark.gpu_monitor import Moment, look
from repaconv.benchmark.latency_statistics import parts
from repaconv.benchmark.measurement_quality import FEWEST as FEWEST_ROUNDS
from repaconv.benchmark.system_monitor import Watched, between, state

Tick = Callable[[int, int], None]
"""Told after every round: (done, in all)."""

# The warm-up rests when the medians of two windows of this many rounds differ by no more than this.
WINDOW, RESTING = 5, 0.03
LONGEST_WARMUP = 5
"""Times the rounds that were asked for."""
PRIORITY = 99
LOOKED = 10
"""Rounds from one look at the card to the next."""
OPENING_S = 5.0
"""Seconds of openings that a user waits for."""
FEWEST, MOST = 4, 100
"""Openings of a measurement that is to be believed, and of what a user waits for."""
OF_ONE = 2
"""Rounds of an opening, at least."""
SETTLING = 3
"""Rounds of warm-up of an opening but the first: it touches its pages, and a runtime plans memory by its first call."""


class Opening(NamedTuple):
    """Subjects that were opened together: what is called, by name, and which of them return a card's milliseconds."""

    calls: Mapping[str, Callable[[], Any]]
    clocked: Collection[str] = ()


class Measured(NamedTuple):
    """Samples in milliseconds by subject, one a round; how many rounds of warm-up it took, and what else went on.

    The rounds are those of so many ``openings``, one after the other, parted by
    `repaconv.benchmark.latency_statistics.parts`.
    """

    samples_ms: dict[str, NDArray[np.float64]]
    warmup_rounds: int
    stable: bool
    watched: Watched
    openings: int = 1

    @property
    def rounds(self) -> int:
        """Measured ones."""
        return len(next(iter(self.samples_ms.values())))


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


def anew(load: Mapping[str, Callable[[], Callable[[], Any]]]) -> Iterator[Opening]:
    """These, each opened by its loader to what is called: in turn from the first and from the last, without end."""
    order = list(load)
    while True:
        calls = {name: load[name]() for name in order}
        yield Opening(calls)
        del calls
        order.reverse()


def measure(
    subjects: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    warmup_rounds: int,
    seed: int,
    cores: Sequence[int] = (),
    clocked: Collection[str] = (),
) -> Measured:
    """Time of every call of what is open already, and stays so; see `measure_anew`."""
    opened = iter([Opening(subjects, clocked)])
    return measure_anew(opened, rounds=rounds, warmup_rounds=warmup_rounds, seed=seed, cores=cores, most=1)


def measure_anew(
    openings: Iterator[Opening],
    *,
    rounds: int,
    warmup_rounds: int,
    seed: int,
    cores: Sequence[int] = (),
    most: int = MOST,
    more: bool = False,
    spend_s: float = OPENING_S,
    tick: Tick | None = None,
) -> Measured:
    """Time of every call, interleaved: by this machine's clock, or by the card's own where a call returns that.

    Args:
        openings: The same subjects, opened anew by each step, which first lets go of those before. As many are taken as
            `how_many` says; one of what a card clocks, whose memory has pages so large that nothing depends on them.
        rounds: Measured ones, of all openings together.
        warmup_rounds: At least so many before; up to `LONGEST_WARMUP` times as many until the times come to rest.
        seed: Of the order.
        cores: That are used, to tell others' work on them.
        most: So many openings.
        more: Whether there may be more rounds than that, where calls are short: see `more_rounds`.
        spend_s: Seconds that openings may take in all, or as long as the rounds do.
        tick: See `Tick`.
    """
    random = np.random.default_rng(seed)
    opened, opening_s = _first_of(openings)
    names, clocked = list(opened.calls), bool(opened.clocked)
    tell = tick or (lambda _done, _total: None)
    warmup, stable = _warmed_up(partial(_round, names, opened, random), warmup_rounds, tell, warmup_rounds + rounds)
    round_s = sum(warmup[-1]) / 1e3 if warmup else 0.0
    if more and not clocked:
        rounds = max(rounds, min(more_rounds(round_s, opening_s, spend_s), OF_ONE * most))
    turns = 1 if clocked else min(most, how_many(rounds, round_s, opening_s, spend_s))
    before, card = state(), _at_card(clocked)
    measured = np.zeros((rounds, len(names)))
    for turn, share in enumerate(parts(np.arange(rounds), turns)):
        if turn:
            del opened  # or it would lie in memory beside the next
            opened = next(openings)
            for _ in range(SETTLING):
                _round(names, opened, random)
        for count in share:
            measured[count] = _round(names, opened, random)
            card += _at_card(clocked and count % LOOKED == 0)
            tell(warmup_rounds + int(count) + 1, warmup_rounds + rounds)
    after, card = state(), card + _at_card(clocked)
    samples = {name: measured[:, position].copy() for position, name in enumerate(names)}
    return Measured(samples, len(warmup), stable, between(before, after, cores, card), turns)


def how_many(rounds: int, round_s: float, opening_s: float, spend_s: float = OPENING_S) -> int:
    """Openings: as many as take no longer than the rounds do, or than may be spent.

    The shorter a call, the more depends on where memory lies, and the less an opening takes. Where a result is to be
    believed there are `FEWEST`, whatever they take.
    """
    affordable = int(max(spend_s, rounds * round_s) / max(opening_s, 1e-6))
    least = FEWEST if rounds >= FEWEST_ROUNDS else 1
    return max(1, min(max(affordable, least), rounds // OF_ONE))


def more_rounds(round_s: float, opening_s: float, spend_s: float = OPENING_S) -> int:
    """Those of as many openings as may be spent, their rounds included."""
    one = opening_s + (SETTLING + OF_ONE) * round_s
    return OF_ONE * int(spend_s / max(one, 1e-6))


def _first_of(openings: Iterator[Opening]) -> tuple[Opening, float]:
    """And the seconds that it took."""
    begun = time.perf_counter()
    return next(openings), time.perf_counter() - begun


def _at_card(looked: bool) -> list[Moment]:
    return [seen] if looked and (seen := look()) else []


def _round(names: Sequence[str], opened: Opening, random: np.random.Generator) -> list[float]:
    """Every subject once, in an order drawn anew: their milliseconds, in the order of the names."""
    spent = [0.0] * len(names)
    for position in random.permutation(len(names)):
        call = opened.calls[names[position]]
        begin = time.perf_counter_ns()
        found = call()
        taken = (time.perf_counter_ns() - begin) / 1e6
        spent[position] = found if names[position] in opened.clocked else taken
    return spent


def _warmed_up(
    one_round: Callable[[], list[float]], rounds: int, tell: Tick, total: int
) -> tuple[list[list[float]], bool]:
    """Rounds until they rest, at least so many; and whether they do."""
    warmup: list[list[float]] = []
    while len(warmup) < rounds or not _rests(warmup):
        if len(warmup) >= LONGEST_WARMUP * max(rounds, 1):
            return warmup, False
        warmup.append(one_round())
        tell(min(len(warmup), rounds), total)
    return warmup, True


def _rests(warmup: list[list[float]]) -> bool:
    """Whether the last two windows agree; a warm-up too short for two is taken as it was asked for."""
    if len(warmup) < 2 * WINDOW:
        return True
    earlier, later = (np.median(part, axis=0) for part in (warmup[-2 * WINDOW : -WINDOW], warmup[-WINDOW:]))
    return bool((np.abs(later / earlier - 1) <= RESTING).all())
