"""Options of `save`, each with its type, default and help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from repaconv.stages.shared.common_options import AllowUnverified
from repaconv.stages.shared.option_dataclasses import Options, output


@dataclass(frozen=True, kw_only=True)
class SaveOptions(Options):
    """Options of `repaconv.save`."""

    out: Annotated[str | Path | None, output("Folder to write.", "timm or transformers in the run folder")] = None
    allow_unverified: AllowUnverified = False
