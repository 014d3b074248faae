"""Decide whether a measurement is reliable, and give the reasons if not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from repaconv.benchmark import gpu_monitor
from repaconv.benchmark.latency_statistics import by_session_load
from repaconv.benchmark.system_monitor import MachineChanges
from repaconv.results import Quality, Ratio

FEWEST_ROUNDS = 20
"""Minimum number of rounds for a meaningful confidence interval."""
LARGEST_HALF_WIDTH = 0.025
"""Largest half-width of a ratio's interval at which a difference of 5% is still detected."""
MOST_TIMES = 100
"""How many times more rounds may be recommended; a measurement that needs more was disturbed."""
OTHER_LOAD, OTHER_LOAD_HERE, TOO_MUCH_OTHER_LOAD = 0.10, 0.02, 0.25
"""Limits for the time share of other processes: on the machine, on the cores in use, and too much for a result."""
STEAL_SHARE, SPEED_CHANGE, LATENCY_DRIFT = 0.01, 0.08, 0.05
OUTLIER_FACTOR, OUTLIER_SHARE = 1.5, 0.05
"""A sample of this many times its median is an outlier; this share of them is too many."""
ONE_OF_100 = 2.576
"""Standard deviations of a normal distribution that chance exceeds, in either direction, in 1 of 100 measurements."""


def quality(
    samples_ms: Mapping[str, NDArray[np.float64]],
    watched: MachineChanges,
    *,
    compared: Ratio | None,
    stable: bool,
    session_loads: int = 1,
) -> Quality:
    """Return the verdict on a measurement, with all reasons for doubt.

    Args:
        samples_ms: Milliseconds by subject, one per round.
        watched: The state of the machine during the measurement.
        compared: The speedup, if there is one.
        stable: Whether the warm-up became stable.
        session_loads: Number of session loads, to which the rounds belong in order.

    Returns:
        *trusted* if there is no reason for doubt; *inconclusive* if a difference of 5% may be undetected or may be
        caused by other load; *noisy* in between.
    """
    spoiling = [
        *_too_little(samples_ms, compared),
        *_machine(watched, spoils=True),
        *gpu_monitor.invalidating_reasons(watched.gpu),
    ]
    disturbing = [*_machine(watched, spoils=False), *_clocks(watched), *gpu_monitor.disturbance_reasons(watched.gpu)]
    disturbing += [] if stable else ["latency did not stabilize during warm-up"]
    disturbing += [reason for name, values in samples_ms.items() for reason in _uneven(name, values, session_loads)]
    return Quality(
        verdict="inconclusive" if spoiling else "noisy" if disturbing else "trusted",
        reasons=(*spoiling, *disturbing),
        seconds=round(watched.seconds, 3),
        other_load=_rounded(watched.others),
        other_load_on_cores=_rounded(watched.others_here),
        steal_time=_rounded(watched.steal_time),
        speed=round(watched.speed, 4),
        before=watched.before,
        after=watched.after,
    )


def _too_little(samples_ms: Mapping[str, NDArray[np.float64]], compared: Ratio | None) -> Iterator[str]:
    """Yield the reasons if there are too few samples."""
    rounds = min(len(values) for values in samples_ms.values())
    if rounds < FEWEST_ROUNDS:
        yield f"too few samples: {rounds} rounds, {FEWEST_ROUNDS} at least"
    elif compared is not None and (compared.high - compared.low) / 2 > LARGEST_HALF_WIDTH * compared.median:
        known = (compared.high - compared.low) / 2 / compared.median
        wanted = enough(rounds, known)
        what = (
            f"about {wanted} rounds would be enough on a quiet machine (--rounds)"
            if wanted <= MOST_TIMES * rounds
            else "more rounds cannot help, other processes must stop"
        )
        yield f"the ratio is known to {known:.1%} only, and {LARGEST_HALF_WIDTH:.1%} is needed: {what}"


def enough(rounds: int, known: float) -> int:
    """Rounds after which half of a ratio's interval is probably within `LARGEST_HALF_WIDTH`, from what so many rounds
    gave.

    The interval is of session loads, which `bench` has in proportion to ``--rounds``; its width falls with the square
    root of their number. A fifth more, since the width itself is an estimate.
    """
    wanted = 1.2 * rounds * (known / LARGEST_HALF_WIDTH) ** 2
    return ceil(wanted / 10) * 10


