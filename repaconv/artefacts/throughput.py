"""What ``bench --objective throughput`` leaves: images a second of several calls at once, and what a call takes."""

from __future__ import annotations

from typing import Any

from repaconv.artefacts.benching import Quality, Ratio
from repaconv.artefacts.records import Artefact, ImageSize, Record


class Throughput(Record):
    """A model that is called by so many streams at once, each call on so many threads.

    ``images_per_second`` is the median over rounds; the latencies are of single calls meanwhile, in milliseconds.
    """

    name: str
    model: str
    sha256: str
    engine: str
    precision: str
    streams: int
    threads: int
    images_per_second: float
    p50_ms: float
    p95_ms: float


class ThroughputArtefact(Artefact):
    """Images a second, measured interleaved in one run, on the machine that ``machine`` describes.

    It is another record than a latency's, so that no baseline and no history takes it. The first of ``rows`` is the
    model with all its streams, the second the same alone in one stream; ``scaling`` is of these two. ``ratio`` is
    against what runs beside it with as many streams, where something does. The rounds are of so many ``openings``.
    """

    stage: str = "throughput"
    variant: str = ""
    target: str
    batch: int
    image_size: ImageSize | None
    rounds: int
    openings: int = 1
    seed: int
    session: dict[str, str]
    machine: dict[str, Any]
    rows: tuple[Throughput, ...]
    scaling: Ratio
    ratio: Ratio | None
    quality: Quality
    note: str = ""

    @property
    def inconclusive(self) -> bool:
        """Whether the measurement says nothing."""
        return self.quality.verdict == "inconclusive"
