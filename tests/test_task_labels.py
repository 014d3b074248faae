"""Unknown tasks, labels that do not fit, and budgets without an accuracy do not pass silently."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from test_score_and_convert_commands import HEADS, images, plain_weights

from repaconv.conversion.image_splits import role_of
from repaconv.core.errors import Refused
from repaconv.results import Preprocessing, Tolerance
from repaconv.stages.recipe.recipe_file import check_recipe
from repaconv.stages.shared import task_choice
from repaconv.stages.tune.accuracy_loss import LossEvaluation
from repaconv.tasks.contract import NetworkFacts
from repaconv.tasks.detection import Labeled
from repaconv.tasks.evaluation import Evaluation, _bootstrap, _interval
from repaconv.tasks.labels import coco_images, label_array
from repaconv.tasks.segmentation import Segmentation
from repaconv.tasks.task_of_network import Choice, by_outputs
from repaconv.verification.accuracy_budget import Budget
from repaconv.verification.comparison import Comparison, link_between
from repaconv.verification.input_batches import Batch, Inputs
from repaconv.verification.tolerances import tolerance

SIZE = (64, 64)
ABOUT = NetworkFacts(size=SIZE)
PLAIN = {"mean": (0, 0, 0), "std": (1, 1, 1), "source": "none"}


def links_of(task, found, right, *, precision="fp16", labels=None, asked=True, channels=3, about=ABOUT):
    """All links of one batch in a lossy precision."""
    evaluation = Evaluation(Choice(task, "--task" if asked else "the outputs", asked, about), precision, channels)
    compared = Comparison(precision, tolerance(precision, logits=False), "", evaluation=evaluation)
    compared.add(found, right, truths=labels)
    return compared.links(precision, "float32")


# --- Which task it is


@pytest.mark.parametrize(("taken", "given"), [(4, 3), (6, 2), (1, 2), (3, 17)])
def test_numbers_per_pixel_alone_show_no_task(taken, given):
    """A denoiser, optical flow, colors of a gray image, heatmaps: sound FP16 passes, and --task is offered."""
    rng = np.random.default_rng(0)
    right = rng.random((4, 1, 64, 64)).repeat(given, 1) + 0.004 * rng.normal(size=(4, given, 64, 64))
    found = right + 5e-4 * rng.normal(size=right.shape)
    (link,) = links_of(None, {"y": found}, {"y": right}, asked=False, channels=taken)
    assert (link.verdict, link.task) == ("passed", None)
    assert f"{given} numbers per pixel (--task segment if they are scores of classes)" in link.note
    (_, segment) = links_of("segment", {"y": right}, {"y": right}, channels=taken)
    assert segment.task.task == "segment"


def test_larger_images_and_sequences_show_no_task():
    assert by_outputs({"y": np.zeros((1, 3, 128, 128))}, ABOUT, 3)[0] == "other"
    assert "--task restore" in by_outputs({"y": np.zeros((1, 3, 128, 128))}, ABOUT, 3)[1]
    assert by_outputs({"y": [np.zeros(2), np.zeros(3)]}, ABOUT, 3)[0] == "other"


# --- Labels that do not fit


def labeled(boxes, ids, names=None):
    boxes, ids = np.asarray(boxes, float).reshape(-1, 4), np.asarray(ids, int)
    return Labeled(boxes, ids, np.zeros(len(ids), bool), dict.fromkeys(ids.tolist(), "") if names is None else names)


BOXES = np.array([[i * 8, 0, i * 8 + 7, 15.0] for i in range(8)])
OBJECTS = {"boxes": BOXES, "scores": np.linspace(0.9, 0.5, 8), "labels": np.zeros(8, int)}
SCORES = np.random.default_rng(0).normal(size=(4, 5, 64, 64))
DEPTH = 1 + np.random.default_rng(1).random((4, 16, 16))
IMAGES = np.random.default_rng(2).random((4, 3, 32, 32))


@pytest.mark.parametrize(
    ("task", "outputs", "right", "wrong"),
    [
        ("detect", OBJECTS, [labeled(BOXES, [0] * 8)], [labeled(BOXES, [1] * 8, {0: "", 1: ""})]),
        ("segment", {"y": SCORES}, list(SCORES.argmax(1)), list(SCORES.argmax(1)[:, ::-1])),
        ("restore", {"y": IMAGES}, list(IMAGES), list(255 * IMAGES)),
        ("depth", {"y": DEPTH}, list(DEPTH), list(1000 * DEPTH)),
    ],
)
def test_labels_that_the_original_network_does_not_meet_at_all_are_refused(task, outputs, right, wrong):
    """Nothing can be lost of nothing: a drop of 0 would be within every budget."""
    accuracy = links_of(task, outputs, outputs, labels=right)[-1].task.accuracy
    assert accuracy.drop == 0
    with pytest.raises(Refused, match="the original network finds nothing of the labels") as refused:
        links_of(task, outputs, outputs, labels=wrong)
    assert refused.value.code == "labels.mismatch"


COCO_IDS = [number for number in range(1, 91) if number not in (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)]
EIGHT = np.asarray([0, 2, 15, 16, 3, 77, 0, 1])  # places among COCO's categories
RT_DETR, DETR = "transformers:RTDetrForObjectDetection", "transformers:DetrForObjectDetection"


def queries(classes, numbers, softmax):
    """Outputs of a relative of DETR with an object for each number."""
    logits = np.full((1, 20, classes + softmax), -9.0)
    if softmax:
        logits[0, :, -1] = 9
    logits[0, np.arange(8), numbers] = 3.0
    logits[0, :8, classes:] = -9
    middle, side = (BOXES[:, :2] + BOXES[:, 2:]) / 2, BOXES[:, 2:] - BOXES[:, :2]
    boxes = np.full((1, 20, 4), 0.5)
    boxes[0, :8] = np.concatenate([middle, side], 1) / 64
    return {"logits": logits, "pred_boxes": boxes}


def accuracy_of(outputs, ids, names, architecture="", own=()):
    label, about = labeled(BOXES, ids, names), NetworkFacts(architecture, size=SIZE, names=own)
    return links_of("detect", outputs, outputs, labels=[label], about=about)[-1].task.accuracy.reference


def test_categories_of_coco_are_the_classes_of_the_network_however_it_counts_them():
    ids, names = np.asarray(COCO_IDS)[EIGHT], dict.fromkeys(COCO_IDS, "")
    named = {"boxes": BOXES, "scores": np.linspace(0.9, 0.5, 8)}
    assert accuracy_of(queries(80, EIGHT, False), ids, names, RT_DETR) == 1  # without gaps
    assert accuracy_of(queries(91, ids, True), ids, names, DETR) == 1  # by their ids
    assert accuracy_of({**named, "labels": EIGHT}, ids, names) == 1
    assert accuracy_of({**named, "labels": ids}, ids, names) == 1
    few = dict.fromkeys(ids.tolist(), "")
    assert accuracy_of(queries(91, ids, True), ids, few, DETR) == 1
    with pytest.raises(Refused, match=r"have 7 categories \(ids 1, 2, 3, \.\.\.\), and the network has 80") as refused:
        accuracy_of(queries(80, EIGHT, False), ids, few, RT_DETR)
    assert refused.value.code == "labels.categories"
    words = {kind: f"Name {place}" for place, kind in zip(EIGHT.tolist(), ids.tolist(), strict=True)}
    own = tuple(f"name {place}" for place in range(80))
    assert accuracy_of(queries(80, EIGHT, False), ids, words, RT_DETR, own) == 1


def test_a_file_of_few_categories_is_refused_where_both_ways_of_counting_fit():
    """Of the objects 0, 1 is found as 1 and 1 as 0: ids 1 and 2 agree with one, and the order with another."""
    objects = {"boxes": BOXES[:2], "scores": np.asarray([0.9, 0.8]), "labels": np.asarray([0, 2])}
    with pytest.raises(Refused, match="1 objects of the network agree with the ids"):
        links_of("detect", objects, objects, labels=[labeled(BOXES[:2], [1, 2], {1: "", 2: ""})])


@pytest.mark.parametrize("asked", [True, False])
def test_labels_of_another_size_are_refused_however_the_task_is_known(asked):
    with pytest.raises(Refused, match=r"labels of \[32, 32\]") as refused:
        links_of("segment", {"y": SCORES}, {"y": SCORES}, labels=[np.zeros((32, 32), int)] * 4, asked=asked)
    assert refused.value.code == "labels.size"


@pytest.mark.parametrize("hole", [np.nan, np.inf])
def test_a_hole_in_a_depth_map_leaves_the_other_pixels(hole):
    truth = DEPTH.copy()
    truth[:, 0, 0] = hole
    accuracy = links_of("depth", {"y": DEPTH * 1.5}, {"y": DEPTH}, precision="int8", labels=list(truth))[
        -1
    ].task.accuracy
    assert (accuracy.reference, accuracy.candidate) == pytest.approx((0, 0.5))


def test_labels_that_show_nothing_give_no_accuracy_and_meet_no_budget():
    one_class = [np.zeros((64, 64), int)] * 4
    link = links_of("segment", {"y": SCORES}, {"y": SCORES}, labels=one_class)[-1]
    assert link.task.accuracy is None
    assert "no mean IoU against the labels" in link.note
    message = LossEvaluation._too_much(SimpleNamespace(allowed=Budget(None, 0.5)), 0.0, link)
    assert message == "no accuracy could be evaluated with these labels"
    assert LossEvaluation._too_much(SimpleNamespace(allowed=Budget(0.1, None)), 0.0, link) == ""
    assert not Budget(None, 0.5).allows(0.0, None)


def test_a_loss_that_is_not_known_is_not_within_a_budget():
    features = np.random.default_rng(0).normal(size=(8, 5))
    link = link_between("converted", ("a", features), ("b", features), logits=True, tolerance=Tolerance(kind="lossy"))
    assert Budget(0.5, None).concluded(link).reason == "within_budget"
    unknown = Budget(0.5, 0.5).concluded(link)  # no labels
    assert (unknown.reason, unknown.verdict) == ("loss_unknown", "not verified")
    assert "the budget limits a loss that these images do not show" in unknown.note
    known = link_between(
        "converted",
        ("a", features),
        ("b", features),
        logits=True,
        tolerance=Tolerance(kind="lossy"),
        labels=features.argmax(1),
    )
    assert Budget(0.5, 0.5).concluded(known).reason == "within_budget"
    flipped = link_between(
        "converted", ("a", features), ("b", -features), logits=True, tolerance=Tolerance(kind="lossy")
    )
    assert Budget(0.1, 0.5).concluded(flipped).reason == "exceeds_budget"
    lost = link_between(
        "converted",
        ("a", features),
        ("b", -features),
        logits=True,
        tolerance=Tolerance(kind="lossy"),
        labels=features.argmax(1),
    )
    assert Budget(None, 0.1).concluded(lost).reason == "exceeds_budget"
    assert Budget(None, 1.0).concluded(lost).reason == "within_budget"
    no_classes = link_between(
        "converted", ("a", features), ("b", features), logits=False, tolerance=Tolerance(kind="lossy")
    )
    assert Budget(0.5, None).concluded(no_classes).reason == "loss_unknown"


def test_the_row_of_numbers_says_that_the_task_has_its_own():
    objects, alone = (links_of(task, OBJECTS, OBJECTS, asked=True) for task in ("detect", "other"))
    assert "labels" not in {link.candidate for link in objects}
    raw = {"y": SCORES}
    numbers, pixels = links_of("segment", raw, raw)
    assert "the results of segment have a row of their own" in numbers.note
    assert "by cosine and error alone" not in numbers.note
    assert pixels.task is not None
    assert all("row of their own" not in link.note for link in alone)
    assert "evaluated by cosine and error alone" in links_of("other", raw, raw)[0].note


def test_the_ends_of_an_interval_are_known_to_a_twentieth_of_its_width():
    """The interval of a mean of 200 numbers is known: 1.96 standard errors to each side."""
    off = []
    for seed in range(30):
        rows = [{"x": number} for number in np.random.default_rng(seed).normal(size=200)]
        values = np.asarray([row["x"] for row in rows])
        low, high = _interval(_bootstrap(lambda some: {"x": np.mean([row["x"] for row in some])}, rows)["x"])
        side = 1.96 * values.std() / np.sqrt(len(values))
        off += [(low - values.mean() + side) / (2 * side), (high - values.mean() - side) / (2 * side)]
    assert np.sqrt(np.mean(np.square(off))) < 0.05


def test_of_integers_that_differ_it_is_said_how_many():
    right = {"y": np.asarray([[1, 2], [3, 4], [5, 6]])}
    compared = Comparison("b", tolerance("onnx"))
    compared.add({"y": np.asarray([[1, 2], [3, 5], [5, 7]])}, right)
    (link,) = compared.links("onnx", "float32")
    assert link.reason == "discrete_values_differ"
    assert "2 of 3 images differ" in link.note
    assert "by up to" not in link.note


def test_results_of_another_number_of_images_are_not_compared_as_a_task():
    with pytest.raises(Refused, match="results of 2 images, the reference of 4"):
        metrics_of("segment", (SCORES[:2], SCORES))
    with pytest.raises(Refused, match="results of 4 images, and labels of 5"):
        links_of("segment", {"y": SCORES}, {"y": SCORES}, labels=[np.zeros(SIZE, int)] * 5)


def metrics_of(task, *batches):
    """The metrics of batches of (candidate's, reference's) outputs, by name; or the reason why there are none."""
    evaluation = Evaluation(Choice(task, "", True, ABOUT), "fp16")
    for found, right in batches:
        evaluation.add({"y": found}, {"y": right})
    link = evaluation.link("fp16", "r", "c")
    return {each.name: each.value for each in link.task.metrics} if link.task else (link.verdict, link.figures.detail)


def test_vectors_of_zeros_are_equal():
    vectors = np.vstack([np.eye(4), np.zeros((1, 4))])
    assert metrics_of("embed", (vectors, vectors))["cosine"] == 1
    assert metrics_of("embed", (np.vstack([np.eye(4), np.ones((1, 4))]), vectors))["cosine"] == 0.8


def test_black_images_do_not_decide_the_peak_of_others():
    black, bright = np.zeros_like(IMAGES), 255 * IMAGES
    near, off = (black, black), (bright + 2.55, bright)
    for batches in ((near, off), (off, near)):
        assert metrics_of("restore", *batches)["PSNR"] == pytest.approx((100 + 40) / 2)
    assert metrics_of("restore", (black + 2.55, black), off)["PSNR"] == pytest.approx(40)


def test_an_infinite_error_has_no_psnr():
    infinite = IMAGES.copy()
    infinite[0, 0, 0, 0] = np.inf
    assert metrics_of("restore", (IMAGES, infinite))["PSNR"] < 100


def test_classes_that_the_candidate_invents_fail_where_the_reference_has_one():
    scores = np.zeros((2, 2, 64, 64))
    scores[:, 0] = 1
    few, many = scores.copy(), scores.copy()
    few[0, 1, 0, 0] = many[:, 1, :32] = 2
    assert metrics_of("segment", (many, scores)) == (
        "failed",
        "all pixels of all images have one class, and 50.0% of the candidate's have another",
    )
    for found in (few, scores):
        assert metrics_of("segment", (found, scores)) == ("not verified", "all pixels of all images have one class")


def test_disagreement_that_is_not_known_is_the_largest():
    vectors = np.eye(2)
    evaluation = Evaluation(Choice("embed", "", True, ABOUT), "int8")
    evaluation.add({"y": vectors}, {"y": vectors})
    assert evaluation.disagreement() == 1.0  # two images: nothing to choose
    lost = Evaluation(Choice("restore", "", True, ABOUT), "int8")
    lost.add({"y": IMAGES}, {"y": np.where(IMAGES > 0.99, np.nan, IMAGES)})
    assert lost.disagreement() == lost.result().disagreement == 1.0


def test_a_conversion_by_nearest_images_needs_some(repaconv):
    torch.save(plain_weights(classes=0), "vit.pth")
    few = images(400)
    roles = [role_of(image) for image in few]
    kept = [image for image, role in zip(few, roles, strict=True) if role != "test"][:60]
    kept += [image for image, role in zip(few, roles, strict=True) if role == "test"][:2]
    np.savez("x.npz", input=np.stack(kept))
    asked = ("--inputs", "x.npz", "--set", f"num_heads={HEADS}", "--blocks", "3")
    code, _, err = repaconv("convert", "vit.pth", "--max-disagreement", "0.95", *asked)
    assert code == 4
    assert "3 images or more, and there are 2 for test" in err
    assert repaconv("convert", "vit.pth", *asked)[0] == 0


# --- Maps of classes


def test_pixels_without_a_class_do_not_count_and_a_network_may_have_a_class_255():
    task = Segmentation(ABOUT)
    result, truth = np.asarray([[0, 1, 2, 2]]), np.asarray([[0, 1, -1, -1]])
    assert task.row(result, truth)["iou"] == 1
    assert task.row(np.asarray([[0, -1]]), np.asarray([[0, 1]]))["agreement"] == 0.5
    assert task.row(np.full((2, 2), 7), np.full((2, 2), 255))["agreement"] == 0
    assert task.labeled_row(result, np.asarray([[0, 1, 255, 255]]))["iou"] == 1
    assert task.labeled_row(np.asarray([[0, 255]]), np.asarray([[0, 1]]))["agreement"] == 0.5


def test_painted_instances_are_compared_with_masks_of_the_image_s_size():
    raw = np.zeros((1, 4 + 3 + 32, 84))
    raw[0, :5, 3] = [16, 32, 32, 64, 0.9]
    raw[0, 7, 3] = 1
    outputs = {"output0": raw, "output1": np.ones((1, 32, 16, 16))}
    mask = np.zeros((64, 64), int)
    mask[:, :32] = 1
    link = links_of("segment", outputs, outputs, labels=[mask], about=NetworkFacts("", 3, SIZE))[-1]
    assert link.task.accuracy.reference == 1


def test_masks_of_painted_instances_count_from_one_and_those_of_scores_from_zero():
    """Ultralytics: 0 is none, and class c is c + 1; the page of the docs says so."""
    raw = np.zeros((1, 4 + 3 + 32, 84))
    raw[0, :4, 3], raw[0, 4 + 2, 3], raw[0, 7, 3] = [16, 32, 32, 64], 0.9, 1  # of class 2, the left half
    raw[0, :4, 4], raw[0, 4 + 0, 4], raw[0, 7, 4] = [56, 32, 16, 64], 0.8, 1  # of class 0, the right quarter
    outputs = {"output0": raw, "output1": np.ones((1, 32, 16, 16))}
    classes = np.zeros((64, 64), int)
    classes[:, :32], classes[:, 48:] = 3, 1
    about = NetworkFacts("", 3, SIZE)
    link = links_of("segment", outputs, outputs, labels=[classes], about=about)[-1]
    assert link.task.accuracy.reference == 1
    with pytest.raises(Refused, match="finds nothing of the labels"):
        links_of("segment", outputs, outputs, labels=[np.where(classes, classes - 1, 255)], about=about)
    message = (Path(__file__).resolve().parents[1] / "docs" / "tasks.md").read_text()
    assert "0 where there is none, and the class number plus 1 elsewhere" in message


# --- Files of labels, and recipes


COCO = {
    "images": [{"id": 1, "file_name": "a"}],
    "categories": [{"id": 1}],
    "annotations": [{"image_id": 1, "category_id": 1, "bbox": [1, 1, 5, 5]}],
}


def with_box(*box):
    return json.dumps({**COCO, "annotations": [{**COCO["annotations"][0], "bbox": box}]})


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100000,
        json.dumps({**COCO, "images": [{"id": 1, "file_name": "a", "width": float("inf"), "height": 1}]}),
        json.dumps({**COCO, "categories": [{"id": 1}, {"id": 1}]}),
        with_box(float("nan"), 1, 1, 1),
        with_box(5, 5, -3, 3),
        with_box(*[1] * 8),
    ],
)
def test_coco_files_that_make_no_sense_are_refused(text):
    Path("coco.json").write_text(text)
    with pytest.raises(Refused, match="no COCO file"):
        coco_images(Path("coco.json"))


def labeled_by_name(monkeypatch, task, labels, *names):
    """What labels say of images of these names, all of 8 x 8."""
    monkeypatch.setattr(task_choice, "preprocessing_for", lambda *_: Preprocessing(image_size=(8, 8), **PLAIN))
    for name in names:
        Path("pictures", name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(Path("pictures", name))
    given = Inputs("images", (len(names), 3, 8, 8), lambda *_: Batch({}))
    found = task_choice.with_labels(None, given, Path(labels), Choice(task, "", True, ABOUT), images=Path("pictures"))
    return [truth is not None for truth in found.piece(0, len(names)).truths]


def test_labels_belong_to_an_image_in_another_folder_only_if_no_other_image_has_its_name(monkeypatch):
    Path("coco.json").write_text(json.dumps({**COCO, "images": [{"id": 1, "file_name": "1.png"}]}))
    assert labeled_by_name(monkeypatch, "detect", "coco.json", "a/1.png") == [True]
    with pytest.raises(Refused, match="labels of none"):
        labeled_by_name(monkeypatch, "detect", "coco.json", "a/1.png", "b/1.png")
    Path("masks").mkdir()
    for name in ("1.png", "2.png"):
        Image.new("L", (8, 8)).save(Path("masks", name))
    assert labeled_by_name(monkeypatch, "segment", "masks", "a/1.png", "a/2.png", "b/1.png") == [False, True, False]


def test_a_damaged_image_of_a_coco_file_without_sizes_is_refused(monkeypatch):
    Path("coco.json").write_text(json.dumps({**COCO, "images": [{"id": 1, "file_name": "1.png"}]}))
    monkeypatch.setattr(Image.Image, "save", lambda _, path: path.write_bytes(b"junk"))
    with pytest.raises(Refused, match=r"1\.png is not a readable image"):
        labeled_by_name(monkeypatch, "detect", "coco.json", "1.png")


def test_labels_of_one_number_are_refused():
    np.savez("labels.npz", labels=np.float32(3))
    with pytest.raises(Refused, match="one number"):
        label_array(Path("labels.npz"))


def test_top1_limits_next_to_labels_of_another_task_are_errors_of_the_recipe():
    Path("r.toml").write_text(
        'checkpoint = "c.onnx"\n[reference]\nsource = "s"\ntop1 = 90.0\n[verify]\ninputs = "x.npz"\nlabels = "l.json"\n'
        "min_top1 = 90.0\n"
    )
    lines = [each.text for each in check_recipe(Path("r.toml")).wrong]
    assert any("verify.min_top1 would do nothing here" in each for each in lines)
    assert any("reference.top1 would do nothing here" in each for each in lines)