def _machine(watched: MachineChanges, *, spoils: bool) -> Iterator[str]:
    """Yield disturbances by other load: those that invalidate the measurement, or the lesser ones."""
    for share, limit, sentence in (
        (watched.others, OTHER_LOAD, "other load: {:.0%} of the machine's time went to other processes"),
        (watched.others_here, OTHER_LOAD_HERE, "other load: {:.0%} of these cores' time went to other processes"),
        (watched.steal_time, STEAL_SHARE, "the hypervisor took {:.0%} of the time"),
    ):
        if share is not None and share > limit and (share > TOO_MUCH_OTHER_LOAD) == spoils:
            yield sentence.format(share)
    if spoils and watched.throttled:
        yield f"throttled: the CPU slowed down for heat {watched.throttled} times"


def _clocks(watched: MachineChanges) -> Iterator[str]:
    """Yield the changes of CPU speed."""
    if abs(watched.speed - 1) > SPEED_CHANGE:
        yield f"the core's speed changed: a fixed loop takes {watched.speed:.2f} times as long at the end"
    for name in sorted(set(watched.before) & set(watched.after)):
        was, now = watched.before[name], watched.after[name]
        if name.endswith(" kHz") and was and abs(now / was - 1) > gpu_monitor.CLOCK_CHANGE:
            yield f"the clock changed: {name[:-4]} from {was / 1e3:.0f} to {now / 1e3:.0f} MHz"


def _uneven(name: str, values: NDArray[np.float64], session_loads: int) -> Iterator[str]:
    """Yield drift and outliers in the samples of one subject. Differences between session loads count as neither."""
    several = by_session_load(values, session_loads)
    if len(values) >= FEWEST_ROUNDS and abs(change := _change(values)) > LATENCY_DRIFT and _goes_one_way(several):
        yield f"{name} drifted: its last third takes {1 + change:.2f} times as long as its first"
    beyond = float(np.concatenate([part > OUTLIER_FACTOR * np.median(part) for part in several]).mean())
    if beyond > OUTLIER_SHARE:
        yield f"{name} has outliers: {beyond:.0%} of its samples"


def _change(values: NDArray[np.float64]) -> float:
    """Return the relative change of the median from the first third to the last."""
    third = len(values) // 3
    return float(np.median(values[-third:]) / np.median(values[:third]) - 1)


def _goes_one_way(several: Sequence[NDArray[np.float64]]) -> bool:
    """Return whether session loads get steadily slower or faster, more than by chance. Always for a single one.

    Fewer than 6 are in order by chance too often: their rounds must go the same way.
    """
    if len(several) == 1:
        return True
    loads = _correlation_with_time([np.array([np.median(part) for part in several])])
    if len(several) >= 6:
        return abs(loads) >= critical_correlation(len(several)) - 1e-9
    rounds = _correlation_with_time(several)
    return abs(loads) > 1 - 1e-9 and loads * rounds >= critical_correlation(sum(len(part) - 1 for part in several) + 1)


def _correlation_with_time(several: Sequence[NDArray[np.float64]]) -> float:
    """Return the rank correlation of values and time within each of these parts, in all of them (Spearman 1904)."""
    times, ranks = (
        np.concatenate([_ranks(values) for values in each])
        for each in ([np.arange(len(part)) for part in several], several)
    )
    scale = np.linalg.norm(times) * np.linalg.norm(ranks)
    return float(times @ ranks / scale) if scale else 0.0


def _ranks(values: NDArray[Any]) -> NDArray[np.float64]:
    """Return the ranks of values around 0; equal ones share theirs."""
    ordered = np.sort(values)
    return (np.searchsorted(ordered, values) + np.searchsorted(ordered, values, "right") - len(values)) / 2.0


def critical_correlation(count: int) -> float:
    """Return the rank correlation of so many values, in either direction, that chance gives in 1 of 100 measurements.

    For 6 or more; no order of fewer is so rare: 5 are all in order in 1 of 60 measurements. The correction of the
    normal distribution gives the exact values for 6 to 12, and those for more to 0.001.
    """
    return ONE_OF_100 / sqrt(count - 1) * (1 - 0.75 / (count - 1))


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 4)
