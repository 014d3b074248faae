"""Options of `bundle`, each with its type, default and help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from repaconv.deprecation import Deprecation
from repaconv.stages.shared.common_options import (
    COUNT_OF_NPZ,
    MOST_IMAGES,
    SEED_OF_RANDOM_IMAGES,
    AllowUnverified,
    BatchSize,
    Checkpoint,
    Images,
    Workspace,
)
from repaconv.stages.shared.option_dataclasses import IMAGES, INPUT, TARGET, NoEffect, Option, Options, output


@dataclass(frozen=True, kw_only=True)
class BundleOptions(Options):
    """Options of `repaconv.bundle`."""

    NO_EFFECT: ClassVar[tuple[NoEffect, ...]] = (
        COUNT_OF_NPZ,
        SEED_OF_RANDOM_IMAGES,
    )

    target: Annotated[
        str,
        Option(
            "The board: a TensorRT target listed by `repaconv targets`, or the path of a target's TOML file.",
            usual="orin-nano",
            panel=TARGET,
        ),
    ]
    precision: Annotated[
        str | None,
        Option(
            "Precision of the run's ONNX model to pack: fp32, fp16, bf16 or int8.",
            default_text="the only one for the board, otherwise fp32",
            panel=INPUT,
        ),
    ] = None
    preset: Annotated[
        str | Path | None,
        Option(
            "Rewrite preset of the run's ONNX model to pack, or the result file of `tune`, which also sets the "
            "precision.",
            panel=INPUT,
            former=Deprecation("form", "preset", removed_in="0.3.0"),
        ),
    ] = None
    inputs: Annotated[
        str | Path | None,
        Option("Inputs for the board (.npz): 'input' [N, C, H, W], or one array per input name.", panel=IMAGES),
    ] = None
    images: Images = None
    count: Annotated[
        int | None,
        Option(
            "Number of images.",
            least=1,
            most=MOST_IMAGES,
            default_text="up to 64 that evaluated a lossy export, all of --images, otherwise 4 random ones",
            panel=IMAGES,
        ),
    ] = None
    seed: Annotated[int, Option("Seed of the random images.", least=0, panel=IMAGES)] = 0
    batch: BatchSize = None
    workspace_mib: Workspace = None
    checkpoint: Checkpoint = None
    allow_unverified: AllowUnverified = False
    out: Annotated[str | Path | None, output("File for the bundle.", "build/<target>.tar.gz in the run folder")] = None
