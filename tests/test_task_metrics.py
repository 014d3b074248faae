"""Lossy steps evaluated in the network's task: metrics against manual values, layouts of outputs, an INT8 detector."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from onnx import numpy_helper
from test_score_and_convert_commands import HEADS, images, plain_weights
from test_tune_command import ratio_of

import repaconv as rc
from repaconv.core.errors import Refused, UsageProblem
from repaconv.core.run_folder import find_run
from repaconv.onnx_export import fp16_and_int8
from repaconv.tasks.contract import NetworkFacts, NothingToCompare, Unreadable
from repaconv.tasks.depth import Depth
from repaconv.tasks.detection import Detection, Labeled, Objects, ious, suppressed
from repaconv.tasks.embedding import Embedding
from repaconv.tasks.evaluation import TASKS, Evaluation
from repaconv.tasks.keypoints import Keypoints
from repaconv.tasks.labels import coco_images
from repaconv.tasks.restoration import Restoration, ssim
from repaconv.tasks.rotated_boxes import rotated_ious
from repaconv.tasks.segmentation import Segmentation
from repaconv.tasks.task_of_network import ARCHITECTURES, Choice, by_architecture, by_outputs, task_named
from repaconv.tasks.text_recognition import TextRecognition, edit_distance
from repaconv.verification.accuracy_budget import Budget
from repaconv.verification.comparison import Comparison
from repaconv.verification.tolerances import tolerance

SHAPES = Path(__file__).resolve().parents[1] / "benchmarks" / "train" / "shapes.py"
SIZE = (64, 64)
ABOUT = NetworkFacts(size=SIZE)


def shapes():
    """benchmarks/train/shapes.py as a module."""
    spec = importlib.util.spec_from_file_location("shapes", SHAPES)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compared(task, candidate, reference):
    """All metrics of a candidate's outputs against a reference's."""
    expected = task.read(reference)
    return task.summary(
        task.settled([task.row(a, task.truth(b)) for a, b in zip(task.read(candidate), expected, strict=True)])
    )


# --- Detection

BOXES = np.asarray([[8.0, 8, 24, 24], [30, 30, 60, 50], [2, 40, 20, 62]])
SCORES, CLASSES = np.asarray([0.9, 0.8, 0.6]), np.asarray([0, 2, 1])


def in_layout(kind, boxes=BOXES, scores=SCORES, classes=CLASSES):
    """The same objects of one image, as networks of different origins give them; with a second, lower box each."""
    wide = boxes[:, 2:] - boxes[:, :2]
    middle = boxes[:, :2] + wide / 2
    boxes_twice, scores_twice = np.concatenate([boxes, boxes + 0.5]), np.concatenate([scores, scores / 2])
    if kind == "torchvision":
        return {"boxes": boxes, "labels": classes, "scores": scores}
    if kind == "after nms":
        rows = np.concatenate([boxes, scores[:, None], classes[:, None].astype(float)], 1)
        return {"output0": np.concatenate([rows, np.zeros((5, 6))])[None]}
    scored = np.zeros((len(scores), 3))
    scored[np.arange(len(scores)), classes] = scores
    if kind == "ultralytics":
        both = np.concatenate([middle, wide], 1), np.concatenate([middle + 0.5, wide], 1)
        raw = np.concatenate([np.concatenate(both), np.concatenate([scored, scored / 2])], 1)
        return {"output0": np.concatenate([raw, np.zeros((20, 7))]).T[None]}
    relative = np.concatenate([middle, wide], 1) / 64
    if kind == "rt-detr":
        with np.errstate(divide="ignore"):
            return {"logits": np.log(scored / (1 - scored)).clip(-20)[None], "pred_boxes": relative[None]}
    rest = np.concatenate([scored, 1 - scored.sum(1, keepdims=True)], 1).clip(1e-9)
    nothing = np.tile(np.log([1e-9, 1e-9, 1e-9, 1.0]), (6, 1))
    assert boxes_twice.shape[0] == len(scores_twice)
    return {
        "logits": np.concatenate([np.log(rest), nothing])[None],
        "pred_boxes": np.concatenate([relative, np.zeros((6, 4))])[None],
    }


LAYOUTS = ("torchvision", "after nms", "ultralytics", "rt-detr", "detr")


@pytest.mark.parametrize("kind", LAYOUTS)
def test_the_same_objects_are_read_from_every_layout(kind):
    name = {"rt-detr": "transformers:RTDetrForObjectDetection", "detr": "transformers:DetrForObjectDetection"}.get(
        kind, ""
    )
    task = Detection(NetworkFacts(name, 3, SIZE))
    (found,) = task.read(in_layout(kind))
    found = task.truth(found)
    assert np.allclose(found.boxes, BOXES, atol=1e-4)
    assert np.allclose(found.scores, SCORES, atol=1e-6)
    assert found.classes.tolist() == CLASSES.tolist()
    assert by_outputs(in_layout(kind), ABOUT, 3)[0] == ("other" if kind == "ultralytics" else "detect")  # no 84 places
    assert bool(task.lists) == (kind not in ("ultralytics", "detr"))


def test_logits_are_read_with_sigmoids_unless_the_network_has_a_class_for_no_object():
    logits = np.full((1, 300, 91), -5.0)
    logits[0, :4, 5] = 1.0
    outputs = {"logits": logits, "pred_boxes": np.full((1, 300, 4), 0.2)}
    layouts = {}
    for name in ("LwDetr", "RfDetr", "RTDetrV2", "DFine", "ConditionalDetr", "Detr", "TableTransformer", "Yolos"):
        task = Detection(NetworkFacts(f"transformers:{name}ForObjectDetection", None, SIZE))
        (objects,) = task.read(outputs)
        layouts.setdefault(task.layout.split()[1], []).append(name)
        assert objects.scores[0] == pytest.approx(0.7311 if "sigmoid" in task.layout else 0.8176, abs=1e-4)
    assert layouts == {
        "sigmoid": ["LwDetr", "RfDetr", "RTDetrV2", "DFine", "ConditionalDetr"],
        "softmax": ["Detr", "TableTransformer", "Yolos"],
    }
    one = {"logits": logits[:, :, 5:6], "pred_boxes": outputs["pred_boxes"]}
    (objects,) = Detection(NetworkFacts("transformers:DetrForObjectDetection", None, SIZE)).read(one)
    assert (objects.scores >= 0.5).sum() == 4


def test_padding_after_nms_is_not_part_of_the_layout():
    rows = np.zeros((1, 300, 6))
    rows[0, :3] = np.concatenate([BOXES, SCORES[:, None], CLASSES[:, None]], 1)
    rows[0, 7] = [12, 10, 11.9, 12, 0.0004, 3]  # next to no score, and a corner off by rounding
    rows[0, 10:] = -1
    (found,) = Detection(NetworkFacts(classes=80, size=SIZE)).read({"output0": rows})
    assert np.allclose(found.boxes, BOXES)
    assert by_outputs({"y": rows}, ABOUT, 3)[0] == "detect"
    for nothing in (np.zeros((1, 300, 6)), np.full((1, 300, 6), -1.0)):
        assert by_outputs({"y": nothing}, ABOUT, 3)[0] == "other"
        (found,) = Detection(NetworkFacts(classes=80, size=SIZE)).read({"output0": nothing})
        assert not len(found.scores)
    with pytest.raises(Unreadable, match="of 300 classes"):  # 300 queries with 300 scores, not 296 scores of 304 boxes
        Detection(NetworkFacts(classes=300, size=SIZE)).read({"o": np.random.default_rng(0).random((1, 300, 304))})


def test_a_loss_against_few_labels_is_no_failure():
    """The interval of one image is a point: whatever moves a box would be a significant loss."""
    boxes = np.asarray([[i * 20.0, 0, i * 20 + 15, 15] for i in range(8)])
    right = in_layout("torchvision", boxes, np.linspace(0.9, 0.5, 8), np.zeros(8, int))
    moved = {**right, "boxes": boxes + np.asarray([1.0, 0, 1, 0]) * (np.arange(8) == 0)[:, None]}
    label = Labeled(boxes, np.zeros(8, int), np.zeros(8, bool), {0: ""})
    for count, verdict in ((1, "passed"), (19, "passed"), (20, "failed")):
        evaluation = Evaluation(Choice("detect", "", True, ABOUT), "int8")
        for _ in range(count):
            evaluation.add(moved, right, [label])
        link = evaluation.link("int8", "reference", "candidate")
        assert (link.verdict, link.task.accuracy.low > 0.02) == (verdict, True)


def test_precision_recall_and_average_precision_equal_manual_values():
    task, right = Detection(NetworkFacts(classes=3, size=SIZE)), in_layout("torchvision")
    assert compared(task, right, right) == {"precision": 1, "recall": 1, "F1": 1, "mAP50-95": 1}
    lost = in_layout("torchvision", BOXES[:2], SCORES[:2], CLASSES[:2])
    assert compared(task, lost, right) == pytest.approx({"precision": 1, "recall": 2 / 3, "F1": 0.8, "mAP50-95": 2 / 3})
    other = in_layout("torchvision", classes=np.asarray([0, 2, 2]))
    assert compared(task, other, right) == pytest.approx(
        {"precision": 2 / 3, "recall": 2 / 3, "F1": 2 / 3, "mAP50-95": 2 / 3}
    )
    # 16 x 16 moved by 2 has IoU 14/18 = 0.78: a hit at 0.5 ... 0.75, so 6 of 10 thresholds; the other two boxes stay
    moved = in_layout("torchvision", BOXES + np.asarray([[2, 0, 2, 0], [0] * 4, [0] * 4]))
    found = compared(task, moved, right)
    assert found["F1"] == 1
    assert found["mAP50-95"] == pytest.approx((0.6 + 1 + 1) / 3)
    with pytest.raises(NothingToCompare, match="no object"):
        compared(task, right, in_layout("torchvision", scores=SCORES / 10))


def test_a_perfect_candidate_of_many_objects_passes():
    """COCO counts 100 detections of an image; the reference's objects are all of its objects."""
    places = np.stack(np.meshgrid(np.arange(15), np.arange(15)), -1).reshape(-1, 2)[:200] * 40.0
    right = in_layout("torchvision", np.concatenate([places, places + 30], 1), np.linspace(0.9, 0.5, 200), np.ones(200))
    task = Detection(ABOUT)
    assert compared(task, right, right) == {"precision": 1, "recall": 1, "F1": 1, "mAP50-95": 1}
    half = {name: array[:100] for name, array in right.items()}
    assert compared(task, half, right)["recall"] == 0.5


