"""Object detection: boxes after NMS, matched by class and IoU; precision, recall, F1 and COCO's mAP50-95.

The reference's objects with a score of at least `SCORE_THRESHOLD` take the place of labels. Precision, recall and F1
are of the candidate's objects above the same score, matched at IoU 0.5; within `SCORE_MARGIN` of it, matched objects
count and others do not. The average precision is that of COCO (101 recall levels, 10 IoU thresholds), and against
labels (of at most 100 detections per image) equal to pycocotools'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from importlib import import_module
from io import StringIO
from typing import Any, NamedTuple

import numpy as np

from repaconv.core.errors import Refused
from repaconv.tasks.contract import (
    Array,
    Metric,
    NetworkFacts,
    NothingToCompare,
    OnlyCandidateFinds,
    Outputs,
    Row,
    Task,
    Unmatched,
    Unreadable,
    described,
)
from repaconv.tasks.rotated_boxes import rotated_ious

SCORE_THRESHOLD = 0.25
"""Score from which on a detection counts as an object: the default of Ultralytics' ``predict``."""
SCORE_MARGIN = 0.02
"""A score that lower precision moves by no more than that across `SCORE_THRESHOLD` neither loses an object nor makes
one."""
LEAST_SCORE = 0.001
"""Score from which on a detection counts for the average precision, as in Ultralytics' ``val``."""
NMS_IOU = 0.7
"""IoU above which NMS removes the box with the lower score: the default of Ultralytics."""
IOUS = np.linspace(0.5, 0.95, 10)
RECALLS = np.linspace(0.0, 1.0, 101)
"""The IoU thresholds and the recall levels of COCO's mAP50-95."""
MOST_DETECTIONS, MOST_BEFORE_NMS = 100, 2000
"""Boxes per image that are compared with labels, as in COCO, and that enter NMS, those with the highest scores."""
BOXES, SCORES, CLASSES = ("boxes",), ("scores",), ("labels", "classes")
MASKS, MASK_THRESHOLD = "masks", 0.5
"""Name of the output with the masks of instances, and the number from which on a pixel is part of one (torchvision)."""
DETR_BOXES, DETR_LOGITS = ("pred_boxes",), ("logits", "pred_logits")
SIGMOID = ("rtdetr", "lwdetr", "rfdetr", "deformable", "conditional", "dab", "dfine")
"""Parts of the names of networks like DETR that have a sigmoid for each class."""
SOFTMAX = ("detr", "tabletransformer", "yolos")
"""Beginnings of the names of those that have a class for no object. For other names, the logits decide."""
STRIDES = (8, 16, 32)


class Objects(NamedTuple):
    """The objects of one image, by falling score.

    ``boxes`` [M, 4] are x1, y1, x2, y2 in pixels of the network's image, or [M, 5] rotated: center, width, height and
    angle; ``scores`` [M]; ``classes`` [M]; ``places`` [M] are the rows of the output that they were read from;
    ``masks`` [M, H, W] are the pixels of each, if the network gives them.
    """

    boxes: Array
    scores: Array
    classes: Array
    places: Array
    masks: Array | None = None

    @classmethod
    def of(cls, boxes: Array, scores: Array, classes: Array, least: float = LEAST_SCORE) -> Objects:
        """Sort by falling score, and leave out objects with a score below ``least``."""
        places = np.argsort(-scores, kind="stable")
        places = places[scores[places] >= least]
        return cls(boxes[places].astype(float), scores[places].astype(float), classes[places].astype(int), places)

    def only(self, places: Array) -> Objects:
        """Return the objects with these indices."""
        masks = None if self.masks is None else self.masks[places]
        return Objects(self.boxes[places], self.scores[places], self.classes[places], self.places[places], masks)


class Labeled(NamedTuple):
    """The objects of one image according to its labels.

    ``boxes`` [M, 4] are x1, y1, x2, y2 in pixels of the network's image; ``ids`` [M] are the categories; ``crowd`` [M]
    are boxes around groups; ``categories`` are the names of all categories of the file by id, empty where it has none.
    """

    boxes: Array
    ids: Array
    crowd: Array
    categories: Mapping[int, str]

    def only(self, places: Array) -> Labeled:
        """Return the objects with these indices."""
        return Labeled(self.boxes[places], self.ids[places], self.crowd[places], self.categories)


