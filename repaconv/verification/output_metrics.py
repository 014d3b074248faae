"""Measure how far two outputs differ, batch by batch: a few numbers for each image, and the accuracy on labels.

Polygraphy's comparators hold all outputs of both sides at once; this module handles any number of images. Every image
has its own scale, so that an image with large outputs excuses no error in the others. Verdicts are decided in
`repaconv.verification.comparison`.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from repaconv.results import Accuracy, Metrics, Tolerance
from repaconv.verification.tolerances import DECIDING_COSINE, norm_error

# --- Compare the accuracy of reference and candidate on the same labeled images.

Z95 = 1.959964
"""The 97.5% quantile of the standard normal distribution."""


class CorrectCounts:
    """Counts of the labeled images that both networks, one of them or neither classify correctly."""

    def __init__(self) -> None:
        self.both = self.only_reference = self.only_candidate = self.neither = 0

    def add(self, candidate: NDArray[np.bool_], reference: NDArray[np.bool_], labeled: NDArray[np.bool_]) -> None:
        """Add the masks [N] of the images that each network classifies correctly; only labeled images count."""
        a, b = candidate[labeled], reference[labeled]
        self.both += int((a & b).sum())
        self.only_reference += int((~a & b).sum())
        self.only_candidate += int((a & ~b).sum())
        self.neither += int((~a & ~b).sum())

    def accuracy(self) -> Accuracy | None:
        """Return the comparison; None without labeled images.

        The interval is Wald's with half an image added to each cell (Agresti and Min, Statistics in Medicine 24,
        2005), which holds its level for the few discordant pairs that a good conversion leaves.
        """
        b, c = self.only_candidate, self.only_reference
        n = self.both + self.neither + b + c
        if not n:
            return None
        b_, c_, n_ = b + 0.5, c + 0.5, n + 2
        center, spread = (b_ - c_) / n_, Z95 * sqrt(b_ + c_ - (b_ - c_) ** 2 / n_) / n_
        return Accuracy(
            images=n,
            reference=(self.both + c) / n,
            candidate=(self.both + b) / n,
            only_reference=c,
            only_candidate=b,
            difference=(b - c) / n,
            low=max(-1.0, center - spread),
            high=min(1.0, center + spread),
            p_value=mcnemar(b, c),
        )


def mcnemar(b: int, c: int) -> float:
    """Two-sided exact p-value of b against c discordant pairs (binomial with p = 1/2)."""
    n = b + c
    term = tail = 1  # each binomial coefficient from the one before
    for k in range(1, min(b, c) + 1):
        term = term * (n - k + 1) // k
        tail += term
    return min(1.0, 2 * tail / 2**n) if n else 1.0


# --- How far two outputs differ.

Array = NDArray[np.floating]
MOST_EXAMPLES = 10
"""Maximum number of changed top-1 predictions in the metrics."""
NO_ANGLE = np.inf
"""The cosine of an image whose output is one number, or the lead of one class: it has a sign, no direction."""
LEAST_SHARE, MOST_RAISED = 0.25, 1e4
"""The scale of an image is at least this share of the median image's, since few outputs may all be near zero by chance,
where rounding is no smaller. It is at most so many times its own size: large images excuse no error in tiny ones."""
MASK_NUMBER = np.finfo(np.float32).max
"""The number that masks write if they do not write infinity: `torch.finfo(x.dtype).min`. It is ignored in scales."""


class Meter:
    """Collects how a candidate's output differs from the reference's, as a few numbers for each image.

    Args:
        tolerance: The tolerance of the link. It defines which changed predictions matter, and the error from which on
            an image may have merged other tokens.
        logits: Whether outputs are logits [N, K].
    """

    def __init__(self, tolerance: Tolerance, *, logits: bool) -> None:
        self.tolerance, self.logits = tolerance, logits
        self.counts = CorrectCounts()
        self.seen = self.undecided = self._numbers = 0
        self._sum = self._kl = 0.0
        self._columns: dict[str, list[Array]] = {}
        self._first: dict[tuple[int, ...], Array] = {}

    def add(
        self,
        candidate: Array,
        reference: Array,
        *,
        labels: NDArray[np.int64] | None = None,
        undecided: NDArray[np.bool_] | None = None,
        moved: Array | None = None,
    ) -> None:
        """Add one batch.

        Args:
            candidate: Output of the candidate [N, ...].
            reference: Output of the reference [N, ...].
            labels: Class of each image, -1 where unknown.
            undecided: The images for which rounding may decide which tokens merge. Those that differ by no more than
                another merge explains are left out.
            moved: How far rounding alone moves each image [N], if it was measured.

        Raises:
            ValueError: If the shapes differ or there is no image.
        """
        if candidate.shape != reference.shape or candidate.ndim < 2 or not len(candidate):
            raise ValueError(f"cannot compare outputs of shape {candidate.shape} and {reference.shape}")
        given = [output.astype(np.float64).reshape(len(output), -1) for output in (candidate, reference)]
        a, b = without_equal_infinities(*given)
        found = _error_columns(a, b, self._first.setdefault(reference.shape[1:], b[0]), logits=self.logits)
        logits = _masked(*given)
        if self.logits and b.shape[1] > 1:
            found |= _class_columns(*logits)
        found["image"] = self.seen + np.arange(float(len(b)))
        found["moved"] = np.zeros(len(b)) if moved is None else moved
        self.seen += len(b)
        if undecided is not None and undecided.any():
            kept = ~(undecided & self._merged_otherwise(found))
            self.undecided += int((~kept).sum())
            a, b, found = a[kept], b[kept], {name: column[kept] for name, column in found.items()}
            labels, logits = None if labels is None else labels[kept], [each[kept] for each in logits]
        for name, column in found.items():
            self._columns.setdefault(name, []).append(column)
        with np.errstate(invalid="ignore", over="ignore"):
            self._sum += float(np.abs(a - b).sum())
        self._numbers += a.size
        if labels is not None:
            chosen, wanted = (each.argmax(1) for each in logits)
            self.counts.add(chosen == labels, wanted == labels, labels >= 0)

    def _merged_otherwise(self, found: dict[str, Array]) -> NDArray[np.bool_]:
        """Return the images [n] that differ by more than rounding, and by no more than other merged tokens explain."""
        with np.errstate(invalid="ignore"):
            apart = ~(found["error"] <= (self.tolerance.rtol or 0.0) * found["scale"])
            alike = ~(found["cosine"] < DECIDING_COSINE) & (found["off"] <= norm_error(DECIDING_COSINE) * found["norm"])
        merged: NDArray[np.bool_] = apart & alike
        return merged

    def column(self, name: str) -> Array:
        """Return a measured value, by its name, of each image that is not left out."""
        parts = self._columns.get(name)
        return np.concatenate(parts) if parts else np.zeros(0)

    @property
    def images(self) -> int:
        """The number of images that are not left out."""
        return len(self.column("image"))

    @property
    def moves(self) -> float:
        """The largest difference between the reference's output for any image and for the first one."""
        return float(self.column("apart").max(initial=0.0))

    def scales(self) -> Array:
        """Return the scale of every image, to which its error is relative."""
        return _floored(self.column("scale"))

    def _errors(self) -> Array:
        """Return the error of each image relative to its scale."""
        with np.errstate(invalid="ignore", over="ignore"):
            errors: Array = self.column("error") / self.scales()
        return errors

    @property
    def worst(self) -> int:
        """The image with the largest error relative to its scale; an image with NaN counts as the largest."""
        errors = self._errors()
        return int(self.column("image")[errors.argmax()]) if len(errors) else 0

    def metrics(self) -> Metrics:
        """Return the metrics over all batches.

        Raises:
            ValueError: If there was no image.
        """
        errors = self._errors()
        if not len(errors):
            raise ValueError("no image was compared")
        cosines = self.column("cosine")
        with np.errstate(invalid="ignore", over="ignore"):
            norms = self.column("off") / _floored(self.column("norm"))
        largest = float(self.column("scale").max())
        return Metrics(
            images=len(errors),
            max_abs_error=float(self.column("error").max()),
            max_rel_error=float(errors.max()),
            norm_error=float(norms.max()),
            mean_abs_error=self._sum / self._numbers,
            cosine=None if (cosines == NO_ANGLE).all() else float(cosines.min()),
            spread=self.moves / (largest or 1.0) if self.seen > len(self._first) else None,
            undecided=self.undecided,
            **self._classes(),
        )

    def _classes(self) -> dict[str, Any]:
        """Return the metrics of top-1 predictions; none if the shape changes, since an axis of classes has one size."""
        leads, lost = self.column("lead"), self.column("lost")
        if len(self._first) > 1 or not len(leads) or not np.isfinite(leads).any():
            return {}
        scale, noise = self.scales(), self.tolerance.noise
        leads, lost, images = leads / scale, lost / scale, self.column("image")
        flipped = np.flatnonzero(~np.isnan(lost))
        flips = sorted(((int(images[row]), float(lost[row])) for row in flipped), key=lambda flip: -flip[1])
        matter = int((lost[flipped] > noise).sum())
        return {
            "kl_divergence": float(self.column("kl").mean()),
            "top1_agreement": 1 - len(flips) / len(leads),
            "top1_smallest_margin": float(np.nanmin(leads)),
            "top1_flips": len(flips),
            "top1_flips_that_matter": matter,
            "top1_flips_within_noise": len(flips) - matter,
            "top1_close": int((leads <= noise).sum()),
            "examples": tuple(flips[:MOST_EXAMPLES]),
        }


