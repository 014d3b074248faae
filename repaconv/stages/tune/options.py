"""Options of `tune`, each with its type, default and help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from repaconv.deprecation import Deprecation
from repaconv.stages.bench.options import Objective
from repaconv.stages.shared.common_options import (
    CLASSES_OF_IMAGES,
    MOST_ROUNDS,
    AllowUnverified,
    BatchSize,
    Classes,
    EvaluatedTask,
    Images,
    Labels,
    Seed,
    Settings,
    Target,
)
from repaconv.stages.shared.option_dataclasses import (
    IMAGES,
    MEASURE,
    NAMES,
    PRECISION,
    SEARCH,
    SHAPES,
    SHARE,
    SIZE,
    NoEffect,
    Option,
    Options,
    output,
)


@dataclass(frozen=True, kw_only=True)
class TuneOptions(Options):
    """Options of `repaconv.tune`."""

    NO_EFFECT: ClassVar[tuple[NoEffect, ...]] = (
        NoEffect(
            ("labels", "task"),
            lambda options: options.max_disagreement is None and options.max_accuracy_drop is None,
            "they evaluate lower precision, which max_disagreement or max_accuracy_drop asks for",
        ),
        CLASSES_OF_IMAGES,
    )

    target: Target = "x86-64"
    runtimes: Annotated[
        Sequence[str] | None,
        Option(
            "Runtimes to try in addition to the target's own: names separated by commas, e.g. openvino,torch-compiled.",
            text=NAMES,
            default_text="auto: all that are installed and run ONNX models",
            panel=SEARCH,
        ),
    ] = None
    objective: Objective = "latency"
    settings: Settings = None
    batch: BatchSize = None
    image_size: Annotated[
        int | tuple[int, int] | None,
        Option(
            "Tune graphs of one image size, N or HEIGHTxWIDTH: more rewrites apply to them. `export` with the result "
            "takes that size.",
            text=SIZE,
            default_text="dynamic if the network allows it",
            panel=SHAPES,
        ),
    ] = None
    threads: Annotated[
        int | None,
        Option(
            "Threads per inference; with --objective throughput, threads in total.",
            least=1,
            default_text="from the target, usually 1",
            panel=MEASURE,
        ),
    ] = None
    rounds: Annotated[
        int | None,
        Option(
            "Number of rounds of the final measurement.",
            least=2,
            most=MOST_ROUNDS,
            default_text="from the target, usually 50",
            panel=MEASURE,
        ),
    ] = None
    budget_s: Annotated[
        float,
        Option(
            "Time for the search in seconds; the final measurement is part of it.",
            option=("--budget",),
            least=0,
            panel=SEARCH,
        ),
    ] = 600
    max_disagreement: Annotated[
        float | None,
        Option(
            "Also try lower precision; largest share of changed top-1 predictions, e.g. 0.5%, or of what changes in "
            "the network's task; 100% for speed alone.",
            text=SHARE,
            panel=PRECISION,
        ),
    ] = None
    max_accuracy_drop: Annotated[
        float | None,
        Option(
            "Also try lower precision; largest drop of the accuracy on labeled images, e.g. 1%, or of the metric of "
            "the network's task.",
            text=SHARE,
            panel=PRECISION,
        ),
    ] = None
    inputs: Annotated[
        str | Path | None,
        Option(
            "Images (.npz: 'input' [N, C, H, W], optionally 'labels' [N]): outputs are compared on some of them; for "
            "lower precision they are split into calibration and test images.",
            panel=IMAGES,
        ),
    ] = None
    images: Images = None
    classes: Classes = None
    labels: Labels = None
    task: EvaluatedTask = None
    seed: Seed = 0
    rewrites: Annotated[
        Sequence[str] | None,
        Option(
            "Use no rewrites but these, not even those of the default preset: names separated by commas.",
            text=NAMES,
            default_text="all that apply",
            panel=SEARCH,
        ),
    ] = None
    exhaustive: Annotated[
        bool,
        Option(
            "Measure every configuration; running the same command again continues for another --budget.", panel=SEARCH
        ),
    ] = False
    rerun: Annotated[
        bool,
        Option(
            "Search again even if a result for this machine is cached.",
            panel=SEARCH,
            former=Deprecation("again", "rerun", removed_in="0.3.0"),
        ),
    ] = False
    allow_unverified: AllowUnverified = False
    out: Annotated[
        str | Path | None, output("File for the result (JSON).", "tuned/<target>.json in the run folder")
    ] = None
