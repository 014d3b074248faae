"""What ``bench --objective throughput`` leaves: images a second of several calls at once, and what a call takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import ValidationInfo, field_validator

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
    against what runs beside it with as many streams, where something does. The rounds are of so many ``session_loads``.
    """

    FORMER: ClassVar[Mapping[str, str]] = {"openings": "session_loads"}

    stage: str = "throughput"
    variant: str = ""
    target: str
    batch: int
    image_size: ImageSize | None
    rounds: int
    session_loads: int = 1
    seed: int
    session: dict[str, str]
    machine: dict[str, Any]
    rows: tuple[Throughput, ...]
    quality: Quality
    scaling: Ratio
    ratio: Ratio | None
    note: str = ""

    @field_validator("scaling", "ratio")
    @classmethod
    def _claims_no_more(cls, ratio: Ratio | None, info: ValidationInfo) -> Ratio | None:
        return ratio and ratio.under(info.data.get("quality"))

    @property
    def compared(self) -> tuple[str, ...]:
        """What the streams are worth, and how it stands to what runs beside it, in words."""
        named = {row.name: f"{row.name} ({row.precision})" for row in self.rows}
        found = [each for each in (self.scaling, self.ratio) if each]
        return tuple(_many(each, named.get(each.subject, ""), named.get(each.other, "")) for each in found)

    @property
    def inconclusive(self) -> bool:
        """Whether the measurement says nothing."""
        return self.quality.verdict == "inconclusive"


def _many(found: Ratio, subject: str, other: str) -> str:
    subject, other = subject or found.subject, other or found.other
    if not found.conclusive:
        return found.told(subject, other)
    return f"{subject} has {found.median:.3f} times the throughput of {other} ({found.interval})"
