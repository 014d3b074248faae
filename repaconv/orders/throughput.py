"""What a measurement of several calls at once may be asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from repaconv.orders.knobs import Knob, Order
from repaconv.orders.panels import MEASURE, OUTPUT
from repaconv.orders.shared import Against, Deployed, ImagesACall, ImageSize, OfTheRun, Rounds, Seed, Target, Unverified


@dataclass(frozen=True, kw_only=True)
class ThroughputOrder(Order):
    """What `repaconv.throughput`, which is `bench --objective throughput`, may be asked for."""

    target: Target = "x86-64"
    precision: OfTheRun = "fp32"
    preset: Deployed = None
    against: Against = None
    streams: Annotated[
        int | None,
        Knob("Number of inferences that run at the same time.", least=1, default_text="one per core", panel=MEASURE),
    ] = None
    threads: Annotated[int | None, Knob("Threads per inference.", least=1, default_text="1", panel=MEASURE)] = None
    batch: ImagesACall = None
    image_size: ImageSize = None
    rounds: Rounds = None
    seed: Seed = 0
    allow_unverified: Unverified = False
    out: Annotated[
        str | Path | None,
        Knob(
            "File for the result (JSON).",
            option=("-o", "--out"),
            recorded=False,
            default_text="bench/<target>.throughput.json in the run folder",
            panel=OUTPUT,
        ),
    ] = None
