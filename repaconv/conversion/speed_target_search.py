"""Find the token merging schedule, or the number of replaced blocks, that reaches a given speedup, by measurement.

The cost of a schedule is its latency relative to the latency without merging. The cost model has four terms: a cost per
token, per pair of tokens (attention), per token in a block that merges, and a constant. The coefficients are fitted to
latencies of whole networks measured on the target. Each further measurement corrects the model near that schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from repaconv.backbones.vit import ViTConfig

Schedule = tuple[int, ...]
SPEEDUP_TOLERANCE = 0.05
"""A speed target is met if the measured speedup is within this fraction of it."""
CORRECTION_THRESHOLD = 0.5 * SPEEDUP_TOLERANCE
"""Smaller deviations are not corrected, because measurements are not more precise."""
MOST_CORRECTIONS = 5

SHAPES: Mapping[str, Callable[[int, int], float]] = {
    "even": lambda _block, _last: 1.0,  # ToMe's
    "falling": lambda block, last: last - block,  # its decreasing one
    "early": lambda block, last: float(block < (last + 1) // 2),  # fewer merges
}
"""How the merged tokens are distributed over all blocks but the last, after which merging saves nothing: weight of
(block,
last block)."""
PROBES = (("even", 0.5), ("even", 1.0), ("falling", 1.0), ("early", 1.0))
"""The schedules that are measured first, as (shape, fraction of the tokens that can merge at most)."""


class TokenCounts(NamedTuple):
    """The quantities of a network that the cost depends on: number of blocks, tokens that never merge, patches."""

    depth: int
    prefix: int
    patches: int

    @classmethod
    def of(cls, config: ViTConfig) -> TokenCounts:
        """Return those of a vision transformer."""
        return cls(len(config.blocks), config.prefix, config.grid[0] * config.grid[1])

    @property
    def none(self) -> Schedule:
        """The schedule in which nothing merges."""
        return (0,) * self.depth

    def schedule(self, total: int, shape: str) -> Schedule:
        """Return the schedule of that shape that merges ``total`` tokens, or as many as possible: at most half per
        block."""
        last = self.depth - 1
        shares = [SHAPES[shape](block, last) for block in range(last)]
        rows: list[int] = []
        for block in range(last):
            wanted = math.ceil(total * sum(shares[: block + 1]) / sum(shares) - 1e-9) - sum(rows)
            rows.append(min(wanted, (self.patches - sum(rows)) // 2) if shares[block] else 0)
        return (*rows, 0)

    def schedules(self, shape: str) -> list[Schedule]:
        """Return all schedules of a shape, those with the fewest merged tokens first."""
        every = dict.fromkeys(self.schedule(total, shape) for total in range(1, self.patches))
        return sorted(every, key=sum)

    def probes(self) -> tuple[Schedule, ...]:
        """Return the schedules that are measured first."""
        most = {shape: sum(self.schedules(shape)[-1]) for shape in SHAPES}
        return tuple(dict.fromkeys(self.schedule(round(share * most[shape]), shape) for shape, share in PROBES))

    def works(self, schedule: Schedule) -> list[float]:
        """Return the terms of the cost model: tokens, pairs and merging tokens of all blocks relative to no merging;
        and 1."""
        entering = [self.prefix + self.patches - sum(schedule[:block]) for block in range(self.depth)]
        leaving = [n - r for n, r in zip(entering, schedule, strict=True)]
        full = self.prefix + self.patches
        tokens = sum(n + 2 * left for n, left in zip(entering, leaving, strict=True)) / (3 * full)  # 1/3 is attention's
        pairs = sum(n * n for n in entering) / full**2
        merging = sum(n for n, r in zip(entering, schedule, strict=True) if r) / full
        return [tokens / self.depth, pairs / self.depth, merging / self.depth, 1.0]


@dataclass(frozen=True)
class CostModel:
    """The cost model: the measured cost of schedules, as latency relative to no merging."""

    tokens: TokenCounts
    measured: Mapping[Schedule, float]

    @cached_property
    def weights(self) -> NDArray[np.float64]:
        """The four coefficients, by relative least squares."""
        known = {self.tokens.none: 1.0, **self.measured}
        rows, times = np.array([self.tokens.works(each) for each in known]), np.array(list(known.values()))
        return _non_negative_least_squares(rows / times[:, None], np.ones(len(times)))

    def of(self, schedule: Schedule) -> float:
        """Return the cost of a schedule: as measured, or as modeled, corrected by measurements of similar schedules."""
        if schedule in self.measured:
            return self.measured[schedule]
        fitted = self._fitted(schedule)
        weights = [_schedule_distance(schedule, other) ** -2.0 for other in self.measured]
        ratios = [cost / self._fitted(other) for other, cost in self.measured.items()]
        return fitted * float(np.average(ratios, weights=weights)) if ratios else fitted

    def reaching(self, speedup: float, shape: str) -> Schedule | None:
        """Return the schedule of that shape with the fewest merged tokens that reaches the speedup, if any."""
        found = (each for each in self.tokens.schedules(shape) if self.of(each) * speedup <= 1)
        return next(found, None)

    def also(self, measured: Mapping[Schedule, float]) -> CostModel:
        """Return the model with further measurements."""
        return replace(self, measured={**self.measured, **measured})

    def _fitted(self, schedule: Schedule) -> float:
        return float(np.dot(self.tokens.works(schedule), self.weights))


def _schedule_distance(one: Schedule, other: Schedule) -> float:
    """Return the distance of two schedules: the difference in tokens that enter the blocks, summed over blocks."""
    return float(np.abs(np.cumsum(np.subtract(one, other))).sum())


def _non_negative_least_squares(rows: NDArray[np.float64], right: NDArray[np.float64]) -> NDArray[np.float64]:
    """Non-negative least squares: the best solution over all subsets of columns."""
    width = rows.shape[1]
    best, least = np.zeros(width), math.inf
    for columns in map(list, chain.from_iterable(combinations(range(width), n) for n in range(1, width + 1))):
        weights = np.zeros(width)
        weights[columns] = np.linalg.lstsq(rows[:, columns], right, rcond=None)[0]
        error = float(np.square(rows @ weights - right).sum())
        if weights.min() >= 0 and error < least:
            best, least = weights, error
    return best


def fewest_blocks(most: int, speedup: float, measure: Callable[[int], float]) -> int | None:
    """Return the smallest number of replaced blocks that reaches the speedup, assuming that each saves about the same;
    None
    if ``most`` is not enough."""
    fastest = measure(most)
    if fastest < speedup:
        return None
    count = min(most, max(1, math.ceil(most * (1 - 1 / speedup) / (1 - 1 / fastest))))
    while count < most and measure(count) < speedup:
        count += 1
    while count > 1 and measure(count - 1) >= speedup:
        count -= 1
    return count


class FoundSchedule(NamedTuple):
    """The chosen schedule, and the measured speedups by schedule, in the order of measurement."""

    schedule: Schedule
    speeds: Mapping[Schedule, float]


def schedule_for_speedup(
    tokens: TokenCounts,
    speedup: float,
    measure: Callable[[Sequence[Schedule]], Mapping[Schedule, float]],
    loss: Callable[[Schedule], float],
) -> FoundSchedule | None:
    """Find the schedule that reaches the speedup, corrected by measuring it; None if none does.

    Args:
        tokens: The tokens of the network.
        speedup: The speedup over the network without merging.
        measure: Measures the speedups of schedules.
        loss: Returns the loss of a schedule on the validation images. Shapes with a smaller loss are tried first.
    """
    speeds = dict(measure(tokens.probes()))
    costs = CostModel(tokens, {each: 1 / speed for each, speed in speeds.items()})
    reaching = {shape: found for shape in SHAPES if (found := costs.reaching(speedup, shape))}
    for shape in sorted(reaching, key=lambda each: loss(reaching[each])):
        schedule: Schedule | None = reaching[shape]
        for _ in range(MOST_CORRECTIONS):
            if schedule is None or (schedule in speeds and abs(speeds[schedule] / speedup - 1) > CORRECTION_THRESHOLD):
                break
            speeds |= measure([schedule]) if schedule not in speeds else {}
            if abs(speeds[schedule] / speedup - 1) <= CORRECTION_THRESHOLD:
                return FoundSchedule(schedule, speeds)
            costs = costs.also({schedule: 1 / speeds[schedule]})
            schedule = costs.reaching(speedup, shape)
    nearest = min(speeds, key=lambda each: abs(speeds[each] / speedup - 1))
    return FoundSchedule(nearest, speeds) if abs(speeds[nearest] / speedup - 1) <= SPEEDUP_TOLERANCE else None
