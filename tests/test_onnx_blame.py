"""A graph that cannot be folded: whether it or repaconv is at fault, and what is at fault in neither."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import repaconv as rc
from repaconv.core.errors import Refused
from repaconv.verification.model_runners import load_onnx

F, INT = TensorProto.FLOAT, TensorProto.INT64


def write(nodes, weights, outputs, opset=17, inputs=None, path="net.onnx") -> onnx.ModelProto:
    tensors = [numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()]
    inputs = inputs or {"x": (F, ["N", 3, 8, 8])}
    ends = [[helper.make_tensor_value_info(n, *kind) for n, kind in side.items()] for side in (inputs, outputs)]
    graph = helper.make_graph(nodes, "net", *ends, tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return model


def conv_and_norm(**named) -> tuple[list[onnx.NodeProto], dict[str, np.ndarray]]:
    random = np.random.default_rng(0)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], **named),
        helper.make_node("BatchNormalization", ["c", "s", "b", "m", "v"], ["y"]),
    ]
    weights = {"w": random.standard_normal((4, 3, 3, 3)).astype(np.float32)}
    weights |= {name: random.standard_normal(4).astype(np.float32) for name in "sbm"}
    return nodes, {**weights, "v": np.ones(4, np.float32)}


@pytest.mark.parametrize("named", [{"dilations": [1]}, {"strides": [1]}, {"pads": [1, 1]}], ids=str)
def test_a_graph_that_no_tool_takes_is_not_called_a_defect_of_repaconv(named, repaconv):
    """As the old exporter writes SuperPoint; onnx.checker passes it, as it does not look at sizes."""
    nodes, weights = conv_and_norm(**named)
    model = write(nodes, weights, {"y": (F, ["N", 4, "H", "W"])})
    with pytest.raises(Exception, match="incorrect size"):
        onnx.checker.check_model(model, full_check=True)
    code, _, said = repaconv("fold", "net.onnx")
    assert code == 4
    assert "not valid ONNX" in said
    assert "incorrect size" in said
    assert "defect" not in said


def test_an_operator_that_an_exporter_left_as_its_framework_has_it(repaconv):
    """As tf2onnx does; only its Erfc is read."""
    nodes, weights = conv_and_norm()
    model = write(nodes, weights, {"y": (F, ["N", 4, "H", "W"])})
    model.graph.node[1].op_type = "StatefulPartitionedCall"
    onnx.save(model, "net.onnx")
    code, _, said = repaconv("fold", "net.onnx")
    assert code == 4
    assert "No Op registered for StatefulPartitionedCall" in said
    assert "write it with others in the network" in " ".join(said.split())


def test_a_graph_that_only_the_checker_rejects_is_folded():
    """MeanVarianceNormalization of opset 13: ONNX's checker fails on its own function body, ONNX Runtime runs it."""
    nodes, weights = conv_and_norm()
    nodes.append(helper.make_node("MeanVarianceNormalization", ["y"], ["z"]))
    model = write(nodes, weights, {"z": (F, ["N", 4, "H", "W"])}, opset=13)
    try:
        onnx.checker.check_model(model, full_check=True)
    except onnx.shape_inference.InferenceError:
        pass
    else:
        pytest.skip("this onnx checks it")
    assert rc.fold("net.onnx", measure=False).applied == ("convolution",)


def test_a_defect_of_repaconv_is_called_one(repaconv, monkeypatch):
    nodes, weights = conv_and_norm()
    write(nodes, weights, {"y": (F, ["N", 4, "H", "W"])})

    def fail(*_):
        raise IndexError("planted")

    monkeypatch.setattr("repaconv.rewrites.fold.fold_pipeline.without", fail)
    with pytest.raises(Refused, match="cannot be rewritten: planted") as caught:
        rc.fold("net.onnx", measure=False)
    assert "defect of repaconv" in caught.value.hint


def test_a_selection_of_nothing_is_folded_around():
    """As exporters split off what a rotary embedding does not rotate, which may be nothing."""
    random = np.random.default_rng(0)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Add", ["h", "b"], ["a"]),
        helper.make_node("Reshape", ["a", "heads"], ["r"]),
        helper.make_node("Transpose", ["r"], ["t"], perm=[0, 2, 1, 3]),
        helper.make_node("Split", ["t", "parts"], ["some", "none"], axis=-1),
        helper.make_node("Gather", ["none", "nothing"], ["empty"], axis=-1),
        helper.make_node("Slice", ["t", "end", "end", "last"], ["past"]),
        helper.make_node("Mul", ["some", "two"], ["twice"]),
        helper.make_node("Concat", ["twice", "none", "empty", "past"], ["y"], axis=-1),
    ]
    weights = {
        "w": random.standard_normal((6, 8)).astype(np.float32),
        "b": random.standard_normal(8).astype(np.float32),
        "heads": np.array([0, 0, 2, 4]),
        "parts": np.array([4, 0]),
        "nothing": np.zeros(0, np.int64),
        "end": np.array([4]),
        "last": np.array([3]),
        "two": np.array(2, np.float32),
    }
    model = write(nodes, weights, {"y": (F, ["N", 2, "L", 4])}, inputs={"x": (F, ["N", "L", 6])})
    rc.fold("net.onnx", measure=False)
    feeds = {"x": random.standard_normal((2, 3, 6)).astype(np.float32)}
    after = onnx.load("repaconv-out/net/net.folded.onnx")
    np.testing.assert_allclose(*(load_onnx(each).run(feeds)["y"] for each in (model, after)), rtol=1e-5, atol=1e-6)
