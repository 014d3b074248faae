"""What `repaconv.save` may be asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from repaconv.orders.knobs import Knob, Order
from repaconv.orders.shared import Unverified


@dataclass(frozen=True, kw_only=True)
class SaveOrder(Order):
    """What `repaconv.save` may be asked for."""

    out: Annotated[
        str | Path | None,
        Knob("The folder; timm or transformers in the run.", option=("-o", "--out"), recorded=False),
    ] = None
    unverified: Unverified = False
