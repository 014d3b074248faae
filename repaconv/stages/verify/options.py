"""Options of `verify`, each with its type, default and help."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from repaconv.stages.shared.common_options import (
    CLASSES_OF_IMAGES,
    COUNT_OF_NPZ,
    LABELS_OF_IMAGES,
    MOST_IMAGES,
    SEED_OF_RANDOM_IMAGES,
    Checkpoint,
    Classes,
    EvaluatedTask,
    Images,
    Labels,
)
from repaconv.stages.shared.option_dataclasses import (
    IMAGES,
    INPUT,
    LINKS,
    TOLERANCES,
    VERIFICATION,
    NoEffect,
    Option,
    Options,
    output,
)


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(Options):
    """Options of `repaconv.verify`."""

    NO_EFFECT: ClassVar[tuple[NoEffect, ...]] = (
        COUNT_OF_NPZ,
        SEED_OF_RANDOM_IMAGES,
        CLASSES_OF_IMAGES,
        LABELS_OF_IMAGES,
    )

    inputs: Annotated[
        str | Path | None,
        Option(
            "Images (.npz): 'input' float [N, C, H, W]; optionally 'output', the official one, and 'labels' [N].",
            panel=IMAGES,
        ),
    ] = None
    images: Images = None
    classes: Classes = None
    labels: Labels = None
    task: EvaluatedTask = None
    checkpoint: Checkpoint = None
    count: Annotated[
        int | None,
        Option(
            "Number of images.",
            least=1,
            most=MOST_IMAGES,
            default_text="4 random ones, or all of --images",
            panel=IMAGES,
        ),
    ] = None
    seed: Annotated[int, Option("Seed of the random images.", least=0, panel=IMAGES)] = 0
    rtol: Annotated[
        Mapping[str, float] | None,
        Option(
            "Relative tolerance of one link of the verification chain, e.g. onnx:1e-6; repeatable.",
            metavar="LINK:VALUE",
            text=TOLERANCES,
            default_text="from the policy",
            panel=VERIFICATION,
        ),
    ] = None
    atol: Annotated[
        Mapping[str, float] | None,
        Option(
            "Absolute tolerance of one link; meeting either tolerance is enough.",
            metavar="LINK:VALUE",
            text=TOLERANCES,
            panel=VERIFICATION,
        ),
    ] = None
    require: Annotated[
        Sequence[str],
        Option(
            "Fail if this link cannot be run, e.g. engine; repeatable.", metavar="LINK", text=LINKS, panel=VERIFICATION
        ),
    ] = ()
    engine: Annotated[
        str | Path | None, Option("An engine file to verify as well; it is loaded and run.", panel=INPUT)
    ] = None
    drift: Annotated[
        bool, Option("Also report, layer by layer, how the error grows through links that pass.", panel=VERIFICATION)
    ] = False
    out: Annotated[str | Path | None, output("File for the result (JSON).", "verify.json in the run folder")] = None
