"""The result of ``sweep``: a row for each cell of its matrix."""

from __future__ import annotations

from repaconv.results.records import Artefact, Record


class SweepRow(Record):
    """One cell of a sweep: a model for a target in one precision and batch size.

    Attributes:
        model: The name of the model: the stem of its checkpoint, with as much of its settings as it needs to be unique.
        target: The target as the matrix names it.
        precision: The precision, e.g. ``fp32``.
        batch: The batch size.
        p50_ms: The median latency of an inference in milliseconds; null if it was not measured.
        p95_ms: The 95th percentile of the latency in milliseconds; null if it was not measured.
        quality: ``trusted``, ``noisy`` or ``inconclusive``; empty if it was not measured.
        worker: The cluster worker that measured it, or ``this machine``; empty if no measurement was started.
        attempts: How many times a worker started it; 0 if no measurement was started.
        problem: Why there is no latency; empty if there is one.
    """

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
    """The result of ``sweep``: the latency of each combination of model, target, precision and batch size.

    Attributes:
        stage: The command that wrote this result, ``sweep``.
        matrix: The name of the matrix file.
        resumed: The number of cells that were taken from an earlier call.
        rows: One row for each cell, in the order of the matrix.
    """

    stage: str = "sweep"
    matrix: str
    resumed: int
    rows: tuple[SweepRow, ...]

    @property
    def inconclusive(self) -> bool:
        """Whether a cell's measurement says nothing."""
        return any(row.quality == "inconclusive" for row in self.rows)