Reader = Callable[[Outputs], list[Objects]]


class Detection(Task):
    """Boxes with scores and classes."""

    name = "detect"
    accuracy = "mAP50-95"
    labels = "COCO annotations (.json)"
    changed = "of objects changed"
    counted = "objects"
    library = "pycocotools"
    metrics = (
        Metric("precision", "share"),
        Metric("recall", "share"),
        Metric("F1", "share", {"tf32": 0.95, "fp16": 0.95, "bf16": 0.9, "int8": 0.8}),
        Metric("mAP50-95", "share", {"tf32": 0.95, "fp16": 0.95, "bf16": 0.85, "int8": 0.7}),
        Metric("mask IoU", "share", {"tf32": 0.98, "fp16": 0.98, "bf16": 0.95, "int8": 0.88}),
    )

    def __init__(self, about: NetworkFacts) -> None:
        super().__init__(about)
        self.reader: Reader | None = None
        self.classes: int | None = None
        self.numbers: Mapping[int, int] | None = None

    def read(self, outputs: Outputs) -> list[Objects]:
        """Read boxes after NMS."""
        if self.reader is None:
            self.reader, self.layout, self.lists, self.classes = reader_of(outputs, self.about)
        return self.reader(outputs)

    def truth(self, result: Objects) -> Objects:
        """The reference's objects above `SCORE_THRESHOLD`, which take the place of labels."""
        return result.only(result.scores >= SCORE_THRESHOLD)

    def row(self, result: Objects, truth: Objects) -> Row:
        """Match the objects of one image, class by class."""
        to = matched_to(result, truth)
        matched = to >= 0
        masks = mask_ious(result, truth, to[:, 0])
        hit = matched[:, 0] & (result.scores >= SCORE_THRESHOLD - SCORE_MARGIN)
        shown = hit | (result.scores >= SCORE_THRESHOLD + SCORE_MARGIN)
        return {
            "scores": result.scores,
            "classes": result.classes,
            "matched": matched,
            "truths": truth.classes,
            "hits": int(hit.sum()),
            "shown": int(shown.sum()),
            "there": len(truth.scores),
            **({} if masks is None else {"masks": masks}),
        }

    def matched_rows(self, result: Objects, truth: Objects) -> tuple[Array, Array]:
        """The rows of objects that match."""
        return rows_that_match(result, truth)

    def labeled_row(self, result: Objects, label: Labeled) -> Row:
        """Keep the result and the label. `settled_labels` matches them: the classes may follow from all images only."""
        if result.boxes.shape[1] != 4:
            raise Refused(
                "the boxes of COCO annotations are upright, and those of this network are rotated.",
                hint="Leave --labels out: the results are compared with those of the original network.",
                code="labels.rotated",
            )
        return {"result": result.only(np.arange(len(result.scores)) < MOST_DETECTIONS), "label": label}

    def settled_labels(self, pairs: Sequence[tuple[Row, ...]]) -> Sequence[tuple[Row, ...]]:
        """Match the objects of every image with those of COCO."""
        if self.numbers is None:
            references = [pair[1] for pair in pairs]
            self.numbers = class_numbers(references[0]["label"].categories, self.classes, self.about, references)
        return [tuple(self._against(row["result"], row["label"], self.numbers) for row in pair) for pair in pairs]

    def _against(self, result: Objects, label: Labeled, numbers: Mapping[int, int]) -> Row:
        """Match the objects of one image; boxes around groups are no objects."""
        single = label.only(~label.crowd)
        truth = _objects_of(single, numbers)
        classes = np.asarray([numbers[kind] for kind in label.ids.tolist()], int)
        return {**self.row(result, truth), "boxes": result.boxes, "label": label, "label classes": classes}

    def by_library(self, rows: Sequence[Row]) -> float | None:
        """mAP50-95 by pycocotools, which ignores what lies in boxes around groups."""
        try:
            coco, cocoeval = (import_module(f"pycocotools.{name}") for name in ("coco", "cocoeval"))
        except ImportError:
            return None
        there: list[dict[str, Any]] = []
        found: list[dict[str, Any]] = []
        for image, row in enumerate(rows, 1):
            label: Labeled = row["label"]
            for box, kind, crowd in zip(label.boxes, row["label classes"], label.crowd, strict=True):
                at = _as_coco(image, box, kind)
                there.append({**at, "id": len(there) + 1, "iscrowd": int(crowd), "area": at["bbox"][2] * at["bbox"][3]})
            for box, kind, score in zip(row["boxes"], row["classes"], row["scores"], strict=True):
                found.append({**_as_coco(image, box, kind), "score": float(score)})
        if not found:
            return 0.0
        with redirect_stdout(StringIO()):
            labels = coco.COCO()
            labels.dataset = {
                "info": {},
                "images": [{"id": image} for image in range(1, len(rows) + 1)],
                "annotations": there,
                "categories": [{"id": kind} for kind in sorted({each["category_id"] for each in (*there, *found)})],
            }
            labels.createIndex()
            evaluated = cocoeval.COCOeval(labels, labels.loadRes(found), "bbox")
            evaluated.evaluate()
            evaluated.accumulate()
            evaluated.summarize()
        return float(evaluated.stats[0])

    def summary(self, rows: Sequence[Row]) -> dict[str, float]:
        """Precision, recall, F1 and mAP50-95."""
        hits, shown, there = (sum(row[name] for row in rows) for name in ("hits", "shown", "there"))
        if not there:
            nothing = f"the reference finds no object with a score of {SCORE_THRESHOLD:g} in any image"
            raise OnlyCandidateFinds(f"{nothing}, the candidate finds {shown}") if shown else NothingToCompare(nothing)
        return {
            "precision": hits / shown if shown else 0.0,
            "recall": hits / there,
            "F1": 2 * hits / (shown + there),
            "mAP50-95": average_precision(rows),
            **mask_iou(rows),
        }

    def disagreement(self, summary: Mapping[str, float]) -> float:
        """The share of objects that are missing, new, moved or of another class."""
        return 1 - summary["F1"]

    def count(self, rows: Sequence[Row]) -> int:
        """The objects of the reference."""
        return sum(row["there"] for row in rows)

    def agreement(self, row: Row) -> float:
        """F1 of one image."""
        return 2 * row["hits"] / (row["shown"] + row["there"]) if row["shown"] + row["there"] else 1.0


