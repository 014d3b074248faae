"""What scoring and converting may be asked for; see `repaconv.orders.stages`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from repaconv.orders.knobs import Knob, Order
from repaconv.orders.stages import Classes, Images, Settings, Weights
from repaconv.orders.texts import SHARE

Inputs = Annotated[str | Path | None, Knob(".npz with 'input' [N, C, H, W], and 'labels' [N] if there are any.")]
Samples = Annotated[int, Knob("Images at most, evenly spread.", least=1)]


@dataclass(frozen=True, kw_only=True)
class ScoreOrder(Order):
    """What `repaconv.score` may be asked for."""

    images: Images = None
    inputs: Inputs = None
    classes: Classes = None
    samples: Samples = 1000
    kernel: Annotated[int, Knob("Side of the kernel that locality is for.")] = 3
    errors: Annotated[
        bool,
        Knob("Also fit each block as a convolution and measure what replacing it alone costs.", option=("--errors",)),
    ] = False
    settings: Settings = None
    weights: Weights = None
    out: Annotated[
        str | Path | None,
        Knob(
            "The result, and a drawing beside it; repaconv-out/<stem>.score.json.",
            option=("-o", "--out"),
            recorded=False,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ConvertOrder(Order):
    """What `repaconv.convert` may be asked for."""

    method: Annotated[str, Knob("dwconv: attention to convolution; pyra: merge tokens.")] = "dwconv"
    images: Images = None
    inputs: Inputs = None
    classes: Classes = None
    samples: Samples = 1000
    blocks: Annotated[
        str, Knob("auto: as many as the budget allows; how many; or which: 0,2,5.", metavar="auto|N|I,J,...")
    ] = "auto"
    kernel: Annotated[int, Knob("Side of the kernels: 3, 5 or 7; 1 to see what is not the kernel's doing.")] = 3
    kind: Annotated[str, Knob("depthwise, ensembled (one head) or static (a constant matrix).")] = "depthwise"
    fit: Annotated[str, Knob("squares, or the papers' kernels for comparison: gaussian, mean.")] = "squares"
    criterion: Annotated[str, Knob("Which blocks first: error, as measured, or sigma, the paper's.")] = "error"
    schedule: Annotated[str | None, Knob("pyra: tokens that go, block by block: 16,16,...")] = None
    keep: Annotated[float | None, Knob("pyra: the share of the patches that is left at the end, e.g. 0.6.")] = None
    max_disagreement: Annotated[
        float | None, Knob("A budget: images whose first class may change, e.g. 2%.", text=SHARE)
    ] = None
    max_accuracy_drop: Annotated[
        float | None, Knob("A budget: accuracy that may go, of labelled images, e.g. 1%.", text=SHARE)
    ] = None
    settings: Settings = None
    weights: Weights = None
    out: Annotated[
        str | Path | None,
        Knob("The run's folder; repaconv-out/<stem>-<method>.", option=("-o", "--out"), recorded=False),
    ] = None
    force: Annotated[bool, Knob("Replace the run of another network.", recorded=False)] = False
