"""What every stage leaves behind, as frozen results.

An artefact is a payload file and beside it ``<stage>.json`` (`repaconv.files` writes both). The same input gives the
same bytes, so nothing here carries a time stamp; what a clock says belongs to the measurements of ``bench`` alone.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = 2

Verdict = Literal["passed", "failed", "not verified"]

ImageSize = tuple[int, int]
"""(height, width) in pixels."""


def parse_image_size(text: str) -> ImageSize:
    """``224`` or ``140x126`` (height x width).

    Raises:
        ValueError: If it is neither.
    """
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.isdigit() and int(side) for side in sides):
        raise ValueError("neither a number of pixels nor HEIGHTxWIDTH")
    return int(sides[0]), int(sides[-1])


class Record(BaseModel):
    """A frozen result; unknown fields are errors, so a newer file is not half-read."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class Fact(Record):
    """A value used about a checkpoint, where it comes from and what speaks against it.

    ``overrules``: it is the user's, and the file or its weights say otherwise.
    """

    name: str
    value: Any
    source: str
    against: str = ""
    overrules: bool = False


class Payload(Record):
    """A file beside the artefact; ``path`` is relative to the artefact's folder."""

    path: str
    sha256: str
    bytes: int


class WeightSet(Record):
    """One state dict of a container; ``path`` is its dotted place, ``.`` for the whole file."""

    path: str
    tensors: int
    parameters: int


class Origin(Record):
    """The checkpoint that a run started from, and which weights of it were taken."""

    path: str
    sha256: str
    bytes: int
    container: str
    weights: str
    weights_reason: str
    stripped: tuple[str, ...] = ()


class Preprocessing(Record):
    """What happens to an image before the network; mean and std on the 0..255 scale, per channel.

    ``resize_edge`` is the shorter edge's length, the image size's longer side where None; with ``keep_ratio`` False,
    both edges', the image size itself where None.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    channel_order: Literal["RGB", "BGR"] = "RGB"
    image_size: ImageSize
    resize_edge: int | None = None
    keep_ratio: bool = True
    interpolation: str = "bicubic"
    source: str


class FoldStep(Record):
    """One row of the fold certificate: what went where, and the float64 difference it makes.

    ``max_rel_error`` is max|folded - training| / max|training| of the module's output on random input, or of its
    weights where those alone change. ``allowed`` is what this step alone may differ by; where that is not the
    policy's, ``reason`` says why. A method leaves it None for the policy's.
    """

    module: str
    folded: tuple[str, ...]
    left: tuple[str, ...] = ()
    equation: str = ""
    max_rel_error: float
    allowed: float | None = None
    reason: str = ""


class Change(Record):
    """One exact change of a graph: by which rewrite, at which node, and what it did there."""

    rewrite: str
    place: str
    told: str


class TensorInfo(Record):
    """Name, shape and dtype of one tensor of the folded model."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class Cost(Record):
    """Parameters, and multiply-accumulates of one image; ``layer_macs`` are those of layers with weights alone."""

    parameters: int
    macs: int
    layer_macs: int


class Metrics(Record):
    """How two outputs of shape [N, K] differ.

    Of each image apart, and the worst of them: ``max_rel_error`` is max|a - b| / max|b|, ``norm_error`` is
    ||a - b|| / ||b||, and ``cosine`` the smallest, of logits around their mean; None for a single number. An image near
    zero is measured by what is usual of the others (`repaconv.proof.parity`). ``mean_abs_error`` is over all numbers,
    ``spread`` how far the reference's outputs lie from that of the first image, relative to the largest; None for one
    image. For logits: ``kl_divergence`` KL(softmax b || softmax a) in nats, its mean over the images;
    ``top1_agreement`` is 1 - ``top1_flips`` / images, where ``top1_flips`` counts other first classes: those in which
    the reference's lead over the class chosen instead is more than the noise matter (``top1_flips_that_matter``), the
    others are ``top1_flips_within_noise``, of the ``top1_close`` images whose first class leads by no more than that at
    all. ``examples`` lists some flips, by image and lead. Leads and margins are relative to the image's max|b|.
    ``undecided`` counts images left out, where rounding decides which tokens merge; of a graph of any origin, numbers
    left out that hang on a rounding.
    """

    images: int
    max_abs_error: float
    max_rel_error: float
    mean_abs_error: float
    norm_error: float = 0.0
    cosine: float | None
    spread: float | None = None
    kl_divergence: float | None = None
    top1_agreement: float | None = None
    top1_smallest_margin: float | None = None
    top1_flips: int = 0
    top1_flips_that_matter: int = 0
    top1_flips_within_noise: int = 0
    top1_close: int = 0
    examples: tuple[tuple[int, float], ...] = ()
    undecided: int = 0


