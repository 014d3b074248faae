"""What ``save`` leaves: a folder in the layout of model hubs."""

from __future__ import annotations

from repaconv.artefacts.records import Artefact, Link, Payload


class SaveArtefact(Artefact):
    """A folded network in an architecture that timm or transformers loads.

    ``arch`` is that architecture: norms and scales that were folded stand in it, and do nothing. ``links`` hold it to
    the training form in float64: its numbers as they were found, and the folder as its library loads it.
    ``payload`` is ``model.safetensors``, the rest is ``beside``.
    """

    stage: str = "save"
    arch: str
    payload: Payload
    links: tuple[Link, ...]
