"""Verification: metrics, tolerances, accuracy and inputs on which a verdict depends."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import repaconv as rc
from repaconv.core.errors import Refused, UsageProblem
from repaconv.method_api.preprocessing import preprocessing_of
from repaconv.method_api.settings import SettingsReader
from repaconv.results import Link, Preprocessing, Tolerance
from repaconv.verification.comparison import Comparison, link_between
from repaconv.verification.comparison import overall_link as outputs_joined
from repaconv.verification.image_files import prepared, read_image
from repaconv.verification.input_batches import image_inputs, npz_inputs, random_inputs
from repaconv.verification.model_runners import FixedBatch, ImageSession, TorchRunner
from repaconv.verification.output_metrics import CorrectCounts, Meter, mcnemar
from repaconv.verification.tolerances import EXACT, LOSSY, depth_reason, exact_rtols, tolerance

PLAIN = Preprocessing(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), image_size=(8, 8), source="test")


# --- metrics ------------------------------------------------------------------------------------------


def measure(candidate, reference, *, logits):
    meter = Meter(Tolerance(kind="exact"), logits=logits)
    meter.add(candidate, reference)
    return meter.metrics()


def test_metrics_equal_manual_values():
    reference = np.array([[1.0, 2.0, 4.0], [3.0, 2.9, 0.0]])
    candidate = reference + np.array([[0, 0, 0.1], [-0.2, 0, 0]])
    found = measure(candidate, reference, logits=True)
    assert found.max_abs_error == pytest.approx(0.2)
    assert found.max_rel_error == pytest.approx(0.2 / 3)  # each image by its own scale
    assert found.spread == pytest.approx(1.0)
    assert found.mean_abs_error == pytest.approx(0.3 / 6)
    assert found.top1_agreement == 0.5
    assert found.examples == ((1, pytest.approx(0.1 / 3)),)
    p, q = (np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (reference, candidate))
    assert found.kl_divergence == pytest.approx((p * np.log(p / q)).sum(1).mean())
    assert measure(candidate, reference, logits=False).top1_agreement is None
    for bad in (np.nan, np.inf):
        broken = reference.copy()
        broken[0, 0] = bad
        for name in ("stored", "int8"):
            link = link_between(name, ("a", reference), ("b", broken), logits=True, tolerance=tolerance(name))
            assert link.verdict == "failed"
    with pytest.raises(ValueError, match="cannot compare"):
        measure(reference[:1], reference, logits=True)
    zero = np.zeros((1, 2))
    allowed = tolerance("fold", logits=False)
    assert link_between("fold", ("a", zero), ("b", zero), logits=False, tolerance=allowed).verdict == "passed"


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 2**31))
def test_in_batches_or_at_once_is_the_same(count, batch, seed):
    random = np.random.default_rng(seed)
    reference = random.standard_normal((count, 4))
    candidate = reference + 0.3 * random.standard_normal((count, 4))
    meter = Meter(tolerance("int8"), logits=True)
    for start in range(0, count, batch):
        meter.add(candidate[start : start + batch], reference[start : start + batch])
    whole = Meter(tolerance("int8"), logits=True)
    whole.add(candidate, reference)
    a, b = meter.metrics().model_dump(), whole.metrics().model_dump()
    assert a.pop("examples") == b.pop("examples")
    assert a == pytest.approx(b)
    assert meter.worst == whole.worst


def test_an_axis_of_another_size_in_another_batch_is_not_one_of_classes():
    meter, similarities = Meter(tolerance("int8"), logits=True), [np.eye(count) for count in (1, 2, 3)]
    for each in similarities:
        meter.add(each[:, ::-1], each)
    found = meter.metrics()
    assert (found.images, found.max_abs_error) == (6, 1.0)
    assert (found.top1_agreement, found.kl_divergence, found.top1_flips) == (None, None, 0)


def test_a_flip_within_the_noise_is_distinguished_from_one_that_matters():
    reference = np.array([[1.0, 0.999999, 0.0], [1.0, 0.5, 0.0], [0.0, 1.0, 0.2]])
    close, far = reference.copy(), reference.copy()
    close[0, 1] = 1.0000005
    far[1, 1] = 1.1
    exact = link_between("onnx", ("a", reference), ("b", close), logits=True, tolerance=tolerance("onnx"))
    assert (exact.metrics.top1_flips, exact.metrics.top1_flips_that_matter) == (1, 0)
    assert exact.verdict == "passed"
    lossy = link_between("int8", ("a", reference), ("b", far), logits=True, tolerance=tolerance("int8"))
    assert lossy.metrics.top1_flips_that_matter == 1
    assert lossy.verdict == "failed"


def test_flips_within_the_noise_are_a_figure_of_their_own_with_a_limit():
    """Of 100 images 40 lead by 5% of the largest logit, within int8's noise, the rest by 50%."""
    reference = np.tile([10.0, 5.0, 0.0], (100, 1))
    reference[:40, 1] = 9.5
    reference[:, 2] = np.linspace(0, 1, 100)

    def judged(within, beyond=0, images=100):
        candidate = reference[:images].copy()
        candidate[:within, 1] = 10.1
        candidate[40 : 40 + beyond, 1] = 10.1
        return link_between(
            "int8", ("a", reference[:images]), ("b", candidate), logits=True, tolerance=tolerance("int8")
        )

    sound = judged(6)
    assert (sound.verdict, sound.metrics.top1_agreement, sound.metrics.top1_close) == ("passed", 0.94, 40)
    assert (sound.metrics.top1_flips_that_matter, sound.metrics.top1_flips_within_noise) == (0, 6)
    assert sound.note == "94.0% of 100 top-1 predictions agree; accuracy was not measured: no labels"
    flips = "0 of 100 with a lead above 10% (limit 1%), 6 of 40 with a smaller one (limit 25%)"
    assert sound.lossy_text.endswith(f"changed top-1 predictions: {flips}")
    assert "1% flips beyond 10%, 25% within" in sound.tolerance.description
    many = judged(24)
    assert (many.verdict, many.metrics.top1_flips_that_matter) == ("failed", 0)
    assert "24 of 40 with a smaller lead changed, 25% is allowed" in many.note
    assert judged(2, images=2).verdict == "passed"  # of two, chance has both
    assert "2 predictions with a lead above 10% of the largest logit changed, 1% of all" in judged(0, beyond=2).note
    same = {"logits": True, "tolerance": tolerance("int8")}
    labelled = link_between("int8", ("a", reference), ("b", reference), labels=np.zeros(100, dtype=np.int64), **same)
    assert "accuracy was not measured" not in labelled.note
    many = np.tile(reference, (50, 1))
    # 2000 close ones: no number overflows.
    assert link_between("int8", ("a", many), ("b", many), **same).verdict == "passed"


