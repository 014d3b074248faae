"""Measure latency with interleaved rounds: after a warm-up, each round runs every entrant once in random order.

Memory layout differs between session loads, which shifts a model's latency by a few percent. All entrants are therefore
loaded several times, and confidence intervals are computed over loads (`repaconv.benchmark.latency_statistics`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from repaconv.benchmark.gpu_monitor import GpuState, sample_gpu
from repaconv.benchmark.latency_statistics import by_session_load, ratio
from repaconv.benchmark.machine_fingerprint import fingerprint
from repaconv.benchmark.measurement_quality import FEWEST_ROUNDS as FEWEST_ROUNDS
from repaconv.benchmark.measurement_quality import quality
from repaconv.benchmark.system_monitor import MachineChanges, changes_between, cores_by_preference, state
from repaconv.engines.contract import GpuTimed
from repaconv.results import Quality, Ratio

Call = Callable[[], Any]

Tick = Callable[[int, int], None]
"""Called after every round with the rounds done and the total."""

# The warm-up ends when the medians of two consecutive windows of this many rounds differ by at most this share.
WARMUP_WINDOW, STABLE_CHANGE = 5, 0.03
LONGEST_WARMUP = 5
"""Maximum length of the warm-up, as a multiple of the requested rounds."""
REAL_TIME_PRIORITY = 99
ROUNDS_PER_GPU_SAMPLE = 10
"""Rounds between two samples of the GPU's state."""
SESSION_LOAD_BUDGET_S = 5.0
"""Default time budget for session loads in seconds."""
FEWEST_LOADS, MOST_LOADS = 4, 100
"""Minimum number of session loads for a reliable result, and the maximum."""
ROUNDS_PER_LOAD = 2
"""Minimum number of rounds per session load."""
WARMUP_ROUNDS_PER_LOAD = 3
"""Warm-up rounds after every later session load: memory is allocated and planned in the first inference."""


@dataclass(frozen=True)
class Entrant:
    """A model to measure: how it is loaded, and how it is called.

    Attributes:
        load: Loads it, at each session load anew.
        call: Makes the function that is timed, from what was loaded and the inputs. By default what was loaded is that
            function. A `GpuTimed` function returns its own time.
        streams: Concurrent inferences, each in a thread: a round is a `Burst`. 0 for a round of one call.
        images: Images per inference; the times of a round are divided by the images in it.
        optional: Whether it is left out if its first load fails, rather than the measurement.
    """

    load: Callable[[], Any]
    call: Callable[[Any, Any], Call] = lambda loaded, _inputs: loaded
    streams: int = 0
    images: int = 1
    optional: bool = False


@dataclass(frozen=True)
class Protocol:
    """How entrants are measured.

    Attributes:
        rounds: Measured rounds, of all session loads together.
        warmup_rounds: Minimum number of warm-up rounds; up to `LONGEST_WARMUP` times as many until times are stable.
        seed: Seed of the random order and of the confidence intervals.
        cores: Number of cores to which the process is bound; 0 leaves it on all of them.
        session_loads: Maximum number of session loads. Models timed on a GPU are loaded once, since its large memory
            pages make latency independent of the layout.
        more: Whether to run more rounds if inferences are short: see `more_rounds`.
        seconds: Time budget for session loads in seconds; they may also take as long as the rounds.
        real_time: Whether to run at real-time priority.
    """

    rounds: int
    warmup_rounds: int = 10
    seed: int = 0
    cores: int = 0
    session_loads: int = MOST_LOADS
    more: bool = False
    seconds: float = SESSION_LOAD_BUDGET_S
    real_time: bool = False


