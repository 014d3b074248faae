"""What a measurement of several calls at once may be asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from repaconv.orders.knobs import Knob, Order
from repaconv.orders.shared import Against, Deployed, ImagesACall, ImageSize, OfTheRun, Rounds, Seed, Target, Unverified


@dataclass(frozen=True, kw_only=True)
class ThroughputOrder(Order):
    """What `repaconv.throughput`, which is `bench --objective throughput`, may be asked for."""

    target: Target = "x86-64"
    precision: OfTheRun = "fp32"
    form: Deployed = None
    against: Against = None
    streams: Annotated[int | None, Knob("Calls at once; one for every core if left out.", least=1)] = None
    threads: Annotated[int | None, Knob("Of a call; 1 if left out.", least=1)] = None
    batch: ImagesACall = None
    image_size: ImageSize = None
    rounds: Rounds = None
    seed: Seed = 0
    unverified: Unverified = False
    out: Annotated[
        str | Path | None,
        Knob("The result; bench/<target>.throughput.json of the run.", option=("-o", "--out"), recorded=False),
    ] = None
