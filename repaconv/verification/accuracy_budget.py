"""What may be lost against the network as it was: top-1 predictions and accuracy, as shares of the images."""

from __future__ import annotations

from typing import Any, NamedTuple

from repaconv.results import Link, Reason
from repaconv.verification.tolerances import bounded, by_chance

CHANCE_LIMIT = 0.01
"""More flips than the budget allows are a failure where chance has less than this to do with it."""
SHARE_ROUNDING = 1e-11
"""What the division by the number of images may add to a share: 1 - 95 / 100 must meet a limit of 5%."""


class Budget(NamedTuple):
    """What may be lost, as shares of the images; None is not asked for."""

    max_disagreement: float | None = None
    max_accuracy_drop: float | None = None

    @classmethod
    def of(cls, asked: Any) -> Budget:
        """What an order, or a result, has of it under these names.

        Raises:
            UsageProblem: If one of them is no share, from 0 to 1.
        """
        shares = {name: getattr(asked, name) for name in cls._fields}
        return cls(**{name: share if share is None else bounded(name, share, 1) for name, share in shares.items()})

    @property
    def asked(self) -> bool:
        """Whether there is one."""
        return self != (None, None)

    def allows(self, disagreement: float | None, accuracy: float | None) -> bool:
        """Whether what was measured lies within it.

        Args:
            disagreement: The share of images with another first class; None, where it is not known, is all of them.
            accuracy: How much more of the labeled images are right than before; None, where it is not known, is all
                fewer.
        """
        changed, lost = 1.0 if disagreement is None else disagreement, 1.0 if accuracy is None else -accuracy
        near = self.max_disagreement is None or changed <= self.max_disagreement + SHARE_ROUNDING
        right = self.max_accuracy_drop is None or lost <= self.max_accuracy_drop + SHARE_ROUNDING
        return near and right

    def judged(self, link: Link, note: str = "") -> Link:
        """The link with what the images that judge say; there is nothing that it may differ by but this budget."""
        told = "; ".join(filter(None, [_told(link, self), note]))
        kept = {name: getattr(link, name) for name in ("name", "reference", "candidate", "metrics", "accuracy", "task")}
        return Link.concluded(self._reason(link), note=told, **kept)

    def _reason(self, link: Link) -> Reason:
        """Whether the images that judge speak against it: no more than chance explains."""
        if not self.asked or link.metrics is None:
            return "no_budget"
        flips, images = link.metrics.top1_flips, link.metrics.images
        if link.task is not None:
            flips, images = round(link.task.disagreement * link.task.images), link.task.images
        many = self.max_disagreement is not None and by_chance(flips, images, self.max_disagreement) < CHANCE_LIMIT
        drop = _least_drop(link)
        wrong = self.max_accuracy_drop is not None and drop is not None and drop > self.max_accuracy_drop
        if many or wrong:
            return "exceeds_budget"
        compared = link.task is not None or link.metrics.top1_agreement is not None
        unknown = (self.max_disagreement is not None and not compared) or (
            self.max_accuracy_drop is not None and drop is None
        )
        return "loss_unknown" if unknown else "within_budget"


def _least_drop(link: Link) -> float | None:
    """The least of accuracy that was lost, by its 95% interval; None if it is not known."""
    if link.task is not None:
        return link.task.accuracy.low if link.task.accuracy else None
    return -link.accuracy.high if link.accuracy else None


def _told(link: Link, budget: Budget) -> str:
    """What was measured and allowed, in words."""
    metrics = link.metrics
    words = ["lossy, against the network before conversion"]
    if metrics and metrics.top1_agreement is not None:
        words.append(f"{metrics.top1_agreement:.1%} of {metrics.images} top-1 predictions agree")
    if link.task is not None:
        words.append(f"{link.task.disagreement:.1%} {link.task.changed} ({link.task.images} images)")
    if budget.max_disagreement is not None:
        words.append(f"{budget.max_disagreement:.2%} may differ")
    if budget.max_accuracy_drop is not None:
        words.append(f"{budget.max_accuracy_drop:.2%} of accuracy may go")
    return "; ".join([*words, *([] if budget.asked else ["no budget was given: measured only"])])
