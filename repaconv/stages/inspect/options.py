"""Options of `inspect`, each with its type, default and help."""

from __future__ import annotations

from dataclasses import dataclass

from repaconv.stages.shared.common_options import Settings, Sha256, Weights
from repaconv.stages.shared.option_dataclasses import Options


@dataclass(frozen=True, kw_only=True)
class InspectOptions(Options):
    """Options of `repaconv.inspect`."""

    weights: Weights = None
    settings: Settings = None
    sha256: Sha256 = None
