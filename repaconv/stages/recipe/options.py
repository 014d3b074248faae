"""Options of `run` and `gate`, each with its type, default and help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from repaconv.stages.shared.common_options import ACCEPTED_IN_BASELINE, AcceptInconclusive, Rerun
from repaconv.stages.shared.option_dataclasses import BASELINE, NoEffect, Option, Options


@dataclass(frozen=True, kw_only=True)
class RunOptions(Options):
    """Options of `repaconv.run`; everything else is in the recipe."""

    dry_run: Annotated[bool, Option("List the steps that would run and why, and run none.", option=("--dry-run",))] = (
        False
    )
    rerun: Rerun = False


@dataclass(frozen=True, kw_only=True)
class GateOptions(Options):
    """Options of `repaconv.gate`; everything else is in the recipes."""

    NO_EFFECT: ClassVar[tuple[NoEffect, ...]] = (ACCEPTED_IN_BASELINE,)

    rerun: Rerun = False
    update_baseline: Annotated[
        bool,
        Option("Write the measured latencies to the baseline files instead of comparing with them.", panel=BASELINE),
    ] = False
    accept_inconclusive: AcceptInconclusive = False
