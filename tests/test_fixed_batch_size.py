"""Exports with a fixed batch size of graphs whose outputs have no row for each image, or that take no images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from planted_graph_faults import INT, F, Net

import repaconv as rc
from repaconv.core import run_folder
from repaconv.core.errors import Refused, UsageProblem
from repaconv.distributed.sweep import sweep
from repaconv.engines.contract import Port
from repaconv.sources.source_of_run import source_model_of
from repaconv.stages.shared.exports_of_run import export_for
from repaconv.stages.verify.layer_divergence import within_engine
from repaconv.verification.input_batches import npz_calls, random_inputs

RANDOM = np.random.default_rng(5)  # of its own: that of planted_graph_faults makes the weights of other tests


def normal(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape) * shape[0] ** -0.5


CONVS = [("Conv", "x w", "a", {"pads": [1] * 4}), ("Relu", "a", "b"), ("Conv", "b v", "c", {"pads": [1] * 4})]
POOLED = [*CONVS, ("GlobalAveragePool", "c", "d"), ("Flatten", "d", "e"), ("MatMul", "e h", "f")]
ROWS = [("MatMul", "x k", "r"), ("Relu", "r", "s"), ("MatMul", "s h", "y")]
WEIGHTS = {"w": normal(8, 3, 3, 3), "v": normal(8, 8, 3, 3), "h": normal(8, 4), "k": normal(8, 8)}
IMAGES = {"x": (F, ("n", 3, 8, 8))}
NETS = {
    "mean of the batch": Net([*POOLED, ("ReduceMean", "f first", "y", {"keepdims": 0})], WEIGHTS, IMAGES, {"y": F}),
    "rows": Net(ROWS, WEIGHTS, {"x": (F, ("n", 8))}, {"y": F}),
    "two inputs": Net([("Add", "q z", "x"), *ROWS], WEIGHTS, {"q": (F, ("n", 8)), "z": (F, ("n", 8))}, {"y": F}),
    "indices": Net([("Gather", "table i", "x"), *ROWS], WEIGHTS, {"i": (INT, ("n", 6))}, {"y": F}),
}
for one in NETS.values():
    one.weights.update(first=np.array([0]), table=normal(50, 8), two=np.array([2, 8]))


def folded(net: Net):
    onnx.save(net.model(), "net.onnx")
    return rc.fold("net.onnx", measure=False)


@pytest.mark.parametrize("precision", ["int8", "fp16"])
@pytest.mark.parametrize("name", NETS)
def test_a_lower_precision_is_calibrated_and_compared_in_its_batch(name, precision):
    assert folded(NETS[name]).batch == "dynamic"
    done = rc.export(precision=precision, batch=3)  # 32 images are no multiple of it
    assert done.batch == 3
    assert done.links[-1].metrics is not None
    graph = onnx.load(Path("repaconv-out/net") / done.payload.path).graph
    assert {value.type.tensor_type.shape.dim[0].dim_value for value in graph.input} == {3}


@pytest.mark.parametrize("name", NETS)
def test_verify_runs_it_in_its_batch(name):
    folded(NETS[name])
    rc.export(batch=3)
    links = {link.name: link for link in rc.verify(drift=True).links}
    assert {name: link.verdict for name, link in links.items()} == dict.fromkeys(("fold", "stored", "onnx"), "passed")
    assert links["onnx"].inputs or name == "mean of the batch"


def test_images_are_joined_to_batches_and_the_last_repeats_its_own():
    np.savez("images.npz", input=np.random.default_rng(0).standard_normal((5, 3, 8, 8), dtype=np.float32))
    folded(NETS["mean of the batch"])
    done = rc.export(precision="int8", batch=2, inputs="images.npz")
    assert done.links[-1].verdict == "passed"
    onnx_link = [link for link in rc.verify(inputs="images.npz").links if link.name == "int8"]
    assert [link.verdict for link in onnx_link] == ["passed"]
    given = random_inputs((3, 8, 8), count=5, seed=0)
    joined = [batch.images for batch in given.together(2).batches()]
    assert [len(each) for each in joined] == [5]  # an output with a row for each image needs no joining
    whole = type(given)(**{**vars(given), "whole": True}).together(2)
    single = given.images
    for found, places in zip(whole.batches(), ([0, 1], [2, 3], [4, 4]), strict=True):
        np.testing.assert_array_equal(found.images, single[places])


def test_own_inputs_of_another_batch_are_refused_or_not_verified():
    np.savez("calls.npz", x=np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32))
    folded(NETS["rows"])
    with pytest.raises(UsageProblem, match=r"calls.npz: the graph takes a batch of 2 only, and x has 4 rows"):
        rc.export(precision="int8", batch=2, inputs="calls.npz")
    rc.export(batch=2)
    links = {link.name: link for link in rc.verify(inputs="calls.npz").links}
    assert (links["stored"].verdict, links["onnx"].verdict) == ("passed", "not verified")
    assert "the graph takes a batch of 2 only, and x has 4 rows" in links["onnx"].note


def test_rows_of_own_inputs_both_calibrate_and_evaluate_where_the_batch_is_dynamic():
    """As images with channels last, which no folder of images is read for."""
    np.savez("calls.npz", x=np.random.default_rng(0).standard_normal((10, 8, 8, 3)).astype(np.float32))
    np.savez("one.npz", x=np.zeros((1, 8, 8, 3), np.float32))
    rows = [("Transpose", "x", "t", {"perm": [0, 3, 1, 2]}), ("Conv", "t w", "c"), ("Relu", "c", "r")]
    rows += [("GlobalAveragePool", "r", "p"), ("Flatten", "p", "f"), ("MatMul", "f h", "y")]
    folded(Net(rows, {name: WEIGHTS[name] for name in "wh"}, {"x": (F, ("n", 8, 8, 3))}, {"y": F}))
    for batch in (None, 1):
        exported = rc.export(precision="int8", inputs="calls.npz", batch=batch)
        assert (exported.images.count, len(exported.images.calibration)) == (10, 5)
    link = next(link for link in rc.verify().links if link.name == "int8")
    assert (link.verdict, link.inputs) == (
        "passed",
        "calls.npz (10 inferences of one row), the 5 not used for calibration",
    )
    assert rc.verify(inputs="calls.npz").inputs == "calls.npz (one inference)"
    agreement = rc.bench(precision="int8", rounds=2, batch=2).agreement
    assert agreement.verdict == "passed"
    assert agreement.inputs == "calls.npz (10 inferences of one row), the 5 not used for calibration"
    with pytest.raises(UsageProblem, match=r"one.npz \(one inference\): one inference cannot both calibrate"):
        rc.export(precision="int8", inputs="one.npz")


def test_only_rows_of_one_dynamic_batch_are_separate_calls():
    arrays = {"a": np.zeros((4, 2, 2, 3), np.float32), "c": np.zeros((4, 2)), "d": np.zeros((3, 2))}
    np.savez("calls.npz", b=np.arange(4.0), **arrays)

    def count(*shapes, outputs=()):
        ports = [Port(name, shape, "float32") for name, shape in shapes]
        return npz_calls(Path("calls.npz"), ports, outputs, by_row=True).shape

    image = ("n", 2, 2, 3)
    assert count(("a", image), ("b", ("n",))) == count(("a", (None, 2, 2, 3)), outputs=["b"]) == (4,)
    assert count(("a", image), ("b", ("m",))) == count(("a", (4, 2, 2, 3))) == (1,)
    assert count(("a", image), ("d", ("n", 2))) == count(("a", image), outputs=["d"]) == (1,)
    assert count(("c", ("n", 2))) == (1,)  # n may be the tokens of one call
    given = npz_calls(Path("calls.npz"), [Port("a", image, "float32")], ["b"], by_row=True)
    assert [batch.recorded["b"].tolist() for batch in given.batches()] == [[0], [1], [2], [3]]


def test_a_graph_that_runs_in_one_batch_only_has_that_batch():
    """It declares any, and reshapes to two."""
    rows = [*POOLED[:-1], ("Reshape", "e two", "g"), ("MatMul", "g h", "y")]
    assert folded(Net(rows, NETS["rows"].weights, IMAGES, {"y": F})).batch == 2
    for how in ({}, {"batch": 2}, {"precision": "int8"}):
        assert rc.export(**how).batch == 2
    assert {link.verdict for link in rc.verify().links if link.name in ("fold", "stored", "onnx")} == {"passed"}
    with pytest.raises(UsageProblem, match="a fixed batch size of 2; 3 was requested"):
        rc.export(batch=3)


def test_without_a_batch_size_a_model_is_measured_in_its_own():
    fixed, free = (Net(POOLED, WEIGHTS, {"x": (F, (batch, 3, 8, 8))}, {"f": F}) for batch in (2, "n"))
    onnx.save(fixed.model(), "fixed.onnx")
    folded(free)
    rc.export(batch=2)
    for source in ("fixed.onnx", None):
        done = rc.bench(source, rounds=2), rc.throughput(source, rounds=2), rc.estimate(source)
        assert [each.batch for each in done] == [2, 2, 2]
        with pytest.raises(UsageProblem, match="fixed input shape"):
            rc.bench(source, rounds=2, protocol="nondeep-throughput")


def test_a_target_of_modules_does_not_measure_a_model_by_another_runtime():
    onnx.save(Net(POOLED, WEIGHTS, IMAGES, {"f": F}).model(), "net.onnx")
    for measure in (rc.bench, rc.throughput):
        with pytest.raises(UsageProblem, match=r"runs PyTorch modules, and net\.onnx is an ONNX model"):
            measure("net.onnx", target="cpu-torch")
    Path("m.toml").write_text('targets = ["cpu-torch"]\nrounds = 2\n[[models]]\ncheckpoint = "net.onnx"\n')
    (row,) = sweep("m.toml").rows
    assert (row.p50_ms, "runs PyTorch modules" in row.problem) == (None, True)


@pytest.mark.parametrize(
    ("given", "dtype", "message"),
    [
        ([0, 300], "uint8", "300"),
        ([0, -1], "uint8", "-1"),
        ([0, 3.7], "int64", "3.7"),
        ([0, np.nan], "int32", "nan"),
        ([0, 2], "bool", "2"),
        ([0, 1e300], "float32", r"1e\+300"),
        ([0, 1 + 2j], "float32", "complex128"),
        (np.zeros(2, "M8[D]"), "float32", "datetime64"),
    ],
)
def test_numbers_that_an_input_does_not_have_are_refused(given, dtype, message):
    np.savez("calls.npz", a=np.asarray(given))
    with pytest.raises(Refused, match=f"a holds .*{message}.*{dtype}"):
        npz_calls(Path("calls.npz"), [Port("a", (None,), dtype)], ())


def test_numbers_are_converted_to_the_type_of_the_input():
    np.savez("calls.npz", a=[0.0, 1.0], b=[1 / 3, np.inf])
    ports = [Port("a", (None,), "int32"), Port("b", (None,), "float32")]
    given = npz_calls(Path("calls.npz"), ports, ()).piece(0, 1).given
    assert given["a"].dtype == np.int32
    assert given["b"].tolist() == [np.float32(1 / 3), np.inf]


def test_labels_of_no_rows_are_refused():
    np.savez("calls.npz", a=np.zeros((0, 4), np.float32), labels=np.zeros(0, np.int64))
    with pytest.raises(Refused, match="labels of no images"):
        npz_calls(Path("calls.npz"), [Port("a", (None, 4), "float32")], (), labels=True)


def test_an_engine_of_a_target_that_is_known_by_its_file_alone_is_not_followed():
    done = folded(NETS["rows"])
    rc.export()
    export, run = (
        export_for(run_folder.find_run(None), done, "x86-64", "fp32"),
        source_model_of(run_folder.find_run(None)),
    )
    feeds = {"x": normal(2, 8).astype(np.float32)}
    found = within_engine(run, export, "pi-01", "fp32", feeds, export.artefact.links[0].tolerance)
    assert (found.module, "not followed: unknown target 'pi-01'" in found.reason) == ("", True)
