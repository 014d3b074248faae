"""What ``finetune`` leaves: how every epoch did, which was kept, and what the network costs against the original."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from repaconv.artefacts.converting import Share
from repaconv.artefacts.records import Artefact, Link, Origin, Payload, Record


class Epoch(Record):
    """An epoch on the images that choose.

    ``cost`` is the KL divergence from the original's first classes, or the relative error of features; ``agreement``
    and ``accuracy`` are as those of `Tried`. ``loss`` is the mean over what was learnt from; the start has none.
    """

    cost: float
    agreement: float | None = None
    accuracy: float | None = None
    loss: float | None = None


class FinetuneArtefact(Artefact):
    """A network trained from a conversion, or from an untrained training form; ``start`` is that checkpoint.

    ``epochs`` begins with the start; ``best_epoch`` is the best of them on the images that choose. ``evaluation`` is
    what that one costs against ``parent``, the network before conversion, on images that neither trained nor chose, and
    ``start_evaluation`` the same of the start. While epochs are left, ``payload`` is None and ``beside`` has the state
    to go on from.
    """

    FORMER: ClassVar[Mapping[str, str]] = {
        "rate": "lr",
        "judged": "evaluation",
        "judged_start": "start_evaluation",
        "started": "start",
        "kept": "best_epoch",
        "planned": "planned_epochs",
    }

    stage: str = "finetune"
    start: Origin
    parent: Origin
    parent_settings: dict[str, str]
    settings: dict[str, str]
    method: str
    teacher: Origin
    inputs: str
    images: Share
    labels: str = ""
    images_sha256: str
    precision: str
    lr: float
    planned_epochs: int
    epochs: tuple[Epoch, ...]
    best_epoch: int
    max_disagreement: float | None = None
    max_accuracy_drop: float | None = None
    evaluation: Link | None = None
    start_evaluation: Link | None = None
    payload: Payload | None = None

    @property
    def complete(self) -> bool:
        """Whether no epoch is left."""
        return self.payload is not None
