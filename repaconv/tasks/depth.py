"""Depth estimation: the relative error of depth or disparity (AbsRel), and the share of pixels within 25% of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from repaconv.tasks.contract import (
    Array,
    Metric,
    NothingToCompare,
    Outputs,
    Row,
    Task,
    Unreadable,
    described,
    mean,
    require_same_shape,
)

LEAST_DEPTH_SHARE = 0.01
"""Share of an image's largest depth below which a pixel is not compared: a relative error means nothing near zero."""
DELTA_THRESHOLD = 1.25
OTHER_SCALE = 0.9
"""AbsRel from which on depth is not that of the labels."""


class Depth(Task):
    """Maps [H, W] of depth or disparity, above zero."""

    name = "depth"
    accuracy = "AbsRel"
    labels = "depth maps (.npz with labels [N, H, W])"
    changed = "of depth changed (AbsRel)"
    metrics = (
        Metric("AbsRel", "error", {"tf32": 0.01, "fp16": 0.01, "bf16": 0.03, "int8": 0.05}),
        Metric("within 25%", "share", {"tf32": 0.99, "fp16": 0.99, "bf16": 0.95, "int8": 0.9}),
    )

    def read(self, outputs: Outputs) -> list[Array]:
        """Read the maps of a batch, [N, H, W] or [N, 1, H, W]."""
        found = [each for each in outputs.values() if each.ndim == 3 or (each.ndim == 4 and each.shape[1] == 1)]
        if len(found) != 1:
            raise Unreadable(f"not one of its outputs ({described(outputs)}) is a map [N, H, W] or [N, 1, H, W]")
        self.layout = "depth or disparity per pixel"
        return list(found[0].reshape(len(found[0]), *found[0].shape[-2:]).astype(float))

    def row(self, result: Array, truth: Array) -> Row:
        """AbsRel of one image, over the pixels where the reference is above zero."""
        require_same_shape(result, truth)
        there = np.isfinite(truth) & (truth > 0)
        there &= truth > LEAST_DEPTH_SHARE * truth[there].max(initial=0.0)
        if not there.any():
            return {"pixels": 0, "AbsRel": 0.0, "within 25%": 1.0}
        a, b = np.maximum(result[there], 0.0), truth[there]
        ratio = np.maximum(a / b, b / np.maximum(a, 1e-12))
        return {
            "pixels": int(there.sum()),
            "AbsRel": float((np.abs(result[there] - b) / b).mean()),
            "within 25%": float((ratio < DELTA_THRESHOLD).mean()),
        }

    def summary(self, rows: Sequence[Row]) -> dict[str, float]:
        """The means over the images."""
        rows = [row for row in rows if row["pixels"]]
        if not rows:
            raise NothingToCompare("no pixel of the reference is above zero")
        return {name: mean(rows, name) for name in ("AbsRel", "within 25%")}

    def by_chance(self, _rows: Sequence[Row], value: float) -> bool:
        """Whether the depth is as wrong as a map of zeros, whose AbsRel is 1: it has another scale."""
        return value >= OTHER_SCALE

    def disagreement(self, summary: Mapping[str, float]) -> float:
        """AbsRel."""
        return min(1.0, summary["AbsRel"])

    def agreement(self, row: Row) -> float:
        """One image's AbsRel, less being better."""
        return -float(row["AbsRel"])