# --- Which category is which class

COCO_CLASSES = 91
"""Classes of networks that count by the ids of COCO's 80 categories, which are 1 to 90 with gaps."""


def class_numbers(
    categories: Mapping[int, str], count: int | None, about: NetworkFacts, references: Sequence[Row]
) -> Mapping[int, int]:
    """The network's number of every category, by id.

    By the names of the network's classes, if it has all of the file's. Else by the number of classes that the network
    distinguishes. As many as there are categories: in the order of their ids. One more than the largest id, or 91: the
    ids. If that number is not known (outputs named boxes, scores and labels), the ids or their order, whichever more of
    the original network's objects agree with.

    Args:
        categories: All categories of the file: names by id.
        count: The number of classes that the network distinguishes; None if it is not known.
        about: What else is known of the network.
        references: The original network's ``result`` and ``label`` of every image.

    Raises:
        Unmatched: If none of these decides.
    """
    ids = sorted(categories)
    own, order = {kind: kind for kind in ids}, {kind: place for place, kind in enumerate(ids)}
    places = {name.strip().lower(): number for number, name in enumerate(about.names)}
    named = {kind: places.get(name.strip().lower()) for kind, name in categories.items() if name.strip()}
    by_name = {kind: place for kind, place in named.items() if place is not None}
    if ids and len(by_name) == len(ids) == len(set(by_name.values())):
        return by_name
    if own == order or not ids:
        return own
    if count is not None:
        if len(ids) == count:
            return order
        if ids[-1] < count and count in (ids[-1] + 1, COCO_CLASSES):
            return own
        shown = ", ".join(map(str, ids[:3])) + (", ..." if len(ids) > 3 else "")
        raise Unmatched(f"the labels have {len(ids)} categories (ids {shown}), and the network has {count} classes")
    if about.architecture.startswith("torchvision:"):
        return own
    agreed = [sum(_agreed(row["result"], row["label"], numbers) for row in references) for numbers in (own, order)]
    if agreed[0] == agreed[1] > 0:
        raise Unmatched(
            f"{agreed[0]} objects of the network agree with the ids of the labels' categories, and as many with their "
            "order"
        )
    return own if agreed[0] >= agreed[1] else order


