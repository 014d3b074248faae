"""Options of `fold`, each with its type, default and help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from repaconv.deprecation import Deprecation
from repaconv.stages.shared.common_options import Arch, Settings, Sha256, Task, Weights
from repaconv.stages.shared.option_dataclasses import INPUT, MEASURE, OUTPUT, Option, Options, output


@dataclass(frozen=True, kw_only=True)
class FoldOptions(Options):
    """Options of `repaconv.fold`."""

    method: Annotated[
        str,
        Option(
            "The method that the checkpoint was trained with: dwconv, nondeep, pyra, repavit, repconv, riformer or one "
            "of a plug-in; auto recognizes it by its tensors.",
            recorded=False,
            panel=INPUT,
        ),
    ] = "auto"
    arch: Arch = None
    task: Task = None
    settings: Settings = None
    weights: Weights = None
    sha256: Sha256 = None
    out: Annotated[
        str | Path | None,
        output(
            "The run folder; for an .onnx input also an .onnx file, to which the folded graph is written.",
            "repaconv-out/<stem>",
        ),
    ] = None
    force: Annotated[
        bool,
        Option(
            "Replace a run folder made from another checkpoint; accept settings that contradict the checkpoint, and a "
            "fold of which no output can be compared.",
            recorded=False,
            panel=OUTPUT,
        ),
    ] = False
    allow_deployed: Annotated[
        bool, Option("Accept a checkpoint that already has the official inference-time architecture.", panel=INPUT)
    ] = False
    identify: Annotated[
        str | Path | None,
        Option(
            "Recorded input and output of the network (.npz); selects among settings missing from the checkpoint.",
            panel=INPUT,
        ),
    ] = None
    inputs: Annotated[
        str | Path | None,
        Option(
            "Inputs by name that an ONNX model takes (.npz), where it does not run on random ones.",
            panel=INPUT,
        ),
    ] = None
    preset: Annotated[
        str,
        Option(
            "Rewrite preset for the exported graph: default, official, fastest-known, or the result file of `tune`.",
            panel=OUTPUT,
            former=Deprecation("form", "preset", removed_in="0.3.0"),
        ),
    ] = "default"
    measure: Annotated[
        bool,
        Option("Revert rewrites that make the folded graph slower than the original on this machine.", panel=MEASURE),
    ] = True
