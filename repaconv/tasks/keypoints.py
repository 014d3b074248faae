"""Keypoints (pose, landmarks): PCK and OKS of the points of matched objects.

Objects of both networks are matched one to one, by falling score, at an IoU of 0.5. A point is near if it is visible in
both and within 5% of the object's longer side of the reference's point. PCK@0.05 is the F1 of points that are near: of
all visible points of both networks, those of objects without a match among them. OKS is COCO's object keypoint
similarity, with one falloff for all points, as the F1 of objects; points visible in one network alone have none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from repaconv.tasks.contract import (
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
)
from repaconv.tasks.detection import (
    NMS_IOU,
    SCORE_MARGIN,
    SCORE_THRESHOLD,
    Objects,
    classes_of,
    matched_to,
    rows_that_match,
    ultralytics,
)

NEAR, FALLOFF = 0.05, 0.05
VISIBLE_SCORE = 0.25


class Poses(NamedTuple):
    """The objects of one image, with their ``points`` [M, K, 2] in pixels, and whether each is ``visible`` [M, K]."""

    objects: Objects
    points: Array
    visible: Array


class Keypoints(Task):
    """Points of the objects in an image."""

    name = "keypoints"
    changed = "of points moved (PCK@0.05)"
    counted = "points"
    metrics = (
        Metric("PCK@0.05", "share", {"tf32": 0.97, "fp16": 0.97, "bf16": 0.9, "int8": 0.8}),
        Metric("OKS", "share", {"tf32": 0.97, "fp16": 0.97, "bf16": 0.9, "int8": 0.85}),
    )

    def __init__(self, about: NetworkFacts) -> None:
        super().__init__(about)
        self.reader: Callable[[Outputs], list[Poses]] | None = None

    def read(self, outputs: Outputs) -> list[Poses]:
        """Read the points of a batch."""
        if self.reader is None:
            self.reader, self.layout, self.lists = _reader_of(outputs, self.about)
        return self.reader(outputs)

    def truth(self, result: Poses) -> Poses:
        """The objects that are there, by the reference."""
        there = np.flatnonzero(result.objects.scores >= SCORE_THRESHOLD)
        return Poses(result.objects.only(there), result.points[there], result.visible[there])

    def matched_rows(self, result: Poses, truth: Poses) -> tuple[Array, Array]:
        """The rows of objects that match."""
        return rows_that_match(result.objects, truth.objects)

    def row(self, result: Poses, truth: Poses) -> Row:
        """Compare the points of matched objects."""
        matched = matched_to(result.objects, truth.objects)[:, 0]
        shown = (matched >= 0) | (result.objects.scores >= SCORE_THRESHOLD + SCORE_MARGIN)
        near, similar = 0, 0.0
        for place in np.flatnonzero(matched >= 0):
            box = truth.objects.boxes[matched[place]]
            seen = np.stack([result.visible[place], truth.visible[matched[place]]])
            if not seen.any():
                continue
            off = np.linalg.norm(result.points[place] - truth.points[matched[place]], axis=1)
            sides, both = box[2:] - box[:2], seen.all(0)
            near += int((both & (off <= NEAR * sides.max())).sum())
            with np.errstate(divide="ignore", invalid="ignore"):
                alike = np.exp(-(off**2) / (2 * sides.prod() * (2 * FALLOFF) ** 2))
            similar += float(np.where(both, alike, 0.0)[seen.any(0)].mean())
        return {
            "points": int(truth.visible.sum()),
            "points shown": int(result.visible[shown].sum()),
            "near": near,
            "objects": int(truth.visible.any(1).sum()),
            "objects shown": int(result.visible[shown].any(1).sum()),
            "similar": similar,
        }

    def summary(self, rows: Sequence[Row]) -> dict[str, float]:
        """PCK over all points, OKS over all objects."""
        points, shown = (sum(row[name] for row in rows) for name in ("points", "points shown"))
        if not points:
            nothing = "the reference finds no visible point in any image"
            raise OnlyCandidateFinds(f"{nothing}, the candidate finds {shown}") if shown else NothingToCompare(nothing)
        objects = sum(row["objects"] + row["objects shown"] for row in rows)
        return {
            "PCK@0.05": 2 * sum(row["near"] for row in rows) / (points + shown),
            "OKS": 2 * sum(row["similar"] for row in rows) / objects,
        }

    def disagreement(self, summary: Mapping[str, float]) -> float:
        """The share of points that moved, are missing or new."""
        return 1 - summary["PCK@0.05"]

    def count(self, rows: Sequence[Row]) -> int:
        """The visible points of the reference."""
        return sum(row["points"] for row in rows)

    def agreement(self, row: Row) -> float:
        """OKS of one image."""
        objects = row["objects"] + row["objects shown"]
        return 2 * row["similar"] / objects if objects else 1.0


def _reader_of(outputs: Outputs, about: NetworkFacts) -> tuple[Callable[[Outputs], list[Poses]], str, frozenset[str]]:
    """How outputs of this kind are read.

    Raises:
        Unreadable: In no known way.
    """
    if {"boxes", "keypoints", "scores"} <= set(outputs):
        lists = frozenset({"boxes", "keypoints", "scores", "labels"} & set(outputs))
        return _torchvision, "boxes, scores and keypoints after NMS", lists
    name, first = next(iter(outputs.items()))
    if len(outputs) == 1 and first.ndim == 4 and about.size:
        return partial(_of_maps, name=name, size=about.size), f"heatmaps of {first.shape[1]} points", frozenset()
    if len(outputs) == 1 and first.ndim == 3 and first.shape[2] in (2, 3) and about.size:
        layout = f"{first.shape[1]} points"
        return (
            partial(_of_points, name=name, size=about.size, relative=np.abs(first[..., :2]).max() <= 2),
            layout,
            frozenset(),
        )
    if first.ndim == 3 and first.shape[1] < first.shape[2]:
        classes = about.classes or 1
        points, rest = divmod(first.shape[1] - 4 - classes, 3)
        if points > 0 and rest == 0:
            classes_of({name: first[:, : 4 + classes]}, NetworkFacts(about.architecture, classes, about.size))
            layout = f"Ultralytics: {points} points, NMS at IoU {NMS_IOU:g}"
            return partial(_ultralytics, name=name, classes=classes), layout, frozenset()
    raise Unreadable(
        f"its outputs ({described(outputs)}) are none of: boxes, scores and keypoints; heatmaps [N, K, H, W]; points "
        "[N, K, 2]; [N, 5 + 3 K, M] as Ultralytics has them"
    )


def _torchvision(outputs: Outputs) -> list[Poses]:
    """Of one image: boxes [M, 4], scores [M], keypoints [M, K, 3], and labels [M] if any; or of several, N first."""
    boxes, scores, points = (outputs[name] for name in ("boxes", "scores", "keypoints"))
    classes = outputs["labels"] if "labels" in outputs else np.zeros(scores.shape)
    if boxes.ndim == 2:
        boxes, scores, points, classes = boxes[None], scores[None], points[None], classes[None]
    fit = boxes.ndim == 3 and points.ndim == 4 and scores.shape == boxes.shape[:2] == points.shape[:2] == classes.shape
    if not fit or boxes.shape[2] != 4 or points.shape[3] != 3:
        raise Unreadable(f"boxes, scores and keypoints do not fit each other: {described(outputs)}")
    found = []
    for box, score, point, kind in zip(boxes, scores, points, classes, strict=True):
        objects = Objects.of(box, score, kind, SCORE_THRESHOLD - SCORE_MARGIN)
        numbers = point[objects.places]
        found.append(Poses(objects, numbers[:, :, :2].astype(float), numbers[:, :, 2] > 0))
    return found


def _of_maps(outputs: Outputs, name: str, size: tuple[int, int]) -> list[Poses]:
    """The largest value of each heatmap [N, K, H, W]; one object, the whole image."""
    maps = np.asarray(outputs[name], float)
    count, points, height, width = maps.shape
    flat = maps.reshape(count, points, -1)
    best = flat.argmax(2)
    scale = np.asarray([size[1] / width, size[0] / height])
    places = np.stack([best % width, best // width], 2) * scale
    seen = flat.max(2) >= VISIBLE_SCORE * max(float(np.nanmax(flat)), 1e-30)
    return [Poses(_whole(size), each[None], shown[None]) for each, shown in zip(places, seen, strict=True)]


def _of_points(outputs: Outputs, name: str, size: tuple[int, int], *, relative: bool) -> list[Poses]:
    """Points [N, K, 2] in pixels, or relative to the image; a third number is the score."""
    found = np.asarray(outputs[name], float)
    places = found[..., :2] * (np.asarray(size[::-1]) if relative else 1)
    seen = found[..., 2] >= VISIBLE_SCORE if found.shape[2] == 3 else np.ones(found.shape[:2], bool)
    return [Poses(_whole(size), each[None], shown[None]) for each, shown in zip(places, seen, strict=True)]


def _whole(size: tuple[int, int]) -> Objects:
    return Objects.of(np.asarray([[0.0, 0.0, size[1], size[0]]]), np.ones(1), np.zeros(1))


def _ultralytics(outputs: Outputs, name: str, classes: int) -> list[Poses]:
    """[N, 4 + classes + 3 K, M]: a box, scores, then x, y and visibility of each point."""
    found = []
    for each, objects in zip(outputs[name], ultralytics(outputs, name, classes), strict=True):
        objects = objects.only(np.flatnonzero(objects.scores >= SCORE_THRESHOLD - SCORE_MARGIN))
        numbers = each[4 + classes :, objects.places].T
        points = numbers.reshape(len(numbers), numbers.shape[1] // 3, 3)
        found.append(Poses(objects, points[:, :, :2].astype(float), points[:, :, 2] >= VISIBLE_SCORE))
    return found
