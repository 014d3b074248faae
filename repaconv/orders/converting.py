"""What scoring and converting may be asked for; see `repaconv.orders.stages`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from repaconv.orders.knobs import Knob, Order
from repaconv.orders.shared import Classes, Images, Settings, Target, Weights
from repaconv.orders.texts import SETTINGS, SHARE

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

    method: Annotated[
        str,
        Knob("dwconv: attention to convolution; pyra: merge tokens; with --to training-form any but pyra, see --to."),
    ] = "dwconv"
    to: Annotated[
        str | None,
        Knob(
            "training-form: no more than take the weights over, for finetune. dwconv (gates), repavit and nondeep "
            "start from a plain ViT, riformer from a PoolFormer.",
            metavar="training-form",
        ),
    ] = None
    images: Images = None
    inputs: Inputs = None
    classes: Classes = None
    samples: Samples = 1000
    blocks: Annotated[
        str, Knob("auto: as many as the budget allows; how many; or which: 0,2,5.", metavar="auto|N|I,J,...")
    ] = "auto"
    heads: Annotated[
        str | None,
        Knob("Single heads instead of blocks: how many, or which: BLOCK.HEAD.", metavar="N|0.2,3.1,..."),
    ] = None
    kernel: Annotated[int, Knob("Side of the kernels: 3, 5 or 7; 1 to see what is not the kernel's doing.")] = 3
    kind: Annotated[str, Knob("depthwise, ensembled (one head) or static (a constant matrix).")] = "depthwise"
    fit: Annotated[str, Knob("squares, or the papers' kernels for comparison: gaussian, mean.")] = "squares"
    criterion: Annotated[str, Knob("Which blocks first: error, as measured, or sigma, the paper's.")] = "error"
    schedule: Annotated[
        str | None,
        Knob("Tokens that go, block by block: 16,16,...; of dwconv behind the blocks that are replaced: 0,0,16,..."),
    ] = None
    keep: Annotated[float | None, Knob("pyra: the share of the patches that is left at the end, e.g. 0.6.")] = None
    speedup: Annotated[
        float | None,
        Knob("Times as fast as the network as it was, measured here: merges, or replaces, no more than that takes."),
    ] = None
    curve: Annotated[
        bool,
        Knob(
            "Also measure every kind, some and all blocks, and merging: speed here against what is kept.",
            option=("--curve",),
        ),
    ] = False
    target: Target = "x86-64"
    branches: Annotated[int, Knob("nondeep: neighbouring blocks that become one layer.", least=2)] = 2
    idle_ratio: Annotated[float, Knob("repavit: the share of channels that go without activation.")] = 0.75
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


@dataclass(frozen=True, kw_only=True)
class FinetuneOrder(Order):
    """What `repaconv.finetune` may be asked for."""

    images: Images = None
    inputs: Inputs = None
    classes: Classes = None
    samples: Annotated[int, Knob("Images at most, evenly spread; they are held in memory.", least=1)] = 10_000
    teacher: Annotated[
        str | Path | None, Knob("Learn from this network's outputs; from the one before conversion if left out.")
    ] = None
    teacher_settings: Annotated[
        Mapping[str, str] | None,
        Knob("What the teacher's file does not tell.", option=("--set-teacher",), metavar="NAME=VALUE", text=SETTINGS),
    ] = None
    epochs: Annotated[int, Knob("How often each image is seen.", least=1)] = 3
    batch: Annotated[int, Knob("Images that are worked on together.", least=1)] = 32
    accumulate: Annotated[int, Knob("Batches a step.", least=1)] = 1
    rate: Annotated[float | None, Knob("The largest learning rate; the method's own if left out.")] = None
    precision: Annotated[
        str, Knob("Of products: fp32, bf16, or auto: bf16 where the processor has it and the network is wide.")
    ] = "auto"
    seed: Annotated[int, Knob("Of the images' order and changes.", least=0)] = 0
    again: Annotated[bool, Knob("Begin anew, even where another training was broken off.", recorded=False)] = False
    out: Annotated[
        str | Path | None,
        Knob("The run's folder; <RUN>-finetuned.", option=("-o", "--out"), recorded=False),
    ] = None
