"""Compute percentiles and speedups with confidence intervals from latency samples.

Two session loads of the same model differ by a few percent, which more rounds do not average out. The variance is
therefore computed over session loads (Student 1908). With a single load it is computed over blocks of rounds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from repaconv.results import Latency, Ratio, Regression

RESAMPLES = 4000
CONFIDENCE = 0.95
MATTERS = 0.005
"""A relative difference that is too small to matter."""
STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t for `CONFIDENCE`, by degrees of freedom from 1; the last value also for more."""


def latency(
    name: str, model: str, sha256: str, samples_ms: NDArray[np.float64], *, engine: str = "", precision: str = ""
) -> Latency:
    """Compute percentiles of one subject's samples in milliseconds; ``engine`` and ``precision`` are what ran it."""
    p50, p90, p95, p99 = np.percentile(samples_ms, [50, 90, 95, 99])
    return Latency(
        name=name,
        model=model,
        sha256=sha256,
        engine=engine,
        precision=precision,
        p50_ms=_rounded(p50),
        p90_ms=_rounded(p90),
        p95_ms=_rounded(p95),
        p99_ms=_rounded(p99),
        min_ms=_rounded(samples_ms.min()),
        samples_ms=tuple(_rounded(sample) for sample in samples_ms),
    )


def by_session_load(values: NDArray[Any], openings: int) -> list[NDArray[Any]]:
    """Split values by session load, into parts of equal size or with one more in the first ones."""
    return np.array_split(values, openings)


def ratio(
    subject: str,
    subject_ms: NDArray[np.float64],
    other: str,
    other_ms: NDArray[np.float64],
    seed: int,
    openings: int = 1,
) -> Ratio:
    """Compute the speedup other / subject with its confidence interval.

    It is the median over the rounds of a session load, and the geometric mean over loads. The two samples of a
    round are adjacent in time, so that a slow phase of the machine affects both and hardly changes their ratio.
    Slow phases last longer than a round, so a single load is resampled in blocks, not in rounds.
    """
    ratios = other_ms / subject_ms
    low, middle, high = _interval(_estimate(ratios, openings, np.random.default_rng(seed)))
    p10, p90 = np.percentile(ratios, [10, 90])
    return Ratio(
        subject=subject,
        other=other,
        median=_rounded(middle),
        low=_rounded(low),
        high=_rounded(high),
        confidence=CONFIDENCE,
        p10=_rounded(p10),
        p90=_rounded(p90),
        verdict="faster" if low > 1 + MATTERS else "slower" if high < 1 - MATTERS else "no difference shown",
    )


class _Estimate(NamedTuple):
    """The logarithm of a ratio, its variance, and the degrees of freedom of the variance."""

    log: float
    variance: float
    freedom: float


def _estimate(ratios: NDArray[np.float64], openings: int, random: np.random.Generator) -> _Estimate:
    """Estimate the logarithm of a ratio from the rounds of these session loads."""
    if openings > 1:
        logs = np.array([np.median(part) for part in by_session_load(np.log(ratios), openings)])
        return _Estimate(float(logs.mean()), float(logs.var(ddof=1)) / openings, openings - 1)
    drawn = np.median(np.log(ratios)[_bootstrap_indices(len(ratios), random)], axis=1)
    return _Estimate(float(np.median(np.log(ratios))), float(drawn.var()), len(STUDENT))


def _interval(known: _Estimate) -> tuple[float, float, float]:
    """Return the lower bound, the ratio and the upper bound."""
    half = STUDENT[min(max(int(known.freedom), 1), len(STUDENT)) - 1] * known.variance**0.5
    low, middle, high = np.exp([known.log - half, known.log, known.log + half])
    return float(low), float(middle), float(high)


def _bootstrap_indices(rounds: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Return indices [RESAMPLES, rounds] of a circular block bootstrap with blocks of n^(1/3) rounds.

    Source: Politis and Romano 1992.
    """
    length = max(1, round(rounds ** (1 / 3)))
    starts = random.integers(0, rounds, (RESAMPLES, -(-rounds // length), 1))
    blocks = (starts + np.arange(length)) % rounds
    found: NDArray[np.int64] = blocks.reshape(RESAMPLES, -1)[:, :rounds]
    return found


class Timed(NamedTuple):
    """Milliseconds of a model and of its reference model by round, and the number of session loads."""

    subject_ms: NDArray[np.float64]
    yardstick_ms: NDArray[np.float64]
    openings: int = 1


def regression(now: Timed, then: Timed, allowed: float, seed: int = 0) -> Regression:
    """Compare a model's latency with a baseline, each relative to the reference model measured with it.

    The confidence interval is that of Welch (1947), from the session loads of both measurements.

    Args:
        now: The measurement.
        then: The baseline's.
        allowed: Allowed relative increase; 0.05 allows 5% longer.
        seed: Seed of the bootstrap.

    Returns:
        Failed if the whole interval is above the allowed increase, passed if it is below, else inconclusive.
    """
    random = np.random.default_rng(seed)
    present, past = (_estimate(each.subject_ms / each.yardstick_ms, each.openings, random) for each in (now, then))
    variance = present.variance + past.variance
    spread = sum(each.variance**2 / each.freedom for each in (present, past))
    low, middle, high = _interval(_Estimate(present.log - past.log, variance, variance**2 / spread if spread else 1.0))
    return Regression(
        ratio=_rounded(middle),
        low=_rounded(low),
        high=_rounded(high),
        confidence=CONFIDENCE,
        allowed=allowed,
        verdict="failed" if low > 1 + allowed else "passed" if high <= 1 + allowed else "inconclusive",
    )


def _rounded(value: np.floating | float) -> float:
    return round(float(value), 6)
