"""Text recognition: lines read by greedy CTC decoding; lines that are the same, and characters that differ.

Of every step the class with the largest score is taken; repeats are one, and blanks are none (Graves et al., 2006).
The characters need no names to be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from repaconv.tasks.contract import (
    Array,
    Metric,
    NetworkFacts,
    NothingToCompare,
    OnlyCandidateFinds,
    Outputs,
    Row,
    Task,
    Unreadable,
    mean,
    only_output,
)

Line = tuple[int, ...]
"""The characters of an image, as class numbers."""


class TextRecognition(Task):
    """Lines of characters."""

    name = "recognize"
    changed = "of lines changed"
    counted = "lines"
    metrics = (
        Metric("equal lines", "share", {"tf32": 0.97, "fp16": 0.97, "bf16": 0.9, "int8": 0.8}),
        Metric("CER", "error", {"tf32": 0.01, "fp16": 0.01, "bf16": 0.02, "int8": 0.05}),
    )

    def __init__(self, about: NetworkFacts) -> None:
        super().__init__(about)
        self.blank: int | None = None

    def read(self, outputs: Outputs) -> list[Line]:
        """Read the lines of a batch, of scores [N, T, C], or [T, 1, C] of one image.

        The blank has the lowest class number or the highest, whichever the reference's first batch has more of: most
        steps of a line are blank.
        """
        scores = only_output(outputs, (3,), "scores of characters [N, T, C]")
        if scores.shape[2] < 2:
            raise Unreadable(f"its output {list(scores.shape)} has no scores of two classes or more at each step")
        if scores.shape[1] == 1:
            scores = scores.transpose(1, 0, 2)
        best, last = scores.argmax(2), scores.shape[2] - 1
        if self.blank is None:
            self.blank = last if (best == last).sum() > (best == 0).sum() else 0
            self.layout = f"CTC: {last} characters, the blank is class {self.blank}"
        return [_line(steps, self.blank) for steps in best]

    def row(self, result: Line, truth: Line) -> Row:
        """Compare two lines."""
        return {
            "equal": float(result == truth),
            "edits": edit_distance(result, truth),
            "characters": len(truth),
            "shown": len(result),
        }

    def summary(self, rows: Sequence[Row]) -> dict[str, float]:
        """Equal lines, and edits per character of the reference (character error rate)."""
        there, shown, edits = (sum(row[name] for row in rows) for name in ("characters", "shown", "edits"))
        if not there:
            nothing = "the reference reads no character in any image"
            raise OnlyCandidateFinds(f"{nothing}, the candidate reads {shown}") if shown else NothingToCompare(nothing)
        return {"equal lines": mean(rows, "equal"), "CER": edits / there}

    def disagreement(self, summary: Mapping[str, float]) -> float:
        """The share of lines that are not the same."""
        return 1 - summary["equal lines"]

    def count(self, rows: Sequence[Row]) -> int:
        """The lines with a character."""
        return sum(row["characters"] > 0 for row in rows)

    def agreement(self, row: Row) -> float:
        """Edits per character of one line, fewer being better."""
        return -float(row["edits"] / max(1, row["characters"]))


def _line(steps: Array, blank: int) -> Line:
    """Greedy CTC decoding of the best classes [T]."""
    changes = np.append(True, steps[1:] != steps[:-1])
    return tuple(steps[changes & (steps != blank)].tolist())


def edit_distance(a: Line, b: Line) -> int:
    """The fewest insertions, deletions and substitutions that make one of the other (Levenshtein)."""
    last = list(range(len(b) + 1))
    for place, one in enumerate(a, 1):
        row = [place]
        for other, character in enumerate(b):
            row.append(min(row[-1] + 1, last[other + 1] + 1, last[other] + (one != character)))
        last = row
    return last[-1]
