"""The result of ``verify``: the links of the verification chain."""

from __future__ import annotations

from repaconv.results.records import Artefact, Claim, Link, Metrics


class VerifyArtefact(Artefact):
    """The result of ``verify``: the verification chain of a run, on one set of inputs.

    Attributes:
        stage: The command that wrote this result, ``verify``.
        policy: The version of the table of tolerances.
        inputs: What the inputs were, e.g. ``4 random images, seed 0``.
        input_shape: The number of images, channels, height and width; the number of inferences alone for other inputs.
        model_sha256: The SHA-256 of the folded model that was verified.
        required: The links that ``--require`` named: each fails if it could not be run.
        labels: Where the labels of the images come from or why there are none, and which output is compared as class
            scores; may be empty.
        preprocessing: How image files were preprocessed; empty for random images and .npz files.
        claims: The accuracies that the checkpoint itself records, to be compared with those of the links.
        links: All links with their verdicts, in the order of the chain.
        for_scale: What FP32 rounding alone changes: the training form in float32 compared with itself in float64, on
            the first batch, by name and output. It has no verdict.
    """

    stage: str = "verify"
    policy: str
    inputs: str
    input_shape: tuple[int, ...]
    model_sha256: str
    required: tuple[str, ...] = ()
    labels: str = ""
    preprocessing: str = ""
    claims: tuple[Claim, ...] = ()
    links: tuple[Link, ...]
    for_scale: dict[str, Metrics]
