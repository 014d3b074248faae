"""Measure the loss of a conversion against the original network: top-1 predictions, accuracy, error, budget."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from repaconv.conversion.image_splits import Split
from repaconv.conversion.plain_vit import map_batches
from repaconv.results import Link, Tolerance, Tried
from repaconv.tasks.contract import NetworkFacts
from repaconv.tasks.evaluation import Evaluation as TaskEvaluation
from repaconv.tasks.task_of_network import Choice
from repaconv.verification.accuracy_budget import Budget
from repaconv.verification.comparison import link_between

LINK = "converted"
ORIGINAL = "the original, float32"


def of_features() -> TaskEvaluation:
    """The evaluation of a network without classes: what it finds as the nearest image."""
    return TaskEvaluation(Choice("embed", "the network, which outputs features", False, NetworkFacts()), "fp32")


class Evaluation:
    """Compares networks with the outputs of the original on one split of the images."""

    def __init__(self, original: nn.Module | Tensor, part: Split, *, logits: bool) -> None:
        """``original`` is the network, or its outputs on these images if they are already computed."""
        self.part, self.logits = part, logits
        self.right = original if isinstance(original, Tensor) else self._outputs(original)

    def link(self, net: nn.Module, budget: Budget) -> Link:
        """Compare a network with the original, with the verdict of the budget."""
        return self._link(self._outputs(net), budget)

    def tried(self, net: nn.Module | Tensor, blocks: tuple[int, ...], budget: Budget) -> Tried:
        """Measure the loss of a choice of blocks, given the converted network or its outputs."""
        found = net if isinstance(net, Tensor) else self._outputs(net)
        link = self._link(found, Budget())
        agreement = link.metrics.top1_agreement if link.metrics else None
        if not self.logits and budget.is_limited:
            agreement = 1 - self._embedded(found).disagreement()
        accuracy = link.accuracy.difference if link.accuracy else None
        divergence = link.metrics.kl_divergence if link.metrics else None
        tried = Tried(
            blocks=blocks, error=self.error(found), agreement=agreement, accuracy=accuracy, divergence=divergence
        )
        other = None if agreement is None else 1 - agreement
        return tried.model_copy(update={"within": budget.allows(other, accuracy)}) if budget.is_limited else tried

    def _outputs(self, net: nn.Module) -> Tensor:
        with torch.inference_mode():
            return map_batches(net, self.part.images)

    def _link(self, found: Tensor, budget: Budget) -> Link:
        ends = (ORIGINAL, self.right.numpy()), ("converted, float32", found.numpy())
        allowed = Tolerance(kind="lossy")
        link = link_between(LINK, *ends, logits=self.logits, tolerance=allowed, labels=self.part.labels)
        if not self.logits and budget.is_limited:
            link = link.model_copy(update={"task": self._embedded(found).result()})
        return budget.concluded(link)

    def _embedded(self, found: Tensor) -> TaskEvaluation:
        """Features by the nearest images that they find."""
        evaluation = of_features()
        evaluation.add({"features": found.numpy()}, {"features": self.right.numpy()})
        return evaluation

    def error(self, found: Tensor) -> float:
        """Return |found - right| / |right| over all outputs."""
        return float((found - self.right).double().norm() / self.right.double().norm())