def _objects_of(label: Labeled, numbers: Mapping[int, int]) -> Objects:
    count = len(label.ids)
    classes = np.asarray([numbers[kind] for kind in label.ids.tolist()], int)
    return Objects(label.boxes, np.ones(count), classes, np.arange(count))


def _agreed(result: Objects, label: Labeled, numbers: Mapping[int, int]) -> int:
    """Count the objects that match an object of the labels with its class, at IoU 0.5."""
    shown = result.only(result.scores >= SCORE_THRESHOLD)
    return int(matches(shown, _objects_of(label.only(~label.crowd), numbers))[:, 0].sum())


def _as_coco(image: int, box: Array, kind: int) -> dict[str, Any]:
    """The fields that COCO's annotations and results share."""
    left, top, right, bottom = map(float, box)
    return {"image_id": image, "category_id": int(kind) + 1, "bbox": [left, top, right - left, bottom - top]}


# --- Matching and average precision, as in COCO


def ious(a: Array, b: Array) -> Array:
    """IoU [M, N] of boxes [M, 4] and [N, 4], or of rotated ones [M, 5] and [N, 5]."""
    if a.shape[1] == 5:
        return rotated_ious(a, b)
    corner = np.minimum(a[:, None, 2:], b[None, :, 2:]) - np.maximum(a[:, None, :2], b[None, :, :2])
    inside = corner.clip(0).prod(2)
    areas = [(each[:, 2:] - each[:, :2]).clip(0).prod(1) for each in (a, b)]
    union = areas[0][:, None] + areas[1][None] - inside
    found: Array = np.where(union > 0, inside / np.where(union > 0, union, 1), 0.0)
    return found


def matches(found: Objects, truth: Objects) -> Array:
    """Whether each of M objects matches one of the truth's, at each IoU threshold: [M, 10]; see `matched_to`."""
    found_one: Array = matched_to(found, truth) >= 0
    return found_one


def matched_to(found: Objects, truth: Objects) -> Array:
    """Match M objects with those of the truth, class by class and by falling score, at each of the 10 IoU thresholds.

    Returns:
        [M, 10]: the index of the truth's object with the largest IoU that no earlier object matched, or -1 if none
        reaches the threshold.
    """
    overlap = ious(found.boxes, truth.boxes)
    overlap[found.classes[:, None] != truth.classes[None]] = -1
    matched, taken = np.full((len(found.scores), len(IOUS)), -1), np.zeros((len(IOUS), len(truth.scores)), bool)
    if not len(truth.scores):
        return matched
    for place in range(len(found.scores)):
        free = np.where(taken, -1.0, overlap[place][None])
        best = free.argmax(1)
        hit = free[np.arange(len(IOUS)), best] >= np.minimum(IOUS, 1 - 1e-10)
        matched[place] = np.where(hit, best, -1)
        taken[np.flatnonzero(hit), best[hit]] = True
    return matched


def rows_that_match(found: Objects, truth: Objects) -> tuple[Array, Array]:
    """The rows of the outputs from which objects were read that match at IoU 0.5: of ``found``, and of ``truth``."""
    to = matched_to(found, truth)[:, 0]
    return found.places[to >= 0], truth.places[to[to >= 0]]


def mask_ious(found: Objects, truth: Objects, to: Array) -> Array | None:
    """IoU of the masks of each pair of objects that match; None if a network gives no masks.

    Args:
        found: M objects.
        truth: The truth's objects.
        to: [M]: the truth's object that each matches, -1 for none.
    """
    if found.masks is None or truth.masks is None:
        return None
    a, b = found.masks[to >= 0], truth.masks[to[to >= 0]]
    union = (a | b).sum((1, 2))
    return np.asarray(np.where(union > 0, (a & b).sum((1, 2)) / np.maximum(union, 1), 1.0))