def test_lossy_is_never_held_to_an_exact_tolerance():
    random = np.random.default_rng(0)
    reference = random.standard_normal((200, 10))
    reference[np.arange(200), random.integers(0, 10, 200)] += 6
    candidate = reference + 0.2 * random.standard_normal((200, 10))
    link = link_between("int8", ("a", reference), ("b", candidate), logits=True, tolerance=tolerance("int8"))
    assert (link.verdict, link.tolerance.kind, link.tolerance.rtol) == ("passed", "lossy", None)
    with pytest.raises(UsageProblem, match="lossy"):
        tolerance("int8", rtol={"int8": 1e-3})


def test_a_lossy_link_fails_by_the_accuracy_that_it_loses():
    """Rounding may change what two classes with nearly equal logits predict, but not always from right to wrong."""
    reference = 0.1 * np.random.default_rng(0).standard_normal((200, 10))
    reference[:, 0], reference[:, 1] = 1, 0.98
    candidate = reference.copy()
    candidate[:30, 1] = 1.02

    def link(labels, *, logits=True):
        both, allowed = (("a", reference), ("b", candidate)), tolerance("int8", logits=logits)
        return link_between("int8", *both, logits=True, tolerance=allowed, labels=labels)

    right, half = np.zeros(200, np.int64), np.arange(200) % 2
    assert link(None).verdict == link(half).verdict == "passed"
    assert link(right).verdict == "failed"
    assert link(right, logits=False).verdict == "passed"  # of features that are no logits, no class is predicted


def test_the_policy_by_precision_and_depth():
    assert exact_rtols()["fold"] == 1e-12
    assert exact_rtols(3) == exact_rtols(12) == EXACT
    assert exact_rtols(48)["onnx"] == pytest.approx(2e-5)
    assert (depth_reason(12), "48 blocks" in depth_reason(48)) == ("", True)
    deep = tolerance("onnx", usual=exact_rtols(48), reasons={"onnx": depth_reason(48)})
    assert deep.rtol_reason == depth_reason(48)
    assert tolerance("onnx", usual={"onnx": 1e-4}).rtol == 1e-4
    assert tolerance("onnx", usual={"onnx": 1e-4}, rtol={"onnx": 1e-6}).rtol == 1e-6
    alone = tolerance("onnx", atol={"onnx": 0.5})
    assert (alone.rtol, alone.atol) == (None, 0.5)
    zero = tolerance("onnx", usual={"onnx": 1e-4}, rtol={"onnx": 0.0}, atol={"onnx": 0.0})
    assert (zero.rtol, zero.atol, zero.noise) == (0.0, 0.0, 0.0)
    assert tolerance("onnx", rtol={"onnx": 0.0}).rtol == 0.0
    assert all(tolerance(name, decides=True).cosine == 0.9 for name in LOSSY)
    assert tolerance("int8", logits=False).flips is None
    with pytest.raises(UsageProblem, match="no link 'onx'"):
        tolerance("onnx", rtol={"onx": 1})


def test_a_tolerance_is_a_number_that_can_be_allowed(tiny):
    for value in (np.inf, np.nan, -1.0, 1e300):
        for link in ("onnx", "fold"):
            with pytest.raises(UsageProblem, match="the tolerance of"):
                tolerance("onnx", rtol={link: value})
        if value != 1e300:
            with pytest.raises(UsageProblem, match="the tolerance of"):
                tolerance("onnx", atol={"onnx": value})
    rc.fold(tiny)
    for link in ("onnx", "exported", "engine"):
        with pytest.raises(UsageProblem, match=f"there is no exact link {link} in this run"):
            rc.verify(rtol={link: 1e-6})
    with pytest.raises(UsageProblem, match="max_regression"):
        rc.bench(max_regression=np.inf)


