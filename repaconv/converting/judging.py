"""What a conversion costs, against the network as it was: first classes, accuracy, and a budget of either."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from repaconv.artefacts import Link, Tolerance, Tried, Verdict
from repaconv.converting.parting import Part
from repaconv.converting.plain import mapped
from repaconv.proof.parity import Meter
from repaconv.proof.verdicts import by_chance

LINK = "converted"
ORIGINAL = "the original, float32"
UNLIKELY = 0.01
"""More flips than the budget allows are a failure where chance has less than this to do with it."""


class Budget(NamedTuple):
    """What may be lost, as shares of the images; None is not asked for."""

    max_disagreement: float | None = None
    max_accuracy_drop: float | None = None

    @property
    def asked(self) -> bool:
        """Whether there is one."""
        return self != (None, None)

    def allows(self, tried: Tried) -> bool:
        """Whether what was measured on the images that choose lies within it."""
        near = self.max_disagreement is None or 1 - (tried.agreement or 0.0) <= self.max_disagreement
        right = self.max_accuracy_drop is None or -(tried.accuracy or 0.0) <= self.max_accuracy_drop
        return near and right

    def judged(self, link: Link, note: str = "") -> Link:
        """The link with what the images that judge say; there is nothing that it may differ by but this budget."""
        told = "; ".join(filter(None, [_told(link, self), note]))
        return link.model_copy(update={"tolerance": None, "verdict": self.verdict(link), "note": told})

    def verdict(self, link: Link) -> Verdict:
        """Whether the images that judge speak against it: no more than chance explains."""
        if not self.asked or link.metrics is None:
            return "not verified"
        flips, images, lost = link.metrics.top1_flips, link.metrics.images, link.accuracy
        many = self.max_disagreement is not None and by_chance(flips, images, self.max_disagreement) < UNLIKELY
        wrong = self.max_accuracy_drop is not None and lost is not None and lost.high < -self.max_accuracy_drop
        return "failed" if many or wrong else "passed"


class Judge:
    """The original's outputs on a part of the images, to which others are held."""

    def __init__(self, original: nn.Module | Tensor, part: Part, *, logits: bool) -> None:
        """``original`` is the network, or its outputs on these images where they are known."""
        self.part, self.logits = part, logits
        self.right = original if isinstance(original, Tensor) else self._outputs(original)

    def link(self, net: nn.Module, budget: Budget) -> Link:
        """The link between the two, judged by the budget."""
        return self._link(self._outputs(net), budget)

    def tried(self, net: nn.Module | Tensor, blocks: tuple[int, ...], budget: Budget) -> Tried:
        """What a choice of blocks costs, by the network or its outputs."""
        found = net if isinstance(net, Tensor) else self._outputs(net)
        link = self._link(found, Budget())
        agreement = link.metrics.top1_agreement if link.metrics else None
        accuracy = link.accuracy.difference if link.accuracy else None
        divergence = link.metrics.kl_divergence if link.metrics else None
        tried = Tried(
            blocks=blocks, error=self.error(found), agreement=agreement, accuracy=accuracy, divergence=divergence
        )
        return tried.model_copy(update={"within": budget.allows(tried)}) if budget.asked else tried

    def _outputs(self, net: nn.Module) -> Tensor:
        with torch.inference_mode():
            return mapped(net, self.part.images)

    def _link(self, found: Tensor, budget: Budget) -> Link:
        meter = Meter(Tolerance(kind="lossy"), logits=self.logits)
        meter.add(found.numpy(), self.right.numpy(), labels=self.part.labels)
        return budget.judged(meter.link(LINK, ORIGINAL, "converted, float32"))

    def error(self, found: Tensor) -> float:
        """|found - right| / |right| over all outputs."""
        return float((found - self.right).double().norm() / self.right.double().norm())


def _told(link: Link, budget: Budget) -> str:
    """What was measured and allowed, in words."""
    metrics = link.metrics
    words = ["lossy, against the network before conversion"]
    if metrics and metrics.top1_agreement is not None:
        words.append(f"{metrics.top1_agreement:.1%} of {metrics.images} first classes agree")
    if budget.max_disagreement is not None:
        words.append(f"{budget.max_disagreement:.2%} may differ")
    if budget.max_accuracy_drop is not None:
        words.append(f"{budget.max_accuracy_drop:.2%} of accuracy may go")
    return "; ".join([*words, *([] if budget.asked else ["no budget was given: measured, not judged"])])
