"""Whether one end is right more often than the other, on the same labelled images."""

from __future__ import annotations

from math import comb, sqrt

import numpy as np
from numpy.typing import NDArray

from repaconv.artefacts import Accuracy

Z95 = 1.959964


class Counts:
    """The four cells of the paired table."""

    def __init__(self) -> None:
        self.both = self.only_reference = self.only_candidate = self.neither = 0

    def add(self, candidate: NDArray[np.bool_], reference: NDArray[np.bool_], labelled: NDArray[np.bool_]) -> None:
        """Which images [N] each end gets right; those without a label do not count."""
        a, b = candidate[labelled], reference[labelled]
        self.both += int((a & b).sum())
        self.only_reference += int((~a & b).sum())
        self.only_candidate += int((a & ~b).sum())
        self.neither += int((~a & ~b).sum())

    def accuracy(self) -> Accuracy | None:
        """The comparison; None without labelled images.

        The interval is Wald's with half an image added to each cell (Agresti and Min, Statistics in Medicine 24,
        2005), which holds its level for the few discordant pairs that a good conversion leaves.
        """
        b, c = self.only_candidate, self.only_reference
        n = self.both + self.neither + b + c
        if not n:
            return None
        b_, c_, n_ = b + 0.5, c + 0.5, n + 2
        centre, spread = (b_ - c_) / n_, Z95 * sqrt(b_ + c_ - (b_ - c_) ** 2 / n_) / n_
        return Accuracy(
            images=n,
            reference=(self.both + c) / n,
            candidate=(self.both + b) / n,
            only_reference=c,
            only_candidate=b,
            difference=(b - c) / n,
            low=max(-1.0, centre - spread),
            high=min(1.0, centre + spread),
            p_value=mcnemar(b, c),
        )


def mcnemar(b: int, c: int) -> float:
    """Two-sided exact p-value of b against c discordant pairs (binomial with p = 1/2)."""
    n = b + c
    tail = sum(comb(n, k) for k in range(min(b, c) + 1))
    return min(1.0, 2 * tail / 2**n) if n else 1.0