def test_images_where_rounding_decides_are_left_out_if_they_differ_as_another_merge_does():
    reference = np.random.default_rng(0).standard_normal((4, 6))
    unsure = np.array([True, True, False, False])

    def judged(row, value, undecided=unsure):
        candidate = reference.copy()
        candidate[row] = value
        found = Comparison("b", tolerance("onnx"))
        found.add({"logits": candidate}, {"logits": reference}, undecided=undecided)
        (link,) = found.links("onnx", "a")
        return link

    merged = judged(1, 1.1 * reference[1])
    assert (merged.verdict, merged.metrics.images, merged.metrics.undecided) == ("passed", 3, 1)
    assert judged(2, 1.1 * reference[2]).verdict == "failed"  # nothing undecided about this one
    for value in (np.nan, np.inf, 1e30, -reference[1], 2 * reference[1], np.zeros(6)):
        assert judged(1, value).verdict == "failed"
    most = judged([0, 1, 2], 1.1 * reference[:3], np.ones(4, bool))
    assert (most.verdict, most.reason, most.figures.left_out) == ("not verified", "rounding_decides", 3)


def test_every_image_has_a_scale_of_its_own():
    random = np.random.default_rng(0)
    reference = random.standard_normal((64, 10))

    def judged(candidate, reference, logits=True, name="onnx"):
        return link_between(
            name, ("a", reference), ("b", candidate), logits=logits, tolerance=tolerance(name, logits=logits)
        )

    for loud in (1, 32, 63):  # the others are unrelated
        one, other = reference.copy(), random.standard_normal((64, 10))
        one[:loud] *= 1e6
        other[:loud] = one[:loud]
        found = judged(other, one)
        assert found.verdict == "failed"
        assert found.metrics.top1_flips_that_matter > 0.5 * (64 - loud)
    # one number is near zero by chance, and is rounded as the others are; an output of zero has no scale of its own
    single = random.standard_normal((1000, 1))
    single[0] = 0.0
    rounded = single + 1e-6 * random.choice([-1, 1], (1000, 1))
    assert judged(rounded, single, logits=False).verdict == "passed"
    assert judged(single + 1e-4, single, logits=False).verdict == "failed"


@pytest.mark.parametrize("name", LOSSY)
def test_lossy_links_see_scale_offset_and_a_single_logit(name):
    random = np.random.default_rng(0)
    b = random.standard_normal((64, 10)) + 100 * np.eye(10)[random.integers(0, 10, 64)]
    one = np.abs(b[:, :1])
    wrong = {
        "scale": (3 * b, b, True),
        "small": (b / 1000, b, True),
        "offset": (b + 1000, b, True),
        "features": (2 * b, b, False),
        "unrelated around an offset": (
            100 + random.standard_normal((64, 10)),
            100 + random.standard_normal((64, 10)),
            True,
        ),
        "a single logit": (100 * one * random.random((64, 1)), one, True),
    }
    for label, (candidate, reference, logits) in wrong.items():
        allowed = tolerance(name, logits=logits)
        assert (
            link_between(name, ("a", reference), ("b", candidate), logits=logits, tolerance=allowed).verdict == "failed"
        ), label
        near = reference * (1 + 1e-3 * random.standard_normal(reference.shape) / np.abs(reference).max())
        assert (
            link_between(name, ("a", reference), ("b", near), logits=logits, tolerance=allowed).verdict == "passed"
        ), label


def test_an_output_that_is_the_same_for_all_images_shows_nothing():
    constant = np.tile([1.0, 2.0, 4.0], (3, 1))
    for name in ("onnx", "int8"):
        link = link_between(name, ("a", constant), ("b", constant), logits=True, tolerance=tolerance(name))
        assert (link.verdict, link.metrics.spread) == ("not verified", 0.0)
        assert link.reason == "constant_output"
        wrong = link_between(name, ("a", constant), ("b", 2 * constant), logits=True, tolerance=tolerance(name))
        assert wrong.verdict == "failed"
    moving = constant + np.arange(3)[:, None]
    wide = tolerance("onnx", atol={"onnx": 10.0})
    assert (
        link_between("onnx", ("a", moving), ("b", moving), logits=True, tolerance=tolerance("onnx")).verdict == "passed"
    )
    assert link_between("onnx", ("a", moving), ("b", moving), logits=True, tolerance=wide).verdict == "not verified"


def test_a_merge_knows_by_how_little_it_was_decided():
    from repaconv.backbones.token_merging_block import Merge, MergeSpec

    torch.manual_seed(0)
    merge = Merge(MergeSpec(r=2, sized=False, prefix=1, modulated=False), 8).double()
    x, metric = torch.randn(1, 9, 8).double(), torch.randn(1, 9, 5).double()
    margin = float(merge.decision_margin(x, None, metric))
    assert 0 < margin < 1
    before = merge(x, None, metric)[0]
    sizes = [torch.randn(1, 9, 5).double() for _ in range(20)]
    norm = metric.norm(dim=-1, keepdim=True)
    for noise in sizes:  # cosines move by at most twice the relative change of the vectors
        moved = metric + 0.2 * margin * norm * noise / noise.norm(dim=-1, keepdim=True)
        assert torch.allclose(merge(x, None, moved)[0], before)


