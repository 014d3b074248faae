"""The lossy link between a run and the network before its conversion, evaluated on the test split of the images."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from repaconv.core import run_folder
from repaconv.core.files import read_artefact, stage_of
from repaconv.core.sharded_checkpoint import is_unchanged_checkpoint
from repaconv.results import ConvertArtefact, FinetuneArtefact, FoldArtefact, Link

if TYPE_CHECKING:
    from torch import nn

    from repaconv.sources.source_model import SourceModel
    from repaconv.verification.input_batches import Batch

_FOLDED = "folded as stored, float32"

Lossy = ConvertArtefact | FinetuneArtefact
"""The result of the step that changed the network's outputs."""


class ParentLink:
    """The loss of the run against the network that it was converted from, accumulated batch by batch."""

    def __init__(self, done: Lossy, source_model: SourceModel, why_not: str) -> None:
        """``why_not`` says why it cannot be measured; empty if it can."""
        from repaconv.conversion.conversion_evaluation import of_features
        from repaconv.results import Tolerance
        from repaconv.verification.accuracy_budget import Budget
        from repaconv.verification.comparison import Comparison

        self.done, self.source_model, self.why_not = done, source_model, why_not
        self.parent: nn.Module | None = None if why_not else _parent(done)
        features = source_model.scores is None and Budget.of(done).is_limited
        self.features = of_features() if features else None
        self.compared = Comparison(_FOLDED, Tolerance(kind="lossy"), evaluation=self.features)
        self.tested = self.left_out = 0

    def add(self, batch: Batch) -> None:
        """Compare the test images of a batch; the split of an image follows from its content."""
        if self.parent is None:
            return
        import torch

        from repaconv.conversion.image_splits import role_in_training, role_of

        role = role_in_training if isinstance(self.done, FinetuneArtefact) else role_of
        in_test_split = np.asarray([role(image) == "test" for image in batch.images])
        self.left_out += int((~in_test_split).sum())
        if not in_test_split.any():
            return
        self.tested += int(in_test_split.sum())
        with torch.inference_mode():
            right = self.parent(torch.from_numpy(batch.images[in_test_split])).numpy()
        found = self.source_model.stored.run({"input": batch.images[in_test_split]})
        (output,) = found
        self.compared.add(found, {output: right}, labels=None if batch.labels is None else batch.labels[in_test_split])

    def link(self) -> Link:
        """The link, evaluated by the accuracy budget of the conversion."""
        from repaconv.conversion.conversion_evaluation import LINK, ORIGINAL
        from repaconv.verification.accuracy_budget import Budget
        from repaconv.verification.comparison import not_verified

        none = f"none of {self.left_out} images is a test image: all were used for calibration or validation"
        if self.why_not or not self.tested:
            return not_verified(LINK, ORIGINAL, _FOLDED, self.why_not or none)
        budget = Budget.of(self.done)
        left_out = f"{self.left_out} images of the calibration and validation splits are left out"
        link, *of_task = self.compared.links(LINK, ORIGINAL)
        link = link.model_copy(update={"task": of_task[0].task}) if of_task else link
        return budget.concluded(link, left_out)


def conversion_of(run: run_folder.Run, folded: FoldArtefact) -> ConvertArtefact | None:
    """The conversion that made a run's network; None if it is not a conversion.

    Its folder may contain the file of a conversion whose network was replaced by another fold.
    """
    if stage_of(run.convert_json) != "convert":
        return None
    done = read_artefact(run.convert_json, ConvertArtefact)
    source = done.payload.sha256 if done.payload else done.parent.sha256
    return done if source == folded.origin.sha256 else None


def training_of(run: run_folder.Run, folded: FoldArtefact) -> FinetuneArtefact | None:
    """The fine-tuning that made a run's network; None if it was not fine-tuned."""
    if stage_of(run.folder / run_folder.FINETUNE_JSON) != "finetune":
        return None
    done = read_artefact(run.folder / run_folder.FINETUNE_JSON, FinetuneArtefact)
    return done if done.payload and done.payload.sha256 == folded.origin.sha256 else None


def parent_link(source_model: SourceModel, *, random_images: bool) -> ParentLink | None:
    """The link to the network before conversion; None if the run is not a conversion.

    ``random_images`` says that the images are random.
    """
    done = conversion_of(source_model.run, source_model.folded) or training_of(source_model.run, source_model.folded)
    if done is None:
        return None
    if random_images:
        return ParentLink(done, source_model, "random images say nothing of it: give --images or --inputs")
    known = Path(done.parent.path)
    if not is_unchanged_checkpoint(known, done.parent.sha256):
        return ParentLink(done, source_model, f"the network before conversion, {known}, is gone or another")
    return ParentLink(done, source_model, "")


def _parent(done: Lossy) -> nn.Module:
    """The network before conversion."""
    from repaconv.checkpoints import read_checkpoint
    from repaconv.conversion.finetuning.original_networks import read_original

    found = read_checkpoint(done.parent.path, done.parent.weights, done.parent.sha256)
    return read_original(found, dict(done.parent_settings)).net
