"""What ``compare`` leaves: two models beside each other."""

from __future__ import annotations

from repaconv.artefacts.benching import BenchArtefact
from repaconv.artefacts.records import Artefact, Link, Record


class ComparedEnd(Record):
    """One of two models: what runs it, in which precision, and how large it is.

    ``bytes`` are those of its files, None where it is what a checkpoint holds; ``parameters`` and ``nodes`` are a
    graph's.
    """

    name: str
    engine: str
    precision: str
    sha256: str
    bytes: int | None = None
    parameters: int | None = None
    nodes: int | None = None


class CompareArtefact(Artefact):
    """Two models on the same inputs: a link for every output, and what both take where that was measured."""

    stage: str = "compare"
    reference: ComparedEnd
    candidate: ComparedEnd
    inputs: str
    links: tuple[Link, ...]
    measured: BenchArtefact | None = None

    @property
    def inconclusive(self) -> bool:
        """Whether the measurement is."""
        return self.measured is not None and self.measured.quality.verdict == "inconclusive"
