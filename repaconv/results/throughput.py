"""Results of ``bench --objective throughput``: images per second of several concurrent inferences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import ValidationInfo, field_validator

from repaconv.results.bench import Quality, Ratio
from repaconv.results.records import Artefact, ImageSize, Record


class Throughput(Record):
    """The throughput of one model with a number of concurrent streams.

    Attributes:
        name: What the model is called in this result: e.g. ``deploy form``, ``deploy form, one stream`` or the name of
            its file.
        model: The name of the model's file.
        sha256: The SHA-256 of that file.
        engine: The runtime that ran it, with its version.
        precision: The precision that it computes in, e.g. ``fp32`` or ``int8``.
        streams: The number of concurrent streams; each runs one inference after the other.
        threads: The number of threads per inference.
        images_per_second: The throughput of all streams together, in images/s: the median over the rounds.
        p50_ms: The median latency of a single inference while all streams run, in ms.
        p95_ms: The 95th percentile of that latency, in ms.
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
    """Throughput of a model with all its streams and with one stream, measured in turn in one run on this machine.

    It is not the result of a latency measurement: baselines and histories do not contain it.

    Attributes:
        variant: The export that was measured, by target, precision and whatever else is not the default, e.g.
            ``x86-64.int8``; empty for a model file without a run.
        target: The target, by name.
        batch: The batch size of each inference.
        image_size: (height, width) in pixels; null if the model takes no images.
        rounds: The number of measured rounds; in each round, each stream of every model runs 4 inferences.
        session_loads: How often the models were loaded anew; the rounds are split evenly over these session loads.
        seed: The seed of random inputs, of the order within the rounds and of the confidence intervals.
        session: The options of the first model's session in its runtime, by name; all others are the runtime's
            defaults.
        machine: The description of the machine, by name, as in the result of ``bench``.
        rows: The measured models: first the model with all its streams, second the same model with one stream, third,
            if there is one, the model that it is compared with, with as many streams.
        quality: Whether the measurement can be trusted.
        scaling: The throughput of the model with all its streams over that with one stream.
        ratio: The throughput of the model over that of the one that it is compared with; null if there is none.
        note: What else is to be known of the measurement, e.g. why there is no training form; empty if nothing is.
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
        """In words, the throughput over that of one stream, and over that of the model it is compared with."""
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
