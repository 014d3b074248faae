"""Keypoints (pose, landmarks): PCK and OKS of the points of matched objects.

PCK@0.05 is the share of points within 5% of the object's longer side of the reference's point. OKS is COCO's object
keypoint similarity, with one falloff for all points.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from repaconv.tasks.contract import About, Array, Metric, Nothing, Outputs, Row, Task, Unreadable, told
from repaconv.tasks.detection import NMS_IOU, SCORE, Objects, classes_of, corners_of, ious, suppressed

NEAR, FALLOFF = 0.05, 0.05
SAME_OBJECT = 0.5
"""IoU from which on two boxes are of one object."""
VISIBLE = 0.25


class Poses(NamedTuple):
    """The objects of one image: ``boxes`` [M, 4], ``points`` [M, K, 2] in pixels, and whether each is ``visible``."""

    boxes: Array
    points: Array
    visible: Array


class Keypoints(Task):
    """Points of the objects in an image."""

    name = "keypoints"
    changed = "of points moved (PCK@0.05)"
    metrics = (
        Metric("PCK@0.05", "share", {"tf32": 0.95, "fp16": 0.95, "bf16": 0.8, "int8": 0.8}),
        Metric("OKS", "share", {"tf32": 0.95, "fp16": 0.95, "bf16": 0.8, "int8": 0.8}),
    )

    def __init__(self, about: About) -> None:
        super().__init__(about)
        self.reader: Callable[[Outputs], list[Poses]] | None = None

    def read(self, outputs: Outputs) -> list[Poses]:
        """Read the points of a batch."""
        if self.reader is None:
            self.reader, self.layout, self.lists = _reader_of(outputs, self.about)
        return self.reader(outputs)

    def row(self, result: Poses, truth: Poses) -> Row:
        """Compare the visible points of the reference with those of the object at the same place."""
        overlap = ious(truth.boxes, result.boxes)
        near, similar = [], []
        for place, (box, points, visible) in enumerate(zip(truth.boxes, truth.points, truth.visible, strict=True)):
            if not visible.any():
                continue
            match = int(overlap[place].argmax()) if overlap.shape[1] else -1
            if match < 0 or overlap[place, match] < SAME_OBJECT:
                near += [False] * int(visible.sum())
                similar.append(0.0)
                continue
            off = np.linalg.norm(result.points[match] - points, axis=1)[visible]
            sides = box[2:] - box[:2]
            near += (off <= NEAR * sides.max()).tolist()
            similar.append(float(np.exp(-(off**2) / (2 * sides.prod() * (2 * FALLOFF) ** 2)).mean()))
        return {
            "points": len(near),
            "near": sum(near),
            "objects": len(similar),
            "similar": float(sum(similar)),
        }

    def summary(self, rows: Sequence[Row]) -> dict[str, float]:
        """PCK over all points, OKS over all objects."""
        points, objects = sum(row["points"] for row in rows), sum(row["objects"] for row in rows)
        if not points:
            raise Nothing("the reference finds no visible point in any image")
        return {
            "PCK@0.05": sum(row["near"] for row in rows) / points,
            "OKS": sum(row["similar"] for row in rows) / objects,
        }

    def disagreement(self, summary: Mapping[str, float]) -> float:
        """The share of points that moved."""
        return 1 - summary["PCK@0.05"]

    def agreement(self, row: Row) -> float:
        """OKS of one image."""
        return row["similar"] / row["objects"] if row["objects"] else 1.0


def _reader_of(outputs: Outputs, about: About) -> tuple[Callable[[Outputs], list[Poses]], str, frozenset[str]]:
    """How outputs of this kind are read.

    Raises:
        Unreadable: In no known way.
    """
    lists = {"boxes", "keypoints", "scores"}
    if lists <= set(outputs):
        return _torchvision, "boxes, scores and keypoints after NMS", frozenset(lists)
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
            classes_of({name: first[:, : 4 + classes]}, About(about.architecture, classes, about.size))
            layout = f"Ultralytics: {points} points, NMS at IoU {NMS_IOU:g}"
            return partial(_ultralytics, name=name, classes=classes), layout, frozenset()
    raise Unreadable(
        f"its outputs ({told(outputs)}) are none of: boxes, scores and keypoints; heatmaps [N, K, H, W]; points "
        "[N, K, 2]; [N, 5 + 3 K, M] as Ultralytics has them"
    )


def _torchvision(outputs: Outputs) -> list[Poses]:
    """Of one image: boxes [M, 4], scores [M], keypoints [M, K, 3]."""
    shown = outputs["scores"] >= SCORE
    points = outputs["keypoints"][shown]
    return [Poses(outputs["boxes"][shown].astype(float), points[:, :, :2].astype(float), points[:, :, 2] > 0)]


def _of_maps(outputs: Outputs, name: str, size: tuple[int, int]) -> list[Poses]:
    """The largest value of each heatmap [N, K, H, W]; one object, the whole image."""
    maps = np.asarray(outputs[name], float)
    count, points, height, width = maps.shape
    flat = maps.reshape(count, points, -1)
    best = flat.argmax(2)
    scale = np.asarray([size[1] / width, size[0] / height])
    places = np.stack([best % width, best // width], 2) * scale
    seen = flat.max(2) >= VISIBLE * max(float(np.nanmax(flat)), 1e-30)
    return [Poses(_whole(size), each[None], shown[None]) for each, shown in zip(places, seen, strict=True)]


def _of_points(outputs: Outputs, name: str, size: tuple[int, int], *, relative: bool) -> list[Poses]:
    """Points [N, K, 2] in pixels, or relative to the image; a third number is the score."""
    found = np.asarray(outputs[name], float)
    places = found[..., :2] * (np.asarray(size[::-1]) if relative else 1)
    seen = found[..., 2] >= VISIBLE if found.shape[2] == 3 else np.ones(found.shape[:2], bool)
    return [Poses(_whole(size), each[None], shown[None]) for each, shown in zip(places, seen, strict=True)]


def _whole(size: tuple[int, int]) -> Array:
    return np.asarray([[0.0, 0.0, size[1], size[0]]])


def _ultralytics(outputs: Outputs, name: str, classes: int) -> list[Poses]:
    """[N, 4 + classes + 3 K, M]: a box, scores, then x, y and visibility of each point."""
    found = []
    for each in outputs[name]:
        scores = each[4 : 4 + classes]
        objects = suppressed(Objects.of(corners_of(each[:4].T), scores.max(0), scores.argmax(0)))
        objects = objects.only(objects.scores >= SCORE)
        numbers = each[4 + classes :, objects.places].T
        points = numbers.reshape(len(numbers), numbers.shape[1] // 3, 3)
        found.append(Poses(objects.boxes, points[:, :, :2].astype(float), points[:, :, 2] >= VISIBLE))
    return found
