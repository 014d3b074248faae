"""How two outputs differ, and from when on that counts."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from repaconv.artefact import Link, Metrics

Array = NDArray[np.floating]

POLICY = "1"
"""Version of the tolerances below; it is written into every result."""

TOLERANCES = {
    # float64 against float64: the fold is algebra, what is left is rounding (largest seen: 5e-15).
    "fold": 1e-12,
    # A float32 network against its float64 self (seen: 3e-7 to 1e-6), with room for deeper ones.
    "recorded": 1e-5,
    "stored": 1e-5,
    "onnx": 1e-5,
    "simplified": 1e-5,
    "agreement": 1e-5,
}
"""Largest allowed max|a - b| / max|b| of each link."""


def measure(candidate: Array, reference: Array, *, logits: bool) -> Metrics:
    """Compare two outputs [N, ...], row by row for direction and class, as a whole for size.

    Raises:
        ValueError: If the shapes differ or there is no image.
    """
    if candidate.shape != reference.shape or candidate.ndim < 2 or not len(candidate):
        raise ValueError(f"cannot compare outputs of shape {candidate.shape} and {reference.shape}")
    a, b = (output.astype(np.float64).reshape(len(output), -1) for output in (candidate, reference))
    scale = float(np.abs(b).max(initial=0.0)) or 1.0
    with np.errstate(invalid="ignore", over="ignore"):
        difference = float(np.abs(a - b).max(initial=0.0))
        lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        cosines = np.where(lengths > 0, (a * b).sum(1) / np.where(lengths > 0, lengths, 1), (a == b).all(1))
    top = _top1(a, b, scale) if logits and b.shape[1] > 1 else {}
    return Metrics(
        images=len(b),
        max_abs_error=difference,
        max_rel_error=difference / scale,
        cosine=float(cosines.min()),
        **top,
    )


def _top1(a: Array, b: Array, scale: float) -> dict[str, Any]:
    """Agreement of the first class; every flip with the reference's lead over the class chosen instead."""
    rows = np.arange(len(b))
    chosen, wanted = a.argmax(1), b.argmax(1)
    second = np.partition(b, -2, axis=1)[:, -2]
    flips = rows[chosen != wanted]
    leads = (b[rows, wanted] - b[rows, chosen]) / scale
    return {
        "top1_agreement": 1 - len(flips) / len(b),
        "top1_smallest_margin": float(((b[rows, wanted] - second) / scale).min()),
        "top1_flips": tuple((int(row), float(leads[row])) for row in flips),
    }


def judge(
    name: str,
    reference: tuple[str, Array],
    candidate: tuple[str, Array],
    *,
    logits: bool,
    tolerance: float | None = None,
    note: str = "",
) -> Link:
    """One link of the chain: passed if ``max_rel_error`` is at most the tolerance (NaN never is)."""
    limit = TOLERANCES[name] if tolerance is None else tolerance
    metrics = measure(candidate[1], reference[1], logits=logits)
    return Link(
        name=name,
        reference=reference[0],
        candidate=candidate[0],
        tolerance=limit,
        metrics=metrics,
        verdict="passed" if metrics.max_rel_error <= limit else "failed",
        note=note,
    )
