"""Results of ``bench``: latencies, their ratio, and whether the measurement is trusted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, ValidationInfo, field_validator

from repaconv.deprecation import former_attribute
from repaconv.results.records import SCHEMA_VERSION, Artefact, ImageSize, Link, Record


class MeasuredModel(Record):
    """The network that was measured, described so that a baseline of another network is recognized.

    Attributes:
        sha256: The SHA-256 of the checkpoint or ONNX file that the run was made from; of a model file without a run,
            its own.
        kind: The method and its backbone in words, or ``graph`` for any network that is folded as a graph; empty for an
            engine without a run.
        counts: Its size before the fold, by name: ``parameters``, and MACs or, for an ONNX file without a run,
            ``nodes``; empty for an engine without a run.
    """

    sha256: str
    kind: str = ""
    counts: dict[str, float] = Field(default={})

    def is_other(self, than: MeasuredModel) -> bool:
        """Whether it is another network; other weights of one network are the same."""
        known = self.kind and than.kind and self.sha256 != than.sha256
        return bool(known) and (self.kind, self.counts) != (than.kind, than.counts)

    @property
    def text(self) -> str:
        """Description in words."""
        return ", ".join(
            [self.kind or "a model", *(f"{count:,.0f} {name}" for name, count in sorted(self.counts.items()))]
        )

    told = former_attribute("told", "text", removed_in="0.3.0")


class Baseline(Record):
    """The latencies of one model on one machine, kept to detect regressions, and those of its reference model.

    Attributes:
        sha256: The SHA-256 of the model file that was measured.
        network: The network that was measured; null in files of earlier versions.
        p50_ms: The median latency in ms.
        subject_ms: The latency in ms of each measured round, in the order of measurement.
        reference_sha256: The SHA-256 of the reference model, which was measured in the same rounds: the training form,
            or the model given with ``--against``. Empty if there was none.
        reference_ms: The latency in ms of the reference model in each round; empty if there was none.
        session_loads: How often the models were loaded anew; the rounds are split evenly over these session loads.
        machine: The description of the machine, as in the result of ``bench``.
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
    """The file of ``bench --baseline``, which is committed: the baselines of all machines and models.

    Attributes:
        schema_version: The version of the schema of results.
        machines: The baselines by machine (GPU, CPU, number of cores, system), then by what was measured (file, target
            or variant, runtime, precision, threads, batch size, image size, reference model).
    """

    schema_version: int = SCHEMA_VERSION
    machines: dict[str, dict[str, Baseline]] = Field(default={})


