"""The budget of a lossy conversion: how many top-1 predictions may change, and how much accuracy may be lost."""

from __future__ import annotations

from typing import Any, NamedTuple

from repaconv.results import Link, Reason
from repaconv.verification.tolerances import CHANCE_LIMIT, bounded, by_chance

SHARE_ROUNDING = 1e-11
"""The rounding error of a share of images: 1 - 95 / 100 must meet a limit of 5%."""


class Budget(NamedTuple):
    """The largest loss that is allowed, as shares of the images; None for no limit."""

    max_disagreement: float | None = None
    max_accuracy_drop: float | None = None

    @classmethod
    def of(cls, options: Any) -> Budget:
        """Return the budget in options, or in a result, from the attributes of the same names.

        Raises:
            UsageProblem: If a limit is not from 0 to 1.
        """
        shares = {name: getattr(options, name) for name in cls._fields}
        for name, share in shares.items():
            if share is not None:
                bounded(f"the share --{name.replace('_', '-')}", share, 1, is_share=True)
        return cls(**shares)

    @property
    def is_limited(self) -> bool:
        """Whether there is a limit."""
        return self != (None, None)

    def allows(self, disagreement: float | None, accuracy: float | None) -> bool:
        """Whether a measured loss is within the budget.

        Args:
            disagreement: The share of images with a changed top-1 prediction; None if unknown, which counts as all.
            accuracy: The change of the accuracy; None if unknown, which counts as a loss of all.
        """
        changed, lost = 1.0 if disagreement is None else disagreement, 1.0 if accuracy is None else -accuracy
        few_changed = self.max_disagreement is None or changed <= self.max_disagreement + SHARE_ROUNDING
        little_lost = self.max_accuracy_drop is None or lost <= self.max_accuracy_drop + SHARE_ROUNDING
        return few_changed and little_lost

    def concluded(self, link: Link, note: str = "") -> Link:
        """Return the link with the verdict of this budget alone, on the images that it was evaluated on."""
        words = "; ".join(filter(None, [_loss_and_budget_text(link, self), note]))
        kept = {name: getattr(link, name) for name in ("name", "reference", "candidate", "metrics", "accuracy", "task")}
        return Link.concluded(self._reason(link), note=words, **kept)

    def _reason(self, link: Link) -> Reason:
        """Return the reason of the verdict; a loss above the budget that chance explains is no failure."""
        if not self.is_limited or link.metrics is None:
            return "no_budget"
        flips, images = link.metrics.top1_flips, link.metrics.images
        if link.task is not None:
            flips, images = round(link.task.disagreement * link.task.images), link.task.images
        too_many_changed = (
            self.max_disagreement is not None and by_chance(flips, images, self.max_disagreement) < CHANCE_LIMIT
        )
        drop = _least_drop(link)
        too_much_lost = self.max_accuracy_drop is not None and drop is not None and drop > self.max_accuracy_drop
        if too_many_changed or too_much_lost:
            return "exceeds_budget"
        compared = link.task is not None or link.metrics.top1_agreement is not None
        unknown = (self.max_disagreement is not None and not compared) or (
            self.max_accuracy_drop is not None and drop is None
        )
        return "loss_unknown" if unknown else "within_budget"


def _least_drop(link: Link) -> float | None:
    """Return the smallest accuracy loss in its 95% interval; None if the accuracy is unknown."""
    if link.task is not None:
        return link.task.accuracy.low if link.task.accuracy else None
    return -link.accuracy.high if link.accuracy else None


def _loss_and_budget_text(link: Link, budget: Budget) -> str:
    """Describe the measured loss and the budget."""
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
    return "; ".join([*words, *([] if budget.is_limited else ["no budget was given: measured only"])])
