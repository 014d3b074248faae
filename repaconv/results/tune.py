"""Results of ``tune``: every deployment that was considered, and the fastest one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from repaconv.results.bench import Ratio
from repaconv.results.records import Artefact, ImageSize, Link, Record


class Deployment(Record):
    """One way to run a network: runtime, precision, rewrites, runtime settings, threads and batch size together.

    Attributes:
        target: The target for which its ONNX graph is written, by name.
        runtime: The runtime that executes it: that of ``target``.
        rewrites: The rewrites of its graph, by name, in their order.
        precision: The precision of its graph, or the one in which the runtime computes an FP32 graph.
        fp32_modules: The modules whose layers an INT8 graph keeps in FP32, by name; empty for other precisions.
        quantizer: The INT8 quantizer, if it is not ONNX Runtime's: ``onnxruntime-symmetric``, ``nncf`` or
            ``nncf-symmetric``; empty otherwise.
        settings: The settings of the runtime that differ from its defaults, as ``NAME=VALUE``.
        threads: The number of threads per inference.
        streams: The number of concurrent inferences.
        batch: The batch size of each inference.
    """

    FORMER: ClassVar[Mapping[str, str]] = {"keep": "fp32_modules", "quantiser": "quantizer"}

    target: str
    runtime: str
    rewrites: tuple[str, ...]
    precision: str = "fp32"
    fp32_modules: tuple[str, ...] = ()
    quantizer: str = ""
    settings: tuple[str, ...] = ()
    threads: int = 1
    streams: int = 1
    batch: int = 1


class Candidate(Record):
    """A deployment that was considered, and what was found about it.

    Attributes:
        deployment: The deployment.
        expected: The speedup over the baseline that was predicted before it was measured; 1 for the baseline, null
            where there is no prediction.
        rounds: The number of rounds of its longest measurement; 0 if it was not measured.
        ratio: The speedup over the baseline in time per image, from that measurement; null if it was not measured, and
            for the baseline.
        memory_bytes: The peak memory of this process while it was loaded and run once, in bytes, beyond what was in use
            before; null if it was not loaded in this search, runs on a GPU or elsewhere, or if the system does not
            report it.
        disagreement: The share (0 to 1) of images of the validation split whose top-1 prediction differs from FP32, or
            how much of FP32's results changed in another task; null for an FP32 deployment, and for one that was not
            evaluated.
        link: The comparison with FP32 on these images; null where ``disagreement`` is.
        description: How far it came in the search, in words, e.g. ``finalist``, ``the fastest`` or why it was ruled
            out.
    """

    FORMER: ClassVar[Mapping[str, str]] = {"told": "description"}

    deployment: Deployment
    expected: float | None = None
    rounds: int = 0
    ratio: Ratio | None = None
    memory_bytes: int | None = None
    disagreement: float | None = None
    link: Link | None = None
    description: str


class Sensitivity(Record):
    """What one group of layers loses in INT8 while all other layers stay in FP32, on the calibration split.

    Attributes:
        layers: The layers of the group, by the names of their modules.
        disagreement: The share (0 to 1) of images whose top-1 prediction differs from FP32; in another task, how much
            of FP32's results changed.
        kl_divergence: The mean KL divergence from the class probabilities of FP32, in nats; 0 in tasks other than
            classification.
    """

    layers: tuple[str, ...]
    disagreement: float
    kl_divergence: float


class TuneArtefact(Artefact):
    """The fastest deployment of a network on a machine, and all measurements behind the choice.

    If lower precision is allowed, the images are split: some calibrate INT8 and FP16, some choose among the candidates
    (validation), and the others evaluate the one that was chosen.

    Attributes:
        target: The target that was tuned for, by name.
        runtimes: The version of each runtime that was tried, by the name of the runtime.
        objective: What was optimized: ``latency`` or ``throughput``.
        method: The registered name of the network's method; ``graph`` if it was folded as a graph.
        shapes_sha256: The SHA-256 of what determines the network's shapes (backbone, configuration and image size; or
            graph and sizes): the result holds for all networks with the same.
        model_sha256: The SHA-256 of the folded network's file if ``deployment`` is lossy, since its loss was evaluated
            with these weights only; empty otherwise.
        image_size: (height, width) in pixels; null if the network takes no images.
        graph_size: Which image sizes the graphs take: ``own``, the only one that the network takes, or none; any
            (``dynamic``); ``image_size`` only, though the network takes others (``fixed``, by ``--image-size``).
        seed: The seed of random inputs, of the order within the rounds and of the confidence intervals.
        baseline: The deployment that all others are compared with: the target's own runtime and default preset in FP32.
        macs: The multiply-accumulates of the baseline; 0 if they were not counted.
        deployment: The fastest deployment among those whose confidence interval is above a speedup of 1; the baseline
            if there is none.
        ratio: The speedup of ``deployment`` over the baseline, in time per image; null if it is the baseline.
        allowed_disagreement: The largest share (0 to 1) of changed top-1 predictions that was allowed, or of what
            changes in another task; null if none was given.
        allowed_accuracy_drop: The largest loss of top-1 accuracy that was allowed, or of the metric of another task, as
            a share (0 to 1); null if none was given. Without either limit only FP32 deployments are considered.
        candidates: Every deployment that was considered; the first one is ``deployment``.
        images: The images and how they were split, or that outputs were compared on them, in words; empty if none were
            given.
        image_preprocessing: How image files were read, in words; empty if there were none.
        scores: Where the labels are from, and which output is taken as class scores, in words; empty if there was
            nothing to decide.
        disagreement: The share (0 to 1) of changed top-1 predictions, or of what changes in another task, of the
            fastest lossy candidate, on images that neither calibrated nor chose; null if an FP32 deployment was the
            fastest. If the loss is too large, ``deployment`` is the fastest FP32 one.
        link: The comparison with FP32 on the same images; null where ``disagreement`` is.
        sensitivities: How sensitive each group of layers is to INT8, the most sensitive first, by target; only of
            targets on which INT8 in all layers lost too much.
        skipped: The runtimes and quantizers that were not tried, each with the reason; and why no lower precision was,
            if the images cannot tell what it loses.
        seconds: How long the search took with its last measurement, in s.
        budget_s: The time limit of the search, in s.
        complete: Whether the search finished before the time limit.
        machine: The description of the machine, by name, as in the result of ``bench``; of a cluster only the target.
        note: ``known from an earlier search`` if nothing was measured now; empty otherwise.
    """

    FORMER: ClassVar[Mapping[str, str]] = {"left_out": "skipped"}

    stage: str = "tune"
    target: str
    runtimes: dict[str, str]
    objective: str = "latency"
    method: str
    shapes_sha256: str
    model_sha256: str = ""
    image_size: ImageSize | None
    graph_size: Literal["own", "dynamic", "fixed"] = "own"
    seed: int
    baseline: Deployment
    macs: int = 0
    deployment: Deployment
    ratio: Ratio | None
    allowed_disagreement: float | None = None
    allowed_accuracy_drop: float | None = None
    candidates: tuple[Candidate, ...]
    images: str = ""
    image_preprocessing: str = ""
    scores: str = ""
    disagreement: float | None = None
    link: Link | None = None
    sensitivities: dict[str, tuple[Sensitivity, ...]] = Field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    seconds: float
    budget_s: float = 0.0
    complete: bool = True
    machine: dict[str, Any]
    note: str = ""