class Regression(Record):
    """A measurement compared with its baseline: how much longer the model takes now.

    If a reference model was measured with both, the latencies are divided by those of the reference model first.

    Attributes:
        ratio: The latency now divided by that of the baseline; above 1, the model became slower.
        low: The lower end of the confidence interval of ``ratio``.
        high: The upper end of the confidence interval of ``ratio``.
        confidence: The confidence level of the interval: 0.95.
        allowed: The largest increase that passes, as a share: 0.05 allows 5% more time.
        verdict: ``failed`` if the whole interval is above 1 + ``allowed``, ``passed`` if none of it is, otherwise
            ``inconclusive``; also ``inconclusive`` where the measurement itself or another machine's baseline allows no
            claim.
        reference: The name of the reference model; empty if there was none, and milliseconds are compared.
        machine: The machine of the baseline, as ``machines`` of the baseline file names it.
        same_machine: Whether the baseline is from this machine; between two machines ``ratio`` compares only roughly.
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
        """Description of the comparison and its result."""
        whose = "the baseline" if self.same_machine else f"the baseline of another machine ({self.machine})"
        unit = f"each relative to the {self.reference} measured with it" if self.reference else "in milliseconds"
        rough = "" if self.same_machine else ", which compares only roughly from one machine to another"
        interval = f"{self.confidence:.0%} interval {self.low:.3f} to {self.high:.3f}"
        if self.verdict == "inconclusive":
            found = f"not conclusive (about {self.ratio:.1f}x the time, {interval})"
            return f"compared with {whose}, {unit}{rough}: {found}, {1 + self.allowed:.3f} is allowed"
        return (
            f"takes {self.ratio:.3f} times as long as {whose}, {unit}{rough} ({interval}), "
            f"{1 + self.allowed:.3f} is allowed"
        )


class Latency(Record):
    """The latency of one model, in milliseconds per inference, over all measured rounds.

    Attributes:
        name: What the model is called in this result: ``deploy form`` and ``training form``, of an ONNX model
            ``folded`` and ``original``, or the name of its file.
        model: The name of the model's file.
        sha256: The SHA-256 of that file.
        engine: The runtime that ran it, with its version.
        precision: The precision that it computes in, e.g. ``fp32`` or ``int8``; ``fp32`` if an ONNX file states none.
        p50_ms: The median latency in ms.
        p90_ms: The 90th percentile of the latency in ms.
        p95_ms: The 95th percentile of the latency in ms.
        p99_ms: The 99th percentile of the latency in ms.
        min_ms: The smallest latency in ms.
        samples_ms: The latency in ms of each round, in the order of measurement.
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
    """The speedup of one model over another, with its confidence interval; see
    `repaconv.benchmark.latency_statistics.ratio`.

    It is the time of ``other`` divided by the time of ``subject`` in the same round.

    Attributes:
        subject: The name of the model whose speedup it is.
        other: The name of the model that it is compared with.
        median: The speedup: above 1, ``subject`` is faster. It is the median over the rounds of a session load, and the
            geometric mean over the session loads.
        low: The lower end of the confidence interval of ``median``.
        high: The upper end of the confidence interval of ``median``.
        confidence: The confidence level of the interval: 0.95.
        p10: The 10th percentile of the ratio over all single rounds. ``median`` is no percentile of the same numbers: a
            session load that differs much from the others can move it below ``p10`` or above ``p90``.
        p90: The 90th percentile of the ratio over all single rounds.
        verdict: ``faster`` or ``slower`` if the whole interval is more than 0.5% away from 1, otherwise ``no difference
            shown``; ``not conclusive`` if the measurement is inconclusive.
    """

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

    def text(self, subject: str = "", other: str = "") -> str:
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

    told = former_attribute("told", "text", removed_in="0.3.0")


