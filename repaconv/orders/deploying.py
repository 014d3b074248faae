"""What deploying and comparing may be asked for; see `repaconv.orders.stages`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from repaconv.orders.knobs import Knob, Order
from repaconv.orders.panels import IMAGES, INPUT, MEASURE, OUTPUT, PRECISION, TARGET, VERIFICATION
from repaconv.orders.shared import Again, Arch, Classes, Images, Rounds, Seed, Settings, Target, Threads, Weights


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
