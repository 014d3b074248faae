"""What deploying and comparing may be asked for; see `repaconv.orders.stages`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from repaconv.orders.knobs import Knob, Order
from repaconv.orders.shared import Again, Arch, Classes, Images, Rounds, Seed, Settings, Target, Threads, Weights


@dataclass(frozen=True, kw_only=True)
class DeployOrder(Order):
    """What `repaconv.deploy` may be asked for."""

    target: Annotated[str, Knob("A target's name, or the path of a .toml.", usual="x86-64")]
    precision: Annotated[str, Knob("fp32, fp16, bf16 or int8; all but the first are lossy.")] = "fp32"
    images: Images = None
    classes: Classes = None
    inputs: Annotated[str | Path | None, Knob(".npz in place of a folder: 'input' [N, C, H, W], 'labels' [N].")] = None
    count: Annotated[int | None, Knob("How many random images (4), or images of the folder (all).", least=1)] = None
    method: Annotated[str, Knob("The method, or auto.")] = "auto"
    arch: Arch = None
    settings: Settings = None
    weights: Weights = None
    rounds: Annotated[int | None, Knob("Measured, interleaved rounds; the target's if left out.", least=10)] = None
    dry_run: Annotated[bool, Knob("Say what would run, and why.", option=("--dry-run",))] = False
    again: Again = False
    out: Annotated[
        str | Path | None, Knob("The folder; repaconv-out/<stem>.<target>.", option=("-o", "--out"), recorded=False)
    ] = None


@dataclass(frozen=True, kw_only=True)
class CompareOrder(Order):
    """What `repaconv.compare` may be asked for."""

    inputs: Annotated[str | Path | None, Knob(".npz with 'input' [N, C, H, W]; seeded random ones if left out.")] = None
    count: Annotated[int, Knob("How many random inputs.", least=1)] = 8
    seed: Seed = 0
    speed: Annotated[bool, Knob("Also measure both, interleaved, on the target.", option=("--speed",))] = False
    target: Target = "x86-64"
    threads: Threads = None
    rounds: Rounds = None
    rtol: Annotated[
        float | None, Knob("Largest difference of each image's outputs; the policy's if left out, e.g. 1e-4.")
    ] = None
    out: Annotated[
        str | Path | None, Knob("Also write the result here, as JSON.", option=("-o", "--out"), recorded=False)
    ] = None
