"""What ``fold`` leaves: the folded model whole, of a checkpoint or of a graph."""

from __future__ import annotations

from typing import Any, Literal

from repaconv.artefacts.records import (
    Artefact,
    Change,
    Cost,
    Fact,
    ImageSize,
    Link,
    Origin,
    Payload,
    Preprocessing,
    Record,
    TensorInfo,
)


class FoldStep(Record):
    """One row of the fold certificate: what went where, and the float64 difference it makes.

    ``max_rel_error`` is max|folded - training| / max|training| of the module's output on random input, or of its
    weights where those alone change. ``allowed`` is what this step alone may differ by; where that is not the
    policy's, ``reason`` says why. A method leaves it None for the policy's.
    """

    module: str
    folded: tuple[str, ...]
    left: tuple[str, ...] = ()
    equation: str = ""
    max_rel_error: float
    allowed: float | None = None
    reason: str = ""


class FoldArtefact(Artefact):
    """The folded model, whole: later stages rebuild it from this and ``model.safetensors`` alone.

    ``applied`` names all that was folded: the method, and what the checkpoint carried besides (LoRA, LayerScale).
    ``form`` is how it will be written, by name, ``rewrites`` that in full; None leaves it to the target of the export.
    ``tolerances`` are those of the links that this net cannot hold at the policy's. ``claims`` are the accuracies that
    the checkpoint's own record has.
    """

    stage: str = "fold"
    origin: Origin
    method: str
    applied: tuple[str, ...]
    settings: dict[str, str]
    backbone: str
    config: dict[str, Any]
    form: str
    rewrites: tuple[str, ...] | None = None
    facts: tuple[Fact, ...]
    claims: tuple[Fact, ...] = ()
    preprocessing: Preprocessing
    image_size: ImageSize
    any_image_size: bool
    output: Literal["logits", "features"]
    tensors: tuple[TensorInfo, ...]
    training: Cost
    deploy: Cost
    tolerances: dict[str, float]
    certificate: tuple[FoldStep, ...]
    payload: Payload


class OnnxFoldArtefact(Artefact):
    """An ONNX graph with everything folded that needs no knowledge of its method; beside it, the folded graph.

    ``changes`` say what was done where, ``links`` compare the outputs before and after. ``macs`` are those of one call
    with free sizes at 1, before and after; None where shapes are not known. ``left`` says what was left alone and why,
    and which linear operators still stand behind or beside another. ``verdict`` is passed where a link passed and none
    failed; outputs that could not be compared are links that are *not verified*, by name. ``payload`` is None where
    there was nothing to fold: then nothing was written, and nothing is verified.
    """

    stage: str = "fold"
    source: str
    sha256: str
    bytes: int
    opset: int
    parameters: tuple[int, int]
    macs: tuple[int, int] | None
    nodes: tuple[int, int]
    operators: dict[str, int]
    changes: tuple[Change, ...]
    left: tuple[str, ...] = ()
    links: tuple[Link, ...] = ()
    payload: Payload | None = None