class Tolerance(Record):
    """What a link allows; None is not judged.

    An ``exact`` link passes where max_rel_error <= rtol or max_abs_error <= atol. A ``lossy`` one is never held to
    those: it passes by cosine and norm_error, by the flips of first classes, and by the loss of accuracy where there
    are labels. Neither passes where the outputs of all images are as much alike as that.
    ``flips`` is the share of all images that may lose a lead of more than ``noise``, ``flips_within_noise`` the share
    of those with a smaller lead that may lose it; more of these is no fault where chance explains it.
    """

    kind: Literal["exact", "lossy"]
    rtol: float | None = None
    atol: float | None = None
    cosine: float | None = None
    norm_error: float | None = None
    flips: float | None = None
    flips_within_noise: float | None = None
    accuracy_loss: float | None = None
    noise: float = 0.0

    @property
    def told(self) -> str:
        """What is allowed, in words."""
        if self.kind == "exact":
            limits = ((self.rtol, "relative"), (self.atol, "absolute"))
            return " or ".join(f"{value:.0e} {kind}" for value, kind in limits if value is not None)
        near = f"lossy: cosine {self.cosine}, error {self.norm_error or 0.0:.1%}"
        if self.flips is None or self.flips_within_noise is None:
            return near
        beyond, within = f"{self.flips:.0%} flips beyond {self.noise:.0%}", f"{self.flips_within_noise:.0%} within"
        return f"{near}, {beyond}, {within}"


class Accuracy(Record):
    """Top-1 accuracy of both ends on the same labelled images.

    ``difference`` is candidate minus reference with its 95% interval (paired, Agresti and Min 2005), ``p_value`` that
    of McNemar's exact test on the images that one end alone gets right.
    """

    images: int
    reference: float
    candidate: float
    only_reference: int
    only_candidate: int
    difference: float
    low: float
    high: float
    p_value: float


class Drift(Record):
    """The difference of both ends at one place on the way: max|a - b| / max|b|, and the same of root mean squares."""

    place: str
    max_rel_error: float
    rms_rel_error: float


class Location(Record):
    """Where two ends part: the first ``module``, in the user's names, and what was compared up to there.

    ``module`` is empty where nothing can be said; ``reason`` says why, or what the name rests on.
    """

    module: str
    reason: str
    drift: tuple[Drift, ...] = ()


class Link(Record):
    """One step of the chain of proof: two ends, what is allowed between them, a verdict.

    ``variant`` is that of the export which it is about, where it is not the usual one; ``sha256`` is the hash of the
    graph or engine that was run.
    """

    name: str
    variant: str = ""
    sha256: str = ""
    reference: str
    candidate: str
    tolerance: Tolerance | None
    metrics: Metrics | None
    verdict: Verdict
    note: str = ""
    accuracy: Accuracy | None = None
    location: Location | None = None


