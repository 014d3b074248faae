"""The result of ``compare``: two models on the same inputs."""

from __future__ import annotations

from repaconv.results.bench import BenchArtefact
from repaconv.results.records import Artefact, Link, Record


class ComparedEnd(Record):
    """One of the two models of a comparison: what runs it, in which precision, and its size.

    Attributes:
        name: The path of the model, with ``as folded`` or ``as trained`` if weights were run instead of a model file.
        engine: The runtime and its version; ``torch`` for weights.
        precision: The precision that the model computes in, e.g. ``fp32`` or ``int8``.
        sha256: The SHA-256 of the model file, of the folded weights, or of the checkpoint.
        bytes: The size in bytes of the model file with its external weights, or of the weights.
        parameters: The number of elements of the constants of an ONNX model, without indices and other integers of more
            than 8 bits; null for others.
        nodes: The number of nodes of an ONNX model; null for others.
    """

    name: str
    engine: str
    precision: str
    sha256: str
    bytes: int | None = None
    parameters: int | None = None
    nodes: int | None = None


class CompareArtefact(Artefact):
    """The result of ``compare``: two models on the same inputs.

    Attributes:
        stage: The command that wrote this result, ``compare``.
        reference: The model that the other is compared with.
        candidate: The model that is evaluated.
        inputs: What the inputs were, e.g. ``4 random images, seed 0``.
        links: The comparison of each output.
        measured: The latency of the candidate and the reference; null without ``--speed``.
    """

    stage: str = "compare"
    reference: ComparedEnd
    candidate: ComparedEnd
    inputs: str
    links: tuple[Link, ...]
    measured: BenchArtefact | None = None

    @property
    def inconclusive(self) -> bool:
        """Whether the measurement is."""
        return self.measured is not None and self.measured.quality.verdict == "inconclusive"