# --- accuracy -----------------------------------------------------------------------------------------


def test_accuracy_pairs_the_images():
    counts = CorrectCounts()
    reference = np.array([1, 1, 1, 1, 0, 0, 1, 0], dtype=bool)
    candidate = np.array([1, 1, 0, 0, 0, 1, 1, 1], dtype=bool)
    labelled = np.array([1, 1, 1, 1, 1, 1, 1, 0], dtype=bool)
    counts.add(candidate, reference, labelled)
    found = counts.accuracy()
    assert (found.images, found.only_reference, found.only_candidate) == (7, 2, 1)
    assert found.difference == pytest.approx(-1 / 7)
    assert found.low < found.difference < found.high
    assert CorrectCounts().accuracy() is None
    assert mcnemar(1, 9) == pytest.approx(2 * 11 / 1024)  # the exact binomial test by hand
    assert mcnemar(0, 0) == mcnemar(5, 5) == 1.0


def test_the_interval_of_the_difference_holds_its_level():
    random = np.random.default_rng(1)
    inside = 0
    for _ in range(1000):
        cells = random.choice(4, 150, p=[0.8, 0.04, 0.02, 0.14])  # both, reference alone, candidate alone, neither
        counts = CorrectCounts()
        counts.add(np.isin(cells, [0, 2]), np.isin(cells, [0, 1]), np.ones(150, dtype=bool))
        found = counts.accuracy()
        inside += found.low <= -0.02 <= found.high
    assert inside >= 930


# --- inputs -------------------------------------------------------------------------------------------


def save_image(path, seed=0, size=(12, 10), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)


def test_preprocessing_equals_manual_values(tmp_path):
    pixels = np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3)
    Image.fromarray(pixels).save(tmp_path / "exact.png")
    assert (read_image(tmp_path / "exact.png", PLAIN, (8, 8), 3) == pixels).all()
    wanted = PLAIN.model_copy(update={"mean": (1.0, 2.0, 3.0), "std": (2.0, 4.0, 8.0)})
    expected = ((pixels - np.array([1, 2, 3])) / np.array([2, 4, 8])).transpose(2, 0, 1)
    assert np.allclose(prepared(pixels[None], wanted)[0], expected)
    bgr = wanted.model_copy(update={"channel_order": "BGR"})
    expected = ((pixels[:, :, ::-1] - np.array([1, 2, 3])) / np.array([2, 4, 8])).transpose(2, 0, 1)
    assert np.allclose(prepared(pixels[None], bgr)[0], expected)
    # the shorter edge to 8, the middle of the longer
    wide = np.zeros((16, 32, 3), dtype=np.uint8)
    wide[:, 8:24] = 200
    Image.fromarray(wide).save(tmp_path / "wide.png")
    assert (
        read_image(tmp_path / "wide.png", PLAIN.model_copy(update={"interpolation": "box"}), (8, 8), 3) == 200
    ).all()
    assert read_image(tmp_path / "wide.png", PLAIN, (8, 8), 1).shape == (8, 8, 1)


def test_images_are_resized_as_the_evaluation_does_or_refused(tmp_path):
    def of(path, **changes):
        wanted = PLAIN.model_copy(update={"image_size": (8, 6), "interpolation": "nearest", **changes})
        return read_image(path, wanted, (8, 6), 3)

    half = np.zeros((40, 80, 3), dtype=np.uint8)
    half[:, 40:] = 200
    Image.fromarray(half).save(tmp_path / "half.png")
    assert (of(tmp_path / "half.png", keep_ratio=False).mean((0, 2)) == [0, 0, 0, 200, 200, 200]).all()
    whole = of(tmp_path / "half.png", keep_ratio=False, resize_edge=10)
    assert (whole.mean((0, 2)) == [0, 0, 0, 200, 200, 200]).all()
    tall = np.arange(6 * 12, dtype=np.uint8).repeat(3).reshape(12, 6, 3)
    Image.fromarray(tall).save(tmp_path / "tall.png")
    assert (of(tmp_path / "tall.png", resize_edge=6) == tall[2:10]).all()
    Image.fromarray(tall[:6]).save(tmp_path / "square.png")
    with pytest.raises(Refused, match="6 x 6, less than the crop 8 x 6"):  # never stretched
        of(tmp_path / "square.png", resize_edge=6)
    deep = np.linspace(0, 65535, 64).reshape(8, 8)
    for name, pixels in (("a.png", deep.astype(np.uint16)), ("b.tif", deep.astype(np.int32)), ("c.tif", deep)):
        Image.fromarray(pixels if pixels.dtype != float else pixels.astype(np.float32)).save(tmp_path / name)
        with pytest.raises(Refused, match="more than 8 bits"):
            of(tmp_path / name)