def test_a_score_next_to_the_limit_neither_loses_an_object_nor_makes_one():
    def metrics(low, reference):
        both = [in_layout("torchvision", scores=np.asarray([0.9, 0.8, score])) for score in (low, reference)]
        found = compared(Detection(ABOUT), *both)
        return found["precision"], found["recall"]

    assert metrics(0.2499, 0.2501) == metrics(0.2501, 0.2499) == metrics(0.26, 0.1) == (1, 1)
    assert metrics(0.22, 0.2501) == (1, pytest.approx(2 / 3))
    assert metrics(0.28, 0.2499) == (pytest.approx(2 / 3), 1)


def test_average_precision_is_that_of_pycocotools():
    pytest.importorskip("pycocotools")
    chance, task = np.random.default_rng(0), Detection(NetworkFacts(classes=3, size=SIZE))
    pairs = []
    for _ in range(20):
        boxes = chance.uniform(0, 40, (5, 4))
        boxes[:, 2:] = boxes[:, :2] + chance.uniform(5, 20, (5, 2))
        found = np.concatenate(
            [boxes + chance.normal(0, 1.5, (5, 4)), chance.uniform(0, 30, (4, 4)) + np.asarray([0, 0, 30, 30])]
        )
        classes = chance.integers(0, 3, 5)
        guesses = np.concatenate([np.where(chance.random(5) < 0.8, classes, 0), chance.integers(0, 3, 4)])
        label = Labeled(boxes, classes + 1, np.zeros(5, bool), {1: "", 2: "", 3: ""})
        pairs.append((task.labeled_row(Objects.of(found, chance.random(9), guesses), label),) * 2)
    rows = [pair[0] for pair in task.settled_labels(pairs)]
    assert task.by_library(rows) == pytest.approx(task.summary(rows)["mAP50-95"], abs=1e-9)


def test_nms_keeps_the_best_box_of_each_class():
    boxes = np.asarray([[0.0, 0, 10, 10], [1, 0, 11, 10], [1, 0, 11, 10], [40, 40, 50, 50]])
    kept = suppressed(Objects.of(boxes, np.asarray([0.9, 0.8, 0.7, 0.6]), np.asarray([0, 0, 1, 0])), 0.5)
    assert kept.scores.tolist() == [0.9, 0.7, 0.6]
    assert ious(boxes[:1], boxes[1:2])[0, 0] == pytest.approx(90 / 110)


# --- Other tasks


def test_pixel_agreement_and_mean_iou_equal_manual_values():
    truth = np.zeros((1, 4, 4), int)
    truth[0, :2] = 1
    truth[0, 0, 0] = 255
    found = np.where(truth == 255, 2, truth)  # what is ignored is not compared
    found[0, 3] = 1
    task = Segmentation(ABOUT)
    (a,), (b,) = task.read({"classes": found}), [truth[0]]
    found_metrics = task.summary([task.labeled_row(a, b)])
    assert found_metrics["pixel agreement"] == pytest.approx(11 / 15)
    assert found_metrics["mean IoU"] == pytest.approx((4 / 8 + 7 / 11) / 2)
    with pytest.raises(NothingToCompare):
        task.summary([task.labeled_row(a * 0, b * 0)])