class Artefact(Record):
    """What all stages share.

    ``unverified`` names the failed proofs that were overridden, and the settings that overrule the checkpoint.
    ``asked`` is what the stage was asked for, as options of its command. ``beside`` are the files that this stage wrote
    besides its payload; of a fold, what exports of an earlier one wrote
    outside the run. ``took`` and ``wrote`` are the files of this call; they are told to the caller and not stored.
    """

    schema_version: int = SCHEMA_VERSION
    stage: str
    made_by: dict[str, str]
    verdict: Verdict
    unverified: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()
    beside: tuple[Payload, ...] = ()
    took: tuple[str, ...] = Field(default=(), exclude=True)
    wrote: tuple[str, ...] = Field(default=(), exclude=True)


class BlockCost(Record):
    """What one block costs in both forms."""

    name: str
    training: Cost
    deploy: Cost


class Inspection(Record):
    """What a checkpoint holds; the result of ``inspect``. ``problems`` say why it cannot be folded."""

    schema_version: int = SCHEMA_VERSION
    stage: str = "inspect"
    origin: Origin
    sets: tuple[WeightSet, ...]
    placeholders: tuple[str, ...]
    method: str | None
    form: str | None
    reason: str
    confidence: str = ""
    applied: tuple[str, ...] = ()
    backbone: str | None = None
    facts: tuple[Fact, ...] = ()
    problems: tuple[str, ...] = ()
    training: Cost | None = None
    deploy: Cost | None = None
    blocks: tuple[BlockCost, ...] = ()


class FileInspection(Record):
    """What an ONNX graph or an engine says of itself, read as bytes; the result of ``inspect`` for those."""

    schema_version: int = SCHEMA_VERSION
    stage: str = "inspect"
    path: str
    kind: str
    sha256: str
    bytes: int
    facts: tuple[Fact, ...]
    problems: tuple[str, ...] = ()


class TableRow(Record):
    """One model of a paper's table: the paper's figures as printed, and ours.

    ``macs`` is in ``unit``: some papers print two FLOPs a MAC. ``agrees`` is false where a figure differs by more
    than the printed precision; ``remark`` says why.
    """

    table: str
    model: str
    form: Literal["training", "deploy"]
    cost: Cost
    parameters: str
    macs: str
    counted: Literal["all", "layers"]
    unit: Literal["MACs", "FLOPs"]
    agrees: bool
    remark: str


class PaperTable(Record):
    """The paper's models in our forms; the result of ``table``."""

    schema_version: int = SCHEMA_VERSION
    method: str
    paper: str
    rows: tuple[TableRow, ...]


class TrainingArtefact(Artefact):
    """The training form as ONNX, to be measured beside the deploy form.

    It is made again when one of the others changes: the checkpoint and its settings, or what of the deploy form's
    export it is ``like``.
    """

    stage: str = "training"
    variant: str = ""
    source_sha256: str
    settings: dict[str, str]
    like: dict[str, Any]
    payload: Payload
    data: Payload | None = None


class FoldArtefact(Artefact):
    """The folded model, whole: later stages rebuild it from this and ``model.safetensors`` alone.

    ``applied`` names all that was folded: the method, and what the checkpoint carried besides (LoRA, LayerScale).
    ``form`` is how it will be written, by name, ``rewrites`` that in full; None leaves it to the target of the export.
    ``tolerances`` are those of the links that this net cannot hold at the policy's. ``claims`` are the accuracies that
    the checkpoint's own record has.
    """

    stage: str = "fold"
    origin: Origin
    method: str
    applied: tuple[str, ...]
    settings: dict[str, str]
    backbone: str
    config: dict[str, Any]
    form: str
    rewrites: tuple[str, ...] | None = None
    facts: tuple[Fact, ...]
    claims: tuple[Fact, ...] = ()
    preprocessing: Preprocessing
    image_size: ImageSize
    any_image_size: bool
    output: Literal["logits", "features"]
    tensors: tuple[TensorInfo, ...]
    training: Cost
    deploy: Cost
    tolerances: dict[str, float]
    certificate: tuple[FoldStep, ...]
    payload: Payload


