"""What ``sweep`` leaves: a row for each cell of its matrix."""

from __future__ import annotations

from repaconv.artefacts.records import Artefact, Record


class SweepRow(Record):
    """One cell of a matrix; ``problem`` says why there is no figure. ``attempts`` counts workers that began it."""

    model: str
    target: str
    precision: str
    batch: int
    p50_ms: float | None
    p95_ms: float | None
    quality: str
    worker: str
    attempts: int
    problem: str


class SweepArtefact(Artefact):
    """A matrix measured; ``resumed`` cells were there from before."""

    stage: str = "sweep"
    matrix: str
    resumed: int
    rows: tuple[SweepRow, ...]

    @property
    def inconclusive(self) -> bool:
        """Whether a cell's measurement says nothing."""
        return any(row.quality == "inconclusive" for row in self.rows)
