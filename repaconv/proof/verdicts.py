"""When a difference counts: metrics and what is allowed to a verdict, and what a lossy one says in words."""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, isfinite, lgamma, log

from repaconv.artefacts import Accuracy, Link, Metrics, Tolerance, Verdict
from repaconv.proof.policy import LUCK


def verdict_by(metrics: Metrics, allowed: Tolerance, accuracy: Accuracy | None) -> Verdict:
    """NaN passes nothing."""
    if allowed.kind == "exact":
        relative = allowed.rtol is not None and metrics.max_rel_error <= allowed.rtol
        absolute = allowed.atol is not None and metrics.max_abs_error <= allowed.atol
        return "passed" if relative or absolute else "failed"
    near = allowed.norm_error is None or metrics.norm_error <= allowed.norm_error
    sound = isfinite(metrics.max_abs_error) and (metrics.cosine is None or metrics.cosine >= (allowed.cosine or -1.0))
    lost = accuracy is not None and allowed.accuracy_loss is not None and accuracy.high < -allowed.accuracy_loss
    return "passed" if sound and near and not lost and not any(_too_many(metrics, allowed)) else "failed"


def _too_many(metrics: Metrics, allowed: Tolerance) -> tuple[bool, bool]:
    """Whether there are more flips than allowed: beyond the noise, and within it."""
    if allowed.flips is None or allowed.flips_within_noise is None:
        return False, False
    beyond = metrics.top1_flips_that_matter > allowed.flips * metrics.images
    chance = by_chance(metrics.top1_flips_within_noise, metrics.top1_close, allowed.flips_within_noise)
    return beyond, chance < LUCK


def by_chance(count: int, n: int, share: float) -> float:
    """How likely so many of n are, or more, where each is with this probability."""
    if not 0 < share < 1:
        return float(count == 0 or share >= 1)
    ways = (lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1) for k in range(count, n + 1))
    odds = (k * log(share) + (n - k) * log(1 - share) for k in range(count, n + 1))
    return sum(exp(way + odd) for way, odd in zip(ways, odds, strict=True))


def lossy_words(metrics: Metrics, allowed: Tolerance, accuracy: Accuracy | None) -> str:
    """What a lossy link's verdict says of first classes, and what was not looked at."""
    if metrics.top1_agreement is None or allowed.flips is None or allowed.flips_within_noise is None:
        return "no top-1 predictions to compare: evaluated by cosine and error alone"
    many = _too_many(metrics, allowed)
    lead, flips = f"{allowed.noise:.0%} of the largest logit", metrics.top1_flips_that_matter
    beyond = f"{flips or 'no'} class{'es' if flips > 1 else ''} that led by more than {lead} changed"
    within = f"{metrics.top1_flips_within_noise} of {metrics.top1_close} with a smaller lead did"
    words = [
        f"{metrics.top1_agreement:.1%} of {metrics.images} top-1 predictions agree",
        beyond + (f", {allowed.flips:.0%} of all is allowed" if many[0] else ""),
        within + (f", {allowed.flips_within_noise:.0%} is allowed and chance explains no more" if many[1] else ""),
    ]
    words = words if metrics.top1_close else words[:2]
    return "; ".join([*words, *([] if accuracy else ["accuracy was not looked at"])])


def verdict_of(links: Iterable[Link]) -> Verdict:
    """Of all together: one that failed fails them, and where none passed nothing is shown."""
    verdicts = {link.verdict for link in links}
    return "failed" if "failed" in verdicts else "passed" if "passed" in verdicts else "not verified"