@dataclass(frozen=True)
class Measurement:
    """What was measured.

    Attributes:
        samples_ms: Latency in milliseconds per image by entrant, one per round. The rounds belong to consecutive
            session loads, separated by `repaconv.benchmark.latency_statistics.by_session_load`.
        session_loads: Number of session loads.
        warmup_rounds: Rounds of the warm-up.
        stable: Whether times were stable at its end.
        watched: The state of the machine.
        seed: Seed of the confidence intervals.
        cores: The cores in use; empty if the process was bound to none.
        on_gpu: Whether a GPU's clock measured.
        loaded: What the last session load loaded, in the order of the entrants.
        inputs: The inputs.
        failed: Why optional entrants were left out.
        inference_ms: Latency of every inference of the rounds of entrants with several streams, in no particular order.
        priority_note: Why it did not run at real-time priority, if that was wanted.
    """

    samples_ms: dict[str, NDArray[np.float64]]
    session_loads: int
    warmup_rounds: int
    stable: bool
    watched: MachineChanges
    seed: int = 0
    cores: tuple[int, ...] = ()
    on_gpu: bool = False
    loaded: Mapping[str, Any] = field(default_factory=dict)
    inputs: Any = None
    failed: Mapping[str, Exception] = field(default_factory=dict)
    inference_ms: Mapping[str, list[float]] = field(default_factory=dict)
    priority_note: str = ""

    @property
    def rounds(self) -> int:
        """Number of measured rounds."""
        return len(next(iter(self.samples_ms.values())))

    @property
    def machine(self) -> dict[str, Any]:
        """Description of the machine."""
        return fingerprint(self.cores, gpu=self.on_gpu)

    def ratio(self, subject: str, other: str) -> Ratio:
        """Return the speedup of an entrant over another; it claims nothing if the measurement is inconclusive."""
        samples = self.samples_ms
        found = ratio(subject, samples[subject], other, samples[other], self.seed, self.session_loads)
        return found.under(self.quality(found))

    def quality(self, compared: Ratio | None = None) -> Quality:
        """Return the verdict on the measurement, and on a ratio of it."""
        return quality(
            self.samples_ms, self.watched, compared=compared, stable=self.stable, session_loads=self.session_loads
        )


@contextmanager
def pinned_to_cores(threads: int) -> Iterator[tuple[int, ...]]:
    """Restrict this process and the threads started inside to as many cores as threads are used; 0 does nothing.

    Yields the cores, chosen by `cores_by_preference`, or () if there is no restriction. The previous affinity is
    restored.
    """
    if not (threads and hasattr(os, "sched_setaffinity")):
        yield ()
        return
    before = os.sched_getaffinity(0)
    cores = sorted(cores_by_preference(before)[:threads])
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
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(REAL_TIME_PRIORITY))
    except OSError as error:
        yield f"not permitted here ({error.strerror}), so it ran as any other process does"
        return
    try:
        yield ""
    finally:
        os.sched_setscheduler(0, policy, parameter)


