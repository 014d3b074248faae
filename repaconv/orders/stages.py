"""What each stage may be asked for: each knob with its type, its default and its words; see `shared` for those of many.

A field stands where its option stands in the command's help. What a stage is of (a checkpoint, a run, a model) is no
field: it is the stage's first argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from repaconv.orders.knobs import Knob, Order
from repaconv.orders.shared import (
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
from repaconv.orders.texts import BATCH, LINKS, NAMES, SHARE, SIZE, TOLERANCES

LATENCY, THROUGHPUT = OBJECTIVES = ("latency", "throughput")
Objective = Annotated[str, Knob("latency of a call, or throughput: images a second of several calls at once.")]


@dataclass(frozen=True, kw_only=True)
class InspectOrder(Order):
    """What `repaconv.inspect` may be asked for."""

    weights: Weights = None
    settings: Settings = None
    sha256: Sha256 = None


@dataclass(frozen=True, kw_only=True)
class FoldOrder(Order):
    """What `repaconv.fold` may be asked for."""

    method: Annotated[str, Knob("The method, or auto.", recorded=False)] = "auto"
    arch: Arch = None
    settings: Settings = None
    weights: Weights = None
    sha256: Sha256 = None
    out: Annotated[
        str | Path | None,
        Knob(
            "The run's folder, repaconv-out/<stem> if left out; of a graph also a file for the folded one.",
            option=("-o", "--out"),
            recorded=False,
        ),
    ] = None
    force: Annotated[
        bool,
        Knob("Replace another checkpoint's run; take settings that contradict the checkpoint.", recorded=False),
    ] = False
    allow_deployed: Annotated[bool, Knob("Take a checkpoint in the official deploy form.")] = False
    identify: Annotated[str | Path | None, Knob("A recorded pair (.npz) that settles what the file does not tell.")] = (
        None
    )
    form: Annotated[str, Knob("How graphs are written: default, official, fastest-known or tune's file.")] = "default"
    measure: Annotated[bool, Knob("Measure a folded graph beside the one given, and take back what is slower.")] = True


@dataclass(frozen=True, kw_only=True)
class VerifyOrder(Order):
    """What `repaconv.verify` may be asked for."""

    inputs: Annotated[str | Path | None, Knob(".npz with 'input' [N, C, H, W] and the official output, if any.")] = None
    images: Images = None
    classes: Classes = None
    checkpoint: Checkpoint = None
    count: Annotated[int | None, Knob("How many random images (4), or images of the folder (all).", least=1)] = None
    seed: Annotated[int, Knob("Of the random images.", least=0)] = 0
    rtol: Annotated[
        Mapping[str, float] | None,
        Knob("A link's tolerance, e.g. onnx:1e-6.", metavar="LINK:VALUE", text=TOLERANCES),
    ] = None
    atol: Annotated[
        Mapping[str, float] | None,
        Knob("An absolute one; either suffices.", metavar="LINK:VALUE", text=TOLERANCES),
    ] = None
    require: Annotated[
        Sequence[str], Knob("Fail if this link cannot be run, e.g. engine.", metavar="LINK", text=LINKS)
    ] = ()
    engine: Annotated[str | Path | None, Knob("An engine built from the ONNX model; it is loaded and run.")] = None
    drift: Annotated[bool, Knob("Follow the drift through links that pass, too.")] = False
    out: Annotated[
        str | Path | None, Knob("The result; verify.json of the run.", option=("-o", "--out"), recorded=False)
    ] = None


@dataclass(frozen=True, kw_only=True)
class ExportOrder(Order):
    """What `repaconv.export` may be asked for."""

    target: Target = "x86-64"
    precision: Annotated[str, Knob("fp32, fp16, bf16 or int8; all but the first are lossy.")] = "fp32"
    batch: Annotated[int | None, Knob("Images a call.", metavar="dynamic|N", text=BATCH, usual="dynamic")] = None
    image_size: Annotated[
        int | tuple[int, int] | None,
        Knob("Fix them: N or HEIGHTxWIDTH; free if the network allows it.", text=SIZE),
    ] = None
    simplify: Annotated[bool, Knob("Simplify, and keep that graph if it computes the same.")] = True
    simplifier: Annotated[str, Knob("onnxsim, onnxslim, or auto: the first that runs.")] = "auto"
    form: Annotated[
        str | None, Knob("How it is written: default, official, fastest-known or tune's file; as fold was asked.")
    ] = None
    with_preprocessing: Annotated[bool, Knob("Take pixels (uint8, NHWC, RGB); normalise in the graph.")] = False
    quantiser: Annotated[
        str | None, Knob("Who writes int8; nncf for OpenVINO; -symmetric: about zero.", usual="onnxruntime")
    ] = None
    inputs: Annotated[str | Path | None, Knob(".npz to measure a lower precision on.")] = None
    images: Images = None
    unverified: Unverified = False


@dataclass(frozen=True, kw_only=True)
class BuildOrder(Order):
    """What `repaconv.build` may be asked for."""

    target: Annotated[str, Knob("A target's name, or the path of a .toml.", usual="x86-64")]
    precision: OfTheRun = "fp32"
    form: Deployed = None
    workspace_mib: Workspace = None
    timing_cache: Annotated[str | Path | None, Knob("TensorRT's; one a target and version if left out.")] = None
    replay: Annotated[bool, Knob("Fail where the timing cache has no answer: the same engine again.")] = False
    unverified: Unverified = False


@dataclass(frozen=True, kw_only=True)
class BenchOrder(Order):
    """What `repaconv.bench` may be asked for."""

    target: Target = "x86-64"
    precision: OfTheRun = "fp32"
    form: Deployed = None
    against: Against = None
    threads: Threads = None
    batch: ImagesACall = None
    image_size: ImageSize = None
    rounds: Rounds = None
    protocol: Annotated[str | None, Knob("A paper's: repavit, nondeep, nondeep-throughput, dwconv, riformer.")] = None
    profile: Annotated[bool, Knob("Also say where the time goes, node by node.")] = False
    baseline: Annotated[str | Path | None, Knob("A committed file of baselines, by machine.", recorded=False)] = None
    max_regression: Annotated[
        float,
        Knob(
            "How much longer than the baseline it may take, e.g. 5%.",
            text=SHARE,
            usual="5%",
            recorded=False,
        ),
    ] = 0.05
    update_baseline: Annotated[bool, Knob("Write the baseline instead.", recorded=False)] = False
    accept_inconclusive: AcceptInconclusive = False
    seed: Seed = 0
    unverified: Unverified = False
    out: Annotated[
        str | Path | None,
        Knob("The result; bench/<target>.json of the run.", option=("-o", "--out"), recorded=False),
    ] = None


@dataclass(frozen=True, kw_only=True)
class EstimateOrder(Order):
    """What `repaconv.estimate`, which is `bench --estimate`, may be asked for."""

    target: Target = "x86-64"
    precision: OfTheRun = "fp32"
    threads: Threads = None
    batch: ImagesACall = None
    image_size: ImageSize = None
    unverified: Unverified = False
    out: Annotated[
        str | Path | None,
        Knob("The result; bench/<target>.estimate.json of the run.", option=("-o", "--out"), recorded=False),
    ] = None


@dataclass(frozen=True, kw_only=True)
class TuneOrder(Order):
    """What `repaconv.tune` may be asked for."""

    target: Target = "x86-64"
    runtimes: Annotated[
        Sequence[str] | None,
        Knob("Besides the target's own: names with commas, or auto: all here that run graphs.", text=NAMES),
    ] = None
    objective: Objective = "latency"
    settings: Settings = None
    batch: ImagesACall = None
    threads: Annotated[
        int | None, Knob("Of one inference, the target's if left out; of throughput all, this process's.", least=1)
    ] = None
    rounds: Annotated[int | None, Knob("Of the last measurement.", least=2)] = None
    budget_s: Annotated[
        float, Knob("Seconds after which only the last measurement begins.", option=("--budget",), least=0)
    ] = 600
    max_disagreement: Annotated[
        float | None,
        Knob("Lower precision too: lossy, at most that share of other first classes, e.g. 0.5%.", text=SHARE),
    ] = None
    max_accuracy_drop: Annotated[float | None, Knob("The same by labels: accuracy that may go.", text=SHARE)] = None
    inputs: Annotated[str | Path | None, Knob("Images (.npz): some calibrate lower precision, others judge it.")] = None
    images: Images = None
    seed: Seed = 0
    rewrites: Annotated[Sequence[str] | None, Knob("Consider no others: names with commas.", text=NAMES)] = None
    exhaustive: Annotated[bool, Knob("Measure everything; asked again, it goes on for another --budget.")] = False
    again: Annotated[bool, Knob("Search even if the answer is known.")] = False
    unverified: Unverified = False
    out: Annotated[
        str | Path | None,
        Knob("The result; tuned/<target>.json of the run.", option=("-o", "--out"), recorded=False),
    ] = None


@dataclass(frozen=True, kw_only=True)
class BundleOrder(Order):
    """What `repaconv.bundle` may be asked for."""

    target: Annotated[str, Knob("A board with TensorRT.", usual="orin-nano")]
    precision: Annotated[str | None, Knob("Which of the run's ONNX models; the only one for the board, else fp32.")] = (
        None
    )
    form: Annotated[str | Path | None, Knob("Of the run's ONNX models; tune's file brings the precision.")] = None
    inputs: Annotated[str | Path | None, Knob(".npz of images, or of inputs by name, for the board.")] = None
    images: Images = None
    count: Annotated[int | None, Knob("How many random images (4), or images of the folder (all).", least=1)] = None
    seed: Annotated[int, Knob("Of random images.", least=0)] = 0
    batch: ImagesACall = None
    workspace_mib: Workspace = None
    checkpoint: Checkpoint = None
    unverified: Unverified = False
    out: Annotated[
        str | Path | None,
        Knob("The bundle; build/<target>.tar.gz of the run.", option=("-o", "--out"), recorded=False),
    ] = None


@dataclass(frozen=True, kw_only=True)
class RunOrder(Order):
    """What `repaconv.run` may be asked for; all else stands in its recipe."""

    dry_run: Annotated[bool, Knob("Say what would run, and why.", option=("--dry-run",))] = False
    again: Again = False


@dataclass(frozen=True, kw_only=True)
class GateOrder(Order):
    """What `repaconv.gate` may be asked for; all else stands in its recipes."""

    again: Again = False
    update_baseline: Annotated[bool, Knob("Write the latencies as the new baseline instead of judging them.")] = False
    accept_inconclusive: AcceptInconclusive = False


@dataclass(frozen=True, kw_only=True)
class ClusterOrder(Order):
    """Where a stage measures: on workers of that Dask cluster, here where there is no scheduler."""

    scheduler: Scheduler = None
    tls_ca: TlsCa = None
    tls_cert: TlsCert = None
    tls_key: TlsKey = None
    wait_s: Annotated[
        float, Knob("Seconds to wait for a worker of the target.", option=("--wait",), least=0, recorded=False)
    ] = 30


@dataclass(frozen=True, kw_only=True)
class WorkerOrder(Order):
    """What a worker of a cluster is."""

    target: Annotated[str, Knob("What this machine is.")]
    scheduler: Annotated[str, Knob("Of the Dask cluster.", metavar="tcp://HOST:PORT")]
    name: Annotated[str | None, Knob("What it is called in results.")] = None
    tls_ca: TlsCa = None
    tls_cert: TlsCert = None
    tls_key: TlsKey = None