def test_segmentation_reads_scores_of_classes_and_of_one_class():
    scores = np.random.default_rng(0).normal(size=(2, 5, 16, 16))
    (first, _) = Segmentation(NetworkFacts(size=(16, 16))).read({"out": scores, "aux": scores})
    assert (first == scores[0].argmax(0)).all()
    assert Segmentation(ABOUT).read({"logits": scores})[0].shape == SIZE  # bilinear, to the size of the image
    assert (Segmentation(NetworkFacts(size=(16, 16))).read({"x": scores[:, :1]})[0] == (scores[0, 0] > 0)).all()
    with pytest.raises(Unreadable):
        Segmentation(ABOUT).read({"logits": scores[:, :, 0, 0]})


def test_psnr_ssim_and_relative_depth_equal_manual_values():
    chance = np.random.default_rng(0)
    image = chance.random((1, 3, 32, 32))
    task = Restoration(ABOUT)
    assert compared(task, {"y": image}, {"y": image}) == {"PSNR": 100, "SSIM": pytest.approx(1)}
    with pytest.raises(Unreadable, match="compared with labels"):
        task.row(image[0], image[0, :, :16])
    assert compared(task, {"y": image + 0.1}, {"y": image})["PSNR"] == pytest.approx(20)
    assert ssim(image[0], 1 - image[0], 1.0)[1.0] < 0
    depth = 1 + chance.random((2, 1, 8, 8))
    found = compared(Depth(ABOUT), {"depth": 1.1 * depth}, {"depth": depth})
    assert found == {"AbsRel": pytest.approx(0.1), "within 25%": 1}
    assert compared(Depth(ABOUT), {"depth": 2 * depth}, {"depth": depth})["within 25%"] == 0


def test_nearest_images_of_embeddings():
    vectors = np.eye(6)[:, :3] + 0.1 * np.random.default_rng(1).normal(size=(6, 3))
    same = compared(Embedding(ABOUT), {"v": 3 * vectors}, {"v": vectors})
    assert same == {"cosine": pytest.approx(1), "nearest image agreement": 1}
    other = compared(Embedding(ABOUT), {"v": -vectors}, {"v": vectors})
    assert other["cosine"] == pytest.approx(-1)
    assert other["nearest image agreement"] < 0.5


def test_an_image_that_is_nearly_as_near_is_as_good_an_answer():
    """Frames of a video: which of two near-identical frames is nearest is a matter of rounding."""
    rng = np.random.default_rng(0)
    frames = np.repeat(rng.normal(size=(8, 16)), 3, 0) + 1e-4 * rng.normal(size=(24, 16))
    moved = frames + 1e-3 * rng.normal(size=frames.shape)
    assert compared(Embedding(ABOUT), {"v": moved}, {"v": frames})["nearest image agreement"] == 1
    same = np.repeat(rng.normal(size=(8, 16)), 3, 0)
    assert compared(Embedding(ABOUT), {"v": same + 1e-6 * rng.normal(size=same.shape)}, {"v": same}) == {
        "cosine": pytest.approx(1),
        "nearest image agreement": 1,
    }
    others = rng.permutation(frames)
    assert compared(Embedding(ABOUT), {"v": others}, {"v": frames})["nearest image agreement"] < 0.5
    # alike vectors, whose similarities are all within 1%, are no ties: the margin is a share of how far they differ
    alike = 10 + rng.normal(size=(24, 16))
    assert compared(Embedding(ABOUT), {"v": rng.permutation(alike)}, {"v": alike})["nearest image agreement"] < 0.5


def scores_of(*lines, characters=5, blank=0):
    """Scores [N, T, C] with one step for each class number of a line."""
    steps = max(map(len, lines))
    found = np.zeros((len(lines), steps, characters + 1))
    found[:, :, blank] = 0.5
    for image, line in enumerate(lines):
        found[image, np.arange(len(line)), line] = 1
    return {"logits": found}


def test_lines_of_text_are_compared_by_characters():
    task = TextRecognition(ABOUT)
    lines = [0, 1, 1, 0, 1, 0, 2, 0], [0, 0, 0, 3, 3, 3, 0, 0]
    assert task.read(scores_of(*lines)) == [(1, 1, 2), (3,)]
    assert task.layout == "CTC: 5 characters, the blank is class 0"
    last = [5, 1, 1, 5, 1, 5, 2, 5], [5, 5, 5, 3, 3, 3, 5, 5]
    assert TextRecognition(ABOUT).read(scores_of(*last, blank=5)) == [(1, 1, 2), (3,)]
    longer = [0, 1, 1, 1, 1, 0, 2, 0], [0, 0, 0, 3, 3, 3, 0, 0]  # 1 2 for 1 1 2: one of four characters is missing
    found = compared(TextRecognition(ABOUT), scores_of(*longer), scores_of(*lines))
    assert found == {"equal lines": 0.5, "CER": 0.25}
    wide = {"logits": 3 * scores_of(*lines)["logits"] - 1}
    assert compared(TextRecognition(ABOUT), wide, scores_of(*lines)) == {"equal lines": 1, "CER": 0}
    one = {"logits": scores_of(lines[0])["logits"].transpose(1, 0, 2)}
    assert TextRecognition(ABOUT).read(one) == [(1, 1, 2)]
    assert [edit_distance(*pair) for pair in (((), ()), ((1, 2), ()), ((1, 2, 3), (2, 3, 4)))] == [0, 2, 2]
    empty = scores_of([0, 0, 0], [0, 0, 0])
    with pytest.raises(NothingToCompare, match="reads no character"):
        compared(TextRecognition(ABOUT), empty, empty)
    with pytest.raises(Unreadable):
        TextRecognition(ABOUT).read({"logits": np.zeros((2, 7))})


def test_text_that_a_broken_recognizer_reads_fails_where_its_numbers_pass():
    """All scores of one step have two classes that are nearly equal: a small error of the numbers reads other text."""
    rng = np.random.default_rng(0)
    right = rng.normal(size=(40, 12, 20)) * 10
    right[:, ::2, 0] += 60
    best = right.argmax(2)
    second = right.copy()
    np.put_along_axis(second, best[..., None], right.max(2, keepdims=True) - 8, 2)
    numbers, text = links_of({"y": second}, {"y": right}, kind="recognize")
    assert numbers.metrics.cosine > tolerance("int8", logits=False).cosine
    assert numbers.verdict != "failed"
    assert text.verdict == "failed"
    assert text.task.changed == "of lines changed"


def test_keypoints_of_heatmaps_and_of_ultralytics():
    maps = np.zeros((1, 2, 16, 16))
    maps[0, 0, 4, 5] = maps[0, 1, 10, 3] = 1
    moved = np.zeros_like(maps)
    moved[0, 0, 4, 6] = moved[0, 1, 10, 10] = 1  # by one cell of 4 pixels, and by seven
    task = Keypoints(ABOUT)
    assert np.allclose(task.read({"maps": maps})[0].points[0], [[20, 16], [12, 40]])
    assert compared(task, {"maps": moved}, {"maps": maps})["PCK@0.05"] == 0  # 4 pixels are more than 5% of 64
    raw = np.zeros((1, 5 + 6, 20))
    raw[0, :5, 3] = [30, 30, 40, 40, 0.9]
    raw[0, 5:, 3] = [20, 20, 1, 40, 40, 1]
    other = raw.copy()
    other[0, 5, 3] += 3
    found = compared(Keypoints(NetworkFacts(classes=1, size=SIZE)), {"o": other}, {"o": raw})
    assert found["PCK@0.05"] == 0.5
    (nothing,) = Keypoints(NetworkFacts(classes=1, size=SIZE)).read({"o": 0 * raw})
    assert nothing.points.shape == (0, 2, 2)
    assert 0.5 < found["OKS"] < 1