class Quality(Record):
    """Whether a measurement can be trusted, and what the machine did meanwhile.

    Attributes:
        verdict: ``trusted`` if no disturbance was detected, ``noisy`` if something disturbed it,
            ``inconclusive`` if a difference of 5% may have been missed or may have another cause.
        reasons: The disturbances and other reasons for doubt; empty if it is trusted.
        seconds: How long the measured rounds took, in s.
        other_load: The share (0 to 1) of the whole machine's CPU time that other processes took; null if the system
            does not report it.
        other_load_on_cores: The share (0 to 1) of the time of the cores in use that other processes took; null if the
            system does not report it.
        steal_time: The share (0 to 1) of the CPU time that the hypervisor took; null if the system does not report it.
        speed: How long a fixed loop takes after the measurement, divided by how long it took before: above 1, the core
            became slower.
        before: The state of the machine before the measured rounds, by name: ``load`` (1 minute), clocks of the cores
            in use in kHz, temperatures in degrees Celsius; of a GPU also its clocks in MHz and its power in W. What the
            system does not report is missing.
        after: The same after the measured rounds.
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
    """The time of one node in the graph that the runtime executes.

    Attributes:
        name: The name of the node: that of its module, ``/``, and its operator with a number.
        module: The module that the node is in, by its dotted name; empty if the name of the node has none.
        operator: The operator of the node, as the runtime calls it; after ``+``, what the runtime fused into it.
        mean_ms: The mean time of the node per inference, in ms.
        share: The share (0 to 1) of ``total_ms``.
        flops: Floating-point operations per inference, 2 for each MAC; 0 for all but matrix products, convolutions and
            attention.
        bytes: The bytes that the node reads and writes; 0 if they are unknown.
        precision: The type that a product multiplies, e.g. ``fp32`` or ``int8``; of other nodes, that of their input.
        group: What the node is, as ``roofline`` names it; empty in results of earlier versions.
        limit_ms: The least time that the node takes at the limits of the cores in use, in ms; at most ``mean_ms``.
        limited_by: ``arithmetic`` or ``memory``: what sets ``limit_ms``; empty if nothing does.
    """

    name: str
    module: str
    operator: str
    mean_ms: float
    share: float
    flops: int
    bytes: int = 0
    precision: str = ""
    group: str = ""
    limit_ms: float = 0.0
    limited_by: str = ""


class ModuleTime(Record):
    """The time of all nodes of one module together.

    Attributes:
        module: The module, by its dotted name: a layer with a name of four or more parts counts for the module around
            it, e.g. ``blocks.0.attn.qkv`` for ``blocks.0.attn``.
        mean_ms: The mean time of these nodes per inference, in ms.
        share: The share (0 to 1) of ``total_ms``.
        flops: Floating-point operations per inference, 2 for each MAC, of matrix products, convolutions and attention.
        gflops: ``flops`` divided by the time, in GFLOP/s.
        share_of_peak: ``gflops`` divided by ``peak_gflops``.
        limit_ms: The sum of the ``limit_ms`` of its products.
    """

    module: str
    mean_ms: float
    share: float
    flops: int
    gflops: float
    share_of_peak: float
    limit_ms: float = 0.0


class ProductPeak(Record):
    """What one large product reaches on the cores in use.

    Attributes:
        operator: ``MatMul`` of 512 rows by 1024 x 1024, or ``Conv``: 3 x 3, 256 channels, 28 x 28 pixels.
        precision: The type that is multiplied: ``fp32``, ``fp16``, ``bf16`` or ``int8``.
        gflops: 1e9 operations/s, 2 for each MAC.
    """

    operator: Literal["MatMul", "Conv"]
    precision: str
    gflops: PositiveFloat


class Bandwidth(Record):
    """How fast a copy moves bytes on the cores in use, with the data in the caches that it fits into.

    Attributes:
        bytes: How many bytes are moved: those that are read, and as many that are written.
        gb_s: 1e9 bytes/s.
    """

    bytes: int
    gb_s: PositiveFloat


class LayerGroup(Record):
    """The time of all layers of one kind, next to the limits.

    Attributes:
        group: ``products``, ``products with an activation`` (fused, so that their times cannot be told apart),
            ``activations``, ``norms``, ``quantize``, ``layout`` (transposes, reorders, copies), ``elementwise`` (sums
            and gates), ``pooling``, ``other``, or ``between layers``: what an inference takes beyond its layers.
        layers: The number of layers.
        mean_ms: Their time per inference, in ms.
        share: The share (0 to 1) of the latency.
        arithmetic_ms: The part of ``limit_ms`` of layers whose operations are their limit.
        memory_ms: The part of ``limit_ms`` of layers whose bytes are their limit; less only by moving fewer bytes.
        limit_ms: The least time that these layers take at the limits of the cores, in ms.
        removable_ms: ``mean_ms`` without ``limit_ms``.
    """

    group: str
    layers: int
    mean_ms: float
    share: float
    arithmetic_ms: float
    memory_ms: float
    limit_ms: float
    removable_ms: float


class Roofline(Record):
    """How far a model is from the limit of the cores in use, which the same runtime measured in turn with it.

    Attributes:
        peaks: What large products reach, by operator and precision.
        bandwidth: How fast copies of several sizes move bytes.
        limit_ms: What the products of the model alone take at these limits, in ms.
        share_of_limit: ``limit_ms`` divided by the latency.
        at_limit: Whether that is 0.9 or more.
        largest_removable: The group with the largest ``removable_ms``; empty if the model is at the limit.
        groups: The time of each group, the largest first.
    """

    peaks: tuple[ProductPeak, ...]
    bandwidth: tuple[Bandwidth, ...]
    limit_ms: float
    share_of_limit: float
    at_limit: bool
    largest_removable: str
    groups: tuple[LayerGroup, ...]

    @property
    def peaks_text(self) -> str:
        """The largest peak of each precision, e.g. ``fp32 105 GFLOP/s (Conv)``."""
        best = {each.precision: each for each in sorted(self.peaks, key=lambda each: each.gflops)}
        return ", ".join(f"{name} {each.gflops:.0f} GFLOP/s ({each.operator})" for name, each in sorted(best.items()))

    @property
    def description(self) -> str:
        """How far it is from the limit, and what could be removed, in words."""
        products = f"products alone take {self.limit_ms:.3f} ms at the limit, {self.share_of_limit:.0%} of the latency"
        if self.at_limit:
            return f"{products}: the model is at the limit"
        most = next((each for each in self.groups if each.group == self.largest_removable), None)
        memory = [each for each in self.groups if each.memory_ms > max(each.removable_ms, 0.02 * self.limit_ms)]
        bound = ", ".join(f"{each.group} ({each.memory_ms:.3f} ms)" for each in memory)
        parts = [products, *([f"largest removable part: {most.group}, {most.removable_ms:.3f} ms"] if most else [])]
        total = sum(each.share for each in self.groups)
        disturbed = f"disturbed while it was profiled: the layers took {total:.2f} times the latency"
        return "; ".join(
            [*parts, *([f"bound by memory: {bound}"] if bound else []), *([disturbed] if total > 1.1 else [])]
        )


class Profile(Record):
    """The time of the first model by node and by module, from the runtime's own profiler.

    Attributes:
        runs: The number of profiled inferences.
        total_ms: The sum of the mean times of all nodes, in ms, as the profiler measured them.
        end_to_end_ms: The median latency in ms without the profiler, right before and after it.
        peak_gflops: What one large matrix product reaches on the same device and threads, in GFLOP/s.
        gflops: The operations of all nodes divided by ``total_ms``, in GFLOP/s.
        share_of_peak: The operations of all nodes divided by ``end_to_end_ms``, as a share of ``peak_gflops``.
        nodes: The time of each node, in the order of the graph.
        modules: The time of each module.
        roofline: The time by kind of layer, next to the limits; null in results of earlier versions.
    """

    runs: int
    total_ms: float
    end_to_end_ms: float
    peak_gflops: float
    gflops: float
    share_of_peak: float
    nodes: tuple[NodeTime, ...]
    modules: tuple[ModuleTime, ...]
    roofline: Roofline | None = None


class HistoryEntry(Record):
    """One measurement in the history of a target; a later ``fold`` of the run keeps the history.

    Attributes:
        when: The date and time of the measurement, UTC, ISO 8601.
        sha256: The SHA-256 of the model file that was measured.
        p50_ms: The median latency in ms.
        p95_ms: The 95th percentile of the latency in ms.
        ratio: The speedup over the model that was measured with it; null if there was none.
        quality: The verdict on the measurement: ``trusted``, ``noisy`` or ``inconclusive``.
        machine: The machine in words: GPU, CPU, number of cores, system.
        threads: The number of threads per inference.
        batch: The batch size.
        image_size: (height, width) in pixels; null if the model takes no images.
    """

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


class _Measurement(Artefact):
    """What results of a measurement have in common: ``quality``, and ratios that claim no more than it allows."""

    if TYPE_CHECKING:
        quality: Quality

    @field_validator("scaling", "ratio", check_fields=False)
    @classmethod
    def _claims_no_more(cls, ratio: Ratio | None, info: ValidationInfo) -> Ratio | None:
        return ratio and ratio.under(info.data.get("quality"))

    @property
    def inconclusive(self) -> bool:
        """Whether the measurement says nothing."""
        return self.quality.verdict == "inconclusive"


class BenchArtefact(_Measurement):
    """Latencies of a model and of the one it is compared with, measured in turn in one run on this machine.

    The verdict is *failed* if the model failed against its baseline, or if its outputs differ from those of the
    training form.

    Attributes:
        network: The network that was measured; null in files of earlier versions.
        variant: The export that was measured, by target, precision and whatever else is not the default, e.g.
            ``x86-64.int8``; empty for a model file without a run.
        target: The target, by name.
        runtime: The runtime that ran the first model, with its version.
        precision: The precision that the first model computes in.
        batch: The batch size.
        image_size: (height, width) in pixels; null if the model takes no images.
        threads: The number of threads per inference.
        rounds: The number of measured rounds; in each round, every model runs once.
        session_loads: How often the models were loaded anew; the rounds are split evenly over these session loads.
        warmup_rounds: The number of rounds that were run before the measured ones, until the times were stable.
        seed: The seed of random inputs, of the order within the rounds and of the confidence interval.
        session: The options of the first model's session in its runtime, by name; all others are the runtime's
            defaults.
        machine: The description of the machine, by name: CPU, cores, caches, memory, load, system, and versions of the
            packages; a value that the system does not report is null.
        protocol: The paper's measuring protocol given with ``--protocol``, in words; empty if none was.
        latencies: The latencies: first of the model, then of the one that it is compared with, if there is one.
        quality: Whether the measurement can be trusted.
        ratio: The speedup of the first model over the other; null if there is no other.
        profile: The time by node and module; null without ``--profile``.
        regression: The comparison with the baseline; null without ``--baseline``, or if the file has no baseline to
            compare with.
        agreement: The comparison of the outputs of both models on the inputs of the measurement; null if there is no
            other model or their outputs cannot be compared.
        image_preprocessing: How image files were read, in words; empty if the inputs were random.
        note: What else is to be known of the measurement, e.g. why there is no training form; empty if nothing is.
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

    @property
    def compared(self) -> str:
        """The ratio in words, with the precision of both models; empty if there is only one."""
        named = {row.name: f"{row.name} ({row.precision})" if row.precision else row.name for row in self.latencies}
        found = self.ratio
        return found.text(named.get(found.subject, ""), named.get(found.other, "")) if found else ""


