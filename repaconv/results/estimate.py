"""Results of ``bench --estimate``: how long a graph would take on a device, by calculation alone."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from repaconv.results.records import Artefact, ImageSize, Record


class Limits(Record):
    """The peak figures of a device, from which an estimate is calculated.

    Attributes:
        device: The device in words: e.g. which module or GPU, and at which clock.
        peak_tflops: The peak in 1e12 operations/s, 2 for each MAC, without sparsity, by the type that is multiplied.
            ``tf32`` is what float32 may be multiplied in.
        bandwidth_gb_s: The bandwidth to and from its memory, in 1e9 bytes/s.
        launch_us: The time that every node costs whatever it computes, in microseconds.
        source: Where these figures are from: data sheets, or a measurement on this machine.
    """

    device: str
    peak_tflops: dict[Literal["fp32", "tf32", "fp16", "bf16", "int8"], PositiveFloat] = Field(min_length=1)
    bandwidth_gb_s: PositiveFloat
    launch_us: NonNegativeFloat
    source: tuple[str, ...] = Field(min_length=1)


class NodeEstimate(Record):
    """The estimated time of one node: from what it computes and what it moves in memory.

    Attributes:
        name: The name of the node.
        operator: The operator of the node.
        precision: The type that the node multiplies in; of a node that multiplies nothing, the type of its output.
        flops: Floating-point operations per inference, 2 for each MAC; 0 for a node that multiplies nothing, or if it
            is not known.
        bytes: The bytes that the node reads and writes, each once; 0 if it moves nothing, or if it is not known.
        low_ms: The lower end of its time in ms: at the peak figures, without a launch. It is 0 for a node other than a
            matrix product, convolution or attention, as a runtime may fuse it.
        high_ms: The upper end of its time in ms: at half of the peak figures, plus a launch.
        limit: What takes longest of ``high_ms``: ``arithmetic``, ``memory`` or ``launch``.
    """

    name: str
    operator: str
    precision: str
    flops: int
    bytes: int
    low_ms: float
    high_ms: float
    limit: Literal["arithmetic", "memory", "launch"]


class EstimateArtefact(Artefact):
    """The estimated latency of a graph: between ``low_ms`` and ``high_ms``; see `repaconv.benchmark.latency_estimate`.

    It is not a measurement: gates, baselines and histories do not use it, and its verdict is always *not verified*.

    Attributes:
        label: Always ``estimated, not measured``.
        variant: The export that is estimated, by target, precision and whatever else is not the default, e.g.
            ``h100.fp16``; empty for an ONNX file without a run.
        target: The target, by name.
        runtime: The runtime of the target, with the version that the target states.
        precision: The precision that the graph would compute in.
        batch: The batch size.
        image_size: (height, width) in pixels.
        threads: The number of threads per inference, for which the limits of a CPU are measured.
        model: The name of the ONNX file.
        sha256: The SHA-256 of the ONNX file.
        limits: The peak figures of the device.
        low_ms: The lower end of the latency in ms: the sum over ``nodes``.
        high_ms: The upper end of the latency in ms: the sum over ``nodes``. Inefficient kernels may take longer.
        nodes: The estimate of each node that costs something, in the order of the graph.
        measured_ms: The median latency in ms that ``bench`` or a board measured of the same file with the same target
            and sizes; null if the run has no such measurement.
        measurement: What made that measurement, and whether it is trusted, in words; empty if there is none.
        note: What else is to be known, e.g. operators that the estimate leaves out; empty if nothing is.
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
