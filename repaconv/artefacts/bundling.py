"""What ``bundle`` and ``collect`` leave: what goes to a board, and what comes back."""

from __future__ import annotations

from typing import Any

from repaconv.artefacts.benching import Latency
from repaconv.artefacts.records import Artefact, Link, Payload, Record, Tolerance, Verdict


class BundleArtefact(Artefact):
    """A model packed for a board; ``bundle_sha256`` is that of ``bundle.json`` in it, by which a result names it.

    ``images`` counts those, or the calls, whose expected outputs are in it, ``inside`` is the folder that all of it is
    in, ``tolerance`` says what the board's engine is held to.
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
    """Mean milliseconds of one layer of an engine, by the runtime's own profile."""

    name: str
    mean_ms: float


class CollectArtefact(Artefact):
    """What a board made of a bundle.

    ``latency`` is of the GPU's kernels alone, as ``printed_median_ms`` is, which trtexec said of the same run.
    ``precision_proof`` is *not verified* where the engine's layers do not tell their types; ``fused_attentions`` counts
    kernels that compute a whole attention. ``machine`` is the board before and after.
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
