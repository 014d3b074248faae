"""What each stage may be asked for: each knob with its type, its default and its words; see `shared` for those of many.

A field stands where its option stands in the command's help. What a stage is of (a checkpoint, a run, a model) is no
field: it is the stage's first argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from repaconv.options.option_definitions import (
    BASELINE,
    BATCH,
    CLUSTER,
    GRAPH,
    IMAGES,
    INPUT,
    LINKS,
    MEASURE,
    NAMES,
    OUTPUT,
    PATTERNS,
    PRECISION,
    SEARCH,
    SHAPES,
    SHARE,
    SIZE,
    TARGET,
    TOLERANCES,
    VERIFICATION,
    Knob,
    Order,
)
from repaconv.options.shared_options import (
    AcceptInconclusive,
    Again,
    Against,
    Arch,
    Checkpoint,
    Classes,
    Deployed,
    Images,
    ImagesACall,
    ImageSize,
    OfTheRun,
    Rounds,
    Scheduler,
    Seed,
    Settings,
    Sha256,
    Target,
    Threads,
    TlsCa,
    TlsCert,
    TlsKey,
    Unverified,
    Weights,
    Workspace,
)

LATENCY, THROUGHPUT = OBJECTIVES = ("latency", "throughput")
Objective = Annotated[
    str,
    Knob(
        "What to measure: latency (ms per inference) or throughput (images/s of several inferences at once).",
        panel=MEASURE,
    ),
]


@dataclass(frozen=True, kw_only=True)
class InspectOrder(Order):
    """What `repaconv.inspect` may be asked for."""

    weights: Weights = None
    settings: Settings = None
    sha256: Sha256 = None


@dataclass(frozen=True, kw_only=True)
class FoldOrder(Order):
    """What `repaconv.fold` may be asked for."""

    method: Annotated[
        str,
        Knob(
            "The method that the checkpoint was trained with; auto recognizes it by its tensors.",
            recorded=False,
            panel=INPUT,
        ),
    ] = "auto"
    arch: Arch = None
    settings: Settings = None
    weights: Weights = None
    sha256: Sha256 = None
    out: Annotated[
        str | Path | None,
        Knob(
            "The run folder; for an .onnx input also an .onnx file, to which the folded graph is written.",
            option=("-o", "--out"),
            recorded=False,
            default_text="repaconv-out/<stem>",
            panel=OUTPUT,
        ),
    ] = None
    force: Annotated[
        bool,
        Knob(
            "Replace a run folder made from another checkpoint; accept settings that contradict the checkpoint.",
            recorded=False,
            panel=OUTPUT,
        ),
    ] = False
    allow_deployed: Annotated[
        bool, Knob("Accept a checkpoint that already has the official inference-time architecture.", panel=INPUT)
    ] = False
    identify: Annotated[
        str | Path | None,
        Knob(
            "Recorded input and output of the network (.npz); selects among settings missing from the checkpoint.",
            panel=INPUT,
        ),
    ] = None
    inputs: Annotated[
        str | Path | None,
        Knob(
            "Inputs by name that an ONNX model takes (.npz), where it does not run on random ones.",
            panel=INPUT,
        ),
    ] = None
    preset: Annotated[
        str,
        Knob(
            "Rewrite preset for the exported graph: default, official, fastest-known, or the result file of `tune`.",
            panel=OUTPUT,
            former="form",
        ),
    ] = "default"
    measure: Annotated[
        bool,
        Knob("Revert rewrites that make the folded graph slower than the original on this machine.", panel=MEASURE),
    ] = True


@dataclass(frozen=True, kw_only=True)
class VerifyOrder(Order):
    """What `repaconv.verify` may be asked for."""

    inputs: Annotated[
        str | Path | None,
        Knob(
            "Images (.npz): 'input' float [N, C, H, W]; optionally 'output', the official one, and 'labels' [N].",
            panel=IMAGES,
        ),
    ] = None
    images: Images = None
    classes: Classes = None
    checkpoint: Checkpoint = None
    count: Annotated[
        int | None, Knob("Number of images.", least=1, default_text="4 random ones, or all of --images", panel=IMAGES)
    ] = None
    seed: Annotated[int, Knob("Seed of the random images.", least=0, panel=IMAGES)] = 0
    rtol: Annotated[
        Mapping[str, float] | None,
        Knob(
            "Relative tolerance of one link of the verification chain, e.g. onnx:1e-6; repeatable.",
            metavar="LINK:VALUE",
            text=TOLERANCES,
            default_text="from the policy",
            panel=VERIFICATION,
        ),
    ] = None
    atol: Annotated[
        Mapping[str, float] | None,
        Knob(
            "Absolute tolerance of one link; meeting either tolerance is enough.",
            metavar="LINK:VALUE",
            text=TOLERANCES,
            panel=VERIFICATION,
        ),
    ] = None
    require: Annotated[
        Sequence[str],
        Knob(
            "Fail if this link cannot be run, e.g. engine; repeatable.", metavar="LINK", text=LINKS, panel=VERIFICATION
        ),
    ] = ()
    engine: Annotated[
        str | Path | None, Knob("An engine file to verify as well; it is loaded and run.", panel=INPUT)
    ] = None
    drift: Annotated[
        bool, Knob("Also report, layer by layer, how the error grows through links that pass.", panel=VERIFICATION)
    ] = False
    out: Annotated[
        str | Path | None,
        Knob(
            "File for the result (JSON).",
            option=("-o", "--out"),
            recorded=False,
            default_text="verify.json in the run folder",
            panel=OUTPUT,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ExportOrder(Order):
    """What `repaconv.export` may be asked for."""

    target: Target = "x86-64"
    opset: Annotated[
        int | None,
        Knob("ONNX opset of the graph, e.g. 17.", least=13, default_text="from the target", panel=TARGET),
    ] = None
    precision: Annotated[
        str,
        Knob(
            "Precision of weights and computation: fp32, fp16, bf16 or int8; all but fp32 are lossy.", panel=PRECISION
        ),
    ] = "fp32"
    keep_fp32: Annotated[
        tuple[str, ...] | None,
        Knob(
            "Modules or ONNX nodes that a lower precision keeps in FP32: a name or a glob, e.g. head or 'blocks.0.*'; "
            "repeatable.",
            metavar="NAME|GLOB",
            text=PATTERNS,
            panel=PRECISION,
        ),
    ] = None
    batch: Annotated[
        int | None,
        Knob("Batch size: a fixed number, or dynamic.", metavar="dynamic|N", text=BATCH, usual="dynamic", panel=SHAPES),
    ] = None
    image_size: Annotated[
        int | tuple[int, int] | None,
        Knob(
            "Fixed image size in pixels: N or HEIGHTxWIDTH, e.g. 224 or 140x126.",
            text=SIZE,
            default_text="dynamic if the network allows it",
            panel=SHAPES,
        ),
    ] = None
    simplify: Annotated[
        bool,
        Knob("Simplify the graph; the simplified one is kept if its outputs are verified to be the same.", panel=GRAPH),
    ] = True
    simplifier: Annotated[
        str, Knob("Simplifier: onnxsim, onnxslim, or auto, the first one that succeeds.", panel=GRAPH)
    ] = "auto"
    preset: Annotated[
        str | None,
        Knob(
            "Rewrite preset: default, official, fastest-known, or the result file of `tune`.",
            default_text="the preset recorded by fold",
            panel=GRAPH,
            former="form",
        ),
    ] = None
    with_preprocessing: Annotated[
        bool, Knob("Take pixels as input (uint8, NHWC, RGB) and normalize them inside the graph.", panel=GRAPH)
    ] = False
    quantizer: Annotated[
        str | None,
        Knob(
            "INT8 quantizer: onnxruntime or nncf (for OpenVINO); append -symmetric for symmetric activations.",
            usual="onnxruntime",
            panel=PRECISION,
            former="quantiser",
        ),
    ] = None
    inputs: Annotated[
        str | Path | None,
        Knob(
            "Images (.npz: 'input' [N, C, H, W], optionally 'labels' [N]) to calibrate and evaluate a lower "
            "precision on.",
            panel=PRECISION,
        ),
    ] = None
    images: Images = None
    allow_unverified: Unverified = False


@dataclass(frozen=True, kw_only=True)
class BuildOrder(Order):
    """What `repaconv.build` may be asked for."""

    target: Annotated[
        str,
        Knob(
            "The device: a name listed by `repaconv targets`, or the path of a target's TOML file.",
            usual="x86-64",
            panel=TARGET,
        ),
    ]
    precision: OfTheRun = "fp32"
    preset: Deployed = None
    workspace_mib: Workspace = None
    timing_cache: Annotated[
        str | Path | None,
        Knob("TensorRT timing cache file.", default_text="one per target and TensorRT version", panel=OUTPUT),
    ] = None
    replay: Annotated[bool, Knob("Rebuild the same engine: fail if the timing cache lacks an entry.", panel=OUTPUT)] = (
        False
    )
    allow_unverified: Unverified = False


@dataclass(frozen=True, kw_only=True)
class BenchOrder(Order):
    """What `repaconv.bench` may be asked for."""

    target: Target = "x86-64"
    precision: OfTheRun = "fp32"
    preset: Deployed = None
    against: Against = None
    threads: Threads = None
    batch: ImagesACall = None
    image_size: ImageSize = None
    rounds: Rounds = None
    protocol: Annotated[
        str | None,
        Knob(
            "Measurement protocol of a paper: repavit, nondeep, nondeep-throughput, dwconv or riformer.",
            default_text="repaconv's own",
            panel=MEASURE,
        ),
    ] = None
    profile: Annotated[bool, Knob("Also measure the time spent in each node of the graph.", panel=MEASURE)] = False
    baseline: Annotated[
        str | Path | None,
        Knob(
            "Baseline file (JSON, one entry per machine) to compare the latency with.", recorded=False, panel=BASELINE
        ),
    ] = None
    max_regression: Annotated[
        float,
        Knob(
            "Largest latency increase over the baseline, e.g. 5%; exit code 1 above it.",
            text=SHARE,
            usual="5%",
            recorded=False,
            panel=BASELINE,
        ),
    ] = 0.05
    update_baseline: Annotated[
        bool,
        Knob(
            "Write this measurement to the baseline file instead of comparing with it.", recorded=False, panel=BASELINE
        ),
    ] = False
    accept_inconclusive: AcceptInconclusive = False
    seed: Seed = 0
    allow_unverified: Unverified = False
    out: Annotated[
        str | Path | None,
        Knob(
            "File for the result (JSON).",
            option=("-o", "--out"),
            recorded=False,
            default_text="bench/<target>.json in the run folder",
            panel=OUTPUT,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class EstimateOrder(Order):
    """What `repaconv.estimate`, which is `bench --estimate`, may be asked for."""

    target: Target = "x86-64"
    precision: OfTheRun = "fp32"
    threads: Threads = None
    batch: ImagesACall = None
    image_size: ImageSize = None
    allow_unverified: Unverified = False
    out: Annotated[
        str | Path | None,
        Knob(
            "File for the result (JSON).",
            option=("-o", "--out"),
            recorded=False,
            default_text="bench/<target>.estimate.json in the run folder",
            panel=OUTPUT,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class TuneOrder(Order):
    """What `repaconv.tune` may be asked for."""

    target: Target = "x86-64"
    runtimes: Annotated[
        Sequence[str] | None,
        Knob(
            "Runtimes to try in addition to the target's own: names separated by commas, or auto for all that are "
            "installed.",
            text=NAMES,
            panel=SEARCH,
        ),
    ] = None
    objective: Objective = "latency"
    settings: Settings = None
    batch: ImagesACall = None
    threads: Annotated[
        int | None,
        Knob(
            "Threads per inference; with --objective throughput, threads in total.",
            least=1,
            default_text="from the target",
            panel=MEASURE,
        ),
    ] = None
    rounds: Annotated[
        int | None,
        Knob("Number of rounds of the final measurement.", least=2, default_text="from the target", panel=MEASURE),
    ] = None
    budget_s: Annotated[
        float,
        Knob(
            "Time for the search in seconds; the final measurement comes after it.",
            option=("--budget",),
            least=0,
            panel=SEARCH,
        ),
    ] = 600
    max_disagreement: Annotated[
        float | None,
        Knob(
            "Also try lower precision; largest share of changed top-1 predictions, e.g. 0.5%.",
            text=SHARE,
            panel=PRECISION,
        ),
    ] = None
    max_accuracy_drop: Annotated[
        float | None,
        Knob(
            "Also try lower precision; largest drop of the accuracy on labeled images, e.g. 1%.",
            text=SHARE,
            panel=PRECISION,
        ),
    ] = None
    inputs: Annotated[
        str | Path | None,
        Knob(
            "Images (.npz: 'input' [N, C, H, W], optionally 'labels' [N]), split into calibration and test images.",
            panel=PRECISION,
        ),
    ] = None
    images: Images = None
    seed: Seed = 0
    rewrites: Annotated[
        Sequence[str] | None,
        Knob(
            "Try only these rewrites: names separated by commas.",
            text=NAMES,
            default_text="all that apply",
            panel=SEARCH,
        ),
    ] = None
    exhaustive: Annotated[
        bool,
        Knob(
            "Measure every configuration; running the same command again continues for another --budget.", panel=SEARCH
        ),
    ] = False
    rerun: Annotated[
        bool, Knob("Search again even if a result for this machine is cached.", panel=SEARCH, former="again")
    ] = False
    allow_unverified: Unverified = False
    out: Annotated[
        str | Path | None,
        Knob(
            "File for the result (JSON).",
            option=("-o", "--out"),
            recorded=False,
            default_text="tuned/<target>.json in the run folder",
            panel=OUTPUT,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class BundleOrder(Order):
    """What `repaconv.bundle` may be asked for."""

    target: Annotated[
        str,
        Knob(
            "The board: a TensorRT target listed by `repaconv targets`, or the path of a target's TOML file.",
            usual="orin-nano",
            panel=TARGET,
        ),
    ]
    precision: Annotated[
        str | None,
        Knob(
            "Precision of the run's ONNX model to pack: fp32, fp16, bf16 or int8.",
            default_text="the only one for the board, otherwise fp32",
            panel=INPUT,
        ),
    ] = None
    preset: Annotated[
        str | Path | None,
        Knob(
            "Rewrite preset of the run's ONNX model to pack, or the result file of `tune`, which also sets the "
            "precision.",
            panel=INPUT,
            former="form",
        ),
    ] = None
    inputs: Annotated[
        str | Path | None,
        Knob("Inputs for the board (.npz): 'input' [N, C, H, W], or one array per input name.", panel=IMAGES),
    ] = None
    images: Images = None
    count: Annotated[
        int | None, Knob("Number of images.", least=1, default_text="4 random ones, or all of --images", panel=IMAGES)
    ] = None
    seed: Annotated[int, Knob("Seed of the random images.", least=0, panel=IMAGES)] = 0
    batch: ImagesACall = None
    workspace_mib: Workspace = None
    checkpoint: Checkpoint = None
    allow_unverified: Unverified = False
    out: Annotated[
        str | Path | None,
        Knob(
            "File for the bundle.",
            option=("-o", "--out"),
            recorded=False,
            default_text="build/<target>.tar.gz in the run folder",
            panel=OUTPUT,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class RunOrder(Order):
    """What `repaconv.run` may be asked for; all else stands in its recipe."""

    dry_run: Annotated[bool, Knob("List the steps that would run and why, and run none.", option=("--dry-run",))] = (
        False
    )
    rerun: Again = False


@dataclass(frozen=True, kw_only=True)
class GateOrder(Order):
    """What `repaconv.gate` may be asked for; all else stands in its recipes."""

    rerun: Again = False
    update_baseline: Annotated[
        bool, Knob("Write the measured latencies to the baseline files instead of comparing with them.", panel=BASELINE)
    ] = False
    accept_inconclusive: AcceptInconclusive = False


@dataclass(frozen=True, kw_only=True)
class ClusterOrder(Order):
    """Where a stage measures: on workers of that Dask cluster, here where there is no scheduler."""

    scheduler: Scheduler = None
    tls_ca: TlsCa = None
    tls_cert: TlsCert = None
    tls_key: TlsKey = None
    wait_s: Annotated[
        float,
        Knob(
            "Seconds to wait for a worker that serves the target.",
            option=("--wait",),
            least=0,
            recorded=False,
            panel=CLUSTER,
        ),
    ] = 30


@dataclass(frozen=True, kw_only=True)
class WorkerOrder(Order):
    """What a worker of a cluster is."""

    target: Annotated[str, Knob("The target that this machine is, e.g. orin-nano.", panel=TARGET)]
    scheduler: Annotated[str, Knob("Address of the Dask scheduler.", metavar="tcp://HOST:PORT", panel=CLUSTER)]
    name: Annotated[
        str | None, Knob("Name of this machine in results.", default_text="chosen by Dask", panel=CLUSTER)
    ] = None
    tls_ca: TlsCa = None
    tls_cert: TlsCert = None
    tls_key: TlsKey = None


# --- What deploying and comparing may be asked for; see `repaconv.options.stage_options`.


@dataclass(frozen=True, kw_only=True)
class DeployOrder(Order):
    """What `repaconv.deploy` may be asked for."""

    target: Annotated[
        str,
        Knob(
            "The device: a name listed by `repaconv targets`, or the path of a target's TOML file.",
            usual="x86-64",
            panel=TARGET,
        ),
    ]
    precision: Annotated[
        str,
        Knob(
            "Precision of weights and computation: fp32, fp16, bf16 or int8; all but fp32 are lossy.", panel=PRECISION
        ),
    ] = "fp32"
    images: Images = None
    classes: Classes = None
    inputs: Annotated[
        str | Path | None,
        Knob("Images as .npz instead of a folder: 'input' [N, C, H, W], optionally 'labels' [N].", panel=IMAGES),
    ] = None
    count: Annotated[
        int | None,
        Knob("Number of images to verify on.", least=1, default_text="4 random ones, or all of --images", panel=IMAGES),
    ] = None
    method: Annotated[
        str, Knob("The method that the checkpoint was trained with; auto recognizes it by its tensors.", panel=INPUT)
    ] = "auto"
    arch: Arch = None
    settings: Settings = None
    weights: Weights = None
    rounds: Annotated[
        int | None,
        Knob("Number of measured, interleaved rounds.", least=10, default_text="from the target", panel=MEASURE),
    ] = None
    dry_run: Annotated[bool, Knob("List the steps that would run and why, and run none.", option=("--dry-run",))] = (
        False
    )
    rerun: Again = False
    out: Annotated[
        str | Path | None,
        Knob(
            "The run folder.",
            option=("-o", "--out"),
            recorded=False,
            default_text="repaconv-out/<stem>.<target>",
            panel=OUTPUT,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class CompareOrder(Order):
    """What `repaconv.compare` may be asked for."""

    inputs: Annotated[
        str | Path | None,
        Knob("Inputs (.npz) with 'input' [N, C, H, W].", default_text="seeded random inputs", panel=IMAGES),
    ] = None
    count: Annotated[int, Knob("Number of random inputs.", least=1, panel=IMAGES)] = 8
    seed: Seed = 0
    speed: Annotated[
        bool, Knob("Also measure the latency of both on the target, interleaved.", option=("--speed",), panel=MEASURE)
    ] = False
    target: Target = "x86-64"
    threads: Threads = None
    rounds: Rounds = None
    rtol: Annotated[
        float | None,
        Knob(
            "Relative tolerance of the outputs, per image, e.g. 1e-4.",
            default_text="from the policy",
            panel=VERIFICATION,
        ),
    ] = None
    out: Annotated[
        str | Path | None,
        Knob("Also write the result to this file (JSON).", option=("-o", "--out"), recorded=False, panel=OUTPUT),
    ] = None


# --- What `repaconv.save` may be asked for.


@dataclass(frozen=True, kw_only=True)
class SaveOrder(Order):
    """What `repaconv.save` may be asked for."""

    out: Annotated[
        str | Path | None,
        Knob(
            "Folder to write.",
            option=("-o", "--out"),
            recorded=False,
            default_text="timm or transformers in the run folder",
            panel=OUTPUT,
        ),
    ] = None
    allow_unverified: Unverified = False


# --- What a measurement of several calls at once may be asked for.


@dataclass(frozen=True, kw_only=True)
class ThroughputOrder(Order):
    """What `repaconv.throughput`, which is `bench --objective throughput`, may be asked for."""

    target: Target = "x86-64"
    precision: OfTheRun = "fp32"
    preset: Deployed = None
    against: Against = None
    streams: Annotated[
        int | None,
        Knob("Number of inferences that run at the same time.", least=1, default_text="one per core", panel=MEASURE),
    ] = None
    threads: Annotated[int | None, Knob("Threads per inference.", least=1, default_text="1", panel=MEASURE)] = None
    batch: ImagesACall = None
    image_size: ImageSize = None
    rounds: Rounds = None
    seed: Seed = 0
    allow_unverified: Unverified = False
    out: Annotated[
        str | Path | None,
        Knob(
            "File for the result (JSON).",
            option=("-o", "--out"),
            recorded=False,
            default_text="bench/<target>.throughput.json in the run folder",
            panel=OUTPUT,
        ),
    ] = None