# --- Results of ``bench --objective throughput``: images per second of several concurrent inferences.


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


class ThroughputArtefact(_Measurement):
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

    @property
    def compared(self) -> tuple[str, ...]:
        """In words, the throughput over that of one stream, and over that of the model it is compared with."""
        named = {row.name: f"{row.name} ({row.precision})" for row in self.rows}
        found = [each for each in (self.scaling, self.ratio) if each]
        return tuple(_many(each, named.get(each.subject, ""), named.get(each.other, "")) for each in found)


def _many(found: Ratio, subject: str, other: str) -> str:
    subject, other = subject or found.subject, other or found.other
    if not found.conclusive:
        return found.text(subject, other)
    return f"{subject} has {found.median:.3f} times the throughput of {other} ({found.interval})"


# --- Results of ``bench --estimate``: how long a graph would take on a device, by calculation alone.


class Limits(Record):
    """The peak figures of a device, from which an estimate is calculated.

    Attributes:
        device: The device in words: e.g. which module or GPU, and at which clock.
        peak_tflops: The peak in 1e12 operations/s, 2 for each MAC, without sparsity, by the type that is multiplied.
            ``tf32`` is what float32 may be multiplied in.
        bandwidth_gb_s: The bandwidth to and from its memory, in 1e9 bytes/s.
        launch_us: The time that every node costs whatever it computes, in microseconds.
        source: Where these figures are from: data sheets, or a measurement on this machine.
    """

    device: str
    peak_tflops: dict[Literal["fp32", "tf32", "fp16", "bf16", "int8"], PositiveFloat] = Field(min_length=1)
    bandwidth_gb_s: PositiveFloat
    launch_us: NonNegativeFloat
    source: tuple[str, ...] = Field(min_length=1)


