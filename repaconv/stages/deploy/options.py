"""Options of `deploy`, each with its type, default and help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from repaconv.stages.shared.common_options import (
    MOST_IMAGES,
    MOST_ROUNDS,
    Arch,
    Classes,
    Images,
    Rerun,
    Settings,
    Weights,
)
from repaconv.stages.shared.option_dataclasses import (
    IMAGES,
    INPUT,
    MEASURE,
    PRECISION,
    TARGET,
    Option,
    Options,
    output,
)


@dataclass(frozen=True, kw_only=True)
class DeployOptions(Options):
    """Options of `repaconv.deploy`."""

    target: Annotated[
        str,
        Option(
            "The device: a name listed by `repaconv targets`, or the path of a target's TOML file.",
            usual="x86-64",
            panel=TARGET,
        ),
    ]
    precision: Annotated[
        str,
        Option(
            "Precision of weights and computation: fp32, fp16, bf16 or int8; all but fp32 are lossy.", panel=PRECISION
        ),
    ] = "fp32"
    images: Images = None
    classes: Classes = None
    inputs: Annotated[
        str | Path | None,
        Option("Images as .npz instead of a folder: 'input' [N, C, H, W], optionally 'labels' [N].", panel=IMAGES),
    ] = None
    count: Annotated[
        int | None,
        Option(
            "Number of images to verify on.",
            least=1,
            most=MOST_IMAGES,
            default_text="4 random ones, or all of --images",
            panel=IMAGES,
        ),
    ] = None
    method: Annotated[
        str,
        Option(
            "The method that the checkpoint was trained with: dwconv, nondeep, pyra, repavit, repconv, riformer or one "
            "of a plug-in; auto recognizes it by its tensors.",
            panel=INPUT,
        ),
    ] = "auto"
    arch: Arch = None
    settings: Settings = None
    weights: Weights = None
    rounds: Annotated[
        int | None,
        Option(
            "Number of measured, interleaved rounds.",
            least=10,
            most=MOST_ROUNDS,
            default_text="from the target, usually 50",
            panel=MEASURE,
        ),
    ] = None
    dry_run: Annotated[bool, Option("List the steps that would run and why, and run none.", option=("--dry-run",))] = (
        False
    )
    rerun: Rerun = False
    out: Annotated[str | Path | None, output("The run folder.", "repaconv-out/<stem>.<target>")] = None