def persons(boxes, points, visible=1.0, scores=(0.9, 0.8)):
    """Keypoints as torchvision gives them: one row of everything for each person."""
    count = len(boxes)
    numbers = np.concatenate([points[:count], np.full((count, points.shape[1], 1), visible)], 2)
    return {"boxes": np.asarray(boxes, float), "scores": np.asarray(scores[:count]), "keypoints": numbers}


def test_persons_that_are_invented_lost_or_without_points_count_as_wrong():
    points = np.random.default_rng(0).uniform(0, 60, (2, 5, 2))
    points[1] = points[0]
    both = persons([[0, 0, 60, 60], [4, 0, 62, 60]], points)
    one = persons([[0, 0, 60, 60]], points)

    def found(candidate, reference):
        return compared(Keypoints(ABOUT), candidate, reference)

    assert found(both, both) == found(one, one) == {"PCK@0.05": 1, "OKS": 1}
    two_thirds = {"PCK@0.05": pytest.approx(2 / 3), "OKS": pytest.approx(2 / 3)}
    assert found(one, both) == two_thirds  # both overlap: the one that is left is matched once
    assert found(both, one) == two_thirds
    assert found(persons([[0, 0, 60, 60]], points, visible=0.0), one) == {"PCK@0.05": 0, "OKS": 0}
    assert found(persons([[0, 0, 60, 60]], points, scores=[0.249]), one)["PCK@0.05"] == 1
    low = persons([[0, 0, 60, 60], [4, 0, 62, 60]], points, scores=[0.9, 0.251])
    assert found(low, one)["PCK@0.05"] == 1  # next to the limit
    hidden = persons([[0, 0, 60, 60]], points, visible=0.0)
    with pytest.raises(NothingToCompare):
        found(hidden, hidden)
    objects = links_of(both, hidden, kind="keypoints")[-1]
    assert (objects.verdict, objects.task) == ("failed", None)


def test_keypoints_of_several_images_are_read_image_by_image():
    points = np.random.default_rng(0).uniform(0, 60, (2, 5, 2))
    one = persons([[0, 0, 60, 60], [4, 0, 62, 60]], points)
    first, second = Keypoints(ABOUT).read({name: np.stack([array, array]) for name, array in one.items()})
    assert np.allclose(first.points, points)
    assert np.allclose(second.points, points)
    with pytest.raises(Unreadable, match="do not fit each other"):
        Keypoints(ABOUT).read({**one, "scores": np.ones(3)})


@pytest.mark.parametrize("name", TASKS)
def test_every_task_has_limits_for_every_lossy_precision(name):
    """A metric with a limit has one in every precision, and the reference itself meets all of them."""
    from repaconv.verification.tolerances import LOSSY

    limited = [metric for metric in TASKS[name].metrics if metric.limits]
    assert limited
    assert all(metric.limits.keys() == LOSSY.keys() for metric in limited)
    assert TASKS[name].accuracy in ("", *(metric.name for metric in TASKS[name].metrics))


# --- Which task it is


def test_tasks_by_architecture_and_by_outputs():
    assert by_architecture("ultralytics:yolo11n-pose.yaml", {"task": "pose"}) == "keypoints"
    for name, task in {
        "torchvision:lraspp_mobilenet_v3_large": "segment",
        "torchvision:ssdlite320_mobilenet_v3_large": "detect",
        "transformers:DetrForObjectDetection": "detect",
        "transformers:DepthAnythingForDepthEstimation": "depth",
        "transformers:Swin2SRForImageSuperResolution": "restore",
        "transformers:CLIPVisionModelWithProjection": "embed",
        "timm:resnet18": None,
    }.items():
        assert by_architecture(name, {}) == task, name
    assert len({pattern for pattern, _ in ARCHITECTURES}) == len(ARCHITECTURES)
    wide = {"output0": np.zeros((1, 84, 84))}
    assert by_outputs(wide, ABOUT, 3)[0] == "detect"
    assert by_outputs({**wide, "output1": np.zeros((1, 32, 16, 16))}, ABOUT, 3)[0] == "segment"
    assert by_outputs({"y": np.zeros((1, 3, 64, 64))}, ABOUT, 3)[0] == "other"  # an image, or three classes
    assert by_outputs({"y": np.zeros((1, 1000))}, ABOUT, 3)[0] == "other"
    with pytest.raises(UsageProblem, match="there is no task"):
        task_named("detection")


def test_outputs_of_another_kind_are_refused_if_the_task_was_named_and_else_compared_as_numbers():
    outputs = {"logits": np.random.default_rng(0).normal(size=(4, 10))}
    with pytest.raises(Refused, match=r"--task detect: its outputs .* are none of") as refused:
        Evaluation(Choice("detect", "--task", True, ABOUT), "int8").add(outputs, outputs)
    assert refused.value.code == "task.outputs"
    known = Evaluation(Choice("detect", "the architecture", False, ABOUT), "int8")
    found = Comparison("int8", tolerance("int8", logits=False), "", evaluation=known)
    found.add(outputs, outputs)
    (link,) = found.links("int8", "float32")
    assert link.verdict == "passed"
    assert link.task is None
    assert "compared as numbers, not as results of detect (the architecture): its outputs" in link.note
    assert "task" not in link.model_dump()  # results without a task are as before


def test_nan_in_the_outputs_fails_in_every_task():
    right = in_layout("torchvision")
    found = Comparison(
        "int8", tolerance("int8", logits=False), "", evaluation=Evaluation(Choice("detect", "", True, ABOUT), "int8")
    )
    wrong = {**right, "boxes": np.where(np.arange(3)[:, None] == 2, np.nan, right["boxes"])}
    found.add(wrong, right, whole=True)
    (link,) = found.links("int8", "float32")
    assert (link.verdict, link.figures.detail) == ("failed", "its outputs have NaN or infinity")