def mask_iou(rows: Sequence[Row]) -> dict[str, float]:
    """The mean IoU of the masks of all objects that match; 0 if none does, and nothing if there are no masks."""
    if not all("masks" in row for row in rows):
        return {}
    found = np.concatenate([row["masks"] for row in rows])
    return {"mask IoU": float(found.mean()) if len(found) else 0.0}


def average_precision(rows: Sequence[Row]) -> float:
    """mAP50-95: the mean over the IoU thresholds and over the classes that the truth has, from 0 to 1."""
    scores, classes = (np.concatenate([row[name] for row in rows]) for name in ("scores", "classes"))
    matched, truths = (np.concatenate([row[name] for row in rows]) for name in ("matched", "truths"))
    order = np.argsort(-scores, kind="stable")
    classes, matched = classes[order], matched[order]
    return float(
        np.mean([_of_class(matched[classes == each], int((truths == each).sum())) for each in np.unique(truths)])
    )


def _of_class(matched: Array, there: int) -> float:
    """The average precision of one class: its precision at 101 levels of recall, averaged over the IoU thresholds.

    Args:
        matched: [M, 10]: whether each detection of the class, by falling score, matches at each threshold.
        there: Number of the truth's objects of this class.
    """
    if not len(matched):
        return 0.0
    right = matched.cumsum(0)
    recall, precision = right / there, right / np.arange(1, len(matched) + 1)[:, None]
    envelope = np.maximum.accumulate(precision[::-1], 0)[::-1]
    found = []
    for column in range(matched.shape[1]):
        places = np.searchsorted(recall[:, column], RECALLS, side="left")
        there_is = places < len(matched)
        found.append(np.where(there_is, envelope[np.minimum(places, len(matched) - 1), column], 0.0).mean())
    return float(np.mean(found))


def suppressed(objects: Objects, threshold: float = NMS_IOU) -> Objects:
    """NMS within each class: of two boxes with an IoU above the threshold, the one with the lower score is removed."""
    objects = objects.only(np.arange(len(objects.scores)) < MOST_BEFORE_NMS)
    kept: list[int] = []
    open_ones = np.ones(len(objects.scores), bool)
    for place in range(len(objects.scores)):
        if not open_ones[place]:
            continue
        kept.append(place)
        later = (
            np.flatnonzero(open_ones[place + 1 :] & (objects.classes[place + 1 :] == objects.classes[place]))
            + place
            + 1
        )
        overlap = ious(objects.boxes[place : place + 1], objects.boxes[later])[0]
        open_ones[later[overlap > threshold]] = False
        if len(kept) >= 3 * MOST_DETECTIONS:
            break
    return objects.only(np.asarray(kept, dtype=int))


# --- Layouts of outputs


def reader_of(outputs: Outputs, about: NetworkFacts) -> tuple[Reader, str, frozenset[str], int | None]:
    """Recognize the layout of a detector's outputs.

    Returns:
        The function that reads such outputs; the layout in words; the names of the outputs whose rows are a list in the
        order of scores (the queries of DETR with a class for no object keep their order, other networks select theirs
        by score); the number of classes that the network distinguishes, None if it is unknown.

    Raises:
        Unreadable: If the layout is none of the known ones.
    """
    if found := _named(outputs, BOXES, SCORES, CLASSES):
        masks = next((name for name in outputs if name.lower() == MASKS), None)
        if masks is not None and outputs[masks].ndim == outputs[found[1]].ndim + 3:
            layout, lists = "boxes, scores, labels and masks after NMS", frozenset({*found, masks})
            return partial(_torchvision, names=found, masks=masks), layout, lists, None
        return partial(_torchvision, names=found), "boxes, scores and labels after NMS", frozenset(found), None
    detr = _named(outputs, DETR_BOXES, DETR_LOGITS) or _named(outputs, BOXES, DETR_LOGITS)
    if detr and outputs[detr[0]].ndim == 3 and outputs[detr[1]].ndim == 3 and about.size is not None:
        softmax = _has_no_object_class(outputs[detr[1]], about.architecture)
        how = "softmax with a class for no object" if softmax else "sigmoid"
        lists = frozenset(() if softmax else detr)
        count = outputs[detr[1]].shape[2] - softmax
        return partial(_detr, names=detr, size=about.size, softmax=softmax), f"DETR: {how}", lists, count
    (name, first), known = next(iter(outputs.items())), about.classes or len(about.names) or None
    if about.rotated and first.ndim == 3 and first.shape[2] == 7:
        layout = "x, y, width, height, score, class, angle after NMS"
        return partial(_rotated_after_nms, name=name), layout, frozenset((name,)), known
    if first.ndim == 3 and (classes := rotated_classes(first, about)):
        layout = f"Ultralytics: {classes} classes, rotated boxes, NMS at IoU {NMS_IOU:g}"
        reader = partial(ultralytics, name=name, classes=classes, rotated=True)
        return reader, layout, frozenset(), classes
    if first.ndim == 3 and (after_nms(first) or _without_objects(first)):
        layout = "x1, y1, x2, y2, score, class after NMS"
        return partial(_rows_after_nms, name=name), layout, frozenset((name,)), known
    if first.ndim == 3:
        classes = classes_of(outputs, about)
        layout = f"Ultralytics: {classes} classes, NMS at IoU {NMS_IOU:g}"
        return partial(ultralytics, name=name, classes=classes), layout, frozenset(), classes
    raise Unreadable(
        f"its outputs ({described(outputs)}) are none of: boxes, scores and labels; logits and pred_boxes; [N, M, 6] "
        "with x1, y1, x2, y2, score and class; [N, 4 + classes, M] as Ultralytics has them"
    )


