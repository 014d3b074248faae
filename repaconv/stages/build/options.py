"""Options of `build`, each with its type, default and help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from repaconv.stages.shared.common_options import AllowUnverified, RunPrecision, RunPreset, Workspace
from repaconv.stages.shared.option_dataclasses import ENGINE, TARGET, Option, Options


@dataclass(frozen=True, kw_only=True)
class BuildOptions(Options):
    """Options of `repaconv.build`."""

    target: Annotated[
        str,
        Option(
            "The device: a name listed by `repaconv targets`, or the path of a target's TOML file.",
            usual="x86-64",
            panel=TARGET,
        ),
    ]
    precision: RunPrecision = "fp32"
    preset: RunPreset = None
    workspace_mib: Workspace = None
    timing_cache: Annotated[
        str | Path | None,
        Option("TensorRT timing cache file.", default_text="one per target and TensorRT version", panel=ENGINE),
    ] = None
    replay: Annotated[
        bool, Option("Rebuild the same engine: fail if the timing cache lacks an entry.", panel=ENGINE)
    ] = False
    allow_unverified: AllowUnverified = False
