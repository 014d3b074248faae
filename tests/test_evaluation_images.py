"""The images of a lossy export are remembered: verify, bench and build evaluate it on those that set no ranges."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import repaconv as rc
from repaconv.core.errors import UsageProblem

RUN = Path("repaconv-out/tiny")
SIZE = 32


def faint(count: int, seed: int = 0) -> np.ndarray:
    """Images of so little contrast that ranges calibrated on them do not hold on standard normal ones."""
    return 0.02 * np.random.default_rng(seed).standard_normal((count, 3, SIZE, SIZE)).astype(np.float32)


@pytest.fixture
def lossy(tiny):
    """A run with an int8 export that was calibrated on such images."""
    np.savez("faint.npz", input=faint(24))
    rc.fold(tiny)
    rc.export()
    return rc.export(precision="int8", inputs="faint.npz")


def link(done, name="int8"):
    return next(each for each in done.links if each.name == name)


def test_the_natural_order_of_int8_passes_from_fold_to_bench(tiny, repaconv, monkeypatch):
    np.savez("faint.npz", input=faint(24), labels=np.arange(24) % 5)
    for words in (["fold", tiny], ["export"], ["export", "--precision", "int8", "--inputs", "faint.npz"], ["verify"]):
        code, out, err = repaconv(*words)
        assert code == 0, (words, out, err)
    assert "int8 passed on faint.npz (24 images), the 12 not used for calibration" in out
    assert "fold, stored, onnx passed on 4 random images, seed 0" in out
    assert "read faint.npz" in err
    assert "verify 3 links on 4 random images, seed 0" in err
    done = rc.bench(precision="int8", rounds=2)
    assert done.verdict == link(rc.verify()).verdict == "passed"
    assert done.agreement.inputs == "faint.npz (24 images), the 12 not used for calibration"
    assert done.agreement.metrics.images == 12
    monkeypatch.chdir(RUN)  # the images are known by their whole path
    assert link(rc.verify(".")).verdict == "passed"


def test_what_random_images_say_of_it_is_that_it_fails(lossy):
    found = link(rc.verify(inputs=saved_normal()))  # as they were drawn for it before
    assert (found.verdict, found.inputs) == ("failed", "")
    assert found.location.reason
    assert link(rc.verify()).verdict == "passed"


def test_a_failed_lossy_link_names_what_keeps_layers_in_fp32(lossy, repaconv):
    code, _, err = repaconv("verify", "--inputs", saved_normal())
    assert code == 1
    assert " next repaconv tune --max-disagreement" in err
    assert "--keep-fp32" in err


def test_a_measurement_records_that_another_export_failed(lossy):
    assert rc.verify(inputs=saved_normal()).verdict == "failed"
    done = rc.bench(rounds=2)
    assert (done.precision, done.unverified) == ("fp32", ())
    assert "verify failed for another export, which was not measured: int8 of int8" in done.note
    rc.verify()
    assert "verify failed" not in rc.bench(rounds=2).note


def test_an_export_remembers_its_images_and_which_of_them_calibrated_it(lossy):
    kept = lossy.images
    assert (kept.path, kept.count, len(kept.calibration)) == (str(Path("faint.npz").resolve()), 24, 12)
    assert json.loads((RUN / "export.int8.json").read_text())["images"]["sha256"] == kept.sha256
    assert rc.export().images is None


@pytest.mark.parametrize("fate", ["moved", "changed"])
def test_images_that_are_gone_or_changed_leave_it_not_verified(lossy, repaconv, fate):
    if fate == "moved":
        Path("faint.npz").rename("elsewhere.npz")
    else:
        np.savez("faint.npz", input=faint(24, seed=1))
    result = {"moved": "are not there any more", "changed": "were changed since"}[fate]
    code, out, _ = repaconv("verify")
    assert code == 0
    assert "not verified: int8" in out
    assert result in " ".join(out.split())
    assert "int8 passed" not in out
    found = link(rc.verify())
    assert (found.verdict, found.metrics) == ("not verified", None)
    assert str(Path("faint.npz").resolve()) in found.note
    done = rc.bench(precision="int8", rounds=2)
    assert (done.verdict, done.agreement.verdict) == ("passed", "not verified")
    assert result in done.agreement.note
    assert rc.verify(require=["int8"]).verdict == "failed"


def test_a_folder_is_remembered_by_the_images_that_were_taken(tiny):
    folder = Path("pictures")
    folder.mkdir()
    for number, pixels in enumerate(np.random.default_rng(0).integers(100, 140, (8, SIZE, SIZE, 3), dtype=np.uint8)):
        Image.fromarray(pixels).save(folder / f"{number}.png")
    (folder / "7.png").rename(folder / os.fsdecode(b"\xff7.png"))  # a file name need not be UTF-8
    rc.fold(tiny)
    rc.export(precision="int8", images=folder)
    rc.export(precision="int8", images=folder, with_preprocessing=True)
    done = rc.verify()
    assert link(done).verdict == link(done, "preprocessing").verdict == "passed"
    assert link(done, "preprocessing").inputs == "8 images of pictures, the 4 not used for calibration"
    (folder / "0.png").unlink()
    assert "were changed since" in link(rc.verify()).note


def test_changed_class_names_leave_it_not_verified(tiny):
    names = [f"kind-{number}" for number in range(rc.fold(tiny).config["classes"])]
    for number, pixels in enumerate(np.random.default_rng(0).integers(100, 140, (8, SIZE, SIZE, 3), dtype=np.uint8)):
        folder = Path("pictures", names[number % 2])
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    Path("names.txt").write_text("\n".join(names))
    rc.export(precision="int8", images="pictures", classes="names.txt")
    assert link(rc.verify()).accuracy is not None
    Path("names.txt").write_text("\n".join(reversed(names)))  # the same images have other labels
    found = link(rc.verify())
    assert (found.verdict, found.accuracy) == ("not verified", None)
    assert f"{Path('names.txt').resolve()}, were changed since" in found.note


def test_a_lossy_link_that_passes_on_random_images_is_not_verified_and_one_that_fails_fails(tiny, repaconv):
    rc.fold(tiny)
    rc.export()
    exported = rc.export(precision="fp16")
    assert (exported.verdict, link(exported, "fp16").verdict) == ("passed", "not verified")  # the FP32 graph passed
    assert "only random images" in link(exported, "fp16").note
    code, out, _ = repaconv("export", "--precision", "fp16")
    assert (code, "not verified fp16" in " ".join(out.split())) == (0, True)
    done = rc.verify()
    found = link(done, "fp16")
    assert (done.verdict, found.verdict) == ("passed", "not verified")
    assert "only random images" in found.note
    assert found.metrics.cosine > 0.999
    code, out, _ = repaconv("verify")
    assert code == 0
    message = "passed: fold, stored, onnx passed on 4 random images, seed 0; not verified: fp16"
    assert out.splitlines()[-1].startswith(message)
    np.savez("given.npz", input=np.random.default_rng(1).standard_normal((8, 3, SIZE, SIZE)).astype(np.float32))
    assert link(rc.verify(inputs="given.npz"), "fp16").verdict == "passed"
    assert link(rc.export(precision="fp16", inputs="given.npz"), "fp16").verdict == "passed"


def test_a_lossy_link_shows_what_was_measured_next_to_its_limits(lossy, repaconv):
    _, out, _ = repaconv("verify")
    message = " ".join(out.split())
    found = link(rc.verify())
    assert f"cosine {found.metrics.cosine:.4f} (limit 0.95)" in message
    assert f"error {found.metrics.norm_error:.1%} (limit 31.2%)" in message
    assert "lossy: cosine" not in message


def test_fewer_of_the_images_of_an_export_are_taken_where_a_count_is_said(lossy):
    found = link(rc.verify(count=3))
    assert (found.inputs, found.metrics.images) == ("faint.npz (24 images), 3 of the 12 not used for calibration", 3)


def test_a_bundle_of_a_lossy_export_holds_its_images(tiny):
    np.savez("faint.npz", input=faint(12))
    rc.fold(tiny)
    rc.export(target="orin-nano", precision="int8", inputs="faint.npz")
    done = rc.bundle(target="orin-nano")
    assert (done.images, done.inputs) == (6, "faint.npz (12 images), the 6 not used for calibration")
    Path("faint.npz").unlink()
    with pytest.raises(UsageProblem, match="are not there any more"):
        rc.bundle(target="orin-nano")
    assert rc.bundle(target="orin-nano", inputs=saved_normal()).images == 8


def saved_normal() -> str:
    np.savez("normal.npz", input=np.random.default_rng(0).standard_normal((8, 3, SIZE, SIZE)).astype(np.float32))
    return "normal.npz"


def test_an_engine_of_a_lossy_export_is_evaluated_on_its_images(lossy):
    done = rc.build(target="x86-64", precision="int8")
    assert done.links[0].metrics.images == 12
    engine = RUN / "build" / "x86-64.int8.onnx"
    found = link(rc.verify(engine=engine), "engine")
    assert (found.verdict, found.inputs) == ("passed", "faint.npz (24 images), the 12 not used for calibration")


def test_an_engine_that_passes_on_random_images_is_not_verified(tiny, repaconv):
    """As `export` and `verify` say of the graph and of the engine."""
    rc.fold(tiny)
    rc.export()
    rc.export(precision="int8")
    code, out, _ = repaconv("build", "--target", "x86-64", "--precision", "int8")
    assert (code, "; not verified: engine\n" in out) == (0, True)
    done = rc.build(target="x86-64", precision="int8")
    assert (done.verdict, done.links[0].verdict) == ("passed", "not verified")
    assert done.links[0].inputs == "4 images of random pixels, seed 0"
    assert "only random images" in done.links[0].note
    measured = rc.bench(precision="int8", rounds=2).agreement
    assert (measured.verdict, measured.reason) == ("not verified", "unsuitable_inputs")
    assert rc.build(target="x86-64").links[0].verdict == "passed"  # FP32 is exact
    rc.export(precision="int8", inputs=saved_normal())
    assert rc.build(target="x86-64", precision="int8").links[0].verdict == "passed"
    assert rc.bench(precision="int8", rounds=2).agreement.verdict == "passed"
    Path("normal.npz").unlink()
    found = rc.build(target="x86-64", precision="int8").links[0]
    assert (found.verdict, "are not there any more" in found.note) == ("not verified", True)


def test_links_of_several_exports_of_a_precision_name_theirs(lossy, repaconv):
    rc.export(precision="int8", inputs="faint.npz", batch=1)
    np.savez("labeled.npz", input=faint(24), labels=np.arange(24) % 5)
    code, out, _ = repaconv("verify", "--inputs", "labeled.npz", "-q")
    assert code == 0
    assert [line.partition(": accuracy")[0] for line in out.splitlines() if ": accuracy" in line][-2:] == [
        "int8",
        "int8 (int8.b1)",
    ]
    assert "int8, int8 (int8.b1) passed" in out.splitlines()[-1]
    assert "McNemar" not in out
    assert "version" not in out.splitlines()[-1]
    assert "McNemar" in repaconv("verify", "--inputs", "labeled.npz", "-v")[1]
