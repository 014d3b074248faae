"""What `repaconv.save` may be asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from repaconv.orders.knobs import Knob, Order
from repaconv.orders.panels import OUTPUT
from repaconv.orders.shared import Unverified


@dataclass(frozen=True, kw_only=True)
class SaveOrder(Order):
    """What `repaconv.save` may be asked for."""

    out: Annotated[
        str | Path | None,
        Knob(
            "Folder to write.",
            option=("-o", "--out"),
            recorded=False,
            default_text="timm or transformers in the run folder",
            panel=OUTPUT,
        ),
    ] = None
    allow_unverified: Unverified = False