def measure(
    entrants: Mapping[str, Entrant],
    protocol: Protocol,
    inputs: Callable[[Mapping[str, Any]], Any] | None = None,
    tick: Tick | None = None,
) -> Measurement:
    """Measure entrants in interleaved rounds, by the CPU clock or by the GPU time that a call returns.

    Everything that measures a latency goes through here. `session_load_count` decides how often they are loaded.

    Args:
        entrants: By name, the model under test first.
        protocol: How they are measured.
        inputs: Chooses the inputs of all calls, from what the first session load loaded.
        tick: See `Tick`.
    """
    bound, priority = pinned_to_cores(protocol.cores), real_time_priority(protocol.real_time)
    with bound as cores, priority as why_not, closing(_SessionLoads(entrants, inputs)) as opened:
        random = np.random.default_rng(protocol.seed)
        opening_s = opened.load()
        names, on_gpu, rounds = opened.names, opened.on_gpu, protocol.rounds
        tell = tick or (lambda _done, _total: None)
        one_round = partial(_round, names, opened, random)
        warmup, stable = _warm_up(one_round, protocol.warmup_rounds, tell, protocol.warmup_rounds + rounds)
        round_s = sum(warmup[-1]) / 1e3 if warmup else 0.0
        most, seconds = protocol.session_loads, protocol.seconds
        if protocol.more and not on_gpu:
            rounds = max(rounds, min(more_rounds(round_s, opening_s, seconds), ROUNDS_PER_LOAD * most))
        turns = 1 if on_gpu else min(most, session_load_count(rounds, round_s, opening_s, seconds))
        before, gpu = state(), _gpu_states(on_gpu)
        measured = np.zeros((rounds, len(names)))
        for turn, share in enumerate(by_session_load(np.arange(rounds), turns)):
            if turn:
                opened.load()
                for _ in range(WARMUP_ROUNDS_PER_LOAD):
                    one_round()
            for count in share:
                measured[count] = one_round()
                opened.keep_inference_ms()
                gpu += _gpu_states(on_gpu and count % ROUNDS_PER_GPU_SAMPLE == 0)
                tell(protocol.warmup_rounds + int(count) + 1, protocol.warmup_rounds + rounds)
        after, gpu = state(), gpu + _gpu_states(on_gpu)
    return Measurement(
        samples_ms={name: measured[:, place] / opened.images(name) for place, name in enumerate(names)},
        session_loads=turns,
        warmup_rounds=len(warmup),
        stable=stable,
        watched=changes_between(before, after, cores, gpu),
        seed=protocol.seed,
        cores=cores,
        on_gpu=on_gpu,
        loaded={name: opened.loaded[name] for name in names},
        inputs=opened.inputs,
        failed=opened.failed,
        inference_ms=opened.inference_ms,
        priority_note=why_not,
    )


class _SessionLoads:
    """Loads all entrants again and again, alternating forward and reverse order.

    Attributes:
        names: The entrants that load.
        loaded: What is loaded.
        calls: The functions that are timed, by name.
        inputs: The inputs, chosen after the first load.
        failed: Why optional entrants were left out.
        inference_ms: See `Measurement`.
    """

    def __init__(
        self, entrants: Mapping[str, Entrant], choose_inputs: Callable[[Mapping[str, Any]], Any] | None
    ) -> None:
        self.names = list(entrants)
        self.loaded: dict[str, Any] = {}
        self.calls: dict[str, Call] = {}
        self.inputs: Any = None
        self.failed: dict[str, Exception] = {}
        self.inference_ms: dict[str, list[float]] = {name: [] for name, each in entrants.items() if each.streams}
        self._entrants, self._choose_inputs = entrants, choose_inputs
        self._loads, self._threads = 0, ExitStack()

    def load(self) -> float:
        """Release what is loaded, and load again; return the seconds that it took."""
        begun = time.perf_counter()
        self.close()
        self.calls.clear()
        self.loaded.clear()  # frees the memory before the next load
        for name in reversed(self.names) if self._loads % 2 else list(self.names):
            self._keep(self.loaded, name, self._entrants[name].load)
        if not self._loads and self._choose_inputs:
            self.inputs = self._choose_inputs(self.loaded)
        for name in list(self.names):
            self._keep(self.calls, name, partial(self._call, name))
        self._loads += 1
        return time.perf_counter() - begun

    def _keep(self, kept: dict[str, Any], name: str, make: Callable[[], Any]) -> None:
        """Keep what is made of an entrant; leave an optional one out that fails at its first load."""
        try:
            kept[name] = make()
        except Exception as error:  # runtimes raise errors of many classes
            if self._loads or not self._entrants[name].optional:
                raise
            self.failed[name] = error
            self.names.remove(name)

    def _call(self, name: str) -> Call:
        entrant = self._entrants[name]
        call = entrant.call(self.loaded[name], self.inputs)
        if not entrant.streams:
            return call
        burst = Burst(call, entrant.streams)
        self._threads.callback(burst.close)
        return burst

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU's clock measures one of them."""
        return any(isinstance(call, GpuTimed) for call in self.calls.values())

    def images(self, name: str) -> int:
        """Images per round."""
        entrant = self._entrants[name]
        return entrant.images * (entrant.streams * INFERENCES_PER_STREAM if entrant.streams else 1)

    def keep_inference_ms(self) -> None:
        """Add the inferences of the last round to `inference_ms`; those of a warm-up round are never added."""
        for name in self.names:
            call = self.calls[name]
            if isinstance(call, Burst):
                self.inference_ms[name] += call.calls_ms

    def close(self) -> None:
        """Stop the threads; the models stay loaded."""
        self._threads.close()


