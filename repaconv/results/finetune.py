"""Results of ``finetune``: every epoch, which was taken, and what the network loses against the original."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from repaconv.results.convert import Share
from repaconv.results.records import Artefact, Link, Origin, Payload, Record


class Epoch(Record):
    """The network after one epoch, evaluated against the original network on the validation split.

    Attributes:
        cost: What decides which epoch is taken, the smaller the better: the mean KL divergence from the original's
            class probabilities in nats, or for features the relative error ||a - b|| / ||b||.
        agreement: The share (0 to 1) of images with the same top-1 prediction as the original; null if the network
            outputs features.
        accuracy: The top-1 accuracy minus that of the original, as a share; null without labels.
        loss: The mean training loss of the epoch; null for the start.
    """

    cost: float
    agreement: float | None = None
    accuracy: float | None = None
    loss: float | None = None


class FinetuneArtefact(Artefact):
    """A network trained from the result of ``convert``, with the original network as teacher.

    The verdict is whether the budget of the conversion is kept, and *not verified* without a budget. While training is
    interrupted it is *not verified*, ``payload`` is null, and ``other_files`` has the state from which it resumes.

    Attributes:
        start: The checkpoint from which training started: the converted network, or the original one if that has the
            same weights.
        parent: The checkpoint of the original network, before conversion, and which weights of it were read.
        parent_settings: The settings with which the original is read, by name, as text.
        settings: The settings with which the fold reads the trained network, by name, as text.
        method: The registered name of the method whose network it is.
        teacher: The checkpoint whose outputs it learned: that of ``--teacher``, or ``parent``.
        inputs: The images, in words, e.g. the name of the folder or file.
        images: How many images are in each split.
        labels: Where the labels of the images are from, or why there are none; empty if an .npz file has none.
        images_sha256: The SHA-256 of all images and labels in their order; an interrupted training resumes with the
            same ones only.
        precision: What matrix products were computed in during training: ``fp32`` or ``bf16``.
        lr: The largest learning rate; it rises linearly to it and then falls along a cosine.
        planned_epochs: The number of epochs that were asked for.
        epochs: The start, then each epoch that is done, on the validation split.
        best_epoch: The index in ``epochs`` of the one with the least ``cost``, which is taken; 0 is the start.
        max_disagreement: The budget of the conversion: the largest share (0 to 1) of changed top-1 predictions; null if
            none was given.
        max_accuracy_drop: The budget of the conversion: the largest loss of top-1 accuracy, as a share (0 to 1); null
            if none was given.
        evaluation: The comparison of the network that was taken with the original, on the test split; null while
            training is interrupted.
        start_evaluation: The same comparison of the network at the start; null while training is interrupted.
        payload: The trained network as a checkpoint of its method; null while training is interrupted.
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
