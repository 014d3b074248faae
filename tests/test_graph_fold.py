"""Which graphs are folded, in which types, and what is said of the rest."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from test_fold_onnx import graph

from repaconv.graph.element_type_conversion import retyped
from repaconv.sources.graph_fold import folded, is_foldable, parts_not_folded

FLOAT = TensorProto.FLOAT
FACTORS = {"k": np.full((3, 1, 1), 2.0), "l": np.full((3, 1, 1), 3.0)}
ROWS = [("Mul", "x k", "a"), ("Mul", "a l", "y")]
FOREIGN = "operators of org.pytorch, other: what they compute is not known here"
QUANTIZED = ("QuantizeLinear", "DequantizeLinear", "QLinearMatMul", "QLinearConv", "MatMulInteger", "ConvInteger")


def single(rows=ROWS, opset=18):
    return retyped(graph(rows, FACTORS, {"x": (2, 3, 4, 4)}, opset=opset), {TensorProto.DOUBLE: FLOAT})


def with_node(kind, domain=""):
    """A graph with one more node, of which only the name is looked at."""
    model = single()
    model.graph.node.append(helper.make_node(kind, ["x"], ["z"], domain=domain))
    if domain:
        model.opset_import.append(helper.make_opsetid(domain, 1))
    return model


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_graphs_are_not_folded(kind):
    model = with_node(kind)
    found = folded(Path("net.onnx"), model)
    assert (is_foldable(model), found.model is model, found.changes, found.in_float64) == (False, True, [], None)
    message = f"the graph is quantized ({kind}): its integers do not fold exactly; fold it before quantizing"
    assert [*parts_not_folded(model)] == [message]


@pytest.mark.parametrize("opset", [12, 13])
def test_old_graphs_are_not_folded(opset):
    model = single(opset=opset)
    assert is_foldable(model) == (opset > 12) == bool(folded(Path("net.onnx"), model).changes)
    assert [*parts_not_folded(model)] == []


@pytest.mark.parametrize("kind", ["If", "Loop", "Scan"])
def test_control_flow_is_named(kind):
    assert [*parts_not_folded(with_node(kind))] == [f"{kind}: which branch runs is not known before it does"]


def test_operators_of_others_are_named():
    model = with_node("Mine", "other")
    assert [*parts_not_folded(model)] == [FOREIGN.replace("org.pytorch, ", "")]
    model.graph.node.append(helper.make_node("Theirs", ["x"], ["w"], domain="org.pytorch"))
    model.graph.node.append(helper.make_node("Relu", ["x"], ["v"], domain="ai.onnx"))
    assert [*parts_not_folded(model)] == [FOREIGN]
    (message,) = parts_not_folded(with_node("Conv", "com.microsoft.nchwc"))
    assert message.endswith("; fold the file from before that")
    assert "not known" not in message


def test_a_float32_graph_is_folded_in_float64_and_one_that_may_write_borders_is_not():
    model = single()
    found = folded(Path("net.onnx"), model)
    assert found.in_float64 is not None
    assert found.model.graph.input[0].type.tensor_type.elem_type == FLOAT
    pads = [("Pad", "y zeros", "p"), ("ScatterND", "p places rows", "q")]
    more = {"zeros": np.zeros(8, np.int64), "places": np.zeros((1, 1), np.int64), "rows": np.ones((1, 3, 4, 4))}
    model = graph([*ROWS, *pads], {**FACTORS, **more}, {"x": (2, 3, 4, 4)}, ("q",), opset=18)
    found = folded(Path("net.onnx"), retyped(model, {TensorProto.DOUBLE: FLOAT}))
    assert (found.in_float64, bool(found.changes)) == (None, True)
    for one in pads[:1]:
        model = graph([*ROWS, one], {**FACTORS, **more}, {"x": (2, 3, 4, 4)}, ("p",), opset=18)
        assert folded(Path("net.onnx"), retyped(model, {TensorProto.DOUBLE: FLOAT})).in_float64 is not None


def test_a_graph_in_float64_is_folded_in_its_own_type():
    model = graph(ROWS, FACTORS, {"x": (2, 3, 4, 4)}, opset=18)
    found = folded(Path("net.onnx"), model)
    assert found.model.graph.input[0].type.tensor_type.elem_type == TensorProto.DOUBLE
    assert len(found.model.graph.node) == 1
    onnx.checker.check_model(found.model, full_check=True)


@pytest.mark.parametrize("opset", [13, 18])
def test_views_down_to_one_number_are_a_reshape_to_no_axes(opset):
    rows = [("Sigmoid", "x", "a"), ("Flatten", "a", "b"), ("Squeeze", "b both", "c"), ("Tan", "c", "y")]
    model = graph(rows, {"both": np.array([-2, 1])}, {"x": (1, 1)}, opset=opset)
    model = retyped(model, {TensorProto.DOUBLE: FLOAT})
    found = folded(Path("net.onnx"), model).model
    onnx.checker.check_model(found, full_check=True)
    x = {"x": np.array([[0.5]], np.float32)}
    before, after = (ReferenceEvaluator(each).run(None, x)[0] for each in (model, found))
    assert (after.shape, after) == ((), pytest.approx(before))
    assert len(found.graph.node) == 3


def test_what_is_left_out_changes_nothing():
    model = single()
    found = folded(Path("net.onnx"), model, ["affine", "constants", "convolution", "batch-norm"])
    assert (found.model is model, found.changes, found.in_float64) == (True, [], None)
