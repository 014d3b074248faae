"""`repaconv compare`: any two models on the same inputs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from planted_faults import wrong_initializer
from small_graphs import F, saved, two_outputs

import repaconv as rc
from repaconv.core.errors import Refused, UsageProblem
from repaconv.verification.model_runners import FixedBatch


@pytest.fixture
def run(tiny) -> Path:
    rc.fold(tiny)
    rc.export(batch=1, simplify=False)
    return Path("repaconv-out/tiny")


def test_a_run_a_graph_and_a_checkpoint_compute_the_same(run, tiny, repaconv):
    model = run / "model.b1.onnx"
    for reference, candidate in ((tiny, run), (run, model), (model, tiny)):
        done = rc.compare(reference, candidate, count=3)
        assert done.verdict == "passed", done.links
        assert done.inputs.startswith("3 random images")
    sizes = rc.compare(tiny, model).candidate
    assert (sizes.bytes, sizes.nodes) == (model.stat().st_size, len(onnx.load(model).graph.node))
    assert sizes.parameters == rc.inspect(tiny).deploy.parameters  # as fold counts them
    code, out, _ = repaconv("compare", tiny, run, "-o", "c.json", "--format", "json")
    assert code == 0
    assert json.loads(out)["data"]["links"][0]["metrics"]["max_rel_error"] < 1e-5
    assert repaconv("compare", model, run)[0] == 0
    assert json.loads(Path("c.json").read_text())["stage"] == "compare"


def test_what_is_wrong_fails_wherever_the_file_lies(run, tiny, tmp_path, repaconv):
    right, wrong = tmp_path / "right.onnx", tmp_path / "wrong.onnx"
    right.write_bytes((run / "model.b1.onnx").read_bytes())
    onnx.save(wrong_initializer("head", onnx.load(right)), wrong)
    assert rc.compare(right, right).verdict == "passed"  # two bare graphs: inputs are found by trying
    code, out, _ = repaconv("compare", right, wrong)
    assert (code, "failed" in out) == (1, True)
    assert rc.compare(run, wrong).verdict == "failed"
    assert rc.compare(tiny, right, rtol=1e-12).verdict == "failed"
    np.savez("x.npz", input=np.zeros((2, 3, 32, 32), np.float32))
    assert rc.compare(right, wrong, inputs="x.npz").verdict == "failed"


def test_graphs_that_round_differently_are_held_to_how_far_rounding_moves_them(tmp_path, repaconv):
    ends = {"x": (F, ("n", 4))}, {"y": (F, ("n", 4))}
    weights = {"w": (4, 4), "far": np.full((1,), 3e3, np.float32), "much": np.full((1,), 1.1, np.float32)}
    layer, near = ("MatMul", "x w", "a", {}), [("Add", "a far", "b", {}), ("Sub", "b far", "y", {})]
    given = saved(tmp_path / "given.onnx", [layer, *near], weights, *ends)
    other = saved(tmp_path / "other.onnx", [("MatMul", "x w", "y", {})], weights, *ends)
    wrong = saved(tmp_path / "wrong.onnx", [layer, ("Mul", "a much", "y", {})], weights, *ends)
    (link,) = rc.compare(given, other).links
    assert (link.verdict, link.reason) == ("passed", "explained_by_rounding")
    assert rc.compare(given, wrong).verdict == "failed"
    assert rc.compare(other, given).verdict == "failed"  # rounding explains nothing of a graph that has none
    assert "explained by FP32 rounding" in repaconv("bench", other, "--against", given, "--rounds", "2")[1]
    assert "relative is allowed: failed" in repaconv("bench", wrong, "--against", given, "--rounds", "2")[1]


def test_bench_compares_outputs_of_the_same_name_in_whichever_order_they_are(tmp_path):
    one, other = (two_outputs(tmp_path / f"{order}.onnx", order) for order in ("ab", "ba"))
    for first, second in ((one, other), (other, one)):
        assert rc.bench(first, against=second, rounds=2, threads=1).agreement.verdict == "passed"


@pytest.mark.slow
def test_speeds_are_measured_interleaved(run, tmp_path):
    done = rc.compare(run, run / "model.b1.onnx", speed=True, rounds=10)
    assert done.measured.ratio.other
    assert done.inconclusive  # ten rounds say nothing


def test_what_cannot_be_compared_is_refused(run, tiny):
    with pytest.raises(Refused, match="there is no file or folder none"):
        rc.compare(run, "none")
    Path("x.pth").write_bytes(b"x")
    with pytest.raises(UsageProblem, match="no run in repaconv-out/ was made from it"):
        rc.compare(run, "x.pth")
    with pytest.raises(UsageProblem, match="--speed compares ONNX models and engines"):
        rc.compare(tiny, run, speed=True)


def test_a_lossy_export_is_compared_on_the_images_that_evaluated_it(tiny, repaconv):
    faint = 0.02 * np.random.default_rng(0).standard_normal((24, 3, 32, 32)).astype(np.float32)
    np.savez("faint.npz", input=faint, labels=np.arange(24) % 5)  # ranges that do not hold on standard normal images
    rc.fold(tiny)
    model = Path(rc.export().output_files[0])
    low = Path(rc.export(precision="int8", inputs="faint.npz").output_files[0])
    for reference, candidate in ((model, low), (tiny, low), ("repaconv-out/tiny", low)):
        done = rc.compare(reference, candidate)
        assert (done.verdict, done.links[0].metrics.images, done.links[0].accuracy.images) == ("passed", 12, 12)
        assert done.inputs == "faint.npz (24 images), the 12 not used for calibration"
    Path("faint.npz").rename("elsewhere.npz")
    code, out, _ = repaconv("compare", model, low)
    assert (code, "are not there any more" in " ".join(out.split())) == (5, True)
    assert rc.compare(model, low, inputs="elsewhere.npz").verdict == "passed"
    half = Path(rc.export(precision="fp16").output_files[0])
    done = rc.compare(model, half)  # its export had random images, on which a pass shows little
    assert (done.verdict, done.links[0].metrics.cosine > 0.999) == ("not verified", True)


def test_an_output_of_classes_of_bare_models_is_compared_by_labels(tmp_path, repaconv):
    ends = {"x": (F, ("n", 4))}, {"y": (F, ("n", 10))}
    given = saved(tmp_path / "given.onnx", [("MatMul", "x w", "y", {})], {"w": (4, 10)}, *ends)
    images = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
    np.savez("labels.npz", x=images, labels=np.arange(6))
    done = rc.compare(given, given, inputs="labels.npz")
    (link,) = done.links
    assert (done.inputs, link.metrics.top1_agreement) == ("labels.npz (one inference)", 1.0)
    assert (link.accuracy.images, link.accuracy.candidate) == (6, link.accuracy.reference)
    assert "accuracy" in repaconv("compare", given, given, "--inputs", "labels.npz")[1]
    np.savez("none.npz", x=images)
    assert rc.compare(given, given, inputs="none.npz").links[0].metrics.top1_agreement is None  # only its shape says so
    for wrong, message in ((np.arange(6) + 7, "labels 7 to 12 are not of 10 classes"), (np.arange(5), "for each of 6")):
        np.savez("wrong.npz", x=images, labels=wrong)
        with pytest.raises(Refused, match=message):
            rc.compare(given, given, inputs="wrong.npz")


def test_a_fixed_first_dimension_that_outputs_lack_is_no_batch(tmp_path):
    """Every row of the output is compared, also of a scalar, and of inputs of different lengths."""
    right = np.arange(20, dtype=np.float32).reshape(5, 4)
    wrong = right.copy()
    wrong[3] += 7
    row, rows = {"x": (F, [1, 4])}, {"y": (F, [5, 4])}
    product = [("Mul", "x w", "y", {})]
    given, other = (saved(tmp_path / f"{n}.onnx", product, {"w": w}, row, rows) for n, w in enumerate((right, wrong)))
    assert [rc.compare(given, each).verdict for each in (given, other)] == ["passed", "failed"]
    rc.fold(given)
    assert rc.compare("repaconv-out/0", given).verdict == "passed"
    scalar = saved(tmp_path / "mean.onnx", [("ReduceMean", "x", "y", {"keepdims": 0})], {}, row, {"y": (F, [])})
    assert rc.compare(scalar, scalar).verdict != "failed"
    pair = {"a": (F, [2, 5]), "b": (F, [5, 6])}
    two = saved(tmp_path / "two.onnx", [("MatMul", "a b", "y", {})], {}, pair, {"y": (F, [2, 6])})
    assert rc.compare(two, two).verdict == "passed"


def test_outputs_without_a_row_per_image_are_not_cut():
    class Mean:
        inputs = ()

        def run(self, feeds):
            return {"mean": feeds["x"].mean(0), "all": feeds["x"].mean()}

    images = np.ones((3, 5))
    with pytest.raises(Refused, match=r"output mean is \[5\] for a batch of 2: not one row per image"):
        FixedBatch(Mean(), 2).run({"x": images})
    assert FixedBatch(Mean(), 3).run({"x": images})["all"] == 1


def test_a_tolerance_of_zero_is_taken_and_one_out_of_bounds_is_refused(tmp_path, repaconv):
    ends = {"x": (F, ("n", 4))}, {"y": (F, ("n", 4))}
    given = saved(tmp_path / "given.onnx", [("Mul", "x w", "y", {})], {"w": np.ones(4, np.float32)}, *ends)
    near = np.full(4, 1 + 2e-7, np.float32)
    other = saved(tmp_path / "other.onnx", [("Mul", "x w", "y", {})], {"w": near}, *ends)
    assert rc.compare(given, other).verdict == "passed"
    assert rc.compare(given, other, rtol=0.0).verdict == "failed"
    assert rc.compare(given, given, rtol=0.0).links[0].tolerance.rtol == 0
    for wrong in (5.0, float("nan"), -1.0):
        with pytest.raises(UsageProblem, match=r"the tolerance --rtol is .*"):
            rc.compare(given, given, rtol=wrong)
    assert repaconv("compare", given, given, "--rtol", "5")[0] == 2


def test_what_fold_does_not_take_is_not_told_to_be_folded(tiny, repaconv):
    rc.fold(tiny)
    Path("empty").mkdir()
    Path("text.txt").write_text("text")
    for other in ("empty", "text.txt"):
        code, _, told = repaconv("compare", "repaconv-out/tiny", other)
        assert (code, "hint: Give one of these, or a checkpoint that was folded." in told) == (2, True), told
    Path("unfolded.pth").write_bytes(tiny.read_bytes() + b"\0")
    code, _, told = repaconv("compare", "repaconv-out/tiny", "unfolded.pth")
    assert (code, "hint: Fold it first: repaconv fold unfolded.pth" in told) == (2, True), told


def layers(path, *, kind=np.float32, shift=0.0, scale="k", ends=("x",)):
    """y = scale * (x @ w), with weights of a type."""
    weights = {"w": np.random.default_rng(0).standard_normal((4, 6)).astype(kind), "k": np.full((1,), 1 + shift, kind)}
    nodes = [("MatMul", f"{ends[0]} w", "a", {}), ("Mul", f"a {scale}", "y", {})]
    each = TensorProto.FLOAT16 if kind == np.float16 else F
    return saved(path, nodes, weights, {name: (each, ["batch", 4]) for name in ends}, {"y": (each, ["batch", 6])})


def test_as_many_random_inputs_as_asked_for_are_compared(tmp_path, repaconv, monkeypatch):
    model, seen = layers(tmp_path / "a.onnx"), []
    run = FixedBatch.run
    monkeypatch.setattr(FixedBatch, "run", lambda self, feeds: (seen.append(feeds["x"]), run(self, feeds))[1])
    found = {}
    for count, seed in ((3, 0), (20, 0), (3, 1)):
        seen.clear()
        done = rc.compare(model, model, count=count, seed=seed)
        assert done.inputs.startswith(f"{count} random inputs, seed {seed}; ")
        found[count, seed] = [*seen]
    assert len(found[20, 0]) - len(found[3, 0]) == 2 * (20 - 3)
    assert len(np.unique(np.concatenate(found[20, 0]), axis=0)) >= 20
    assert not np.array_equal(found[3, 0][-1], found[3, 1][-1])


@pytest.mark.parametrize("options", [("--inputs", "x.npz", "--count", "3"), ("--inputs", "x.npz", "--seed", "3")])
def test_options_of_random_inputs_are_refused_where_inputs_are_given(tmp_path, options, repaconv):
    model = layers(tmp_path / "a.onnx")
    np.savez("x.npz", x=np.eye(4, dtype=np.float32))
    code, _, err = repaconv("compare", model, model, *options)
    assert (code, f"{options[2]} has no effect here" in err) == (2, True)
    code, _, err = repaconv("compare", model, model, "--rounds", "3")
    assert (code, "--rounds has no effect here" in err) == (2, True)


def test_a_graph_of_another_tool_is_held_to_the_precision_of_its_weights(tmp_path, repaconv):
    full, half = layers(tmp_path / "a.onnx"), layers(tmp_path / "half.onnx", kind=np.float16)
    wrong = layers(tmp_path / "wrong.onnx", kind=np.float16, shift=0.2)
    np.savez("x.npz", x=np.random.default_rng(1).standard_normal((16, 4)).astype(np.float32))
    for reference, candidate, verdict in ((full, half, "passed"), (half, full, "passed"), (full, wrong, "failed")):
        done = rc.compare(reference, candidate, inputs="x.npz")
        assert (done.verdict, done.links[0].tolerance.kind) == (verdict, "lossy")
    assert rc.compare(full, half, inputs="x.npz").candidate.precision == "fp16"
    code, _, err = repaconv("compare", full, half)
    assert (code, "fp16 is lossy, and is evaluated on real inputs" in err) == (2, True)
    assert [link.tolerance.kind for link in rc.compare(half, half).links] == ["exact"]  # only rounding is between them
    assert rc.compare(half, layers(tmp_path / "off.onnx", kind=np.float16, shift=0.02)).verdict == "failed"


def test_a_graph_that_another_tool_quantized_is_held_to_the_tolerance_of_int8(tmp_path):
    from onnxruntime.quantization import quantize_dynamic

    full, low = layers(tmp_path / "a.onnx"), tmp_path / "int8.onnx"
    quantize_dynamic(full, low)
    np.savez("x.npz", x=np.random.default_rng(1).standard_normal((16, 4)).astype(np.float32))
    done = rc.compare(full, low, inputs="x.npz")
    assert (done.verdict, done.candidate.precision, done.links[0].tolerance.kind) == ("passed", "int8", "lossy")


def test_a_model_with_another_number_of_inputs_is_refused_by_their_names(tmp_path):
    two, one = layers(tmp_path / "two.onnx", ends=("x", "z")), layers(tmp_path / "one.onnx")
    with pytest.raises(Refused, match="it has x, and not x, z"):
        rc.compare(two, one)
