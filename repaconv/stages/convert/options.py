"""Options of `score`, `convert` and `finetune`, each with its type, default and help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from repaconv.deprecation import Deprecation
from repaconv.stages.shared.common_options import CLASSES_OF_IMAGES, Classes, Images, Settings, Target, Weights
from repaconv.stages.shared.option_dataclasses import (
    CONVERSION,
    IMAGES,
    MEASURE,
    OUTPUT,
    SETTINGS,
    SHARE,
    TRAINING,
    NoEffect,
    Option,
    Options,
    output,
)

Inputs = Annotated[
    str | Path | None, Option("Images (.npz): 'input' [N, C, H, W], optionally 'labels' [N].", panel=IMAGES)
]


Samples = Annotated[int, Option("Largest number of images, taken at even distances.", least=1, panel=IMAGES)]


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(Options):
    """Options of `repaconv.score`."""

    NO_EFFECT: ClassVar[tuple[NoEffect, ...]] = (CLASSES_OF_IMAGES,)

    images: Images = None
    inputs: Inputs = None
    classes: Classes = None
    samples: Samples = 1000
    kernel: Annotated[int, Option("Side length of the convolution kernel that attention is compared with.")] = 3
    errors: Annotated[
        bool,
        Option(
            "Also fit each block as a convolution and measure the error of replacing that block alone.",
            option=("--errors",),
        ),
    ] = False
    settings: Settings = None
    weights: Weights = None
    out: Annotated[
        str | Path | None,
        output("File for the result (JSON); a drawing (SVG) is written next to it.", "repaconv-out/<stem>.score.json"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(Options):
    """Options of `repaconv.convert`."""

    NO_EFFECT: ClassVar[tuple[NoEffect, ...]] = (
        CLASSES_OF_IMAGES,
        NoEffect(
            ("blocks", "heads", "kernel", "kind", "fit", "criterion"),
            lambda options: options.method != "dwconv",
            "they are of attention that becomes convolution (method dwconv)",
        ),
        NoEffect(("kind", "fit"), lambda options: options.to, "gates choose between attention and convolutions"),
        NoEffect(
            ("heads", "schedule"),
            lambda options: options.to and options.method != "pyra",  # which has no training form
            "training chooses whole blocks, and no token merges",
        ),
        NoEffect(("branches",), lambda options: options.method != "nondeep", "only method nondeep has some"),
        NoEffect(("idle_ratio",), lambda options: options.method != "repavit", "it is of method repavit"),
        NoEffect(("keep",), lambda options: options.method != "pyra", "it is of token merging (method pyra)"),
        NoEffect(
            ("schedule",),
            lambda options: options.method not in ("pyra", "dwconv"),
            "it is of token merging (method pyra, or dwconv after the replaced blocks)",
        ),
        NoEffect(("speedup", "curve"), lambda options: options.to, "nothing is measured before it is trained"),
        NoEffect(
            ("target",),
            lambda options: not options.speedup and not options.curve,
            "it is where speedup and curve are measured",
        ),
        NoEffect(
            ("blocks", "schedule", "keep"),
            lambda options: options.speedup,
            "speedup chooses what merges, or how many blocks are replaced",
        ),
        NoEffect(("kernel",), lambda options: options.kind == "static", "a constant matrix has no kernel"),
        NoEffect(("criterion",), lambda options: "," in options.blocks, "the blocks are named; it would choose them"),
    )

    method: Annotated[
        str,
        Option(
            "dwconv (attention to depthwise convolution) or pyra (token merging); with --to training-form also "
            "repavit, nondeep and riformer.",
            panel=CONVERSION,
        ),
    ] = "dwconv"
    to: Annotated[
        str | None,
        Option(
            "training-form: only copy the weights into the method's training-time architecture, for `finetune`. "
            "dwconv, "
            "repavit and nondeep start from a plain ViT, riformer from a PoolFormer.",
            metavar="training-form",
            panel=CONVERSION,
        ),
    ] = None
    images: Images = None
    inputs: Inputs = None
    classes: Classes = None
    samples: Samples = 1000
    blocks: Annotated[
        str,
        Option(
            "Blocks to convert: auto (as many as the budget allows), a number of blocks, or indices such as 0,2,5.",
            metavar="auto|N|I,J,...",
            panel=CONVERSION,
        ),
    ] = "auto"
    heads: Annotated[
        str | None,
        Option(
            "Convert single attention heads instead of blocks: a number of heads, or BLOCK.HEAD indices.",
            metavar="N|0.2,3.1,...",
            panel=CONVERSION,
        ),
    ] = None
    kernel: Annotated[
        int, Option("Side length of the convolution kernels: 3, 5 or 7; 1 as a control experiment.", panel=CONVERSION)
    ] = 3
    kind: Annotated[
        str,
        Option(
            "What replaces attention: depthwise (a convolution), ensembled (one head) or static (a constant matrix).",
            panel=CONVERSION,
        ),
    ] = "depthwise"
    fit: Annotated[
        str,
        Option(
            "How kernels are fitted: squares (least squares), or the papers' gaussian or mean for comparison.",
            panel=CONVERSION,
        ),
    ] = "squares"
    criterion: Annotated[
        str, Option("How blocks are ranked: error (measured) or sigma (the paper's locality score).", panel=CONVERSION)
    ] = "error"
    schedule: Annotated[
        str | None,
        Option(
            "Tokens merged in each block, e.g. 16,16,...; with dwconv, in the blocks after the replaced ones, "
            "e.g. 0,0,16,...",
            panel=CONVERSION,
        ),
    ] = None
    keep: Annotated[
        float | None,
        Option("pyra: fraction of the patches that remain after the last block, e.g. 0.6.", panel=CONVERSION),
    ] = None
    speedup: Annotated[
        float | None,
        Option(
            "Target speedup over the original network, e.g. 1.5; converts no more than that needs, measured on "
            "--target.",
            panel=CONVERSION,
        ),
    ] = None
    curve: Annotated[
        bool,
        Option(
            "Also measure the speed against the accuracy of every --kind, of some and of all blocks, and of token "
            "merging.",
            option=("--curve",),
            panel=MEASURE,
        ),
    ] = False
    target: Target = "x86-64"
    branches: Annotated[
        int, Option("nondeep: number of neighboring blocks that become one layer.", least=2, panel=CONVERSION)
    ] = 2
    idle_ratio: Annotated[
        float, Option("repavit: fraction of the hidden channels without activation.", panel=CONVERSION)
    ] = 0.75
    max_disagreement: Annotated[
        float | None,
        Option(
            "Budget: largest share of changed top-1 predictions, e.g. 2%, or without classes of changed nearest "
            "images; exit code 1 above it.",
            text=SHARE,
            panel=CONVERSION,
        ),
    ] = None
    max_accuracy_drop: Annotated[
        float | None,
        Option(
            "Budget: largest drop of the accuracy on labeled images, e.g. 1%; exit code 1 above it.",
            text=SHARE,
            panel=CONVERSION,
        ),
    ] = None
    settings: Settings = None
    weights: Weights = None
    out: Annotated[str | Path | None, output("The run folder.", "repaconv-out/<stem>-<method>")] = None
    force: Annotated[bool, Option("Replace a run folder made from another network.", recorded=False, panel=OUTPUT)] = (
        False
    )


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(Options):
    """Options of `repaconv.finetune`."""

    NO_EFFECT: ClassVar[tuple[NoEffect, ...]] = (
        CLASSES_OF_IMAGES,
        NoEffect(
            ("teacher_settings",),
            lambda options: not options.teacher,
            "they are of a teacher's file; the network before conversion has its own",
        ),
    )

    images: Images = None
    inputs: Inputs = None
    classes: Classes = None
    samples: Annotated[
        int,
        Option("Largest number of images, taken at even distances; they are kept in memory.", least=1, panel=IMAGES),
    ] = 10_000
    teacher: Annotated[
        str | Path | None,
        Option(
            "Checkpoint of the network whose outputs are learned (the teacher).",
            default_text="the network before conversion",
            panel=TRAINING,
        ),
    ] = None
    teacher_settings: Annotated[
        Mapping[str, str] | None,
        Option(
            "A model setting missing from the teacher's checkpoint, e.g. num_heads=3; repeatable.",
            option=("--set-teacher",),
            metavar="NAME=VALUE",
            text=SETTINGS,
            panel=TRAINING,
        ),
    ] = None
    epochs: Annotated[int, Option("Number of passes over the images.", least=1, panel=TRAINING)] = 3
    batch: Annotated[int, Option("Batch size in images.", least=1, panel=TRAINING)] = 32
    grad_accum_steps: Annotated[
        int,
        Option(
            "Batches per optimizer step (gradient accumulation).",
            least=1,
            panel=TRAINING,
            former=Deprecation("accumulate", "grad_accum_steps", removed_in="0.3.0"),
        ),
    ] = 1
    lr: Annotated[
        float | None,
        Option(
            "Peak learning rate.",
            default_text="the method's own",
            panel=TRAINING,
            former=Deprecation("rate", "lr", removed_in="0.3.0"),
        ),
    ] = None
    precision: Annotated[
        str,
        Option(
            "Precision of matrix products: fp32, bf16, or auto (bf16 if the CPU supports it and the network is wide).",
            panel=TRAINING,
        ),
    ] = "auto"
    seed: Annotated[int, Option("Seed of the order and augmentation of the images.", least=0, panel=TRAINING)] = 0
    restart: Annotated[
        bool,
        Option(
            "Start from the beginning instead of resuming an interrupted training.",
            recorded=False,
            panel=TRAINING,
            former=Deprecation("again", "restart", removed_in="0.3.0"),
        ),
    ] = False
    out: Annotated[str | Path | None, output("The run folder.", "<RUN>-finetuned")] = None
