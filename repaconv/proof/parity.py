"""How two outputs differ, measured batch by batch, and when that counts.

Polygraphy's comparators hold all outputs of both sides at once, know no classes, and have no verdict on a flip; what
is here runs over any number of images in constant memory.
"""

from __future__ import annotations

from math import exp, lgamma, log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from repaconv.artefact import Accuracy, Link, Metrics, Tolerance, Verdict
from repaconv.proof.accuracy import Counts
from repaconv.proof.policy import LUCK

Array = NDArray[np.floating]
EXAMPLES = 10


class Meter:
    """Adds up how a candidate's output differs from the reference's.

    Args:
        tolerance: Of the link: it says which flips matter, and from which error on a lost decision is looked for.
        logits: Whether outputs are logits [N, K].
    """

    def __init__(self, tolerance: Tolerance, *, logits: bool) -> None:
        self.tolerance, self.logits = tolerance, logits
        self.counts = Counts()
        self.worst = 0
        """The image with the largest error so far."""
        self._images = self._numbers = self._undecided = 0
        self._largest = self._scale = self._sum = self._kl = 0.0
        self._cosine = 1.0
        self._leads: list[float] = []
        self._flips: list[tuple[int, float]] = []

    def add(
        self,
        candidate: Array,
        reference: Array,
        *,
        labels: NDArray[np.int64] | None = None,
        undecided: NDArray[np.bool_] | None = None,
    ) -> None:
        """One batch, [N, ...] each.

        Args:
            candidate: Output of one end.
            reference: Output of the other.
            labels: Class of each image, -1 where unknown.
            undecided: Images in which rounding may decide what merges; those that differ are left out.

        Raises:
            ValueError: If the shapes differ or there is no image.
        """
        if candidate.shape != reference.shape or candidate.ndim < 2 or not len(candidate):
            raise ValueError(f"cannot compare outputs of shape {candidate.shape} and {reference.shape}")
        a, b = (output.astype(np.float64).reshape(len(output), -1) for output in (candidate, reference))
        first = self._images + self._undecided
        rows = first + np.arange(len(b))
        if undecided is not None and undecided.any():
            with np.errstate(invalid="ignore"):
                apart = ~(np.abs(a - b).max(1) <= (self.tolerance.rtol or 0.0) * np.abs(b).max())
            kept = ~(undecided & apart)
            self._undecided += int((~kept).sum())
            a, b, rows = a[kept], b[kept], rows[kept]
            labels = None if labels is None else labels[kept]
            if not len(b):
                return
        self._images += len(b)
        self._scale = max(self._scale, float(np.abs(b).max(initial=0.0)))
        with np.errstate(invalid="ignore", over="ignore"):
            error = np.abs(a - b)
            each = error.max(1)
            if not float(each.max()) <= self._largest and np.isfinite(self._largest):
                self.worst = int(rows[int(each.argmax())])
            self._largest = float(np.maximum(self._largest, each.max()))  # NaN stays
            self._sum += float(error.sum())
            self._numbers += error.size
            lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
            cosines = np.where(lengths > 0, (a * b).sum(1) / np.where(lengths > 0, lengths, 1), (a == b).all(1))
            self._cosine = float(np.minimum(self._cosine, cosines.min()))
        if self.logits and b.shape[1] > 1:
            self._add_classes(a, b, rows)
        if labels is not None:
            self.counts.add(a.argmax(1) == labels, b.argmax(1) == labels, labels >= 0)

    def _add_classes(self, a: Array, b: Array, rows: NDArray[np.int64]) -> None:
        with np.errstate(invalid="ignore", over="ignore"):
            log_a, log_b = _log_softmax(a), _log_softmax(b)
            self._kl += float((np.exp(log_b) * (log_b - log_a)).sum())
        each = np.arange(len(b))
        chosen, wanted = a.argmax(1), b.argmax(1)
        top = np.partition(b, -2, axis=1)
        self._leads += (top[:, -1] - top[:, -2]).tolist()
        leads = b[each, wanted] - b[each, chosen]
        for place in np.flatnonzero(chosen != wanted):
            self._flips.append((int(rows[place]), float(leads[place])))

    def metrics(self) -> Metrics:
        """What was added up.

        Raises:
            ValueError: If there was no image.
        """
        if not self._images:
            raise ValueError("no image was compared")
        scale = self._scale or 1.0
        found: dict[str, Any] = {}
        if np.isfinite(margin := min(self._leads, default=np.inf)):
            flips = sorted(((row, lead / scale) for row, lead in self._flips), key=lambda flip: -flip[1])
            matter = sum(lead > self.tolerance.noise for _, lead in flips)
            found = {
                "kl_divergence": self._kl / self._images,
                "top1_agreement": 1 - len(flips) / self._images,
                "top1_smallest_margin": margin / scale,
                "top1_flips": len(flips),
                "top1_flips_that_matter": matter,
                "top1_flips_within_noise": len(flips) - matter,
                "top1_close": sum(lead / scale <= self.tolerance.noise for lead in self._leads),
                "examples": tuple(flips[:EXAMPLES]),
            }
        return Metrics(
            images=self._images,
            max_abs_error=self._largest,
            max_rel_error=self._largest / scale,
            mean_abs_error=self._sum / self._numbers,
            cosine=self._cosine,
            undecided=self._undecided,
            **found,
        )

    def link(self, name: str, reference: str, candidate: str, note: str = "") -> Link:
        """The link with its verdict."""
        if not self._images:
            why = f"in all {self._undecided} images rounding decides which tokens merge"
            return not_verified(name, reference, candidate, why)
        metrics, accuracy = self.metrics(), self.counts.accuracy()
        words = lossy_words(metrics, self.tolerance, accuracy) if self.tolerance.kind == "lossy" else ""
        return Link(
            name=name,
            reference=reference,
            candidate=candidate,
            tolerance=self.tolerance,
            metrics=metrics,
            verdict=_verdict(metrics, self.tolerance, accuracy),
            note="; ".join(filter(None, [note, words])),
            accuracy=accuracy,
        )


