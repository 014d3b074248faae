"""What merges where, or how many blocks are replaced, in a network that is to be so many times as fast: by measurement.

A schedule's cost is its time as a share of the time without merging. It is made of what every block takes: so much a
token, so much a pair of tokens (attention), so much a token of a block that merges; and what no schedule changes. The
four are fitted to networks that were measured whole on the target, and every further measurement corrects them near it.
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
NEAR = 0.05
"""A speed that was asked for is met where the measured one is within this of it."""
AIMED = 0.5 * NEAR
"""Nearer than this is not corrected: measurements are not finer."""
CORRECTIONS = 5

SHAPES: Mapping[str, Callable[[int, int], float]] = {
    "even": lambda _block, _last: 1.0,  # ToMe's
    "falling": lambda block, last: last - block,  # its decreasing one
    "early": lambda block, last: float(block < (last + 1) // 2),  # fewer merges
}
"""How a total is shared among all blocks but the last, behind which no block gains by it: (block, last)."""
PROBES = (("even", 0.5), ("even", 1.0), ("falling", 1.0), ("early", 1.0))
"""What is measured first, as shares of what can go at most."""


class Tokens(NamedTuple):
    """What of a network costs depend on: blocks, tokens that never merge, patches."""

    depth: int
    prefix: int
    patches: int

    @classmethod
    def of(cls, config: ViTConfig) -> Tokens:
        """Of a vision transformer."""
        return cls(len(config.blocks), config.prefix, config.grid[0] * config.grid[1])

    @property
    def none(self) -> Schedule:
        """Nothing merges."""
        return (0,) * self.depth

    def schedule(self, total: int, shape: str) -> Schedule:
        """So many tokens go in that shape, or as many as can: half of those that are left in a block."""
        last = self.depth - 1
        shares = [SHAPES[shape](block, last) for block in range(last)]
        rows: list[int] = []
        for block in range(last):
            wanted = math.ceil(total * sum(shares[: block + 1]) / sum(shares) - 1e-9) - sum(rows)
            rows.append(min(wanted, (self.patches - sum(rows)) // 2) if shares[block] else 0)
        return (*rows, 0)

    def schedules(self, shape: str) -> list[Schedule]:
        """All of a shape, those first that merge least."""
        every = dict.fromkeys(self.schedule(total, shape) for total in range(1, self.patches))
        return sorted(every, key=sum)

    def probes(self) -> tuple[Schedule, ...]:
        """What is to be measured before anything is chosen."""
        most = {shape: sum(self.schedules(shape)[-1]) for shape in SHAPES}
        return tuple(dict.fromkeys(self.schedule(round(share * most[shape]), shape) for shape, share in PROBES))

    def works(self, schedule: Schedule) -> list[float]:
        """A row of the fit: tokens, pairs and merging tokens of all blocks, relative to no merging; and 1."""
        entering = [self.prefix + self.patches - sum(schedule[:block]) for block in range(self.depth)]
        behind = [n - r for n, r in zip(entering, schedule, strict=True)]
        full = self.prefix + self.patches
        tokens = sum(n + 2 * left for n, left in zip(entering, behind, strict=True)) / (3 * full)  # 1/3 is attention's
        pairs = sum(n * n for n in entering) / full**2
        merging = sum(n for n, r in zip(entering, schedule, strict=True) if r) / full
        return [tokens / self.depth, pairs / self.depth, merging / self.depth, 1.0]


@dataclass(frozen=True)
class Costs:
    """Costs by what was measured: the share of the time without merging that each schedule took."""

    tokens: Tokens
    measured: Mapping[Schedule, float]

    @cached_property
    def weights(self) -> NDArray[np.float64]:
        """What the four take, in relative least squares."""
        known = {self.tokens.none: 1.0, **self.measured}
        rows, times = np.array([self.tokens.works(each) for each in known]), np.array(list(known.values()))
        return _none_negative(rows / times[:, None], np.ones(len(times)))

    def of(self, schedule: Schedule) -> float:
        """The cost, right where it was measured, and corrected by what was measured near."""
        if schedule in self.measured:
            return self.measured[schedule]
        fitted = self._fitted(schedule)
        weights = [_apart(schedule, other) ** -2.0 for other in self.measured]
        ratios = [cost / self._fitted(other) for other, cost in self.measured.items()]
        return fitted * float(np.average(ratios, weights=weights)) if ratios else fitted

    def reaching(self, speedup: float, shape: str) -> Schedule | None:
        """The schedule of that shape with the fewest tokens that go, by which it is so many times as fast."""
        found = (each for each in self.tokens.schedules(shape) if self.of(each) * speedup <= 1)
        return next(found, None)

    def also(self, measured: Mapping[Schedule, float]) -> Costs:
        """With what was measured since."""
        return replace(self, measured={**self.measured, **measured})

    def _fitted(self, schedule: Schedule) -> float:
        return float(np.dot(self.tokens.works(schedule), self.weights))


def _apart(one: Schedule, other: Schedule) -> float:
    """How many tokens more or fewer enter the blocks."""
    return float(np.abs(np.cumsum(np.subtract(one, other))).sum())


def _none_negative(rows: NDArray[np.float64], right: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares in which nothing takes less than no time: the best of all choices of columns."""
    width = rows.shape[1]
    best, least = np.zeros(width), math.inf
    for columns in map(list, chain.from_iterable(combinations(range(width), n) for n in range(1, width + 1))):
        weights = np.zeros(width)
        weights[columns] = np.linalg.lstsq(rows[:, columns], right, rcond=None)[0]
        error = float(np.square(rows @ weights - right).sum())
        if weights.min() >= 0 and error < least:
            best, least = weights, error
    return best


