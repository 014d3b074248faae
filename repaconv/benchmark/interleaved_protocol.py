"""Measure latency with interleaved rounds: after a warm-up, each round runs every subject once in random order.

Memory layout differs between session loads, which shifts a model's latency by a few percent. All subjects are therefore
loaded several times, and confidence intervals are computed over loads (`repaconv.benchmark.latency_statistics`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from repaconv.benchmark.gpu_monitor import GpuState, sample_gpu
from repaconv.benchmark.latency_statistics import by_session_load
from repaconv.benchmark.measurement_quality import FEWEST as FEWEST_ROUNDS
from repaconv.benchmark.system_monitor import MachineChanges, changes_between, state

Tick = Callable[[int, int], None]
"""Called after every round with the rounds done and the total."""

# The warm-up ends when the medians of two consecutive windows of this many rounds differ by at most this share.
WINDOW, RESTING = 5, 0.03
LONGEST_WARMUP = 5
"""Maximum length of the warm-up, as a multiple of the requested rounds."""
PRIORITY = 99
ROUNDS_PER_GPU_SAMPLE = 10
"""Rounds between two samples of the GPU's state."""
SESSION_LOAD_BUDGET_S = 5.0
"""Default time budget for session loads in seconds."""
FEWEST_LOADS, MOST_LOADS = 4, 100
"""Minimum number of session loads for a reliable result, and the maximum."""
ROUNDS_PER_LOAD = 2
"""Minimum number of rounds per session load."""
SETTLING = 3
"""Warm-up rounds after every later session load: memory is allocated and planned in the first inference."""


class SessionLoad(NamedTuple):
    """Subjects that were loaded together: the calls by name, and the names of calls that return GPU milliseconds."""

    calls: Mapping[str, Callable[[], Any]]
    clocked: Collection[str] = ()


class Measured(NamedTuple):
    """Latency samples in milliseconds by subject, one per round, with the warm-up and the state of the machine.

    The rounds belong to ``openings`` consecutive session loads, separated by
    `repaconv.benchmark.latency_statistics.by_session_load`.
    """

    samples_ms: dict[str, NDArray[np.float64]]
    warmup_rounds: int
    stable: bool
    watched: MachineChanges
    openings: int = 1

    @property
    def rounds(self) -> int:
        """Number of measured rounds."""
        return len(next(iter(self.samples_ms.values())))


