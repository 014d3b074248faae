"""From samples to statements: percentiles, and a ratio with the interval that the data allow."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from repaconv.artefacts import Latency, Ratio, Regression

RESAMPLES = 4000
CONFIDENCE = 0.95
MATTERS = 0.005
"""Two sessions of one and the same model may differ by so much, by where their memory came to lie."""


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


def ratio(subject: str, subject_ms: NDArray[np.float64], other: str, other_ms: NDArray[np.float64], seed: int) -> Ratio:
    """Median over rounds of other / subject, with a bootstrap interval over blocks of rounds.

    The two samples of a round stand beside each other in time, so a slow moment of the machine hits both and leaves
    their ratio nearly alone. Moments last longer than a round: blocks are drawn, not rounds.
    """
    ratios = other_ms / subject_ms
    random = np.random.default_rng(seed)
    medians = np.median(ratios[_drawn(len(ratios), random)], axis=1)
    low, high = np.quantile(medians, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    p10, p90 = np.percentile(ratios, [10, 90])
    return Ratio(
        subject=subject,
        other=other,
        median=_rounded(np.median(ratios)),
        low=_rounded(low),
        high=_rounded(high),
        confidence=CONFIDENCE,
        p10=_rounded(p10),
        p90=_rounded(p90),
        verdict="faster" if low > 1 + MATTERS else "slower" if high < 1 - MATTERS else "no difference shown",
    )


def _drawn(rounds: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Indices [RESAMPLES, rounds] of a circular block bootstrap (Politis and Romano 1992), blocks of n^(1/3) rounds."""
    length = max(1, round(rounds ** (1 / 3)))
    starts = random.integers(0, rounds, (RESAMPLES, -(-rounds // length), 1))
    blocks = (starts + np.arange(length)) % rounds
    found: NDArray[np.int64] = blocks.reshape(RESAMPLES, -1)[:, :rounds]
    return found


def regression(
    now: tuple[NDArray[np.float64], NDArray[np.float64]],
    then: tuple[NDArray[np.float64], NDArray[np.float64]],
    allowed: float,
    seed: int = 0,
) -> Regression:
    """How many times as long a model takes as it did, each time relative to the yardstick that ran beside it.

    Args:
        now: Milliseconds of the model and of its yardstick, round by round.
        then: The same of the baseline.
        allowed: 0.05 lets it take 5% longer.
        seed: Of the bootstrap.

    Returns:
        Failed if the whole interval lies beyond what is allowed, passed if none of it does, else inconclusive.
    """
    random = np.random.default_rng(seed)

    def medians(pair: tuple[NDArray[np.float64], NDArray[np.float64]]) -> tuple[float, NDArray[np.float64]]:
        relative = pair[0] / pair[1]
        drawn = relative[_drawn(len(relative), random)]
        return float(np.median(relative)), np.median(drawn, axis=1)

    (present, presents), (past, pasts) = medians(now), medians(then)
    low, high = np.quantile(presents / pasts, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Regression(
        ratio=_rounded(present / past),
        low=_rounded(low),
        high=_rounded(high),
        confidence=CONFIDENCE,
        allowed=allowed,
        verdict="failed" if low > 1 + allowed else "passed" if high <= 1 + allowed else "inconclusive",
    )


def _rounded(value: np.floating | float) -> float:
    return round(float(value), 6)
