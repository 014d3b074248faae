"""Outputs that are decided, not computed: classes, places, truth values. They are the same, or others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from repaconv.artefacts import Link, Metrics, Tolerance
from repaconv.proof.parity import not_verified
from repaconv.proof.policy import UNDECIDED_SHARE

Array = NDArray[Any]


class Decided:
    """Counts numbers that are others; see `repaconv.proof.parity.Meter`.

    What a lower precision decides otherwise is counted and not judged.
    """

    def __init__(self, tolerance: Tolerance) -> None:
        """``tolerance`` is that of the link."""
        self.tolerance = tolerance
        self.seen = self.left = self.numbers = self.others = self.worst = 0
        self._first: dict[tuple[int, ...], Array] = {}
        self._moves = False

    def add(
        self,
        candidate: Array,
        reference: Array,
        *,
        labels: NDArray[np.int64] | None = None,
        undecided: NDArray[np.bool_] | None = None,
        sway: Callable[[], Array] | None = None,
    ) -> None:
        """One batch [n, ...] of each; images that rounding may decide otherwise, and that are others, are left out.

        What is decided is moved by nothing; ``sway`` is not asked.
        """
        first = self._first.setdefault(reference.shape[1:], reference[:1])
        self._moves = self._moves or bool((reference != first).any())
        apart = (candidate != reference).reshape(len(reference), -1)
        left = apart.any(1) & (False if undecided is None else undecided)
        wrong = apart.any(1) & ~left
        if wrong.any() and not self.others:
            self.worst = self.seen + int(wrong.argmax())
        self.seen, self.left = self.seen + len(reference), self.left + int(left.sum())
        self.numbers, self.others = self.numbers + apart[~left].size, self.others + int(apart[~left].sum())

    def link(self, name: str, reference: str, candidate: str, note: str = "") -> Link:
        """The link with its verdict."""
        told = f"{self.others} of {self.numbers} numbers that are decided are others"
        note = "; ".join(filter(None, [note, told]))
        still = not self._moves and self.seen > len(self._first)
        if still and not self.others:
            note = "the same at every call: a fault would not show"
        unknown = self.left > UNDECIDED_SHARE * self.seen
        if self.left:
            told = f"in {self.left} of {self.seen} images rounding decides what comes out"
            note = told if unknown else f"{note}; {told}: they were left out"
        lost = bool(self.others) and self.tolerance.kind == "lossy"
        if unknown or lost or (still and not self.others):
            return not_verified(name, reference, candidate, note)
        share = self.others / self.numbers
        metrics = Metrics(
            images=self.seen - self.left,
            max_abs_error=float(self.others > 0),
            max_rel_error=share,
            mean_abs_error=share,
            cosine=None,
            undecided=self.left,
        )
        return Link(
            name=name,
            reference=reference,
            candidate=candidate,
            tolerance=self.tolerance,
            metrics=metrics,
            verdict="failed" if self.others else "passed",
            note=note,
        )