def links_of(found, right, name="", kind="detect", precision="int8", classes=None, labels=None):
    """All links of a candidate's outputs against a reference's."""
    choice = Choice(kind, "", True, NetworkFacts(name, classes, SIZE))
    compared = Comparison(precision, tolerance(precision, logits=False), "", evaluation=Evaluation(choice, precision))
    for _ in range(2):
        compared.add(found, right, whole=True, truths=labels)
    return compared.links(precision, "float32")


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_broken_candidate_fails_where_the_reference_finds_nothing(kind):
    """Where neither shows an object, lists of objects are compared as the numbers that they are."""
    name = {"rt-detr": "x:RTDetrForObjectDetection", "detr": "x:DetrForObjectDetection"}.get(kind, "")
    low, asked = in_layout(kind, scores=SCORES / 10), {"name": name, "classes": 3}

    def verdicts(found):
        return [link.verdict for link in links_of(found, low, **asked)]

    *numbers, objects = links_of(low, low, **asked)
    assert (objects.verdict, len(numbers)) == ("not verified", len(low))
    assert "failed" not in verdicts(low)
    nan = {name: array * np.nan for name, array in low.items()}
    objects = links_of(nan, low, **asked)[-1]
    assert (objects.verdict, objects.figures.detail) == ("failed", "its outputs have NaN or infinity")
    objects = links_of(in_layout(kind), low, **asked)[-1]
    assert objects.verdict == "failed"
    assert "in any image, the candidate finds 6" in objects.figures.detail
    assert "failed" in verdicts(in_layout(kind, boxes=BOXES[::-1] * [1, 1, 1.5, 1.5], scores=SCORES / 10))


@pytest.mark.parametrize("kind", LAYOUTS)
def test_outputs_that_are_not_read_as_objects_are_compared_as_numbers(kind):
    name = {"rt-detr": "x:RTDetrForObjectDetection", "detr": "x:DetrForObjectDetection"}.get(kind, "")
    right = in_layout(kind) | {"pred_masks": np.random.default_rng(0).normal(size=(1, 6, 8, 8))}
    *_, masks, objects = links_of(right | {"pred_masks": -right["pred_masks"]}, right, name, classes=3)
    assert (masks.verdict, objects.verdict) == ("failed", "passed")


def test_a_list_of_objects_is_compared_as_objects_and_not_row_by_row():
    """Two objects with nearly equal scores in the other order: by numbers another output, by objects the same."""
    right = in_layout("torchvision", scores=np.asarray([0.9, 0.62, 0.61]))
    order = [0, 2, 1]
    swapped = {name: array[order] for name, array in right.items()} | {"scores": np.asarray([0.9, 0.615, 0.612])}
    for evaluation, verdicts in ((None, {"failed", "passed", "not verified"}), ("detect", {"passed"})):
        choice = Evaluation(Choice("detect", "", True, ABOUT), "int8") if evaluation else None
        found = Comparison("int8", tolerance("int8", logits=False), "", evaluation=choice)
        found.add(swapped, right, whole=True)
        found.add(right, right, whole=True)
        links = found.links("int8", "float32")
        assert {link.verdict for link in links} <= verdicts
        assert ("failed" in {link.verdict for link in links}) == (evaluation is None)


def instances(boxes, scores, classes, masks):
    """As Mask R-CNN gives them: masks [M, 1, 64, 64] of numbers from 0 to 1."""
    return {"boxes": boxes, "labels": classes, "scores": scores, "masks": masks[:, None]}


def painted(boxes):
    """A mask of the inside of each box."""
    masks = np.full((len(boxes), 64, 64), 0.1)
    for mask, (left, top, right, bottom) in zip(masks, boxes.astype(int), strict=True):
        mask[top:bottom, left:right] = 0.9
    return masks


def test_masks_of_single_instances_are_those_of_matched_boxes():
    """One object that is lost shifts all rows below it: by numbers all is wrong, by objects one."""
    right = instances(BOXES, SCORES, CLASSES, painted(BOXES))
    assert compared(Detection(ABOUT), right, right)["mask IoU"] == 1
    first_lost = {name: array[1:] for name, array in right.items()}
    found = compared(Detection(ABOUT), first_lost, right)
    assert (found["mask IoU"], found["F1"]) == (1, pytest.approx(0.8))
    (link,) = links_of(first_lost, right)  # nothing is left that is compared row by row
    assert link.task.layout == "boxes, scores, labels and masks after NMS"
    assert {metric.name for metric in link.task.metrics} >= {"F1", "mask IoU"}
    half = painted(BOXES)
    half[0, :, 16:] = 0.1
    assert compared(Detection(ABOUT), {**right, "masks": half[:, None]}, right)["mask IoU"] == pytest.approx(2.5 / 3)
    (broken,) = links_of({**right, "masks": half[:, None]}, right)
    assert broken.verdict == "failed"
    several = {name: np.stack([array, array]) for name, array in right.items()}
    assert compared(Detection(ABOUT), several, several)["mask IoU"] == 1


@pytest.mark.parametrize("kind", ["detect", "keypoints"])
def test_other_outputs_with_a_row_for_each_object_are_compared_by_the_rows_that_match(kind):
    rng = np.random.default_rng(0)
    features = {"features": rng.normal(size=(3, 4)), "pooled": rng.normal(size=(1, 8))}
    right = in_layout("torchvision") | features
    if kind == "keypoints":
        right = {name: array for name, array in right.items() if name != "labels"}
        points = np.concatenate([BOXES[:, None, :2] + [[3, 3]], np.ones((3, 1, 1))], 2)
        right |= {"keypoints": points}
    order = [2, 1]  # the first object is lost, and the others change places
    moved = {name: array if name == "pooled" else array[order] for name, array in right.items()}
    moved["scores"] = moved["scores"][::-1]
    wrong = {**moved, "features": moved["features"] + 3}
    outcomes = {}
    for name, candidate in (("moved", moved), ("wrong", wrong)):
        links = links_of(candidate, right, kind=kind)
        outcomes[name] = {link.candidate.rpartition("output ")[2]: link.verdict for link in links[:-1]}
        assert links[-1].task is not None
    assert outcomes["moved"]["features"] != "failed"
    assert outcomes["wrong"]["features"] == "failed"


def rotated_output(boxes, scores, classes):
    """[N, 4 + 3 + 1, M] of Ultralytics' oriented boxes: x, y, width, height, scores, and the angle last."""
    scored = np.zeros((len(scores), 3))
    scored[np.arange(len(scores)), classes] = scores
    rows = np.concatenate([boxes[:, :4], scored, boxes[:, 4:]], 1)
    padding = np.zeros((20, 8))
    padding[:, 7] = -0.5
    return {"output0": np.concatenate([rows, padding]).T[None]}


TURNED = np.asarray([[20.0, 20, 30, 6, 0.7], [40, 40, 24, 8, -0.3], [20, 44, 20, 10, 1.2]])