def fewest(most: int, speedup: float, measure: Callable[[int], float]) -> int | None:
    """How few blocks are enough, where each saves about as much as any other; None where all are too few."""
    fastest = measure(most)
    if fastest < speedup:
        return None
    count = min(most, max(1, math.ceil(most * (1 - 1 / speedup) / (1 - 1 / fastest))))
    while count < most and measure(count) < speedup:
        count += 1
    while count > 1 and measure(count - 1) >= speedup:
        count -= 1
    return count


class Paced(NamedTuple):
    """What was chosen, and all that was measured on the way: speeds by schedule, in the order of measuring."""

    schedule: Schedule
    speeds: Mapping[Schedule, float]


def paced(
    tokens: Tokens,
    speedup: float,
    measure: Callable[[Sequence[Schedule]], Mapping[Schedule, float]],
    loss: Callable[[Schedule], float],
) -> Paced | None:
    """The schedule that makes a network so many times as fast, corrected by measuring it; None where none does.

    Args:
        tokens: Of the network.
        speedup: Times as fast as without merging.
        measure: How many times as fast schedules are.
        loss: What one costs on the images that choose: among shapes it decides.
    """
    speeds = dict(measure(tokens.probes()))
    costs = Costs(tokens, {each: 1 / speed for each, speed in speeds.items()})
    reaching = {shape: found for shape in SHAPES if (found := costs.reaching(speedup, shape))}
    for shape in sorted(reaching, key=lambda each: loss(reaching[each])):
        schedule: Schedule | None = reaching[shape]
        for _ in range(CORRECTIONS):
            if schedule is None or (schedule in speeds and abs(speeds[schedule] / speedup - 1) > AIMED):
                break
            speeds |= measure([schedule]) if schedule not in speeds else {}
            if abs(speeds[schedule] / speedup - 1) <= AIMED:
                return Paced(schedule, speeds)
            costs = costs.also({schedule: 1 / speeds[schedule]})
            schedule = costs.reaching(speedup, shape)
    nearest = min(speeds, key=lambda each: abs(speeds[each] / speedup - 1))
    return Paced(nearest, speeds) if abs(speeds[nearest] / speedup - 1) <= NEAR else None
