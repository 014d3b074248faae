"""The result of ``save``: a folder in the layout of model hubs."""

from __future__ import annotations

from repaconv.results.records import Artefact, Link, Payload


class SaveArtefact(Artefact):
    """The result of ``save``: a folded network in an architecture that timm or transformers loads.

    The norms and scales that were folded are still in the architecture, and compute the identity.

    Attributes:
        stage: The command that wrote this result, ``save``.
        arch: The architecture as ``--arch`` takes it, e.g. ``timm:mobileone_s1``.
        payload: ``model.safetensors``; ``config.json`` and the model card are in ``other_files``.
        links: Two comparisons with the training form in float64: ``fold``, of the folded numbers in the architecture,
            and ``stored``, of the folder as its library loads it.
    """

    stage: str = "save"
    arch: str
    payload: Payload
    links: tuple[Link, ...]