def test_rotated_boxes_are_matched_by_rotated_iou():
    right = rotated_output(TURNED, SCORES, CLASSES)
    task = Detection(ABOUT)
    assert compared(task, right, right)["mAP50-95"] == 1
    assert task.layout == "Ultralytics: 3 classes, rotated boxes, NMS at IoU 0.7"
    swapped = TURNED[:, [0, 1, 3, 2, 4]] + [0, 0, 0, 0, np.pi / 2]  # the same rectangles
    assert compared(Detection(ABOUT), rotated_output(swapped, SCORES, CLASSES), right)["mAP50-95"] == 1
    turned = TURNED + np.asarray([0, 0, 0, 0, 0.6])  # nearly the same upright boxes, other rectangles
    assert compared(Detection(ABOUT), rotated_output(turned, SCORES, CLASSES), right)["F1"] < 0.7
    known = Detection(NetworkFacts("ultralytics:yolo11n-obb.yaml", 3, SIZE, rotated=True))
    after_nms = np.concatenate([TURNED[:, :4], SCORES[:, None], CLASSES[:, None], TURNED[:, 4:]], 1)[None]
    assert compared(known, {"output0": after_nms}, {"output0": after_nms})["F1"] == 1
    assert known.layout == "x, y, width, height, score, class, angle after NMS"
    (link, *_) = links_of(right, right)[-1:]
    assert link.task.task == "detect"
    labels = [Labeled(BOXES, CLASSES, np.zeros(3, bool), {0: "", 1: "", 2: ""})]
    with pytest.raises(Refused, match="COCO annotations are upright") as refused:
        links_of(right, right, labels=labels)
    assert refused.value.code == "labels.rotated"


def test_rotated_iou_is_that_of_pixels():
    square, diamond = np.asarray([[0.0, 0, 2, 2, 0]]), np.asarray([[0.0, 0, 2, 2, np.pi / 4]])
    octagon = 8 * (np.sqrt(2) - 1)
    assert rotated_ious(square, diamond)[0, 0] == pytest.approx(octagon / (8 - octagon))
    assert rotated_ious(square, square + np.asarray([2, 0, 0, 0, 0]))[0, 0] == 0
    rng = np.random.default_rng(0)
    boxes = np.concatenate([rng.uniform(10, 40, (8, 2)), rng.uniform(4, 20, (8, 2)), rng.uniform(-2, 2, (8, 1))], 1)
    grid = np.stack(np.meshgrid(*[np.arange(-10, 60, 0.1) + 0.05] * 2), -1)
    pixels = []
    for x, y, width, height, angle in boxes:
        along = (grid - [x, y]) @ [np.cos(angle), np.sin(angle)]
        across = (grid - [x, y]) @ [-np.sin(angle), np.cos(angle)]
        pixels.append((abs(along) <= width / 2) & (abs(across) <= height / 2))
    by_pixels = [[(a & b).sum() / (a | b).sum() for b in pixels] for a in pixels]
    assert np.allclose(rotated_ious(boxes, boxes), by_pixels, atol=2e-3)
    upright = boxes * [1, 1, 1, 1, 0]
    corners = np.concatenate([upright[:, :2] - upright[:, 2:4] / 2, upright[:, :2] + upright[:, 2:4] / 2], 1)
    assert np.allclose(rotated_ious(upright, upright), ious(corners, corners), atol=1e-12)


# --- From a checkpoint to INT8


@pytest.fixture(scope="module")
def detector(tmp_path_factory):
    """A folder with a detector that was trained for a few seconds, and images with labels."""
    folder, made = tmp_path_factory.mktemp("detector"), shapes()
    net = made.trained("detector", made.made(240, 0), steps=200, seed=0, batch=16)
    torch.save({"state_dict": net.state_dict()}, folder / "detector.pth")
    made.write_data(folder, 0, calibration=32, held_out=80)
    return folder


@pytest.mark.parametrize("steps", [3, 10])
def test_the_shapes_are_trained_for_a_few_steps(steps):
    made = shapes()
    net = made.trained("segmenter", made.made(4, 0), steps=steps, seed=0, batch=2)
    assert all(weight.isfinite().all() for weight in net.parameters())


def folded(detector, **options):
    return rc.fold(
        detector / "detector.pth", arch=f"{SHAPES}:detector", settings={"image_size": "64"}, measure=False, **options
    )


def with_scale(factor, layer):
    """`to_int8` that multiplies the scale of the weights of a layer."""
    right = fp16_and_int8.to_int8

    def broken(model, *arguments, **named):
        low = right(model, *arguments, **named)
        made = {name: node for node in low.graph.node for name in node.output}
        stored = {weight.name: weight for weight in low.graph.initializer}
        convolutions = [node for node in low.graph.node if node.op_type == "Conv" and layer in node.name]
        (node,) = [made[node.input[1]] for node in convolutions]
        scale = stored[node.input[1]]
        scale.CopyFrom(numpy_helper.from_array(factor * numpy_helper.to_array(scale), scale.name))
        return low

    return broken


def test_an_int8_detector_is_evaluated_by_its_objects(detector, repaconv):
    done = folded(detector, task="detect")
    assert done.task == "detect"
    assert json.loads(Path("repaconv-out/detector/fold.json").read_text())["task"] == "detect"
    made = rc.export(precision="int8", inputs=detector / "shapes.calibration.npz")
    numbers, objects = [link for link in made.links if link.name == "int8"]
    assert numbers.task is None
    assert objects.task.task == "detect"
    assert objects.task.layout == "Ultralytics: 3 classes, NMS at IoU 0.7"
    assert {link.verdict for link in made.links} == {"passed"}
    seen = rc.verify(inputs=detector / "shapes.npz", labels=detector / "shapes.json")
    (link,) = [link for link in seen.links if link.task]
    assert link.verdict == seen.verdict == "passed"
    assert link.task.images == link.task.accuracy.images == 80
    assert link.task.accuracy.metric == "mAP50-95"
    assert link.task.accuracy.reference > 0.05  # it has learned something
    assert link.task.accuracy.low <= link.task.accuracy.drop <= link.task.accuracy.high
    assert all(metric.low <= metric.value + 0.02 and metric.value - 0.02 <= metric.high for metric in link.task.metrics)
    code, out, _ = repaconv("verify", "--inputs", detector / "shapes.npz", "--labels", detector / "shapes.json")
    assert code == 0
    assert "of objects changed" in out
    assert "mAP50-95" in out


def half_the_scores(raw):
    """A detector that loses half of its objects, by numbers that are next to nothing beside the boxes'."""
    broken = raw.copy()
    broken[:, 4:, ::2] *= 0.1
    return broken


def test_bench_and_collect_evaluate_a_detector_by_its_objects(detector, monkeypatch):
    from repaconv.sources.source_of_run import source_model_of
    from repaconv.stages.bundle import collect
    from repaconv.stages.shared.model_opening import compare_outputs
    from repaconv.verification.input_batches import Batch

    folded(detector, task="detect")
    run, given = find_run(None), np.load(detector / "shapes.npz")["input"][:24]
    source_model = source_model_of(run)
    (right,) = source_model.stored.run({"input": given}).values()
    models = {name: SimpleNamespace(precision=name, session=None) for name in ("int8", "fp32")}
    for found, verdict in ((right + 1e-4, "passed"), (half_the_scores(right), "failed")):
        outputs = [{"int8": {"output": found}, "fp32": {"output": right}}]
        link = compare_outputs(run, models, [Batch({"input": given})], outputs, scores="")
        assert (link.verdict, link.task.task) == (verdict, "detect")
        assert link.metrics.cosine > 0.999

    described = {"outputs": [{"name": "output"}], "inputs": [{"shape": [24, 3, 64, 64]}], "whole": False}
    monkeypatch.setattr(collect, "expected_in", lambda _bundle: (described, [(right,)]))
    made = SimpleNamespace(tolerance=tolerance("int8", logits=False), precision="int8", batch=24, images=24)
    for found, verdict in ((right, "passed"), (half_the_scores(right), "failed")):
        shape = "x".join(map(str, found.shape))
        board = [{"name": "output", "dimensions": shape, "values": found.ravel().tolist()}]
        files = {"output_0.json": json.dumps(board).encode()}
        numbers, objects = collect._engine_links(files, made, Path(), "board", source_model)
        assert (numbers.verdict, objects.verdict, objects.task.task) == ("passed", verdict, "detect")