def _verdict(metrics: Metrics, allowed: Tolerance, accuracy: Accuracy | None) -> Verdict:
    """NaN passes nothing."""
    if allowed.kind == "exact":
        relative = allowed.rtol is not None and metrics.max_rel_error <= allowed.rtol
        absolute = allowed.atol is not None and metrics.max_abs_error <= allowed.atol
        return "passed" if relative or absolute else "failed"
    sound = np.isfinite(metrics.max_abs_error) and metrics.cosine >= (allowed.cosine or -1.0)
    lost = accuracy is not None and allowed.accuracy_loss is not None and accuracy.high < -allowed.accuracy_loss
    return "passed" if sound and not lost and not any(_too_many(metrics, allowed)) else "failed"


def _too_many(metrics: Metrics, allowed: Tolerance) -> tuple[bool, bool]:
    """Whether there are more flips than allowed: beyond the noise, and within it."""
    if allowed.flips is None or allowed.flips_within_noise is None:
        return False, False
    beyond = metrics.top1_flips_that_matter > allowed.flips * metrics.images
    chance = _at_least(metrics.top1_flips_within_noise, metrics.top1_close, allowed.flips_within_noise)
    return beyond, chance < LUCK


def _at_least(count: int, n: int, share: float) -> float:
    """How likely so many of n are, or more, where each is with this probability."""
    ways = (lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1) for k in range(count, n + 1))
    odds = (k * log(share) + (n - k) * log(1 - share) for k in range(count, n + 1))
    return sum(exp(way + odd) for way, odd in zip(ways, odds, strict=True))


def lossy_words(metrics: Metrics, allowed: Tolerance, accuracy: Accuracy | None) -> str:
    """What a lossy link's verdict says of first classes, and what was not looked at."""
    if metrics.top1_agreement is None or allowed.flips is None or allowed.flips_within_noise is None:
        return "no first classes to compare: judged by cosine alone"
    many = _too_many(metrics, allowed)
    lead, flips = f"{allowed.noise:.0%} of the largest logit", metrics.top1_flips_that_matter
    beyond = f"{flips or 'no'} class{'es' if flips > 1 else ''} that led by more than {lead} changed"
    within = f"{metrics.top1_flips_within_noise} of {metrics.top1_close} with a smaller lead did"
    words = [
        f"{metrics.top1_agreement:.1%} of {metrics.images} first classes agree",
        beyond + (f", {allowed.flips:.0%} of all is allowed" if many[0] else ""),
        within + (f", {allowed.flips_within_noise:.0%} is allowed and chance explains no more" if many[1] else ""),
    ]
    return "; ".join([*words, *([] if accuracy else ["accuracy was not looked at"])])


def measure(candidate: Array, reference: Array, *, logits: bool) -> Metrics:
    """Compare two outputs [N, ...] at once.

    Raises:
        ValueError: If the shapes differ or there is no image.
    """
    meter = Meter(Tolerance(kind="exact"), logits=logits)
    meter.add(candidate, reference)
    return meter.metrics()


def judge(
    name: str,
    reference: tuple[str, Array],
    candidate: tuple[str, Array],
    *,
    logits: bool,
    tolerance: Tolerance,
    note: str = "",
) -> Link:
    """One link of the chain, from two outputs [N, ...] held at once."""
    meter = Meter(tolerance, logits=logits)
    meter.add(candidate[1], reference[1])
    return meter.link(name, reference[0], candidate[0], note)


def not_verified(name: str, reference: str, candidate: str, note: str) -> Link:
    """A link that was not run, and why."""
    return Link(
        name=name,
        reference=reference,
        candidate=candidate,
        tolerance=None,
        metrics=None,
        verdict="not verified",
        note=note,
    )


def _log_softmax(x: Array) -> Array:
    shifted = x - x.max(1, keepdims=True)
    logs: Array = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return logs