class OnnxFoldArtefact(Artefact):
    """An ONNX graph with everything folded that needs no knowledge of its method; beside it, the folded graph.

    ``changes`` say what was done where, ``links`` compare the outputs before and after. ``macs`` are those of one call
    with free sizes at 1, before and after; None where shapes are not known. ``left`` says what was left alone and why,
    and which linear operators still stand behind or beside another. ``verdict`` is passed where a link passed and none
    failed; outputs that could not be compared are links that are *not verified*, by name. ``payload`` is None where
    there was nothing to fold: then nothing was written, and nothing is verified.
    """

    stage: str = "fold"
    source: str
    sha256: str
    bytes: int
    opset: int
    parameters: tuple[int, int]
    macs: tuple[int, int] | None
    nodes: tuple[int, int]
    operators: dict[str, int]
    changes: tuple[Change, ...]
    left: tuple[str, ...] = ()
    links: tuple[Link, ...] = ()
    payload: Payload | None = None


class VerifyArtefact(Artefact):
    """The links of the chain over one set of inputs; ``for_scale`` is measured and not judged.

    ``required`` are the links that must have been run. ``claims`` are the accuracies in the checkpoint's own record, to
    stand beside those of the links.
    """

    stage: str = "verify"
    policy: str
    inputs: str
    input_shape: tuple[int, ...]
    model_sha256: str
    required: tuple[str, ...] = ()
    labels: str = ""
    preprocessing: str = ""
    claims: tuple[Fact, ...] = ()
    links: tuple[Link, ...]
    for_scale: dict[str, Metrics]


class ExportArtefact(Artefact):
    """The ONNX graph and the links that lead to it.

    ``preprocessing`` says that the graph takes pixels and normalises them itself. ``lacks`` are the operators that the
    target does not know, ``violations`` what it does not take all the same. ``islands`` are the nodes of a float16
    graph that compute in float32, ``in_float`` the linear layers and convolutions of a typed graph that are not of its
    precision, ``calibration`` what its ranges were measured on. ``rewrites`` are those of the form that changed
    something, ``changes`` where and how; ``exporter_opset`` is what they started from. ``data`` are the weights that
    have a file of their own, above 2 GiB. The verdict is that of the graph that was written: a simplifier's that was
    thrown away is a failed link and no failed export. ``variant`` is its name in the run (`repaconv.variants`),
    ``target_sha256`` what the target said that bears on graphs.
    """

    stage: str = "export"
    variant: str = ""
    target: str
    target_sha256: str = ""
    precision: str = "fp32"
    preprocessing: bool = False
    islands: tuple[str, ...] = ()
    in_float: tuple[str, ...] = ()
    calibration: str = ""
    lacks: tuple[str, ...] = ()
    violations: tuple[str, ...] = ()
    form: str = "default"
    rewrites: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    opset: int
    exporter_opset: int | None = None
    batch: int | Literal["dynamic"]
    image_size: ImageSize | Literal["dynamic"]
    simplified: bool
    simplifier: str
    nodes: int
    operators: dict[str, int]
    model_sha256: str
    links: tuple[Link, ...]
    payload: Payload
    data: Payload | None = None


class Candidate(Record):
    """A form that the tuner considered.

    ``expected`` is how many times as fast as the default form it should be, by the effects of its rewrites alone;
    ``rounds`` and ``ratio`` (against the default form) are of its longest measurement, None if there was none; ``told``
    says how far it came.
    """

    rewrites: tuple[str, ...]
    expected: float | None = None
    rounds: int = 0
    ratio: Ratio | None = None
    told: str


class LoweredCandidate(Record):
    """The winner in a lower precision, which is lossy.

    ``disagreement`` is the share of images whose first class is another than in float32, ``link`` how it was judged,
    ``ratio`` against float32.
    """

    precision: str
    images: int
    disagreement: float | None = None
    link: Link | None = None
    ratio: Ratio | None = None
    told: str


