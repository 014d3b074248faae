"""The results of ``bundle`` and ``collect``: what is sent to a board, and what it returns."""

from __future__ import annotations

from typing import Any

from repaconv.results.bench import Latency
from repaconv.results.link_reasons import Verdict
from repaconv.results.records import Artefact, Link, Payload, Record, Tolerance


class BundleArtefact(Artefact):
    """The result of ``bundle``: a model packed for a board, with inputs and expected outputs.

    Attributes:
        stage: The command that wrote this result, ``bundle``.
        variant: The name of the model in the run: target, precision and what else differs from the default.
        target: The name of the target.
        runtime_version: The TensorRT version that the target is for, e.g. ``10.3``.
        precision: The precision of the ONNX model, in which the board is to compute.
        inputs: What the inputs are, e.g. ``4 random images, seed 0``.
        images: The number of images, or of inferences for other inputs, whose expected outputs are in the bundle.
        batch: The batch size of each inference; the last batch is filled up with repeated images, which are not
            compared.
        tolerance: The difference that is allowed between the outputs of the board's engine and the expected ones.
        inside: The name of the folder in the tarball that contains all files.
        bundle_sha256: The SHA-256 of ``bundle.json`` in the tarball, by which the board's result refers to the bundle.
        onnx_sha256: The SHA-256 of the ONNX model.
        payload: The tarball.
    """

    stage: str = "bundle"
    variant: str = ""
    target: str
    runtime_version: str
    precision: str
    inputs: str
    images: int
    batch: int
    tolerance: Tolerance
    inside: str
    bundle_sha256: str
    onnx_sha256: str
    payload: Payload


class LayerTime(Record):
    """The time of one layer of an engine, from the profile of the runtime.

    Attributes:
        name: The name of the layer, as the runtime reports it.
        mean_ms: The mean time of the layer in milliseconds.
    """

    name: str
    mean_ms: float


class CollectArtefact(Artefact):
    """The result of ``collect``: how the engine that a board built from a bundle computes, and how fast.

    Attributes:
        stage: The command that wrote this result, ``collect``.
        variant: The name of the model in the run, as in the bundle.
        target: The name of the target.
        runtime: The runtime of the board with its version, e.g. ``tensorrt 10.3.0``; the verdict is failed if its major
            or minor version is not the target's.
        precision: The precision that was asked for.
        batch: The batch size.
        links: The comparison of the engine's outputs with the training form in float64, for each output.
        precision_proof: Whether the engine computes in ``precision``; ``not verified`` if it does not list the data
            types of its layers.
        layer_types: The number of layers that compute convolutions and matrix products, by kind and data type; empty if
            the engine does not list them.
        fused_attentions: The number of kernels that compute a whole attention; 0 also if the engine does not list its
            layers.
        latency: The latency of the GPU's kernels, without copies to and from the GPU.
        printed_median_ms: The median in milliseconds that trtexec printed for the same run, to be compared with
            ``latency``; null if it printed none.
        profile: The mean time of each layer; empty if trtexec wrote no profile.
        machine: ``board``: model, system and power mode; ``before`` and ``after``: load, temperatures and clock rates
            before and after the measurement.
        commands: The commands that were run on the board.
        note: How many layers compute in ``precision``, or why that is not known, and whether the TensorRT version
            differs.
        bundle_sha256: The ``bundle_sha256`` of the bundle that was run.
        result_sha256: The SHA-256 of the tarball that the board wrote.
    """

    stage: str = "collect"
    variant: str = ""
    target: str
    runtime: str
    precision: str
    batch: int
    links: tuple[Link, ...]
    precision_proof: Verdict
    layer_types: dict[str, int]
    fused_attentions: int
    latency: Latency
    printed_median_ms: float | None
    profile: tuple[LayerTime, ...]
    machine: dict[str, Any]
    commands: tuple[str, ...]
    note: str
    bundle_sha256: str
    result_sha256: str