class NodeEstimate(Record):
    """The estimated time of one node: from what it computes and what it moves in memory.

    Attributes:
        name: The name of the node.
        operator: The operator of the node.
        precision: The type that the node multiplies in; of a node that multiplies nothing, the type of its output.
        flops: Floating-point operations per inference, 2 for each MAC; 0 for a node that multiplies nothing, or if it
            is not known.
        bytes: The bytes that the node reads and writes, each once; 0 if it moves nothing, or if it is not known.
        low_ms: The lower end of its time in ms: at the peak figures, without a launch. It is 0 for a node other than a
            matrix product, convolution or attention, as a runtime may fuse it.
        high_ms: The upper end of its time in ms: at half of the peak figures, plus a launch.
        limit: What takes longest of ``high_ms``: ``arithmetic``, ``memory`` or ``launch``.
    """

    name: str
    operator: str
    precision: str
    flops: int
    bytes: int
    low_ms: float
    high_ms: float
    limit: Literal["arithmetic", "memory", "launch"]


class EstimateArtefact(Artefact):
    """The estimated latency of a graph: between ``low_ms`` and ``high_ms``; see `repaconv.benchmark.latency_estimate`.

    It is not a measurement: gates, baselines and histories do not use it, and its verdict is always *not verified*.

    Attributes:
        label: Always ``estimated, not measured``.
        variant: The export that is estimated, by target, precision and whatever else is not the default, e.g.
            ``h100.fp16``; empty for an ONNX file without a run.
        target: The target, by name.
        runtime: The runtime of the target, with the version that the target states.
        precision: The precision that the graph would compute in.
        batch: The batch size.
        image_size: (height, width) in pixels.
        threads: The number of threads per inference, for which the limits of a CPU are measured.
        model: The name of the ONNX file.
        sha256: The SHA-256 of the ONNX file.
        limits: The peak figures of the device.
        low_ms: The lower end of the latency in ms: the sum over ``nodes``.
        high_ms: The upper end of the latency in ms: the sum over ``nodes``. Inefficient kernels may take longer.
        nodes: The estimate of each node that costs something, in the order of the graph.
        measured_ms: The median latency in ms that ``bench`` or a board measured of the same file with the same target
            and sizes; null if the run has no such measurement.
        measurement: What made that measurement, and whether it is trusted, in words; empty if there is none.
        note: What else is to be known, e.g. operators that the estimate leaves out; empty if nothing is.
    """

    stage: str = "estimate"
    label: Literal["estimated, not measured"] = "estimated, not measured"
    variant: str = ""
    target: str
    runtime: str
    precision: str
    batch: int
    image_size: ImageSize
    threads: int
    model: str
    sha256: str
    limits: Limits
    low_ms: float
    high_ms: float
    nodes: tuple[NodeEstimate, ...]
    measured_ms: float | None = None
    measurement: str = ""
    note: str = ""


