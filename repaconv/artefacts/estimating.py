"""What ``bench --estimate`` leaves: how long a graph would take on a device, by calculation alone."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from repaconv.artefacts.records import Artefact, ImageSize, Record


class Limits(Record):
    """What a device can do at most; each figure with where it is from.

    Attributes:
        device: Which module or card, at which clock.
        peak_tflops: 1e12 operations a second, two a multiply-accumulate, by the type that is multiplied; dense.
            ``tf32`` is what float32 may be multiplied in.
        bandwidth_gb_s: 1e9 bytes a second to and from its memory.
        launch_us: Microseconds that a node costs, whatever it computes.
        source: Where these are from.
    """

    device: str
    peak_tflops: dict[Literal["fp32", "tf32", "fp16", "bf16", "int8"], PositiveFloat] = Field(min_length=1)
    bandwidth_gb_s: PositiveFloat
    launch_us: NonNegativeFloat
    source: tuple[str, ...] = Field(min_length=1)


class NodeEstimate(Record):
    """One node: what it computes (2 a MAC) and moves, how long that takes, and which limit the longer time is from."""

    name: str
    operator: str
    precision: str
    flops: int
    bytes: int
    low_ms: float
    high_ms: float
    limit: Literal["arithmetic", "memory", "launch"]


class EstimateArtefact(Artefact):
    """How long a graph would take: between ``low_ms`` and ``high_ms`` (`repaconv.measure.estimate` says how).

    It is another record than a measurement's, so that no gate, no baseline and no history takes it; its verdict is
    always *not verified*. ``measured_ms`` is what `bench` measured of the same graph on that target, where the run has
    that, ``measurement`` whether that is to be trusted.
    """

    stage: str = "estimate"
    label: Literal["estimated, not measured"] = "estimated, not measured"
    variant: str = ""
    target: str
    runtime: str
    precision: str
    batch: int
    image_size: ImageSize
    threads: int
    model: str
    sha256: str
    limits: Limits
    low_ms: float
    high_ms: float
    nodes: tuple[NodeEstimate, ...]
    measured_ms: float | None = None
    measurement: str = ""
    note: str = ""
