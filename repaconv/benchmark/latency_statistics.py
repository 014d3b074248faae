"""Compute percentiles and speedups with confidence intervals from latency samples.

Two session loads of the same model differ by a few percent, which more rounds do not average out. The variance is
therefore computed over session loads (Student 1908). On a busy machine a few interrupted rounds decide the result,
which no variance of a few loads shows; the means of subsets bound it whatever the distribution is (Hartigan 1969).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from repaconv.results import Latency, Ratio, Regression

RESAMPLES = 4000
CONFIDENCE = 0.95
NEGLIGIBLE = 0.005
"""A relative difference that is too small to matter."""
MISS_RATE = 0.03
"""How often an interval may exclude the right ratio, by construction: less than 1 - `CONFIDENCE`, so that also what the
construction neglects stays within it (`benchmarks/statistical_power.py`)."""
STUDENT_T = (
    21.205, 5.643, 3.896, 3.298, 3.003, 2.829, 2.715, 2.634, 2.574, 2.527, 2.491, 2.461, 2.436, 2.415, 2.397,
    2.382, 2.368, 2.356, 2.346, 2.336, 2.328, 2.320, 2.313, 2.307, 2.301, 2.296, 2.291, 2.286, 2.282, 2.278,
)  # fmt: skip
"""Student's t for `MISS_RATE`, by degrees of freedom from 1; the last value also for more."""
FEWEST_BLOCKS = 8
"""Fewest blocks of rounds from which an interval is computed; so few have 255 subsets."""
MOST_ENUMERATED = 12
"""All subsets of up to this many blocks are taken; `RESAMPLES` random ones of more."""


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


def by_session_load(values: NDArray[Any], session_loads: int) -> list[NDArray[Any]]:
    """Split values by session load, into parts of equal size or with one more in the first ones."""
    return np.array_split(values, session_loads)


def ratio(
    subject: str,
    subject_ms: NDArray[np.float64],
    other: str,
    other_ms: NDArray[np.float64],
    seed: int,
    session_loads: int = 1,
) -> Ratio:
    """Compute the speedup other / subject with its confidence interval.

    It is the median over the rounds of a session load, and the geometric mean over loads. The two samples of a
    round are adjacent in time, so that a slow phase of the machine affects both and hardly changes their ratio.
    """
    ratios = other_ms / subject_ms
    low, middle, high = _interval(_estimate(ratios, session_loads, np.random.default_rng(seed)))
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
        verdict="faster" if low > 1 + NEGLIGIBLE else "slower" if high < 1 - NEGLIGIBLE else "no difference shown",
    )


class _Estimate(NamedTuple):
    """The logarithm of a ratio, its variance, and the degrees of freedom of the variance."""

    log: float
    variance: float
    freedom: float


def _estimate(ratios: NDArray[np.float64], session_loads: int, random: np.random.Generator) -> _Estimate:
    """Estimate the logarithm of a ratio from the rounds of these session loads.

    The variance is that over the loads, or over blocks of rounds if there is only one load. It is increased where the
    interval by subsets is wider.
    """
    parts = by_session_load(np.log(ratios), session_loads)
    loads = np.array([np.median(part) for part in parts])
    each = -(-FEWEST_BLOCKS // session_loads)
    blocks = np.array([np.median(block) for part in parts for block in np.array_split(part, min(each, len(part)))])
    units = loads if session_loads > 1 else blocks
    if len(units) < 2:
        return _Estimate(float(loads.mean()), 0.0, 1)
    freedom = len(units) - 1
    variance = max(float(units.var(ddof=1)) / len(units), (_half_by_subsets(blocks, random) / _student(freedom)) ** 2)
    return _Estimate(float(loads.mean()), variance, freedom)


def _half_by_subsets(values: NDArray[np.float64], random: np.random.Generator) -> float:
    """Return half the width of the interval of a mean that the means of subsets give; 0 if there are too few values.

    The means of all subsets of n values divide the line into 2^n intervals that contain the center with the same
    probability, for any symmetric distributions (Hartigan 1969, "Using subsample values as typical values"). A model
    and its copy have such: the order of the two in a round is random, so each interruption hits either.
    """
    count = len(values)
    if count <= MOST_ENUMERATED:
        chosen = (np.arange(1, 2**count)[:, None] >> np.arange(count)) & 1
    else:
        chosen = random.integers(0, 2, (RESAMPLES, count))
        chosen = chosen[chosen.any(axis=1)]
    means = np.sort(chosen @ values / chosen.sum(axis=1))
    outside = int(MISS_RATE / 2 * (len(means) + 1))
    if not outside:
        return 0.0
    return float(max(values.mean() - means[outside - 1], means[-outside] - values.mean()))


def _student(freedom: float) -> float:
    return STUDENT_T[min(max(int(freedom), 1), len(STUDENT_T)) - 1]


def _interval(known: _Estimate) -> tuple[float, float, float]:
    """Return the lower bound, the ratio and the upper bound."""
    half = _student(known.freedom) * known.variance**0.5
    low, middle, high = np.exp([known.log - half, known.log, known.log + half])
    return float(low), float(middle), float(high)


class Timed(NamedTuple):
    """Milliseconds of a model and of its reference model by round, and the number of session loads."""

    subject_ms: NDArray[np.float64]
    reference_ms: NDArray[np.float64]
    session_loads: int = 1


def regression(now: Timed, then: Timed, allowed: float) -> Regression:
    """Compare a model's latency with a baseline, each relative to the reference model measured with it.

    The confidence interval is that of Welch (1947), from the session loads of both measurements.

    Args:
        now: The measurement.
        then: The baseline's.
        allowed: Allowed relative increase; 0.05 allows 5% longer.

    Returns:
        Failed if the whole interval is above the allowed increase, passed if it is below, else inconclusive.
    """
    random = np.random.default_rng(0)  # of the random subsets
    present, past = (_estimate(each.subject_ms / each.reference_ms, each.session_loads, random) for each in (now, then))
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
