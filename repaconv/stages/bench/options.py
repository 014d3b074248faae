"""Options of `bench`, `bench --estimate`, throughput and `compare`, each with its type, default and help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from repaconv.stages.shared.common_options import (
    ACCEPTED_IN_BASELINE,
    COUNT_OF_NPZ,
    MOST_IMAGES,
    AcceptInconclusive,
    Against,
    AllowUnverified,
    BatchSize,
    ImageSize,
    Rounds,
    RunPrecision,
    RunPreset,
    Seed,
    Target,
    Threads,
)
from repaconv.stages.shared.option_dataclasses import (
    BASELINE,
    IMAGES,
    MEASURE,
    SHARE,
    VERIFICATION,
    NoEffect,
    Option,
    Options,
    output,
)

LATENCY, THROUGHPUT = OBJECTIVES = ("latency", "throughput")


Objective = Annotated[
    str,
    Option(
        "What to measure: latency (ms per inference) or throughput (images/s of several inferences at once).",
        metavar="latency|throughput",
        panel=MEASURE,
    ),
]


@dataclass(frozen=True, kw_only=True)
class BenchOptions(Options):
    """Options of `repaconv.bench`."""

    NO_EFFECT: ClassVar[tuple[NoEffect, ...]] = (
        NoEffect(
            ("max_regression", "update_baseline", "accept_inconclusive"),
            lambda options: not options.baseline,
            "there is no baseline",
        ),
        NoEffect(
            ("max_regression",),
            lambda options: options.update_baseline,
            "the baseline is written, and nothing is compared with it",
        ),
        ACCEPTED_IN_BASELINE,
    )

    target: Target = "x86-64"
    precision: RunPrecision = "fp32"
    preset: RunPreset = None
    against: Against = None
    threads: Threads = None
    batch: BatchSize = None
    image_size: ImageSize = None
    rounds: Rounds = None
    protocol: Annotated[
        str | None,
        Option(
            "Measurement protocol of a paper: repavit, nondeep, nondeep-throughput, dwconv or riformer.",
            default_text="repaconv's own",
            panel=MEASURE,
        ),
    ] = None
    profile: Annotated[bool, Option("Also measure the time spent in each node of the graph.", panel=MEASURE)] = False
    baseline: Annotated[
        str | Path | None,
        Option(
            "Baseline file (JSON, one entry per machine) to compare the latency with.", recorded=False, panel=BASELINE
        ),
    ] = None
    max_regression: Annotated[
        float,
        Option(
            "Largest latency increase over the baseline, e.g. 5%; exit code 1 above it.",
            text=SHARE,
            usual="5%",
            recorded=False,
            panel=BASELINE,
        ),
    ] = 0.05
    update_baseline: Annotated[
        bool,
        Option(
            "Write this measurement to the baseline file instead of comparing with it.", recorded=False, panel=BASELINE
        ),
    ] = False
    accept_inconclusive: AcceptInconclusive = False
    seed: Seed = 0
    allow_unverified: AllowUnverified = False
    out: Annotated[
        str | Path | None, output("File for the result (JSON).", "bench/<target>.json in the run folder")
    ] = None


@dataclass(frozen=True, kw_only=True)
class EstimateOptions(Options):
    """Options of `repaconv.estimate`, which is `bench --estimate`."""

    target: Target = "x86-64"
    precision: RunPrecision = "fp32"
    threads: Threads = None
    batch: BatchSize = None
    image_size: ImageSize = None
    allow_unverified: AllowUnverified = False
    out: Annotated[
        str | Path | None, output("File for the result (JSON).", "bench/<target>.estimate.json in the run folder")
    ] = None


@dataclass(frozen=True, kw_only=True)
class CompareOptions(Options):
    """Options of `repaconv.compare`."""

    NO_EFFECT: ClassVar[tuple[NoEffect, ...]] = (
        COUNT_OF_NPZ,
        NoEffect(("seed",), lambda options: options.inputs and not options.speed, "nothing is random"),
        NoEffect(("rounds",), lambda options: not options.speed, "latency is measured with --speed only"),
    )

    inputs: Annotated[
        str | Path | None,
        Option("Inputs (.npz) with 'input' [N, C, H, W].", default_text="seeded random inputs", panel=IMAGES),
    ] = None
    count: Annotated[int, Option("Number of random inputs.", least=1, most=MOST_IMAGES, panel=IMAGES)] = 8
    seed: Seed = 0
    speed: Annotated[
        bool, Option("Also measure the latency of both on the target, interleaved.", option=("--speed",), panel=MEASURE)
    ] = False
    target: Target = "x86-64"
    threads: Threads = None
    rounds: Rounds = None
    rtol: Annotated[
        float | None,
        Option(
            "Relative tolerance of the outputs, per image, e.g. 1e-4.",
            default_text="from the policy",
            panel=VERIFICATION,
        ),
    ] = None
    out: Annotated[str | Path | None, output("Also write the result to this file (JSON).")] = None


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions(Options):
    """Options of `repaconv.throughput`, which is `bench --objective throughput`."""

    target: Target = "x86-64"
    precision: RunPrecision = "fp32"
    preset: RunPreset = None
    against: Against = None
    streams: Annotated[
        int | None,
        Option("Number of inferences that run at the same time.", least=1, default_text="one per core", panel=MEASURE),
    ] = None
    threads: Annotated[int | None, Option("Threads per inference.", least=1, default_text="1", panel=MEASURE)] = None
    batch: BatchSize = None
    image_size: ImageSize = None
    rounds: Rounds = None
    seed: Seed = 0
    allow_unverified: AllowUnverified = False
    out: Annotated[
        str | Path | None, output("File for the result (JSON).", "bench/<target>.throughput.json in the run folder")
    ] = None
