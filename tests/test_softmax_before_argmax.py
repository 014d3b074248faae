"""argmax: the highest score is that of the highest probability; only what is nothing but the order goes."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from folded_operators import operators_after_folding
from onnx import TensorProto, helper, numpy_helper
from test_fold_onnx import graph

import repaconv as rc
from repaconv.graph.models_in_onnx_ir import rewritten
from repaconv.rewrites.fold.fold_pipeline import FOLDS

RANDOM = np.random.default_rng(0)
SOFTMAX, ARGMAX = ("Softmax", "c", "p", {"axis": 1}), ("ArgMax", "p", "y", {"axis": 1})


def network(*rows, outputs=("y",)):
    """A convolution of 5 classes and what comes after it, of a dynamic batch."""
    nodes = [helper.make_node("Conv", ["x", "k"], ["c"])]
    nodes += [helper.make_node(kind, read.split(), [write], **named) for kind, read, write, named in rows]
    kinds = {"y": (TensorProto.INT64, None), "p": (TensorProto.FLOAT, ["n", 5, 6, 7])}
    kernel = numpy_helper.from_array(RANDOM.standard_normal((5, 3, 1, 1)).astype(np.float32), "k")
    ends = [helper.make_tensor_value_info(name, *kinds[name]) for name in outputs]
    image = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 6, 7])
    found = helper.make_graph(nodes, "classes", [image], ends, [kernel])
    model = helper.make_model(found, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    return onnx.shape_inference.infer_shapes(model)


def operators(model):
    return [node.op_type for node in rewritten(model, FOLDS)[0].graph.node]


@pytest.mark.parametrize("kind", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize(("axis", "choice"), [(1, {"axis": 1}), (-3, {"axis": 1}), (0, {}), (None, {"axis": -1})])
def test_the_scores_are_compared(kind, axis, choice):
    softmax = (kind, "c", "p", {} if axis is None else {"axis": axis})
    assert operators(network(softmax, ("ArgMax", "p", "y", choice))) == ["Conv", "ArgMax"]


@pytest.mark.parametrize(
    ("rows", "outputs"),
    [
        ((SOFTMAX, ("ArgMax", "p", "y", {"axis": 2})), ("y",)),
        ((SOFTMAX, ("ArgMin", "p", "y", {"axis": 1})), ("y",)),
        ((SOFTMAX, ARGMAX), ("y", "p")),
        ((("Sigmoid", "c", "p", {}), ARGMAX), ("y",)),  # many large scores are rounded to one
    ],
    ids=["another axis", "the lowest", "also an output", "sigmoid"],
)
def test_what_stays(rows, outputs):
    after, changes = rewritten(network(*rows, outputs=outputs), FOLDS)
    assert [node.op_type for node in after.graph.node] == ["Conv", *(row[0] for row in rows)]
    assert changes == []


def test_a_softmax_of_unknown_rank_stays():
    """Which of its axes is the one that the ArgMax counts from the front is not known."""
    rows = [("Cast", "w", "s", {"to": TensorProto.INT64}), ("Reshape", "x s", "v"), ("Softmax", "v", "p")]
    model = graph([*rows, ("ArgMax", "p", "i", {"axis": 1}), ("Cast", "i", "y", {"to": TensorProto.DOUBLE})], {},
                  {"x": (2, 3), "w": ("k",)})  # fmt: skip
    after, changes = rewritten(model, FOLDS)
    assert changes == []
    assert "Softmax" in [node.op_type for node in after.graph.node]


def test_each_of_three_is_read_by_itself():
    rows = [("Sin", "x", "c"), ("Softmax", "c", "p"), ("Softmax", "c", "q", {"axis": 1}), ("Tan", "x", "t")]
    rows += [("ArgMax", x, f"i{x}", {"axis": axis}) for x, axis in (("t", 0), ("p", 1), ("q", 1))]
    rows += [("Cast", f"i{x}", x + "y", {"to": TensorProto.DOUBLE}) for x in "tpq"]
    model = graph(rows, {}, {"x": (2, 3, 4)}, ("ty", "py", "qy"))
    left = operators_after_folding(model, RANDOM.standard_normal((2, 3, 4)))
    assert left.count("Softmax") == 1


def test_a_segmentation_is_folded_and_verified():
    onnx.save(network(SOFTMAX, ARGMAX), "classes.onnx")
    done = rc.fold("classes.onnx")
    assert (done.applied, done.verdict) == (("argmax",), "passed")
