"""Outputs whose length depends on the image, e.g. keypoints, are compared image by image. If rounding decides a length,
the message says so.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import repaconv as rc
from repaconv.core.errors import Refused
from repaconv.results import Tolerance
from repaconv.verification.comparison import Comparison, PerNeighborhood, run_both
from repaconv.verification.model_runners import FixedBatch, load_onnx
from repaconv.verification.rounding import MEASURED, Rounding

F, INT = TensorProto.FLOAT, TensorProto.INT64


def keypoints(outputs=("places", "scores"), path="net.onnx") -> onnx.ModelProto:
    """A convolution, a norm, and where the result is above its mean: [1, K, 2] places and [1, K] scores."""
    random = np.random.default_rng(0)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c", "s", "b", "m", "v"], ["n"]),
        helper.make_node("Squeeze", ["n", "first"], ["map"]),
        helper.make_node("ReduceMean", ["map"], ["mean"], keepdims=0),
        helper.make_node("Greater", ["map", "mean"], ["above"]),
        helper.make_node("NonZero", ["above"], ["columns"]),
        helper.make_node("Transpose", ["columns"], ["rows"]),
        helper.make_node("GatherND", ["map", "rows"], ["values"]),
        helper.make_node("Unsqueeze", ["rows", "zero"], ["places"]),
        helper.make_node("Unsqueeze", ["values", "zero"], ["scores"]),
    ]
    weights = {name: random.standard_normal(1).astype(np.float32) for name in "sbm"}
    weights |= {"w": random.standard_normal((1, 3, 3, 3)).astype(np.float32), "v": np.ones(1, np.float32)}
    weights |= {"first": np.array([0, 1]), "zero": np.array([0])}
    kinds = {"places": (INT, [1, "K", 2]), "scores": (F, [1, "K"])}
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", F, [1, 3, 12, 12])],
        [helper.make_tensor_value_info(name, *kinds[name]) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)
    return model


def test_outputs_as_long_as_what_an_image_shows_are_compared_image_by_image():
    keypoints()
    folded = rc.fold("net.onnx", measure=False)
    assert folded.applied
    assert folded.whole
    verified = rc.verify()
    rc.export()
    for found in (verified, rc.verify()):
        assert found.verdict == "passed"
        assert all(link.verdict == "passed" and link.metrics.images == 4 for link in found.links)


def test_a_length_that_changes_from_image_to_image_is_movement():
    """All values of `lengths` are one: only how many there are tells of the image."""
    model = keypoints()
    del model.graph.output[:]
    model.graph.node.append(helper.make_node("Mul", ["scores", "nothing"], ["zeros"]))
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((), np.float32), "nothing"))
    model.graph.output.append(helper.make_tensor_value_info("zeros", F, [1, "K"]))
    probes = [{"x": np.random.default_rng(n).standard_normal((1, 3, 12, 12)).astype(np.float32)} for n in range(3)]

    def replaced(model, probes):
        found = Comparison("itself", Tolerance(kind="exact", rtol=1e-5), None, scale=PerNeighborhood)
        return run_both(load_onnx(model), load_onnx(model), probes, found).links("onnx", "reference")

    links = replaced(model, probes)
    assert [link.verdict for link in links] == ["passed"]
    links = replaced(model, probes[:1] * 3)
    assert [link.verdict for link in links] == ["not verified"]


def test_what_no_image_by_image_comparison_was_recorded_for_is_a_sentence():
    model = keypoints()
    images = np.random.default_rng(0).standard_normal((3, 3, 12, 12)).astype(np.float32)
    with pytest.raises(Refused, match="output places has another shape for each image") as refused:
        FixedBatch(load_onnx(model), 1).run({"x": images})
    assert refused.value.hint.startswith("Fold it as an ONNX model: repaconv fold model.onnx")  # it may be a folder


@pytest.mark.parametrize(("float32", "verdict"), [(4, "not verified"), (3, "failed")])
def test_a_length_that_float32_alone_changes_is_not_a_fault(float32, verdict):
    """The reference gives 3, the candidate 4: a fault, unless the network as given has as many in float32 as well."""
    right, found = np.ones((1, 3)), np.ones((1, 4))
    moved = {"out": np.full((1, float32), np.inf) if float32 == 4 else np.zeros((1, 3))}
    compared = Comparison("candidate", Tolerance(kind="exact", rtol=1e-5))
    compared.add({"out": found}, {"out": right}, whole=True, rounding=Rounding(MEASURED, lambda: [moved]))
    assert [link.verdict for link in compared.links("stored", "reference")] == [verdict]


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (np.full((2, 3), np.nan), "not verified"),
        (np.array([[1.0, np.nan, 3.0], [4.0, 5.0, 6.0]]), "failed"),
    ],
    ids=["both are NaN", "one is finite"],
)
def test_what_is_nan_on_both_sides_is_no_fault_and_none_on_one_side_passes(found, verdict):
    compared = Comparison("candidate", Tolerance(kind="exact", rtol=1e-5))
    compared.add({"out": found}, {"out": np.full((2, 3), np.nan)})
    assert [link.verdict for link in compared.links("fold", "reference")] == [verdict]


@pytest.mark.parametrize(("last", "verdict"), [(6.0, "passed"), (7.0, "failed")])
def test_numbers_next_to_a_nan_that_both_sides_have_are_compared(last, verdict):
    right = np.array([[1.0, np.nan, 3.0], [4.0, 5.0, 6.0]])
    found = right.copy()
    found[1, 2] = last
    compared = Comparison("candidate", Tolerance(kind="exact", rtol=1e-5))
    compared.add({"out": found}, {"out": right})
    assert [link.verdict for link in compared.links("fold", "reference")] == [verdict]