# --- The result of ``compare``: two models on the same inputs.


class ComparedEnd(Record):
    """One of the two models of a comparison: what runs it, in which precision, and its size.

    Attributes:
        name: The path of the model, with ``as folded`` or ``as trained`` if weights were run instead of a model file.
        engine: The runtime and its version; ``torch`` for weights.
        precision: The precision that the model computes in, e.g. ``fp32`` or ``int8``.
        sha256: The SHA-256 of the model file, of the folded weights, or of the checkpoint.
        bytes: The size in bytes of the model file with its external weights, or of the weights.
        parameters: The number of parameters of an ONNX model as ``fold`` counts them, with the entries of 8-bit
            constants; null for others.
        nodes: The number of nodes of an ONNX model; null for others.
    """

    name: str
    engine: str
    precision: str
    sha256: str
    bytes: int | None = None
    parameters: int | None = None
    nodes: int | None = None


class CompareArtefact(Artefact):
    """The result of ``compare``: two models on the same inputs.

    Attributes:
        stage: The command that wrote this result, ``compare``.
        reference: The model that the other is compared with.
        candidate: The model that is evaluated.
        inputs: What the inputs were, e.g. ``4 random images, seed 0``.
        links: The comparison of each output.
        measured: The latency of the candidate and the reference; null without ``--speed``.
    """

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