@pytest.mark.parametrize(
    ("folders", "classes", "code"),
    [
        (["train/cat", "train/dog", "val/cat", "val/dog"], 2, "images.nested"),
        ([str(n) for n in range(12)], 12, "classes"),  # ImageFolder's third class is 10
        (["7"], 1000, "classes"),
        (["²", "³"], 2, [0, 1]),
        ([f"{n:02}" for n in range(12)], 12, [*range(12)]),
        ([str(n) for n in range(1, 6)], 5, [*range(5)]),
    ],
)
def test_folders_that_are_not_surely_classes(folders, classes, code, tmp_path):
    for name in folders:
        save_image(tmp_path / "data" / name / "a.png")
    kinds = {"wanted": PLAIN, "size": (8, 8), "channels": 3, "classes": classes}
    if isinstance(code, list):
        assert image_inputs(tmp_path / "data", **kinds).piece(0, len(folders)).labels.tolist() == code
        return
    with pytest.raises((Refused, UsageProblem)) as caught:
        image_inputs(tmp_path / "data", **kinds)
    assert caught.value.code == code
    if code == "classes":
        (tmp_path / "names").write_text("\n".join(map(str, range(classes))))
        named = image_inputs(tmp_path / "data", **kinds, class_names=tmp_path / "names")
        files = sorted(folders)
        assert named.piece(0, len(folders)).labels.tolist() == [int(name) for name in files]


def preprocessing(args=None, steps=None, **settings):
    config = {"test_pipeline": steps, "data_preprocessor": {"mean": [1.0], "std": [2.0]}} if steps else {}
    found = preprocessing_of({"args": args or {}}, config, SettingsReader(settings))
    return found.image_size, found.resize_edge, found.keep_ratio, found.interpolation, found.source


def test_what_the_file_says_of_its_evaluation_is_taken_or_named():
    usual, crop = "ImageNet's, as in the official configuration", {"type": "CenterCrop", "crop_size": 224}
    rest, config = f"else {usual}", "meta.cfg: mean, std, channel_order"
    assert preprocessing() == ((224, 224), 256, True, "bicubic", f"{usual}; not in the file")
    assert preprocessing({"input_size": 224, "eval_crop_ratio": 1.0})[1:] == (
        224,
        True,
        "bicubic",
        f"args: resize_edge; {rest}",
    )
    assert preprocessing({"input_size": 32, "eval_crop_ratio": 0.5})[:2] == (
        (32, 32),
        None,
    )  # DeiT resizes no small images
    assert preprocessing({"input_size": [3, 256, 128]})[0] == preprocessing({"img_size": [256, 128]})[0] == (256, 128)
    assert preprocessing({"img_size": "big", "interpolation": "random"})[-1] == (
        f"{usual}; not taken from args: img_size=big, interpolation=random"
    )
    pyra = {"input_size": 64, "direct_resize": True, "inception": True}
    assert preprocessing(pyra)[1:] == (64, False, "bicubic", "args: mean, std, resize_edge, keep_ratio")
    assert preprocessing({"img_size": 64, "crop_mode": "squash", "crop_pct": 0.5})[1:3] == (128, False)
    edge = {"type": "ResizeEdge", "scale": 248, "edge": "short", "backend": "pillow", "interpolation": "bicubic"}
    whole = ((224, 224), 248, True, "bicubic", f"{config}, resize_edge, interpolation")
    assert preprocessing(steps=[{"type": "LoadImageFromFile"}, edge, crop, {"type": "PackInputs"}]) == whole
    exact = {"type": "Resize", "scale": [256, 256], "backend": "pillow"}  # both edges, as mmcv does
    assert preprocessing(steps=[exact, crop])[:4] == ((224, 224), 256, False, "bilinear")
    assert preprocessing(steps=[{**exact, "scale": [128, 256]}])[:4] == ((256, 128), None, False, "bilinear")
    assert preprocessing(steps=[exact, crop], keep_ratio="yes")[2] is True
    assert preprocessing(steps=[crop, {"type": "Normalize", "mean": [0], "std": [1]}])[-1] == (
        f"{config}; {rest}; not taken from meta.cfg: Normalize(mean=[0], std=[1])"
    )
    for step in (
        {"type": "Pad", "size": 256},
        {**exact, "keep_ratio": True},
        {**edge, "edge": "long"},
        {**crop, "auto_pad": True},
    ):
        assert f"not taken from meta.cfg: {step['type']}(" in preprocessing(steps=[step])[-1]
    assert (
        "not taken from meta.cfg: backend=cv2" in preprocessing(steps=[{"type": "ResizeEdge", "scale": 256}, crop])[-1]
    )