@pytest.mark.parametrize(("layer", "factor"), [("score.1/", 2.0), ("box.1/", 1.5)])
def test_a_broken_scale_in_one_head_is_caught_by_the_objects_alone(layer, factor, detector, monkeypatch):
    folded(detector, task="detect")
    monkeypatch.setattr(fp16_and_int8, "to_int8", with_scale(factor, layer))
    made = rc.export(precision="int8", inputs=detector / "shapes.calibration.npz")
    numbers, objects = [link for link in made.links if link.name == "int8"]
    assert numbers.metrics.cosine > numbers.tolerance.cosine
    assert numbers.metrics.norm_error < numbers.tolerance.norm_error
    assert objects.reason in ("exceeds_tolerance",)
    assert not objects.task.within
    assert made.verdict == "failed"


def test_labels_that_do_not_belong_to_the_images_are_refused(detector):
    folded(detector, task="detect")
    with pytest.raises(Refused, match="no COCO file"):
        rc.verify(inputs=detector / "shapes.npz", labels=detector / "shapes.npz")
    with pytest.raises(Refused, match=r"labels of 80 images, and .* are 32"):
        rc.verify(inputs=detector / "shapes.calibration.npz", labels=detector / "shapes.json")
    assert len(coco_images(detector / "shapes.json")) == 80
    folded(detector)
    with pytest.raises(UsageProblem, match="the task of this network is not known"):
        rc.verify(inputs=detector / "shapes.npz", labels=detector / "shapes.json")
    with pytest.raises(UsageProblem, match="there is no task 'boxes'"):
        rc.verify(task="boxes")
    with pytest.raises(UsageProblem, match="--task classify: this network outputs"):
        rc.verify(task="classify")


def test_boxes_and_masks_follow_their_images_through_resizing_and_crop(detector, tmp_path):
    """An image of twice the size with its labels has the same objects and mask as the image itself."""
    from PIL import Image

    from repaconv.sources.source_of_run import source_model_of
    from repaconv.stages.shared.input_selection import choose_inputs
    from repaconv.stages.shared.task_choice import task_of, with_labels

    folded(detector, task="detect")
    made = shapes()
    data = made.made(3, 7)
    Path("images").mkdir()
    Path("masks").mkdir()
    coco = made.coco(data)
    for number, (image, mask) in enumerate(zip(data.images, data.masks, strict=True)):
        pixels = ((image * made.STD + made.MEAN).clip(0, 1) * 255).astype(np.uint8).transpose(1, 2, 0)
        Image.fromarray(pixels).resize((128, 128)).save(f"images/{number:04}.png")
        Image.fromarray(mask).resize((128, 128), 0).save(f"masks/{number:04}.png")
    for image in coco["images"]:
        image |= {"width": 128, "height": 128}
    for each in coco["annotations"]:
        each["bbox"] = [2 * side for side in each["bbox"]]
    Path("coco.json").write_text(json.dumps(coco))
    rc.fold(
        detector / "detector.pth",
        arch=f"{SHAPES}:detector",
        settings={"image_size": "64", "mean": "127.5", "std": "63.75"},
        task="detect",
        measure=False,
        force=True,
    )
    source_model = source_model_of(find_run(None))
    given = choose_inputs(source_model, images="images")
    choice = task_of(source_model)
    labeled = with_labels(source_model, given, Path("coco.json"), choice, images=Path("images"))
    for truth, boxes in zip(labeled.piece(0, 3).truths, data.boxes, strict=True):
        assert np.allclose(truth.boxes, boxes[:, :4])
        assert truth.ids.tolist() == boxes[:, 4].tolist()
    masked = with_labels(source_model, given, Path("masks"), choice._replace(task="segment"), images=Path("images"))
    for truth, mask in zip(masked.piece(0, 3).truths, data.masks, strict=True):
        assert (truth != mask).mean() < 0.02


def test_the_gate_holds_a_detector_to_budgets_of_its_task(detector, repaconv):
    def gated(disagreement, drop):
        Path("d.toml").write_text(
            f'checkpoint = "{detector}/detector.pth"\narch = "{SHAPES}:detector"\ntask = "detect"\nout = "d"\n'
            f'report = false\n[set]\nimage_size = 64\n[export]\nprecisions = ["fp32", "int8"]\n'
            f'inputs = "{detector}/shapes.calibration.npz"\n[verify]\ninputs = "{detector}/shapes.npz"\n'
            f'labels = "{detector}/shapes.json"\nmax_disagreement = {disagreement}\nmax_drop = {drop}\n'
        )
        code, out, err = repaconv("gate", "d.toml", "--format", "json")
        assert out, err
        (done,) = json.loads(out)["data"]["recipes"]
        return code, {check["name"]: check for check in done["checks"] if check["stage"] == "verify"}

    code, checks = gated(0.5, 20.0)
    assert code == 0, checks
    assert checks["disagreement"]["verdict"] == checks["accuracy"]["verdict"] == "passed"
    assert "of objects changed; [verify] max_disagreement = 0.5: 50.00% at most" in checks["disagreement"]["message"]
    assert "of mAP50-95 lost; [verify] max_drop = 20: 20.00% at most" in checks["accuracy"]["message"]
    code, checks = gated(0.0001, 20.0)
    assert code == 1
    assert checks["disagreement"]["verdict"] == "failed"
    assert checks["disagreement"]["line"] == 14


