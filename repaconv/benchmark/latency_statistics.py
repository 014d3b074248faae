"""From samples to statements: percentiles, and a ratio with the interval that the data allow.

Two openings of one and the same model differ by some percent, which no number of rounds evens out. What varies is
therefore taken from one opening to another (Student 1908); of a single one, from block to block of its rounds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from repaconv.results import Latency, Ratio, Regression

RESAMPLES = 4000
CONFIDENCE = 0.95
MATTERS = 0.005
"""A difference that is none to anybody."""
STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t of `CONFIDENCE`, by degrees of freedom from 1 on; of more than there are here, the last."""


def latency(
    name: str, model: str, sha256: str, samples_ms: NDArray[np.float64], *, engine: str = "", precision: str = ""
) -> Latency:
    """Percentiles of one subject's samples, in milliseconds; ``engine`` is what ran it, and in what precision."""
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


def parts(values: NDArray[Any], openings: int) -> list[NDArray[Any]]:
    """Those of each opening: as many of each, one more of the first where that does not come out even."""
    return np.array_split(values, openings)


def ratio(
    subject: str,
    subject_ms: NDArray[np.float64],
    other: str,
    other_ms: NDArray[np.float64],
    seed: int,
    openings: int = 1,
) -> Ratio:
    """other / subject: the median over the rounds of a session load, the geometric mean over loads, and its interval.

    Medians are of logarithms, so that the two models can change places: of two rounds, a median is a mean, and the mean
    of a ratio and of its reciprocal is above 1. On a busy machine that made a model 3% faster than its own copy.

    The two samples of a round stand beside each other in time, so a slow moment of the machine hits both and leaves
    their ratio nearly alone. Moments last longer than a round: of a single opening blocks are drawn, not rounds.
    """
    ratios = other_ms / subject_ms
    low, middle, high = _interval(_known(ratios, openings, np.random.default_rng(seed)))
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


class _Known(NamedTuple):
    """The logarithm of a ratio, the variance of that, and the degrees of freedom which the variance has."""

    log: float
    variance: float
    freedom: float


def _known(ratios: NDArray[np.float64], openings: int, random: np.random.Generator) -> _Known:
    """What the rounds of so many openings tell."""
    if openings > 1:
        logs = np.array([np.median(part) for part in parts(np.log(ratios), openings)])
        return _Known(float(logs.mean()), float(logs.var(ddof=1)) / openings, openings - 1)
    drawn = np.median(np.log(ratios)[_drawn(len(ratios), random)], axis=1)
    return _Known(float(np.median(np.log(ratios))), float(drawn.var()), len(STUDENT))


def _interval(known: _Known) -> tuple[float, float, float]:
    """Its lower end, the ratio, its upper end."""
    half = STUDENT[min(max(int(known.freedom), 1), len(STUDENT)) - 1] * known.variance**0.5
    low, middle, high = np.exp([known.log - half, known.log, known.log + half])
    return float(low), float(middle), float(high)


def _drawn(rounds: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Indices [RESAMPLES, rounds] of a circular block bootstrap (Politis and Romano 1992), blocks of n^(1/3) rounds."""
    length = max(1, round(rounds ** (1 / 3)))
    starts = random.integers(0, rounds, (RESAMPLES, -(-rounds // length), 1))
    blocks = (starts + np.arange(length)) % rounds
    found: NDArray[np.int64] = blocks.reshape(RESAMPLES, -1)[:, :rounds]
    return found


class Timed(NamedTuple):
    """Milliseconds of a model and of its yardstick, round by round, and of how many openings."""

    subject_ms: NDArray[np.float64]
    yardstick_ms: NDArray[np.float64]
    openings: int = 1


def regression(now: Timed, then: Timed, allowed: float, seed: int = 0) -> Regression:
    """How many times as long a model takes as it did, each time relative to the yardstick that ran beside it.

    The interval is Welch's (1947), of both measurements' openings.

    Args:
        now: The measurement.
        then: The baseline's.
        allowed: 0.05 lets it take 5% longer.
        seed: Of the bootstrap.

    Returns:
        Failed if the whole interval lies beyond what is allowed, passed if none of it does, else inconclusive.
    """
    random = np.random.default_rng(seed)
    present, past = (_known(each.subject_ms / each.yardstick_ms, each.openings, random) for each in (now, then))
    variance = present.variance + past.variance
    spread = sum(each.variance**2 / each.freedom for each in (present, past))
    low, middle, high = _interval(_Known(present.log - past.log, variance, variance**2 / spread if spread else 1.0))
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
