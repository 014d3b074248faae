"""What ``bench`` leaves: latencies, their ratio, and how far to trust them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from repaconv.artefacts.records import SCHEMA_VERSION, Artefact, ImageSize, Link, Record


class MeasuredModel(Record):
    """Which network was measured.

    Attributes:
        sha256: Of the checkpoint or graph that the run was made from; of a model file without a run, its own.
        kind: The method and its backbone, or that it is a graph; empty of an engine without a run.
        counts: What there is of it before a fold, by name: parameters, MACs, or the nodes of a model file.
    """

    sha256: str
    kind: str = ""
    counts: dict[str, float] = Field(default={})

    def is_other(self, than: MeasuredModel) -> bool:
        """Whether it is another network; other weights of one network are the same."""
        known = self.kind and than.kind and self.sha256 != than.sha256
        return bool(known) and (self.kind, self.counts) != (than.kind, than.counts)

    @property
    def told(self) -> str:
        """What it is, in words."""
        return ", ".join(
            [self.kind or "a model", *(f"{count:,.0f} {name}" for name, count in sorted(self.counts.items()))]
        )


class Baseline(Record):
    """Latencies of one model on one machine as they were, with the model that ran beside it as the yardstick.

    ``reference_ms`` is empty where nothing ran beside it; the rounds are of so many ``session_loads``, one after the
    other. ``network`` is None in files of before it was kept.
    """

    FORMER: ClassVar[Mapping[str, str]] = {
        "openings": "session_loads",
        "yardstick_sha256": "reference_sha256",
        "yardstick_ms": "reference_ms",
    }

    sha256: str
    network: MeasuredModel | None = None
    p50_ms: float
    subject_ms: tuple[float, ...]
    reference_sha256: str = ""
    reference_ms: tuple[float, ...]
    session_loads: int = 1
    machine: dict[str, Any]


class Baselines(Record):
    """A committed file of them, by machine, then by recipe and protocol."""

    schema_version: int = SCHEMA_VERSION
    machines: dict[str, dict[str, Baseline]] = Field(default={})


class Regression(Record):
    """How many times as long as the baseline it takes, with an interval over the openings of both.

    Both are relative to the ``reference`` that ran beside each; in milliseconds where there was none. ``machine`` is
    where the baseline is from.
    """

    FORMER: ClassVar[Mapping[str, str]] = {"yardstick": "reference"}

    ratio: float
    low: float
    high: float
    confidence: float
    allowed: float
    verdict: Literal["passed", "failed", "inconclusive"]
    reference: str = ""
    machine: str = ""
    same_machine: bool = True

    @property
    def description(self) -> str:
        """What is compared, and how it came out, in words."""
        whose = "the baseline" if self.same_machine else f"the baseline of another machine ({self.machine})"
        beside = f"each relative to the {self.reference} measured with it" if self.reference else "in milliseconds"
        rough = "" if self.same_machine else ", which compares only roughly from one machine to another"
        interval = f"{self.confidence:.0%} interval {self.low:.3f} to {self.high:.3f}"
        if self.verdict == "inconclusive":
            found = f"not conclusive (about {self.ratio:.1f}x the time, {interval})"
            return f"compared with {whose}, {beside}{rough}: {found}, {1 + self.allowed:.3f} is allowed"
        return (
            f"takes {self.ratio:.3f} times as long as {whose}, {beside}{rough} ({interval}), "
            f"{1 + self.allowed:.3f} is allowed"
        )


class Latency(Record):
    """Wall time of one inference call, in milliseconds, over all measured rounds.

    ``engine`` is what ran it, name and version, ``precision`` what it says that it computes in.
    """

    name: str
    model: str
    sha256: str
    engine: str = ""
    precision: str = ""
    p50_ms: float
    p90_ms: float
    p95_ms: float
    p99_ms: float
    min_ms: float
    samples_ms: tuple[float, ...]


class Ratio(Record):
    """other / subject (above 1: the subject is faster) and its interval; see `repaconv.measure.statistics.ratio`."""

    subject: str
    other: str
    median: float
    low: float
    high: float
    confidence: float
    p10: float
    p90: float
    verdict: Literal["faster", "slower", "no difference shown", "not conclusive"]

    def under(self, quality: Quality | None) -> Ratio:
        """The same without a claim, where the measurement that it is of is inconclusive."""
        doubted = quality is not None and quality.verdict == "inconclusive"
        return self.model_copy(update={"verdict": "not conclusive"}) if doubted else self

    @property
    def conclusive(self) -> bool:
        """Whether it says anything."""
        return self.verdict != "not conclusive"

    @property
    def interval(self) -> str:
        """In words."""
        return f"{self.confidence:.0%} interval {self.low:.3f} to {self.high:.3f}"

    @property
    def cell(self) -> str:
        """It in a table that says what is compared."""
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})" if self.conclusive else self._about

    @property
    def _about(self) -> str:
        return f"{self.verdict} (about {self.median:.1f}x)"

    def told(self, subject: str = "", other: str = "") -> str:
        """It as a sentence without its full stop, which claims no more than was shown.

        Args:
            subject: What is measured, where that is more than its name.
            other: What it is compared with, likewise.
        """
        subject, other = subject or self.subject, other or self.other
        if not self.conclusive:
            return f"{subject} against {other}: {self._about}"
        if self.verdict == "no difference shown":
            return f"{subject} against {other}: {self.verdict} (ratio {self.median:.3f}, {self.interval})"
        return f"{subject}: speedup {self.median:.3f} over {other} ({self.interval}): {self.verdict}"


class Quality(Record):
    """Whether a measurement can be believed.

    ``other_load`` is the share of the machine's time that other processes took, ``other_load_on_cores`` that of the
    cores which were used, ``steal_time`` the hypervisor's; None where the system does not tell. ``speed`` is how long a
    fixed loop took at the end, relative to the beginning; ``before`` and ``after`` are clocks, temperatures and load.
    """

    FORMER: ClassVar[Mapping[str, str]] = {
        "stolen": "steal_time",
        "others": "other_load",
        "others_here": "other_load_on_cores",
    }

    verdict: Literal["trusted", "noisy", "inconclusive"]
    reasons: tuple[str, ...]
    seconds: float
    other_load: float | None
    other_load_on_cores: float | None
    steal_time: float | None
    speed: float
    before: dict[str, float]
    after: dict[str, float]


class NodeTime(Record):
    """One node of the graph that runs: mean milliseconds, its share of all, and what it computes (2 a MAC)."""

    name: str
    module: str
    operator: str
    mean_ms: float
    share: float
    flops: int


class ModuleTime(Record):
    """The nodes of one module together; ``gflops`` is its rate, ``share_of_peak`` that of one large matrix product."""

    module: str
    mean_ms: float
    share: float
    flops: int
    gflops: float
    share_of_peak: float


class Profile(Record):
    """Where the time goes. ``total_ms`` is the sum over the nodes, ``end_to_end_ms`` was measured without a profiler.

    ``gflops`` is the rate inside the nodes; ``share_of_peak`` is of the whole inference, end to end.
    """

    runs: int
    total_ms: float
    end_to_end_ms: float
    peak_gflops: float
    gflops: float
    share_of_peak: float
    nodes: tuple[NodeTime, ...]
    modules: tuple[ModuleTime, ...]


class HistoryEntry(Record):
    """One measurement in the history of a target; ``when`` is UTC."""

    when: str
    sha256: str
    p50_ms: float
    p95_ms: float
    ratio: Ratio | None
    quality: str
    machine: str
    threads: int
    batch: int
    image_size: ImageSize | None = None


class BenchArtefact(Artefact):
    """Latencies measured interleaved in one run, on the machine that ``machine`` describes.

    ``runtime`` and ``precision`` are those of the first model; each latency has its own. ``regression`` compares with a
    baseline, where one was asked for and is there. ``variant`` is that of the run's export; of a bare graph or engine
    there is none. The rounds are of so many ``session_loads`` of all models, one after the other.
    """

    FORMER: ClassVar[Mapping[str, str]] = {"openings": "session_loads"}

    stage: str = "bench"
    network: MeasuredModel | None = None
    variant: str = ""
    target: str
    runtime: str
    precision: str = "fp32"
    batch: int
    image_size: ImageSize | None
    threads: int
    rounds: int
    session_loads: int = 1
    warmup_rounds: int
    seed: int
    session: dict[str, str]
    machine: dict[str, Any]
    protocol: str = ""
    latencies: tuple[Latency, ...]
    quality: Quality
    ratio: Ratio | None
    profile: Profile | None = None
    regression: Regression | None = None
    agreement: Link | None
    image_preprocessing: str = ""
    note: str = ""

    @field_validator("ratio")
    @classmethod
    def _claims_no_more(cls, ratio: Ratio | None, info: ValidationInfo) -> Ratio | None:
        return ratio and ratio.under(info.data.get("quality"))

    @property
    def inconclusive(self) -> bool:
        """Whether the measurement says nothing."""
        return self.quality.verdict == "inconclusive"

    @property
    def compared(self) -> str:
        """The ratio in words, with the precision of both; empty where nothing ran beside it."""
        named = {row.name: f"{row.name} ({row.precision})" if row.precision else row.name for row in self.latencies}
        found = self.ratio
        return found.told(named.get(found.subject, ""), named.get(found.other, "")) if found else ""