def test_tune_chooses_within_a_budget_of_the_task(detector, repaconv):
    folded(detector, task="detect")
    asked = {"inputs": detector / "shapes.npz", "labels": detector / "shapes.json", "rewrites": ["bias-forward"]}

    def by_int8(_reference, others, _rounds, **_):
        return {name: ratio_of(2.0 if name.startswith("int8") else 1.0) for name in others}

    with pytest.raises(UsageProblem, match="accuracy of detect is against labels"):
        rc.tune(max_accuracy_drop=0.05, inputs=detector / "shapes.npz", measurer=by_int8)
    done = rc.tune(max_disagreement=0.5, max_accuracy_drop=0.2, measurer=by_int8, **asked)
    assert done.deployment.precision == "int8"
    assert done.link.task.task == "detect"
    assert done.disagreement == done.link.task.disagreement
    assert done.link.task.accuracy.images == done.link.task.images == 24
    for few, label in ((0.0001, "it takes 1000 to tell whether no more than 0.01%"), (0.002, "it takes 500 to tell")):
        exact = rc.tune(max_disagreement=few, inputs=detector / "shapes.npz", rewrites=[], measurer=by_int8)
        assert exact.deployment.precision == "fp32"
        assert f"objects in the validation images, and {label}" in exact.skipped[0]
    data = np.load(detector / "shapes.npz")["input"]
    np.savez("few.npz", input=data[:40])
    with pytest.raises(UsageProblem, match=r"10 images cannot tell whether no more than 50\.00% is lost") as refused:
        rc.tune(max_disagreement=0.5, inputs="few.npz", measurer=by_int8)
    assert refused.value.code == "tune.too-few"
    with pytest.raises(UsageProblem, match=r"24 labeled images cannot tell whether no more than 1\.00% is lost"):
        rc.tune(max_accuracy_drop=0.01, measurer=by_int8, **asked)
    assert rc.tune(max_disagreement=1.0, inputs="few.npz", rewrites=[], measurer=by_int8).skipped == ()
    images = ("--inputs", detector / "shapes.npz", "--labels", detector / "shapes.json")
    few = ("--budget", "1", "--rounds", "2", "--rewrites", "bias-forward")
    code, out, _ = repaconv("tune", "--max-disagreement", "0.0001%", *images, *few)
    assert code == 0
    assert "exact, float32" in out


def test_a_conversion_without_classes_is_held_to_the_nearest_images_that_it_finds():
    torch.save(plain_weights(classes=0), "vit.pth")
    np.savez("x.npz", input=images())
    asked = {"inputs": "x.npz", "settings": {"num_heads": str(HEADS)}, "blocks": "3"}
    done = rc.convert("vit.pth", max_disagreement=0.95, **asked)
    assert done.evaluation.task.task == "embed"
    assert done.evaluation.reason == "within_budget"
    assert "of nearest images changed" in done.evaluation.note
    assert done.tried[-1].within
    assert done.tried[-1].agreement is not None
    (link,) = [link for link in rc.verify(inputs="x.npz").links if link.name == "converted"]
    assert (link.reason, link.task.changed) == ("within_budget", "of nearest images changed")
    half = done.evaluation.task.model_copy(update={"disagreement": 0.5})
    changed = done.evaluation.model_copy(update={"task": half})
    assert Budget(max_disagreement=0.05).concluded(changed).reason == "exceeds_budget"
    assert Budget(max_disagreement=0.45).concluded(changed).reason == "within_budget"  # chance explains the rest
    with pytest.raises(UsageProblem, match="outputs features"):
        rc.convert("vit.pth", max_accuracy_drop=0.1, **asked)
    plain = rc.convert("vit.pth", **asked)
    assert plain.evaluation.task is None  # as before


@pytest.fixture(scope="module")
def segmenter(tmp_path_factory):
    """A folder with a segmenter that was trained for half a minute, and images with masks."""
    folder, made = tmp_path_factory.mktemp("segmenter"), shapes()
    net = made.trained("segmenter", made.made(800, 1), steps=300, seed=1)
    torch.save({"state_dict": net.state_dict()}, folder / "segmenter.pth")
    made.write_data(folder, 0, calibration=32, held_out=48)
    return folder


@pytest.mark.slow
def test_an_int8_segmenter_is_evaluated_by_its_pixels(segmenter, monkeypatch):
    rc.fold(
        segmenter / "segmenter.pth",
        arch=f"{SHAPES}:segmenter",
        settings={"image_size": "64"},
        task="segment",
        measure=False,
    )
    asked = {"precision": "int8", "inputs": segmenter / "shapes.calibration.npz"}
    made = rc.export(**asked)
    (link,) = [link for link in made.links if link.task]
    assert link.verdict == made.verdict == "passed"
    assert (link.task.task, link.task.source) == ("segment", "--task")
    seen = rc.verify(inputs=segmenter / "shapes.npz", labels=segmenter / "masks", task="segment")
    (link,) = [link for link in seen.links if link.task]
    assert link.task.accuracy.metric == "mean IoU"
    assert link.task.accuracy.reference > 0.2
    assert (link.verdict, seen.verdict) == ("passed", "passed")
    monkeypatch.setattr(fp16_and_int8, "to_int8", with_scale(3.0, "join/"))
    broken = rc.export(**asked)
    numbers, pixels = [link for link in broken.links if link.name == "int8"]
    assert not pixels.task.within
    assert broken.verdict == "failed"
    assert numbers.name == "int8"


def test_the_page_has_the_limits_of_the_code():
    rows = "".join(
        f"| {metric.name} ({task.name}) | "
        + " | ".join(
            f"{metric.limits[name]:g} dB" if metric.unit == "dB" else f"{metric.limits[name]:.1%}"
            for name in ("fp16", "bf16", "int8")
        )
        + " |\n"
        for task in TASKS.values()
        for metric in task.metrics
        if metric.limits
    )
    assert rows in (SHAPES.parents[2] / "docs" / "tasks.md").read_text(), rows


def test_the_page_has_the_rows_of_the_experiment_and_these_have_the_verdicts_of_todays_limits():
    """`make bench-task-tolerances`: what it measured stays, and a limit that moves changes what became of it."""
    kinds = {"detector": "detect", "segmenter": "segment", "upscaler": "restore", "depth": "depth"}
    kinds |= {"heatmaps": "keypoints", "poser": "keypoints", "embedder": "embed", "recognizer": "recognize"}
    titles = {"upscaler": "super-resolution", "poser": "poses", "embedder": "embeddings", "recognizer": "text"}
    known, lines = {}, (SHAPES.parents[1] / "results" / "task_tolerances.jsonl").read_text().splitlines()
    for row in map(json.loads, lines):
        kind, _, trained = row["net"].partition(", ")
        low = row["type"].partition(",")[0].replace("fp32", "fp16")
        limits = {
            each.name: (each.unit, each.limits[low])
            for each in TASKS[kinds[kind]].metrics
            if each.name in row and each.limits
        }
        within = [
            row[name] <= limit if unit == "error" else row[name] >= limit for name, (unit, limit) in limits.items()
        ]
        assert row["by task"] == ("passed" if all(within) else "failed"), row
        if trained == "trained":
            change = row["way"].replace("sound", "none")
            numbers = f"{row['cosine']:.4f}, {row['norm_error']:.1%}", row["by numbers"]
            metrics = {f"{row[name]:.1f} dB" if limits[name][0] == "dB" else f"{row[name]:.1%}" for name in limits}
            known[titles.get(kind, kind), row["type"].upper(), change] = (*numbers, metrics, row["by task"])
    page = (SHAPES.parents[2] / "docs" / "tasks.md").read_text().replace("INT8, symmetric", "INT8, SYMMETRIC")
    shown = re.findall(r"^\| ([^|]+) \| (FP16|BF16|INT8|INT8, SYMMETRIC) \| ([^|]+) \| (.*) \|$", page, flags=re.M)
    assert len(shown) > 60
    for network, precision, change, rest in shown:
        *numbers, metrics, verdict = rest.split(" | ")
        assert (*numbers, set(metrics.split(", ")), verdict) == known[network, precision, change]
