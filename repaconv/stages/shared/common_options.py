"""Options that several commands have, each defined once with its type and help, and the limit of --threads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from repaconv.core.errors import UsageProblem
from repaconv.deprecation import Deprecation
from repaconv.stages.shared.option_dataclasses import (
    BASELINE,
    CLUSTER,
    ENGINE,
    IMAGES,
    INPUT,
    MEASURE,
    SETTINGS,
    SIZE,
    TARGET,
    VERIFICATION,
    NoEffect,
    Option,
)

Target = Annotated[
    str, Option("The device: a name listed by `repaconv targets`, or the path of a target's TOML file.", panel=TARGET)
]
Images = Annotated[
    str | Path | None, Option("Folder of images; for labeled images, one subfolder per class.", panel=IMAGES)
]
Classes = Annotated[
    str | Path | None,
    Option(
        "Text file with one class name per line, if the classes are not numbered in the alphabetical order of the "
        "subfolders.",
        panel=IMAGES,
    ),
]
AllowUnverified = Annotated[
    bool,
    Option(
        "Continue after a failed check, and record the override in every later result.",
        panel=VERIFICATION,
        former=Deprecation("unverified", "allow_unverified", removed_in="0.3.0"),
    ),
]
Settings = Annotated[
    Mapping[str, str] | None,
    Option(
        "A model setting missing from the checkpoint, e.g. num_heads=3; repeatable.",
        option=("--set",),
        panel=INPUT,
        metavar="NAME=VALUE",
        text=SETTINGS,
    ),
]
Weights = Annotated[
    str | None,
    Option(
        "Which set of weights to read if the file has several, e.g. model_ema, or a prefix of names within one set; "
        "without:PREFIX reads the names without it, PREFIX,without:LONGER those of it without a longer one.",
        default_text="the set that the training code evaluates, reported by inspect",
        panel=INPUT,
    ),
]
Sha256 = Annotated[
    str | None, Option("Expected SHA-256 of the file; any other file is refused.", metavar="HEX", panel=INPUT)
]
Checkpoint = Annotated[
    str | Path | None,
    Option(
        "Path of the checkpoint, if it has moved since `fold`.", default_text="the path recorded by fold", panel=INPUT
    ),
]
RunPrecision = Annotated[
    str, Option("Precision of the run's ONNX model to use: fp32, fp16, bf16 or int8; on a GPU also tf32.", panel=INPUT)
]
BatchSize = Annotated[
    int | None,
    Option(
        "Batch size: images per inference.",
        least=1,
        default_text="the model's, otherwise from the target",
        panel=MEASURE,
    ),
]
RunPreset = Annotated[
    str | Path | None,
    Option(
        "Rewrite preset of the run's ONNX model to use, or the result file of `tune`, which also sets the runtime "
        "and its options.",
        default_text="the preset recorded by fold",
        panel=INPUT,
        former=Deprecation("form", "preset", removed_in="0.3.0"),
    ),
]
Threads = Annotated[
    int | None, Option("Threads per inference.", least=1, default_text="from the target, usually 1", panel=MEASURE)
]
Workspace = Annotated[
    int | None,
    Option(
        "Memory limit of TensorRT's workspace, in MiB.",
        option=("--workspace",),
        least=1,
        default_text="TensorRT's own",
        panel=ENGINE,
    ),
]
Seed = Annotated[
    int, Option("Seed of the random images, of the measuring order and of the intervals.", least=0, panel=MEASURE)
]
AcceptInconclusive = Annotated[
    bool, Option("Write the baseline even if the measurement is inconclusive.", recorded=False, panel=BASELINE)
]
Scheduler = Annotated[
    str | None,
    Option(
        "Address of a Dask scheduler; measure on a worker that serves the target.",
        metavar="tcp://HOST:PORT",
        panel=CLUSTER,
    ),
]
TlsCa = Annotated[
    Path | None, Option("TLS certificate of the cluster's certificate authority (PEM).", recorded=False, panel=CLUSTER)
]
TlsCert = Annotated[Path | None, Option("TLS certificate of this machine (PEM).", recorded=False, panel=CLUSTER)]
TlsKey = Annotated[Path | None, Option("Private key of --tls-cert (PEM).", recorded=False, panel=CLUSTER)]
Rerun = Annotated[
    bool,
    Option(
        "Run every step again, including those whose results are up to date.",
        former=Deprecation("again", "rerun", removed_in="0.3.0"),
    ),
]
Arch = Annotated[
    str | None,
    Option(
        "How to build the network: timm:NAME, torchvision:NAME, or FILE.py:FUNCTION (which runs that file).",
        metavar="timm:NAME",
        panel=INPUT,
    ),
]
Labels = Annotated[
    str | Path | None,
    Option(
        "Labels of the images for the network's task: COCO annotations (.json), a folder of masks (.png), or an .npz "
        "with 'labels'; classes need none, they are the names of subfolders.",
        panel=IMAGES,
    ),
]
_TASK = Option(
    "What the network is for: classify, detect, segment, restore, keypoints, depth, embed, recognize or other; "
    "decides how lower precision is evaluated.",
    metavar="TASK",
    default_text="by the architecture, or the outputs",
    panel=INPUT,
)
Task = Annotated[str | None, _TASK]
EvaluatedTask = Annotated[str | None, replace(_TASK, panel=IMAGES)]
"""The same among the images that evaluate, of commands that take some."""
ImageSize = Annotated[
    int | tuple[int, int] | None,
    Option(
        "Image size in pixels: N or HEIGHTxWIDTH, e.g. 224 or 140x126.",
        text=SIZE,
        default_text="the model's own",
        panel=MEASURE,
    ),
]
Against = Annotated[
    str | Path | None,
    Option(
        "Reference for the speedup: another .onnx file or engine.",
        default_text="the training-time network",
        panel=MEASURE,
    ),
]
MOST_IMAGES = 10_000_000
"""Largest number of images: several times those of the largest public data sets that networks are evaluated on."""
MOST_ROUNDS = 1_000_000
"""Largest number of rounds: their times are kept in memory."""
Rounds = Annotated[
    int | None,
    Option(
        "Number of measured, interleaved rounds.",
        least=2,
        most=MOST_ROUNDS,
        default_text="from the target, usually 50",
        panel=MEASURE,
    ),
]


COUNT_OF_NPZ = NoEffect(("count",), lambda options: options.inputs, "an .npz is taken whole")
SEED_OF_RANDOM_IMAGES = NoEffect(
    ("seed",), lambda options: options.inputs or options.images, "it is of random images, and others are given"
)
LABELS_OF_IMAGES = NoEffect(
    ("labels",), lambda options: not (options.inputs or options.images), "they are of images, and none are given"
)
CLASSES_OF_IMAGES = NoEffect(("classes",), lambda options: not options.images, "it names the classes of images")
ACCEPTED_IN_BASELINE = NoEffect(
    ("accept_inconclusive",), lambda options: not options.update_baseline, "it is for writing a baseline"
)


def is_tune_result(preset: str | Path | None) -> bool:
    """Whether a preset is a result file of `tune`, which may also set the precision."""
    return preset is not None and Path(preset).is_file()


THREADS_PER_CPU = 16
"""More threads than this per CPU are a slip of the keyboard: a runtime may wait forever for very many."""


def require_threads(threads: int | None) -> None:
    """Refuse far more threads than this machine has CPUs. A few more share them.

    Raises:
        UsageProblem: If there are more than `THREADS_PER_CPU` for each.
    """
    cpus = os.cpu_count() or 1
    if threads is not None and threads > THREADS_PER_CPU * cpus:
        raise UsageProblem(
            f"{threads} threads per inference are far more than the CPUs of this machine, {cpus}.",
            hint=f"Give --threads {cpus}, or up to {THREADS_PER_CPU} for each CPU.",
            code="bench.threads",
        )
