"""Segmentation: the class of every pixel; pixel agreement and mean IoU over the classes that are there.

Instances of Ultralytics are painted onto one map, those with higher scores over the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from repaconv.tasks.contract import (
    BY_CHANCE,
    Array,
    Metric,
    NetworkFacts,
    NothingToCompare,
    OnlyCandidateFinds,
    Outputs,
    Row,
    Task,
    Unreadable,
    described,
    mean,
    only_output,
    require_same_shape,
)
from repaconv.tasks.detection import SCORE_THRESHOLD, classes_of, ultralytics

IGNORED = 255
"""Class of pixels in a mask that are not compared, as in Pascal VOC and Cityscapes."""
LEAST_AGREEMENT = 0.985
"""Pixel agreement that int8, the lowest precision, must reach."""
COEFFICIENTS = 32
"""Mask coefficients per box in Ultralytics' segmentation."""


class Segmentation(Task):
    """Maps [H, W] of class numbers at the size of the network's image."""

    name = "segment"
    accuracy = "mean IoU"
    labels = "masks (.png) with the class number of each pixel"
    changed = "of mean IoU lost"
    metrics = (
        Metric("pixel agreement", "share", {"tf32": 0.995, "fp16": 0.995, "bf16": 0.99, "int8": LEAST_AGREEMENT}),
        Metric("mean IoU", "share", {"tf32": 0.98, "fp16": 0.98, "bf16": 0.95, "int8": 0.88}),
    )

    def __init__(self, about: NetworkFacts) -> None:
        super().__init__(about)
        self.how = ""
        self.classes = 0
        self.probabilities = False

    def read(self, outputs: Outputs) -> list[Array]:
        """Read the maps of a batch."""
        if not self.how:
            self._choose(outputs)
        if self.how == "instances":
            return _painted(outputs, self.classes, self.about)
        maps = next(array for array in outputs.values() if array.ndim == (3 if self.how == "classes" else 4))
        if self.how == "classes":
            return list(maps.astype(int))
        scores = resized(maps, self.about.size)
        if scores.shape[1] == 1:
            return list((scores[:, 0] > (0.5 if self.probabilities else 0.0)).astype(int))
        return list(scores.argmax(1))

    def _choose(self, outputs: Outputs) -> None:
        """How outputs of this kind are read."""
        shapes = [array.ndim for array in outputs.values()]
        if shapes == [3, 4]:
            _, prototypes = outputs.values()
            if prototypes.shape[1] == COEFFICIENTS:
                self.classes = classes_of(outputs, self.about, more=COEFFICIENTS)
                self.how, self.layout = "instances", f"Ultralytics: masks of {self.classes} classes, painted on one map"
                return
        name = "out" if "out" in outputs else ""  # torchvision's, next to the auxiliary output
        several = {name: outputs[name]} if name else outputs
        if any(array.ndim == 4 for array in several.values()):
            scores = only_output(several, (4,), "scores [N, classes, H, W]")
            self.how = "scores"
            self.probabilities = bool(scores.min() >= 0 and scores.max() <= 1)
            self.layout = f"{scores.shape[1]} scores per pixel" if scores.shape[1] > 1 else "one score per pixel"
            return
        maps = only_output(several, (3,), "class numbers [N, H, W]")
        if maps.dtype.kind not in "iu":
            raise Unreadable(
                f"its outputs ({described(outputs)}) are neither scores [N, classes, H, W] nor class numbers"
            )
        self.how, self.layout = "classes", "class numbers per pixel"

    def row(self, result: Array, truth: Array) -> Row:
        """Count the pixels of each class: in both maps, and in either; negative numbers in ``truth`` do not count."""
        require_same_shape(result, truth)
        valid = truth >= 0
        a, b = result[valid].ravel(), truth[valid].ravel()
        count = int(max(a.max(initial=0), b.max(initial=0))) + 1
        both, left, right = (np.bincount(each, minlength=count) for each in (a[a == b], a[a >= 0], b))
        union = left + right - both
        there = union > 0
        return {
            "both": both,
            "union": union,
            "there": right,
            "agreement": both.sum() / max(1, len(b)),
            "iou": float((both[there] / union[there]).mean()) if there.any() else 1.0,
        }

    def labeled_row(self, result: Array, label: Array) -> Row:
        """Compare one map with its mask; painted instances are enlarged to the image."""
        if self.how == "instances" and label.shape == self.about.size:
            high, wide = (np.arange(to) * of // to for to, of in zip(label.shape, result.shape, strict=True))
            result = result[high[:, None], wide]
        return self.row(result, np.where(label == IGNORED, -1, label))

    def by_chance(self, rows: Sequence[Row], value: float) -> bool:
        """Whether a map with as many pixels of each class, at any places, would have this mean IoU as well."""
        both, union, there = (_sum([row[name] for row in rows]) for name in ("both", "union", "there"))
        total = max(1, there.sum())
        of_labels, of_network = there / total, (union + both - there) / total
        common = of_labels * of_network
        seen = union > 0
        chance = (common[seen] / (of_labels + of_network - common)[seen]).mean()
        return bool(value < chance + BY_CHANCE)

    def summary(self, rows: Sequence[Row]) -> dict[str, float]:
        """Pixel agreement and mean IoU, over all pixels of all images."""
        both, union, there = (_sum([row[name] for row in rows]) for name in ("both", "union", "there"))
        agreement, seen = mean(rows, "agreement"), union > 0
        if (there > 0).sum() < 2:
            message = "all pixels of all images have one class"
            if agreement < LEAST_AGREEMENT:
                raise OnlyCandidateFinds(f"{message}, and {1 - agreement:.1%} of the candidate's have another")
            raise NothingToCompare(message)
        return {"pixel agreement": agreement, "mean IoU": float((both[seen] / union[seen]).mean())}

    def disagreement(self, summary: Mapping[str, float]) -> float:
        """Return 1 minus the mean IoU."""
        return 1 - summary["mean IoU"]

    def agreement(self, row: Row) -> float:
        """Mean IoU of one image."""
        return float(row["iou"])


def resized(scores: Array, size: tuple[int, int] | None) -> Array:
    """Scores [N, K, H, W] at the size of the image, bilinear, as SegFormer and DeepLab are evaluated."""
    if size is None or tuple(scores.shape[2:]) == tuple(size):
        return scores
    import torch

    found = torch.nn.functional.interpolate(
        torch.from_numpy(np.asarray(scores, np.float32)), size=size, mode="bilinear", align_corners=False
    )
    return np.asarray(found.numpy())


def _sum(rows: Sequence[Array]) -> Array:
    """The sum of counts of different numbers of classes."""
    found = np.zeros(max(map(len, rows)), np.int64)
    for row in rows:
        found[: len(row)] += row
    return found


def _painted(outputs: Outputs, classes: int, about: NetworkFacts) -> list[Array]:
    """Instances [N, 4 + classes + 32, M] with prototypes [N, 32, H, W] as maps, 0 where there is none."""
    (name, first), (_, prototypes) = outputs.items()
    height, width = prototypes.shape[2:]
    scale = np.asarray([width, height] * 2) / np.asarray([*(about.size or (4 * height, 4 * width))][::-1] * 2)
    found = []
    for each, objects, basis in zip(first, ultralytics(outputs, name, classes), prototypes, strict=True):
        canvas = np.zeros((height, width), int)
        objects = objects.only(objects.scores >= SCORE_THRESHOLD)
        for box, kind, place in reversed(list(zip(objects.boxes, objects.classes, objects.places, strict=True))):
            left, top, right, bottom = (box * scale).round().astype(int)
            window = (slice(max(0, top), max(0, bottom)), slice(max(0, left), max(0, right)))
            mask = np.tensordot(each[4 + classes :, place], basis[:, window[0], window[1]], 1) > 0
            canvas[window][mask] = kind + 1
        found.append(canvas)
    return found