def test_images_and_their_labels(tmp_path):
    for place, name in enumerate(("cat", "cat", "dog", "eel")):
        save_image(tmp_path / "by_name" / name / f"{place}.png", place)
    kinds = {"wanted": PLAIN, "size": (8, 8), "channels": 3}
    whole = image_inputs(tmp_path / "by_name", classes=3, **kinds)
    assert whole.shape == (4, 3, 8, 8)
    assert whole.piece(0, 4).labels.tolist() == [0, 0, 1, 2]
    assert "alphabetical" in whole.labels
    (tmp_path / "names.txt").write_text("eel\ndog\nowl\ncat\n")
    named = image_inputs(tmp_path / "by_name", classes=4, class_names=tmp_path / "names.txt", **kinds)
    assert named.piece(0, 4).labels.tolist() == [3, 3, 1, 0]
    (tmp_path / "windows.txt").write_bytes(b"\xef\xbb\xbfeel\r\ndog\r\ncat\r\n")  # begins with a byte order mark
    named = image_inputs(tmp_path / "by_name", classes=3, class_names=tmp_path / "windows.txt", **kinds)
    assert named.piece(0, 4).labels.tolist() == [2, 2, 1, 0]
    (tmp_path / "wrong.txt").write_text("Eel\ndog\ncat\n")
    with pytest.raises(UsageProblem, match=r"wrong\.txt has no class eel") as refused:
        image_inputs(tmp_path / "by_name", classes=3, class_names=tmp_path / "wrong.txt", **kinds)
    assert "Did you mean Eel?" in refused.value.hint
    assert image_inputs(tmp_path / "by_name", classes=9, **kinds).piece(0, 4).labels is None
    save_image(tmp_path / "numbers" / "7" / "a.png")
    assert image_inputs(tmp_path / "numbers", classes=9, **kinds).piece(0, 1).labels.tolist() == [7]
    flat = image_inputs(tmp_path / "by_name" / "cat", classes=3, **kinds)
    assert (flat.shape[0], flat.piece(0, 2).labels) == (2, None)
    assert image_inputs(tmp_path / "by_name", classes=3, limit=2, **kinds).piece(0, 2).labels.tolist() == [0, 1]
    with pytest.raises(UsageProblem, match="4 class names"):
        image_inputs(tmp_path / "by_name", classes=3, class_names=tmp_path / "names.txt", **kinds)
    with pytest.raises(Refused, match="no folder"):
        image_inputs(tmp_path / "by_name" / "none", classes=3, **kinds)
    (tmp_path / "by_name" / "cat" / "broken.png").write_bytes(b"\x89PNG no")
    with pytest.raises(Refused, match=r"broken\.png is not a readable image"):
        list(image_inputs(tmp_path / "by_name", classes=3, **kinds).batches())


def test_verify_on_images_says_what_accuracy_changes(tiny, tmp_path, repaconv):
    for place in range(10):
        save_image(tmp_path / "val" / str(place % 5) / f"{place}.png", place, (40, 36))
    rc.fold(tiny)
    rc.export()
    done = rc.verify(images=tmp_path / "val")
    onnx = next(link for link in done.links if link.name == "onnx")
    assert onnx.accuracy.images == 10
    assert onnx.accuracy.difference == 0
    assert done.labels == "folder names, which are class numbers"
    assert "center crop 32 x 32" in done.preprocessing
    assert "ImageNet's" in done.preprocessing
    code, out, _ = repaconv("verify", "--images", tmp_path / "val", "--count", "4")
    assert code == 0
    assert "on 4 images" in out
    assert repaconv("verify", "--images", tmp_path / "val", "--inputs", "x.npz")[0] == 2


def test_labels_of_an_npz(tmp_path):
    images = np.zeros((3, 3, 8, 8), dtype=np.float32)
    np.savez(tmp_path / "a.npz", input=images, labels=np.array([0, 2, 1]))
    assert npz_inputs(tmp_path / "a.npz").piece(1, 3).labels.tolist() == [2, 1]
    np.savez(tmp_path / "b.npz", input=images, labels=np.array([0, 2]))
    with pytest.raises(Refused, match="labels"):
        npz_inputs(tmp_path / "b.npz")
    for classes, match in ((2, "0 to 2 are not of 2 classes"), (0, "no classes")):
        with pytest.raises(Refused, match=match):
            npz_inputs(tmp_path / "a.npz", 3, classes)
    np.savez(tmp_path / "c.npz", input=images, labels=np.array([0, -1, 1]))  # -1 is unknown
    assert npz_inputs(tmp_path / "c.npz", 3, 2).labels