def _error_columns(a: Array, b: Array, first: Array, *, logits: bool) -> dict[str, Array]:
    """Return the measured values [N] of outputs [N, K], by name; ``first`` is the reference's first output [K].

    ``error`` is the largest difference and ``off`` its norm, ``scale`` the largest number of the reference and ``norm``
    its norm, ``apart`` the largest difference between this and the first output of the reference.
    """
    classes = logits and b.shape[1] > 1
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        turned_a, turned_b = (each - each.mean(1, keepdims=True) if classes else each for each in (a, b))
        found: dict[str, Array] = {
            "error": np.abs(a - b).max(1, initial=0.0),
            "scale": magnitudes(b).max(1, initial=0.0),
            "off": np.linalg.norm(a - b, axis=1),
            "norm": np.linalg.norm(magnitudes(b), axis=1),
            "cosine": _cosines(turned_a, turned_b, directions=b.shape[1] - classes),
            "apart": np.abs(b - first).max(1, initial=0.0),
        }
    return found


def _class_columns(a: Array, b: Array) -> dict[str, Array]:
    """Return the measured values [N] of the top-1 predictions of logits [N, K], by name.

    ``kl`` is the divergence of the candidate from the reference, ``lead`` the reference's margin between its first and
    second class, ``lost`` its margin between its own top-1 class and the candidate's, NaN if they are the same.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        log_a, log_b = _log_softmax(a), _log_softmax(b)
        likely = np.exp(log_b)
        chosen, wanted = (each.argmax(1)[:, None] for each in (a, b))
        top = np.partition(b, -2, axis=1)
        lost = np.take_along_axis(b, wanted, 1) - np.take_along_axis(b, chosen, 1)
        return {
            "kl": np.where(likely == 0, 0.0, likely * (log_b - log_a)).sum(1),
            "lead": top[:, -1] - top[:, -2],
            "lost": np.where(chosen == wanted, np.nan, lost)[:, 0],
        }


def without_equal_infinities(candidate: Array, reference: Array) -> tuple[Array, Array]:
    """Return both with 0 where both are the same infinity, NaN, or the number that a mask writes."""
    if candidate.dtype.kind != "f" or reference.dtype.kind != "f":
        return candidate, reference
    same = ((np.abs(reference) >= MASK_NUMBER) & (candidate == reference)) | _nan_in_both(candidate, reference)
    if not same.any():
        return candidate, reference
    return np.where(same, 0.0, candidate), np.where(same, 0.0, reference)


def _masked(candidate: Array, reference: Array) -> list[Array]:
    """Return the logits of both, with -infinity for classes that are NaN in both, so that these are not predicted."""
    same = _nan_in_both(candidate, reference)
    return [np.where(same, -np.inf, each) for each in (candidate, reference)] if same.any() else [candidate, reference]


def _nan_in_both(candidate: Array, reference: Array) -> NDArray[np.bool_]:
    both: NDArray[np.bool_] = np.isnan(reference) & np.isnan(candidate)
    return both


def magnitudes(b: NDArray[Any]) -> NDArray[Any]:
    """Return the absolute value of every number, float64; 0 for NaN, infinity and numbers that a mask writes."""
    size = np.abs(b, dtype=np.float64)
    return np.where(size < MASK_NUMBER, size, 0.0)


def _cosines(a: Array, b: Array, directions: int) -> Array:
    """Return the cosines of outputs [N, K]; if one output is zero, 1 if both are."""
    if directions < 2:
        return np.full(len(b), NO_ANGLE)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    cosines: Array = np.where(lengths > 0, (a * b).sum(1) / np.where(lengths > 0, lengths, 1), (a == b).all(1))
    return cosines


def _floored(sizes: Array) -> Array:
    """Return the scales of images [N] from the sizes of their outputs; see `LEAST_SHARE`."""
    there = sizes > 0
    usual = LEAST_SHARE * float(np.median(sizes[there])) if there.any() else 1.0
    floored: Array = np.where(there, np.clip(usual, sizes, MOST_RAISED * sizes), usual)
    return floored


def _log_softmax(x: Array) -> Array:
    shifted = x - x.max(1, keepdims=True)
    logs: Array = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return logs
