"""What ``verify`` leaves: the links of the chain of proof."""

from __future__ import annotations

from repaconv.artefacts.records import Artefact, Claim, Link, Metrics


class VerifyArtefact(Artefact):
    """The links of the chain over one set of inputs; ``for_scale`` is measured and not judged.

    ``required`` are the links that must have been run. ``claims`` are the accuracies in the checkpoint's own record, to
    stand beside those of the links.
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
