"""The small trained networks that are shipped: they fold, pass verification, and reach their recorded accuracy."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import one_quick
from PIL import Image

import repaconv as rc
from repaconv.core.files import read_artefact
from repaconv.models import FOLDER, HELD_OUT, METHODS, checkpoint
from repaconv.results import MethodFold
from repaconv.verification.image_files import prepared, read_image

TRAIN = Path(__file__).resolve().parents[1] / "benchmarks" / "train"


@pytest.mark.parametrize("method", one_quick(["repavit", *(name for name in METHODS if name != "repavit")]))
def test_a_trained_model_folds_without_a_word_and_keeps_its_accuracy(method, record_property):
    stated = json.loads((FOLDER / f"{method}.json").read_text())
    assert rc.fold(checkpoint(method)).method == method
    rc.export(batch=8)  # a free one takes twice as long to trace
    done = rc.verify(inputs=HELD_OUT)
    links = {link.name: link for link in done.links}
    accuracy = links["onnx"].accuracy
    record_property("trained model", f"{method}: {accuracy.reference:.1%} -> {accuracy.candidate:.1%} of 500")
    assert done.verdict == "passed"
    assert [links[name].verdict for name in ("fold", "stored", "onnx")] == ["passed"] * 3
    undecided = links["onnx"].metrics.undecided  # on some machines, rounding decides which tokens of an image merge
    assert undecided <= (2 if method == "pyra" else 0)
    assert accuracy.images + undecided == stated["held_out"] == 500
    assert accuracy.reference == pytest.approx(stated["accuracy"], abs=undecided / 500 + 1e-9)
    assert accuracy.candidate >= accuracy.reference
    assert stated["accuracy"] >= 0.95


def test_the_checkpoints_tell_the_preprocessing_that_made_the_images(monkeypatch):
    datasets = pytest.importorskip("sklearn.datasets")
    monkeypatch.syspath_prepend(TRAIN)
    digits = pytest.importorskip("digits")
    _, held = digits.load()
    with np.load(HELD_OUT) as kept:
        assert np.array_equal(kept["input"], held.images.numpy())
        assert np.array_equal(kept["labels"], held.labels.numpy())
    place = np.random.default_rng(digits.SPLIT_SEED).permutation(1797)[-digits.HELD_OUT]
    shades = datasets.load_digits().images[place]
    Image.fromarray(np.round(shades * 255 / 16).astype(np.uint8)).save("digit.png")
    for method in METHODS:
        rc.fold(checkpoint(method))
        wanted = read_artefact(Path("repaconv-out") / method / "fold.json", MethodFold).preprocessing
        pixels = read_image(Path("digit.png"), wanted, wanted.image_size, 1)
        assert np.allclose(prepared(pixels[None], wanted)[0], held.images[0].numpy(), atol=1e-6), method


@pytest.mark.parametrize("method", METHODS)
def test_the_norms_that_remain_are_listed_as_those_of_a_graph_are(method, tmp_path, repaconv):
    import onnx

    folded = rc.fold(checkpoint(method), out=tmp_path / "run")
    (remain, *affine) = folded.not_folded
    names = remain.removeprefix("norms remain, since their statistics depend on the input: ").split("; ")
    exported = rc.export(tmp_path / "run", preset="official", simplify=False, opset=18)
    nodes = onnx.load(tmp_path / "run" / exported.payload.path, load_external_data=False).graph.node
    kinds = ("LayerNormalization", "InstanceNormalization", "GroupNormalization")
    assert len(names) == len(set(names)) == sum(node.op_type in kinds for node in nodes)
    assert bool(affine) == (method in ("repavit", "riformer"))
    assert "not folded: norms remain" in repaconv("fold", checkpoint(method), "-q")[1]