@contextmanager
def pinned_to_cores(threads: int) -> Iterator[Sequence[int]]:
    """Restrict this process and the threads started inside to as many cores as threads are used.

    Yields the cores, or () if the system has no CPU affinity. The previous affinity is restored.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield ()
        return
    before = os.sched_getaffinity(0)
    # The last cores: interrupts and other processes tend to use the first.
    cores = sorted(before)[-threads:]
    os.sched_setaffinity(0, cores)
    try:
        yield tuple(cores)
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def real_time_priority(wanted: bool) -> Iterator[str]:
    """Run at real-time priority, as ``chrt -f 99``; yields the reason if that is not possible, else an empty text."""
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


def load_again(load: Mapping[str, Callable[[], Callable[[], Any]]]) -> Iterator[SessionLoad]:
    """Load all subjects again and again with their loaders, alternating forward and reverse order."""
    order = list(load)
    while True:
        calls = {name: load[name]() for name in order}
        yield SessionLoad(calls)
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
    """Measure subjects that are already loaded and stay loaded; see `measure_session_loads`."""
    opened = iter([SessionLoad(subjects, clocked)])
    return measure_session_loads(opened, rounds=rounds, warmup_rounds=warmup_rounds, seed=seed, cores=cores, most=1)


def measure_session_loads(
    openings: Iterator[SessionLoad],
    *,
    rounds: int,
    warmup_rounds: int,
    seed: int,
    cores: Sequence[int] = (),
    most: int = MOST_LOADS,
    more: bool = False,
    spend_s: float = SESSION_LOAD_BUDGET_S,
    tick: Tick | None = None,
) -> Measured:
    """Measure every inference in interleaved rounds, by the CPU clock or by the GPU time that a call returns.

    Args:
        openings: Yields the same subjects, loaded again at each step. `session_load_count` decides how often. Subjects
            timed on a GPU are loaded once, since its large memory pages make latency independent of the layout.
        rounds: Measured rounds, of all session loads together.
        warmup_rounds: Minimum number of warm-up rounds; up to `LONGEST_WARMUP` times as many until times are stable.
        seed: Seed of the random order.
        cores: The cores in use, to detect other load on them.
        most: Maximum number of session loads.
        more: Whether to run more rounds if inferences are short: see `more_rounds`.
        spend_s: Time budget for session loads in seconds; they may also take as long as the rounds.
        tick: See `Tick`.
    """
    random = np.random.default_rng(seed)
    opened, opening_s = _first_of(openings)
    names, clocked = list(opened.calls), bool(opened.clocked)
    tell = tick or (lambda _done, _total: None)
    warmup, stable = _warm_up(partial(_round, names, opened, random), warmup_rounds, tell, warmup_rounds + rounds)
    round_s = sum(warmup[-1]) / 1e3 if warmup else 0.0
    if more and not clocked:
        rounds = max(rounds, min(more_rounds(round_s, opening_s, spend_s), ROUNDS_PER_LOAD * most))
    turns = 1 if clocked else min(most, session_load_count(rounds, round_s, opening_s, spend_s))
    before, card = state(), _gpu_states(clocked)
    measured = np.zeros((rounds, len(names)))
    for turn, share in enumerate(by_session_load(np.arange(rounds), turns)):
        if turn:
            del opened  # frees its memory before the next load
            opened = next(openings)
            for _ in range(SETTLING):
                _round(names, opened, random)
        for count in share:
            measured[count] = _round(names, opened, random)
            card += _gpu_states(clocked and count % ROUNDS_PER_GPU_SAMPLE == 0)
            tell(warmup_rounds + int(count) + 1, warmup_rounds + rounds)
    after, card = state(), card + _gpu_states(clocked)
    samples = {name: measured[:, position].copy() for position, name in enumerate(names)}
    return Measured(samples, len(warmup), stable, changes_between(before, after, cores, card), turns)


def session_load_count(rounds: int, round_s: float, opening_s: float, spend_s: float = SESSION_LOAD_BUDGET_S) -> int:
    """Return the number of session loads: as many as fit in the time budget or in the time of the rounds.

    The shorter an inference, the more its latency depends on memory layout, and the less time a load takes. With
    enough rounds for a reliable result it is at least `FEWEST_LOADS`.
    """
    affordable = int(max(spend_s, rounds * round_s) / max(opening_s, 1e-6))
    least = FEWEST_LOADS if rounds >= FEWEST_ROUNDS else 1
    return max(1, min(max(affordable, least), rounds // ROUNDS_PER_LOAD))


def more_rounds(round_s: float, opening_s: float, spend_s: float = SESSION_LOAD_BUDGET_S) -> int:
    """Return the number of rounds of as many session loads as the time budget allows."""
    one = opening_s + (SETTLING + ROUNDS_PER_LOAD) * round_s
    return ROUNDS_PER_LOAD * int(spend_s / max(one, 1e-6))


def _first_of(openings: Iterator[SessionLoad]) -> tuple[SessionLoad, float]:
    """Return the first session load, and the seconds that it took."""
    begun = time.perf_counter()
    return next(openings), time.perf_counter() - begun


def _gpu_states(looked: bool) -> list[GpuState]:
    return [seen] if looked and (seen := sample_gpu()) else []


def _round(names: Sequence[str], opened: SessionLoad, random: np.random.Generator) -> list[float]:
    """Run every subject once in random order; return milliseconds in the order of the names."""
    spent = [0.0] * len(names)
    for position in random.permutation(len(names)):
        call = opened.calls[names[position]]
        begin = time.perf_counter_ns()
        found = call()
        taken = (time.perf_counter_ns() - begin) / 1e6
        spent[position] = found if names[position] in opened.clocked else taken
    return spent


def _warm_up(
    one_round: Callable[[], list[float]], rounds: int, tell: Tick, total: int
) -> tuple[list[list[float]], bool]:
    """Run warm-up rounds until times are stable; return their times and whether they are stable."""
    warmup: list[list[float]] = []
    while len(warmup) < rounds or not _is_stable(warmup):
        if len(warmup) >= LONGEST_WARMUP * max(rounds, 1):
            return warmup, False
        warmup.append(one_round())
        tell(min(len(warmup), rounds), total)
    return warmup, True


def _is_stable(warmup: list[list[float]]) -> bool:
    """Return whether the last two windows agree. A warm-up shorter than two windows counts as stable."""
    if len(warmup) < 2 * WINDOW:
        return True
    earlier, later = (np.median(part, axis=0) for part in (warmup[-2 * WINDOW : -WINDOW], warmup[-WINDOW:]))
    return bool((np.abs(later / earlier - 1) <= RESTING).all())


# --- Run inferences concurrently in several streams, and record the latency of each.

CALLS = 4
"""Inferences per stream and round. More of them shorten the share of the end, when some streams are already done."""


class Burst:
    """Concurrent inferences of several streams. Each stream is a thread that runs the same number, one after the other.

    Attributes:
        calls: Inferences of all streams together.
        calls_ms: Latency of every inference so far in milliseconds, in no particular order.
    """

    def __init__(
        self, call: Callable[[], Any], streams: int, calls_ms: list[float] | None = None, calls: int = CALLS
    ) -> None:
        """``call`` runs one inference and must be thread-safe; ``calls`` is the number per stream."""
        self.calls = streams * calls
        self.calls_ms = [] if calls_ms is None else calls_ms
        self._call, self._each, self._streams = call, calls, streams
        self._pool = ThreadPoolExecutor(streams)

    def __call__(self) -> None:
        """Run all inferences; an exception in one of them is raised."""
        for stream in [self._pool.submit(self._stream) for _ in range(self._streams)]:
            self.calls_ms += stream.result()

    def _stream(self) -> list[float]:
        found = []
        for _ in range(self._each):
            begin = time.perf_counter_ns()
            self._call()
            found.append((time.perf_counter_ns() - begin) / 1e6)
        return found

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown()