def session_load_count(rounds: int, round_s: float, opening_s: float, spend_s: float = SESSION_LOAD_BUDGET_S) -> int:
    """Return the number of session loads: as many as fit in the time budget or in the time of the rounds.

    The shorter an inference, the more its latency depends on memory layout, and the less time a load takes. With
    enough rounds for a reliable result it is at least `FEWEST_LOADS`. It is three rather than two, whose interval is
    3.6 times as wide (Student's t).
    """
    affordable = int(max(spend_s, rounds * round_s) / max(opening_s, 1e-6))
    least = FEWEST_LOADS if rounds >= FEWEST_ROUNDS else 3 if affordable == 2 else 1
    return max(1, min(max(affordable, least), rounds // ROUNDS_PER_LOAD))


def more_rounds(round_s: float, opening_s: float, spend_s: float = SESSION_LOAD_BUDGET_S) -> int:
    """Return the number of rounds of as many session loads as the time budget allows."""
    one = opening_s + (WARMUP_ROUNDS_PER_LOAD + ROUNDS_PER_LOAD) * round_s
    return ROUNDS_PER_LOAD * int(spend_s / max(one, 1e-6))


def _gpu_states(looked: bool) -> list[GpuState]:
    return [seen] if looked and (seen := sample_gpu()) else []


def _round(names: Sequence[str], opened: _SessionLoads, random: np.random.Generator) -> list[float]:
    """Run every entrant once in random order; return milliseconds in the order of the names."""
    spent = [0.0] * len(names)
    for position in random.permutation(len(names)):
        call = opened.calls[names[position]]
        begin = time.perf_counter_ns()
        found = call()
        taken = (time.perf_counter_ns() - begin) / 1e6
        spent[position] = found if isinstance(call, GpuTimed) else taken
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
    if len(warmup) < 2 * WARMUP_WINDOW:
        return True
    earlier, later = (
        np.median(part, axis=0) for part in (warmup[-2 * WARMUP_WINDOW : -WARMUP_WINDOW], warmup[-WARMUP_WINDOW:])
    )
    return bool((np.abs(later / earlier - 1) <= STABLE_CHANGE).all())


# --- Run inferences concurrently in several streams, and record the latency of each.

INFERENCES_PER_STREAM = 4
"""Inferences per stream and round. More of them shorten the share of the end, when some streams are already done."""


class Burst:
    """Concurrent inferences of several streams. Each stream is a thread that runs the same number, one after the other.

    Attributes:
        calls: Inferences of all streams together.
        calls_ms: Latency of every inference of the last round in milliseconds, in no particular order.
    """

    def __init__(self, call: Callable[[], Any], streams: int, calls: int = INFERENCES_PER_STREAM) -> None:
        """``call`` runs one inference and must be thread-safe; ``calls`` is the number per stream."""
        self.calls = streams * calls
        self.calls_ms: list[float] = []
        self._call, self._each, self._streams = call, calls, streams
        self._pool = ThreadPoolExecutor(streams)

    def __call__(self) -> None:
        """Run all inferences; an exception in one of them is raised."""
        running = [self._pool.submit(self._stream) for _ in range(self._streams)]
        self.calls_ms = [each for stream in running for each in stream.result()]

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
