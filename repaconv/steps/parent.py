"""The link from the network before a conversion to the run: lossy, on images that neither fitted nor chose."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from repaconv.artefacts import ConvertArtefact, Link
from repaconv.files import read_artefact, sha256_of, stage_of

if TYPE_CHECKING:
    from torch import nn

    from repaconv.proof.data import Batch
    from repaconv.subjects.subject import Subject

LINK = "converted"
_FOLDED = "folded as stored, float32"


class ParentLink:
    """What the run loses against the network that it was converted from, added up batch by batch."""

    def __init__(self, done: ConvertArtefact, subject: Subject, why_not: str) -> None:
        """``why_not`` says why it cannot be measured; empty if it can."""
        from repaconv.artefacts import Tolerance
        from repaconv.proof.parity import Meter

        self.done, self.subject, self.why_not = done, subject, why_not
        self.parent: nn.Module | None = None if why_not else _parent(done)
        self.meter = Meter(Tolerance(kind="lossy"), logits="logits" in subject.outputs)
        self.judging = self.left_out = 0

    def add(self, batch: Batch) -> None:
        """Those images of a batch that judge; what they were cast for is told by their content."""
        if self.parent is None:
            return
        import torch

        from repaconv.converting.parting import role_of

        judges = np.asarray([role_of(image) == "judging" for image in batch.images])
        self.left_out += int((~judges).sum())
        if not judges.any():
            return
        self.judging += int(judges.sum())
        with torch.inference_mode():
            right = self.parent(torch.from_numpy(batch.images[judges])).numpy()
        (found,) = self.subject.stored.run({"input": batch.images[judges]}).values()
        self.meter.add(found, right, labels=None if batch.labels is None else batch.labels[judges])

    def link(self) -> Link:
        """Judged by the budget that the conversion was asked for."""
        from repaconv.converting.judging import ORIGINAL, Budget, told
        from repaconv.proof.parity import not_verified

        none = f"none of {self.left_out} images judges: all are of those that fitted or chose, by their content"
        if self.why_not or not self.judging:
            return not_verified(LINK, ORIGINAL, _FOLDED, self.why_not or none)
        link = self.meter.link(LINK, ORIGINAL, _FOLDED)
        budget = Budget(self.done.max_disagreement, self.done.max_accuracy_drop)
        note = f"{told(link, budget)}; {self.left_out} images that fit or choose are left out"
        return link.model_copy(update={"verdict": budget.verdict(link), "note": note})


def parent_link(subject: Subject, *, drawn: bool) -> ParentLink | None:
    """Of a run that is a conversion, None of another; ``drawn`` if its images are random ones."""
    path = subject.run.convert_json
    if stage_of(path) != "convert":
        return None
    done = read_artefact(path, ConvertArtefact)
    source = done.payload.sha256 if done.payload else done.parent.sha256
    if source != subject.folded.origin.sha256:  # somebody folded another network into this folder
        return None
    if drawn:
        return ParentLink(done, subject, "random images say nothing of it: give --images or --inputs")
    known = Path(done.parent.path)
    if not known.is_file() or sha256_of(known) != done.parent.sha256:
        return ParentLink(done, subject, f"the network before conversion, {known}, is gone or another")
    return ParentLink(done, subject, "")


def _parent(done: ConvertArtefact) -> nn.Module:
    """As it was read to be converted."""
    from repaconv.checkpoint import read_checkpoint
    from repaconv.converting.plain import Plain, read_plain

    found = read_checkpoint(done.parent.path, done.parent.weights, done.parent.sha256)
    return Plain.of(read_plain(found, dict(done.parent_settings))).net