class TuneArtefact(Artefact):
    """The fastest exact form of a network on a machine, and the evidence.

    ``rewrites`` are the winner's; ``shapes_sha256`` is the hash of backbone, config and image size, for all checkpoints
    of which it holds. ``precision`` is another than fp32 only where a loss was allowed, ``allowed_disagreement`` what
    that was. ``default`` is the target's own form, against which every ratio is. ``complete`` says whether nothing was
    left because ``budget_s`` was spent.
    """

    stage: str = "tune"
    target: str
    runtime: str
    method: str
    shapes_sha256: str
    image_size: ImageSize
    batch: int
    threads: int
    seed: int
    default: tuple[str, ...]
    rewrites: tuple[str, ...]
    ratio: Ratio | None
    precision: str = "fp32"
    allowed_disagreement: float | None = None
    candidates: tuple[Candidate, ...]
    lowered: tuple[LoweredCandidate, ...] = ()
    images: str = ""
    seconds: float
    budget_s: float = 0.0
    complete: bool = True
    machine: dict[str, Any]
    note: str = ""


class BuildArtefact(Artefact):
    """An engine for a target.

    ``layer_types`` counts the types of what computes, ``MATRIX_MULTIPLY.HALF`` for one; ``note`` says what they were
    read from. ``options`` are the runtime's, ``timing_cache`` is the hash of TensorRT's measurements after the build.
    ``links`` compare the engine with its model where it runs on the machine that built it. ``variant`` is that of the
    export, in the engine's precision.
    """

    stage: str = "build"
    variant: str = ""
    target: str
    runtime: str
    compute_capability: str
    precision: str
    layer_types: dict[str, int]
    options: dict[str, str] = Field(default={})
    timing_cache: str = ""
    note: str
    links: tuple[Link, ...] = ()
    onnx_sha256: str
    payload: Payload


class BundleArtefact(Artefact):
    """A model packed for a board; ``bundle_sha256`` is that of ``bundle.json`` in it, by which a result names it.

    ``images`` counts those whose expected outputs are in it, ``tolerance`` says what the board's engine is held to.
    """

    stage: str = "bundle"
    variant: str = ""
    target: str
    runtime_version: str
    precision: str
    inputs: str
    images: int
    batch: int
    tolerance: Tolerance
    bundle_sha256: str
    onnx_sha256: str
    payload: Payload


class LayerTime(Record):
    """Mean milliseconds of one layer of an engine, by the runtime's own profile."""

    name: str
    mean_ms: float


class CollectArtefact(Artefact):
    """What a board made of a bundle.

    ``latency`` is of the GPU's kernels alone, as ``printed_median_ms`` is, which trtexec said of the same run.
    ``precision_proof`` is *not verified* where the engine's layers do not tell their types; ``fused_attentions`` counts
    kernels that compute a whole attention. ``machine`` is the board before and after.
    """

    stage: str = "collect"
    variant: str = ""
    target: str
    runtime: str
    precision: str
    batch: int
    links: tuple[Link, ...]
    precision_proof: Verdict
    layer_types: dict[str, int]
    fused_attentions: int
    latency: Latency
    printed_median_ms: float | None
    profile: tuple[LayerTime, ...]
    machine: dict[str, Any]
    commands: tuple[str, ...]
    note: str
    bundle_sha256: str
    result_sha256: str


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


class Check(Record):
    """One thing that the gate looked at: a link of the chain, a latency, or a stage that could not be finished.

    ``line`` is that of the recipe which asked for it, ``module`` where it fails, if that is known.
    """

    stage: str
    name: str
    verdict: Literal["passed", "failed", "not verified", "inconclusive", "error"]
    message: str
    line: int
    module: str = ""
    code: str = ""
    hint: str = ""


class GatedRecipe(Record):
    """What the gate found for one recipe."""

    recipe: str
    run: str
    exit_code: int
    checks: tuple[Check, ...]