def _named(outputs: Outputs, *names: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the outputs that have one name of each tuple; empty if one is missing."""
    found = [next((name for name in outputs if name.lower() in each), "") for each in names]
    return tuple(found) if all(found) else ()


def _torchvision(outputs: Outputs, names: tuple[str, ...], masks: str = "") -> list[Objects]:
    """Read torchvision's outputs: boxes [M, 4], scores [M] and labels [M] of one image, or with N images first.

    ``masks`` names an output [M, 1, H, W] of numbers from 0 to 1.
    """
    given = [outputs[name] for name in (*names, *filter(None, [masks]))]
    if given[0].ndim == 2:
        given = [each[None] for each in given]
    boxes, scores, classes = given[:3]
    fit = boxes.ndim == 3 and boxes.shape[2] == 4 and all(each.shape[:2] == boxes.shape[:2] for each in given)
    if not fit or scores.ndim != 2 or classes.ndim != 2:
        raise Unreadable(f"boxes, scores and labels do not fit each other: {described(outputs)}")
    found = [Objects.of(*each) for each in zip(boxes, scores, classes, strict=True)]
    if not masks:
        return found
    pixels = (each[objects.places][:, 0] >= MASK_THRESHOLD for each, objects in zip(given[3], found, strict=True))
    return [objects._replace(masks=each) for objects, each in zip(found, pixels, strict=True)]


def _has_no_object_class(logits: Array, architecture: str) -> bool:
    """Whether the last class is "no object": so in DETR, not in RT-DETR and Deformable DETR, which have sigmoids."""
    name = architecture.lower().replace("_", "").replace("-", "")
    if logits.shape[2] == 1 or any(word in name for word in SIGMOID):
        return False
    if name.split(":")[-1].startswith(SOFTMAX):
        return True
    return bool((logits.argmax(2) == logits.shape[2] - 1).mean() > 0.5)


def _detr(outputs: Outputs, names: tuple[str, ...], size: tuple[int, int], *, softmax: bool) -> list[Objects]:
    """Read DETR's outputs, without NMS: boxes [N, Q, 4] and logits [N, Q, K].

    The boxes are center, width and height relative to the image, whose ``size`` is (height, width) in pixels.
    """
    boxes, logits = (np.asarray(outputs[name], float) for name in names)
    if boxes.ndim != 3 or boxes.shape[2] != 4 or logits.shape[:2] != boxes.shape[:2]:
        raise Unreadable(f"logits and boxes do not fit each other: {described(outputs)}")
    if softmax:
        shifted = np.exp(logits - logits.max(2, keepdims=True))
        scores = (shifted / shifted.sum(2, keepdims=True))[:, :, :-1]
    else:
        scores = 1 / (1 + np.exp(-logits))
    corners = corners_of(boxes) * np.tile(np.asarray(size[::-1], float), 2)
    return [Objects.of(box, score.max(1), score.argmax(1)) for box, score in zip(corners, scores, strict=True)]


def corners_of(boxes: Array) -> Array:
    """Boxes [..., 4] of center, width and height as x1, y1, x2, y2."""
    middle, half = boxes[..., :2], boxes[..., 2:4] / 2
    return np.concatenate([middle - half, middle + half], -1)


def after_nms(array: Array) -> bool:
    """Whether rows [N, M, 6 or more] are corners, a score and a class. Rows below `LEAST_SCORE` are not checked."""
    if array.shape[2] < 6:
        return False
    rows = array[array[:, :, 4] >= LEAST_SCORE]
    scores, classes = rows[:, 4], rows[:, 5]
    ordered = (rows[:, 2] >= rows[:, 0]) & (rows[:, 3] >= rows[:, 1])
    whole = (classes == np.round(classes)) & (classes >= 0)
    return bool(len(rows) and whole.all() and ordered.all() and scores.max() <= 1)


def _without_objects(array: Array) -> bool:
    """Whether all rows [N, M, 6] have scores below `LEAST_SCORE`: padding, which does not show the layout."""
    return array.shape[2] == 6 and bool((array[:, :, 4] < LEAST_SCORE).all())


def _rows_after_nms(outputs: Outputs, name: str) -> list[Objects]:
    return [Objects.of(each[:, :4], each[:, 4], np.round(each[:, 5])) for each in outputs[name]]


def classes_of(outputs: Outputs, about: NetworkFacts, more: int = 0) -> int:
    """The number of classes of an output [N, 4 + classes + more, M] of Ultralytics, checked by its scores.

    Raises:
        Unreadable: If the number of rows does not fit the classes, or the scores are not from 0 to 1.
    """
    name, first = next(iter(outputs.items()))
    rows = first.shape[1] - 4 - more
    classes = about.classes or rows
    if classes != rows:
        raise Unreadable(f"{name} {list(first.shape)} is not [N, 4 + classes, M] of {classes} classes")
    if classes < 1 or first.shape[1] >= first.shape[2]:
        raise Unreadable(f"{name} {list(first.shape)} is not [N, 4 + classes, M] with more boxes M than rows")
    scores = first[:, 4 : 4 + classes]
    if scores.min() < 0 or scores.max() > 1:
        raise Unreadable(
            f"{name} {list(first.shape)} has scores from {scores.min():.2g} to {scores.max():.2g}, not 0 to 1"
        )
    return classes


def ultralytics(outputs: Outputs, name: str, classes: int, *, rotated: bool = False) -> list[Objects]:
    """Read Ultralytics' output [N, 4 + classes, M] and apply NMS within each class.

    The rows are center, width and height in pixels, then one score per class; of ``rotated`` boxes also the angle in
    radians.
    """
    found = []
    for each in outputs[name]:
        scores = each[4 : 4 + classes]
        boxes = each[[0, 1, 2, 3, 4 + classes]].T if rotated else corners_of(each[:4].T)
        found.append(suppressed(Objects.of(boxes, scores.max(0), scores.argmax(0))))
    return found


def rotated_classes(array: Array, about: NetworkFacts) -> int:
    """The number of classes of an output [N, 4 + classes + 1, M] whose last row is an angle; 0 if it is no angle.

    The last row is an angle if the network is known to have rotated boxes, if there is one row more than 4 and the
    number of its classes, or if only the last row has numbers that cannot be scores.
    """
    classes = array.shape[1] - 5
    if classes < 1 or array.shape[1] >= array.shape[2]:
        return 0
    scores, angles = array[:, 4:-1], array[:, -1]
    known = about.rotated or about.classes == classes
    shown = about.classes is None and (angles.min() < 0 or angles.max() > 1) and np.abs(angles).max() <= np.pi
    return classes if (known or shown) and scores.min() >= 0 and scores.max() <= 1 else 0


def _rotated_after_nms(outputs: Outputs, name: str) -> list[Objects]:
    return [Objects.of(each[:, [0, 1, 2, 3, 6]], each[:, 4], np.round(each[:, 5])) for each in outputs[name]]