def test_what_an_npz_holds_is_used_named_or_refused(tmp_path):
    images, output = np.zeros((3, 3, 8, 8), dtype=np.float32), np.zeros((3, 5))
    np.savez(tmp_path / "a.npz", input=images, output=output, output_fp64=output, output_float64=output)
    found = npz_inputs(tmp_path / "a.npz")
    assert (found.recorded, found.name) == ("output_fp64", "a.npz (3 images; not used: output, output_float64)")
    np.savez(tmp_path / "b.npz", input=images, output_fp64=output, output=output[:2])
    with pytest.raises(Refused, match=r"output \[2, 5\] is not an output for each of the 3 images"):
        npz_inputs(tmp_path / "b.npz")
    (tmp_path / "broken.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:-60])
    np.save(tmp_path / "lone.npy", images)
    for name in ("broken.npz", "lone.npy"):
        with pytest.raises(Refused, match="not a readable"):
            npz_inputs(tmp_path / name)
    np.savez(tmp_path / "c.npz", input=images.astype(np.uint8))
    with pytest.raises(Refused, match="holds uint8, not normalized images"):
        npz_inputs(tmp_path / "c.npz")


def test_random_images_do_not_depend_on_the_batch():
    whole = random_inputs((3, 4, 4), count=5, seed=1).images
    parts = np.concatenate([b.images for b in random_inputs((3, 4, 4), count=5, seed=1).batches(2)])
    assert (whole == parts).all()


def test_a_fixed_batch_is_filled_up():
    class Sum:
        inputs = ()

        def run(self, feeds):
            assert {len(array) for array in feeds.values()} == {4}
            return {"sum": feeds["a"].sum((1, 2, 3)) + feeds["b"]}

    random = np.random.default_rng(0)
    feeds = {"a": random.standard_normal((6, 3, 2, 2)).astype(np.float32), "b": random.standard_normal(6)}
    assert np.allclose(FixedBatch(Sum(), 4).run(feeds)["sum"], feeds["a"].sum((1, 2, 3)) + feeds["b"])


def test_every_output_is_compared_by_its_name():
    random = np.random.default_rng(0)
    right = {"logits": random.standard_normal((6, 5)), "features": random.standard_normal((6, 7, 2))}
    swapped = dict(reversed(right.items()))
    compared = Comparison("graph", tolerance("onnx"))
    compared.add({**swapped, "features": right["features"] + 1e-3}, right)
    found = compared.links("onnx", "net")
    assert [(link.candidate, link.verdict, link.metrics.top1_agreement) for link in found] == [
        ("graph, output logits", "passed", 1.0), ("graph, output features", "failed", None)
    ]  # fmt: skip
    with pytest.raises(Refused, match="outputs differ: graph has 1 outputs, the reference 2"):
        compared.add({"logits": right["logits"]}, right)
    with pytest.raises(Refused, match=r"outputs differ: graph has shape \[6, 4\], the reference \[6, 5\]"):
        compared.add({**right, "logits": right["logits"][:, :4]}, right)


# --- the chain ----------------------------------------------------------------------------------------


def test_a_net_that_merges_tokens_over_batches_of_two_sizes(tmp_path):
    from repaconv.core import plugins
    from repaconv.core.run_folder import Run
    from repaconv.sources.source_of_run import source_model_of

    torch.save({"state_dict": plugins.load(plugins.METHODS, "pyra").example("tiny", 1)}, tmp_path / "tiny.pth")
    rc.fold(tmp_path / "tiny.pth", num_heads=3)
    source_model = source_model_of(Run(rc_run()))
    assert source_model.decides
    feeds = {"input": random_inputs((3, *source_model.folded.image_size), count=11, seed=5).images}
    np.savez(tmp_path / "x.npz", **feeds, output=source_model.reference.run(feeds)["logits"])
    done = rc.verify(inputs=tmp_path / "x.npz")
    assert [(link.name, link.verdict, link.metrics.images) for link in done.links] == [
        ("recorded", "passed", 11), ("fold", "passed", 11), ("stored", "passed", 11)
    ]  # fmt: skip
    source_model.exact.run(feeds)
    assert source_model.exact.undecided.shape == (11,)


def test_every_link_whose_ends_exist_is_reported_even_if_one_fails(tiny, repaconv):
    rc.fold(tiny)
    rc.export()
    done = rc.verify(rtol={"stored": 1e-12})
    assert [(link.name, link.verdict) for link in done.links] == [
        ("fold", "passed"), ("stored", "failed"), ("onnx", "passed")
    ]  # fmt: skip
    stored = done.links[1]
    assert stored.location.module
    assert len(stored.location.drift) > 5
    assert "<svg" in (rc_run() / "drift-stored.svg").read_text()
    assert rc.verify().verdict == "passed"
    assert not (rc_run() / "drift-stored.svg").exists()
    followed = rc.verify(drift=True)
    assert all(link.location.drift and not link.location.module for link in followed.links)
    assert (rc_run() / "drift-onnx.svg").exists()
    code, out, _ = repaconv("verify", "--atol", "stored:1e-30", "--rtol", "stored:1e-30")
    assert code == 1
    assert "first different at" in out


def rc_run():
    from pathlib import Path

    return Path("repaconv-out/tiny")


def test_what_was_not_run_is_not_verified_and_what_is_required_fails(tiny, tmp_path, repaconv):
    rc.fold(tiny)
    assert rc.verify().verdict == "passed"
    missing = rc.verify(require=["engine"])
    assert missing.verdict == "failed"
    assert missing.links[-1].name == "engine"
    (tmp_path / "model.plan").write_bytes(b"an engine for a machine that is not here")
    without = rc.verify(engine=tmp_path / "model.plan")
    assert without.verdict == "passed"
    assert without.links[-1].verdict == "not verified"
    assert "TensorRT cannot be imported" in without.links[-1].note
    assert rc.verify(engine=tmp_path / "model.plan", require=["engine"]).verdict == "failed"
    code, out, _ = repaconv("verify", "--engine", tmp_path / "model.plan", "--format", "json")
    assert code == 0
    assert json.loads(out)["data"]["links"][-1]["verdict"] == "not verified"
    rc.export()
    ran = rc.verify(engine=rc_run() / "model.onnx")
    assert (ran.links[-1].name, ran.links[-1].verdict) == ("engine", "passed")
    assert repaconv("verify", "--require", "engines")[0] == 2


def test_a_net_with_a_head_of_zeros_is_not_verified(tiny_weights, repaconv):
    head = next(name for name in tiny_weights if name.endswith("head.fc.weight"))
    torch.save({"state_dict": {**tiny_weights, head: 0 * tiny_weights[head]}, "args": {"img_size": 32}}, "zero.pth")
    rc.fold("zero.pth")
    assert rc.export().verdict == "not verified"
    code, out, _ = repaconv("verify", "--format", "json")
    found = json.loads(out)
    assert (code, found["status"], found["data"]["verdict"]) == (5, "inconclusive", "not verified")
    assert {link["verdict"] for link in found["data"]["links"]} == {"not verified"}


def test_a_graph_with_preprocessing_takes_pixels(tiny, tmp_path):
    rc.fold(tiny, mean=[100, 110, 120], std=[50, 55, 60])
    rc.export(with_preprocessing=True, precision="fp16", batch=1)
    exported = rc.export(with_preprocessing=True, batch=1)
    assert exported.preprocessing
    import onnx

    model = onnx.load(rc_run() / "model.b1.pixels.onnx")
    assert model.graph.input[0].name == "image"
    assert [d.dim_value or d.dim_param for d in model.graph.input[0].type.tensor_type.shape.dim][::3] == [1, 3]
    done = rc.verify()
    assert rc.bench(rounds=2, batch=1).agreement.verdict == "passed"  # pixels in, beside the training form without
    pixels = {link.variant: link.verdict for link in done.links if link.name == "preprocessing"}
    assert pixels == {"b1.pixels": "passed", "fp16.b1.pixels": "not verified"}  # the lossy one has random images alone
    assert {link.name: link.verdict for link in done.links}["onnx"] == "passed"
    np.savez(tmp_path / "x.npz", input=random_inputs((3, 32, 32), count=2, seed=0).images)
    without = rc.verify(inputs=tmp_path / "x.npz").links
    assert len(without) == len({(link.name, link.variant) for link in without})
    lacking = {link.name: link.verdict for link in without}
    assert lacking["preprocessing"] == "not verified"
    assert lacking["onnx"] == "passed"


def test_a_lossy_graph_next_to_a_float32_one_of_another_size_is_evaluated_and_not_located(tiny, tmp_path):
    rc.fold(tiny)
    rc.export(image_size=48)
    rc.export(precision="fp16")
    found = {link.name: link for link in rc.verify().links}
    assert (found["onnx"].verdict, found["fp16"].verdict) == ("passed", "not verified")  # on random images of 48x48
    assert "only random images" in found["fp16"].note
    assert "another batch or image size" in found["fp16"].location.reason


def test_memory_does_not_grow_with_the_images(tiny):
    rc.fold(tiny)
    rc.export()
    code = (
        "import resource; import repaconv as rc\nfor count in (16, 1500):\n    rc.verify(count=count)\n"
        "    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    few, many = map(int, done.stdout.split())
    images = 1500 * 3 * 32 * 32 * 4 // 1024  # KiB that holding the inputs alone would take
    assert many - few < images / 2


def test_polygraphys_runners_are_runners(tiny):
    from polygraphy.backend.onnxrt import OnnxrtRunner, SessionFromOnnx

    from repaconv.engines.tensorrt import PolygraphySession
    from repaconv.verification.model_runners import load_onnx

    rc.fold(tiny)
    rc.export()
    ours = ImageSession(load_onnx(rc_run() / "model.onnx"))
    path = str(rc_run() / "model.onnx")
    runner = PolygraphySession(OnnxrtRunner(SessionFromOnnx(path)), ours.session.outputs)
    assert runner.inputs[0][::2] == ("input", "float32")
    images = random_inputs((3, 32, 32), count=2, seed=0).images
    assert np.array_equal(ImageSession(runner).run(images), ours.run(images))
    runner.close()


def test_runners_say_nothing_of_nets_that_decide_nothing():
    net = torch.nn.Linear(2, 2)
    runner = TorchRunner(net, net.state_dict(), double=True)
    runner.run({"input": np.zeros((1, 2), dtype=np.float32)})
    assert runner.undecided is None


# --- several outputs --------------------------------------------------------------------------------------------------


def test_every_output_is_counted_where_several_become_one_link():
    def one(name, reason, note=""):
        return Link.concluded(reason, note=note, name="agreement", reference="a", candidate=f"b, output {name}")

    still = "constant_output"
    links = [one("y", "within_tolerance"), one("z", "within_tolerance"), one("v", still), one("w", still)]
    same = "the output changes too little between the inputs for an error to show"
    assert outputs_joined(links).note == f"2 of 4 outputs passed, 2 not verified ({same})"
    links = [*links, one("u", "rounding_too_large", "9 of 9"), one("t", "exceeds_tolerance", "off")]
    message = outputs_joined(links)
    assert (message.verdict, message.reason) == ("failed", "exceeds_tolerance")
    why = f"2: {same}, 1: rounding alone moves it so far that a comparison shows nothing"
    assert message.note == f"2 of 6 outputs passed, 1 failed, 3 not verified ({why}); off"
    assert outputs_joined(links[:2]).note == "2 of 2 outputs passed"


@pytest.mark.parametrize(
    ("unsure", "verdict"), [(0, "passed"), (5, "passed"), (6, "not verified"), (10, "not verified")]
)
def test_classes_of_which_rounding_decides_most_are_not_verified(unsure, verdict):
    right = np.arange(10).reshape(10, 1)
    found = np.where(right < unsure, right + 1, right)
    compared = Comparison("b", Tolerance(kind="exact", rtol=1e-5))
    compared.add({"classes": found}, {"classes": right}, undecided=np.arange(10) < unsure)
    (link,) = compared.links("onnx", "a")
    assert link.verdict == verdict
    assert ("left out" in link.note) == bool(unsure)
    assert (link.figures.left_out or 0) == unsure