class GateReport(Record):
    """All recipes of one call; the result of ``gate``. ``exit_code`` is that of the worst."""

    schema_version: int = SCHEMA_VERSION
    stage: str = "gate"
    exit_code: int
    recipes: tuple[GatedRecipe, ...]


class Baseline(Record):
    """Latencies of one model on one machine as they were, with the model that ran beside it as the yardstick.

    ``yardstick_ms`` is empty where nothing ran beside it.
    """

    sha256: str
    p50_ms: float
    subject_ms: tuple[float, ...]
    yardstick_sha256: str = ""
    yardstick_ms: tuple[float, ...]
    machine: dict[str, Any]


class Baselines(Record):
    """A committed file of them, by machine, then by recipe and protocol."""

    schema_version: int = SCHEMA_VERSION
    machines: dict[str, dict[str, Baseline]] = Field(default={})


class Regression(Record):
    """How many times as long as the baseline it takes, with a bootstrap interval.

    Both are relative to the ``yardstick`` that ran beside each; in milliseconds where there was none. ``machine`` is
    where the baseline is from.
    """

    ratio: float
    low: float
    high: float
    confidence: float
    allowed: float
    verdict: Literal["passed", "failed", "inconclusive"]
    yardstick: str = ""
    machine: str = ""
    same_machine: bool = True

    @property
    def told(self) -> str:
        """What is compared, and how it came out, in words."""
        whose = "the baseline" if self.same_machine else f"the baseline of another machine ({self.machine})"
        beside = f"each relative to the {self.yardstick} beside it" if self.yardstick else "in milliseconds"
        rough = "" if self.same_machine else ", which compares only roughly from one machine to another"
        return (
            f"takes {self.ratio:.3f} times as long as {whose}, {beside}{rough} ({self.confidence:.0%} interval "
            f"{self.low:.3f} to {self.high:.3f}), {1 + self.allowed:.3f} is allowed"
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
    """Median over rounds of other / subject (above 1: the subject is faster), bootstrap interval."""

    subject: str
    other: str
    median: float
    low: float
    high: float
    confidence: float
    p10: float
    p90: float
    verdict: Literal["faster", "slower", "no difference shown"]


class Quality(Record):
    """Whether a measurement can be believed.

    ``others`` is the share of the machine's time that other processes took, ``others_here`` that of the cores which
    were used, ``stolen`` the hypervisor's; None where the system does not tell. ``speed`` is how long a fixed loop took
    at the end, relative to the beginning; ``before`` and ``after`` are clocks, temperatures and load.
    """

    verdict: Literal["trusted", "noisy", "inconclusive"]
    reasons: tuple[str, ...]
    seconds: float
    others: float | None
    others_here: float | None
    stolen: float | None
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
    there is none.
    """

    stage: str = "bench"
    variant: str = ""
    target: str
    runtime: str
    precision: str = "fp32"
    batch: int
    image_size: ImageSize
    threads: int
    rounds: int
    warmup_rounds: int
    seed: int
    session: dict[str, str]
    machine: dict[str, Any]
    protocol: str = ""
    latencies: tuple[Latency, ...]
    ratio: Ratio | None
    quality: Quality
    profile: Profile | None = None
    regression: Regression | None = None
    agreement: Link | None
    note: str = ""

    @property
    def inconclusive(self) -> bool:
        """Whether the measurement says nothing."""
        return self.quality.verdict == "inconclusive"


class Report(Artefact):
    """A run on one page. ``open`` is what nobody looked at, ``commands`` make every figure again."""

    stage: str = "report"
    title: str
    folded: FoldArtefact
    verified: VerifyArtefact | None
    exports: tuple[ExportArtefact, ...]
    benches: tuple[BenchArtefact, ...]
    builds: tuple[BuildArtefact, ...]
    collected: tuple[CollectArtefact, ...]
    links: tuple[Link, ...]
    before_after: tuple[tuple[str, float, float], ...]
    worst_fold: float
    open: tuple[str, ...]
    paper: PaperTable | None
    commands: tuple[str, ...]
