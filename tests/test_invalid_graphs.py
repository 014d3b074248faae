"""A graph that cannot be folded: the message says whether the graph or repaconv is at fault."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import repaconv as rc
from repaconv.core.errors import Refused
from repaconv.graph.invalid_graphs import misfit
from repaconv.graph.operator_facts import NCHWC
from repaconv.onnx_export.target_operator_rules import violations
from repaconv.sources.graph_fold import parts_not_folded
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


@pytest.mark.parametrize(
    ("named", "channels", "message"),
    [
        ({"group": 0}, 3, "Conv first has group=0"),
        ({"group": 3}, 3, r"Conv first cannot multiply x \[., 3, 8, 8\] by w \[4, 3, 3, 3\] with group=3"),
        ({}, 4, r"Conv first cannot multiply x \[., 4, 8, 8\] by w \[4, 3, 3, 3\]"),
    ],
    ids=str,
)
def test_a_convolution_that_cannot_run_is_named(named, channels, message):
    """ONNX's checker passes them, and ONNX Runtime loads them and fails where it runs them."""
    nodes, weights = conv_and_norm(name="first", **named)
    write(nodes, weights, {"y": (F, ["N", 4, "H", "W"])}, inputs={"x": (F, ["N", channels, 8, 8])})
    for stage in (lambda: rc.fold("net.onnx", measure=False), lambda: rc.compare("net.onnx", "net.onnx")):
        with pytest.raises(Refused, match=message) as refused:
            stage()
        assert (refused.value.code, "defect" in refused.value.hint) == ("onnx.invalid", False)
    with pytest.raises(Refused, match=message):
        rc.estimate("net.onnx", target="a100")


@pytest.mark.parametrize(
    ("node", "weight", "wrong"),
    [
        (helper.make_node("MatMul", ["x", "w"], ["y"]), (5, 6), True),
        (helper.make_node("MatMul", ["x", "w"], ["y"]), (4, 6), False),
        (helper.make_node("Gemm", ["x", "w"], ["y"], transB=1), (6, 4), False),
        (helper.make_node("Gemm", ["x", "w"], ["y"], transB=1), (4, 6), True),
        (helper.make_node("Gemm", ["x", "w"], ["y"], transA=1), (2, 4), False),
        (helper.make_node("Gemm", ["x", "w"], ["y"]), (2, 4), True),
    ],
)
def test_the_weight_of_a_product_fits_its_input_or_is_named(node, weight, wrong):
    ends = [[helper.make_tensor_value_info(name, F, shape)] for name, shape in (("x", (2, 4)), ("y", None))]
    graph = helper.make_graph([node], "net", *ends, [numpy_helper.from_array(np.zeros(weight, np.float32), "w")])
    said = misfit(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]))
    assert said.startswith(f"{node.op_type} that computes y cannot multiply x") == wrong
    assert bool(said) == wrong


def test_a_size_that_has_no_name_is_a_question_mark():
    """ONNX calls it unk__0."""
    rows = [helper.make_node("Reshape", ["x", "s"], ["r"]), helper.make_node("MatMul", ["r", "w"], ["y"])]
    ends = [[helper.make_tensor_value_info(name, F, shape)] for name, shape in (("x", ("N", "M")), ("y", None))]
    weights = {"s": np.array([0, -1, 4]), "w": np.zeros((5, 6), np.float32)}
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph([*rows, helper.make_node("Identity", ["y"], ["z"])], "net", *ends, tensors)
    said = misfit(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]))
    assert said == "MatMul that computes y cannot multiply r [N, ?, 4] by w [5, 6]"


def test_of_a_transposed_convolution_the_first_axis_is_that_of_the_input():
    for shape, wrong in (((3, 4, 3, 3), False), ((4, 3, 3, 3), True)):
        model = write(
            [helper.make_node("ConvTranspose", ["x", "w"], ["y"])],
            {"w": np.zeros(shape, np.float32)},
            {"y": (F, ["N", "C", "H", "W"])},
        )
        assert bool(misfit(model)) == wrong


def test_a_graph_with_a_cycle_has_no_estimate():
    nodes = [helper.make_node("Add", ["x", "b"], ["a"]), helper.make_node("Relu", ["a"], ["b"])]
    ends = [[helper.make_tensor_value_info(name, F, (1, 3, 8, 8))] for name in "xb"]
    onnx.save(helper.make_model(helper.make_graph(nodes, "net", *ends)), "net.onnx")
    with pytest.raises(Refused, match="Add, which computes a, reads b") as refused:
        rc.estimate("net.onnx", target="a100")
    assert refused.value.code == "onnx.invalid"


def test_an_estimate_of_images_that_a_graph_does_not_take_is_refused():
    nodes = [helper.make_node("Flatten", ["x"], ["f"]), helper.make_node("Gemm", ["f", "w"], ["y"])]
    weights = {"w": np.zeros((3 * 8 * 8, 5), np.float32)}
    write(nodes, weights, {"y": (F, ["N", 5])}, inputs={"x": (F, ["N", 3, "H", "W"])})
    assert rc.estimate("net.onnx", target="a100", image_size=8).nodes
    with pytest.raises(Refused, match=r"cannot run on 1x3x16x16: Gemm that computes y") as refused:
        rc.estimate("net.onnx", target="a100", image_size=16)
    assert refused.value.code == "estimate.size"


def test_an_estimate_of_a_batch_that_a_graph_does_not_take_is_refused():
    nodes = [helper.make_node("Reshape", ["x", "row"], ["f"]), helper.make_node("Gemm", ["f", "w"], ["y"])]
    weights = {"w": np.zeros((3 * 8 * 8, 5), np.float32), "row": np.array([1, -1])}
    write(nodes, weights, {"y": (F, ["N", 5])}, inputs={"x": (F, ["N", 3, 8, 8])})
    assert rc.estimate("net.onnx", target="a100", batch=1).nodes
    with pytest.raises(Refused, match="cannot run on 2x3x8x8: Gemm that computes y") as refused:
        rc.estimate("net.onnx", target="a100", batch=2)
    assert "--batch" in refused.value.hint


def test_of_two_models_that_take_the_same_inputs_the_one_that_does_not_run_is_blamed(repaconv):
    nodes, weights = conv_and_norm(name="first")
    write(nodes, weights, {"y": (F, ["N", 4, "H", "W"])}, path="good.onnx")
    write(nodes, {**weights, "w": weights["w"][:, :2]}, {"y": (F, ["N", 4, "H", "W"])}, path="bad.onnx")
    code, _, said = repaconv("compare", "good.onnx", "bad.onnx")
    assert (code, "bad.onnx does not run" in said, "the model itself" in said) == (4, True, True)
    assert "Both models must" not in said
    write(nodes, weights, {"y": (F, ["N", 4, "H", "W"])}, inputs={"x": (F, ["N", 3, 9, 9])}, path="other.onnx")
    assert "Both models must" in repaconv("compare", "good.onnx", "other.onnx")[2]


def test_of_a_graph_that_onnx_runtime_optimized_the_file_from_before_is_asked_for():
    """The blocked layout stands in a domain of its own that no target has, and that only its CPU runs fast."""
    nodes, weights = conv_and_norm()
    write(nodes, weights, {"y": (F, [1, 4, 6, 6])}, inputs={"x": (F, [1, 3, 8, 8])})
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = "fast.onnx"
    onnxruntime.InferenceSession("net.onnx", options, providers=["CPUExecutionProvider"])
    model = onnx.load("fast.onnx")
    if all(node.domain != NCHWC for node in model.graph.node):  # a CPU without such kernels
        model.graph.node[0].domain = NCHWC
    (found,) = violations(model, 20, (), (), ("com.microsoft",))
    assert "when it saved a graph" in found
    assert found.endswith("export the file from before that")
    assert "fold the file from before that" in next(parts_not_folded(model))


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


@pytest.mark.parametrize("kind", ["MaxPool", "AveragePool", "Conv"])
def test_windows_with_dilations_that_pad_themselves_are_refused_with_what_to_write(kind):
    """ONNX Runtime gives smaller images than ONNX specifies, and a fold that takes ONNX's sizes does not run."""
    pool = helper.make_node(
        kind, ["c", "k"][: 1 + (kind == "Conv")], ["p"], auto_pad="SAME_UPPER", dilations=[2, 2], kernel_shape=[3, 3]
    )
    (conv, norm), weights = conv_and_norm(pads=[1, 1, 1, 1])
    norm.input[0] = "p"
    weights |= {"k": np.ones((4, 4, 3, 3), np.float32)} if kind == "Conv" else {}
    write([conv, pool, norm], weights, {"y": (F, ["N", 4, "H", "W"])}, opset=19)
    with pytest.raises(Refused, match=f"a {kind} with auto_pad=SAME_UPPER and dilations, p") as caught:
        rc.fold("net.onnx")
    assert caught.value.code == "onnx.auto-pad"
    assert "explicit padding" in caught.value.hint


def test_a_graph_that_does_not_load_is_refused_before_it_folds(repaconv):
    """Its pool is padded by a whole window, which ONNX's checker accepts."""
    nodes, weights = conv_and_norm()
    nodes[-1].output[0] = "n"
    nodes.append(helper.make_node("MaxPool", ["n"], ["y"], kernel_shape=[2, 2], pads=[2, 2, 2, 2]))
    write(nodes, weights, {"y": (F, ["N", 4, "H", "W"])})
    steps = []
    with pytest.raises(Refused, match="does not load") as caught:
        rc.fold("net.onnx", progress=lambda step, *_: steps.append(step))
    assert (caught.value.code, "fold" in steps) == ("onnx.unloadable", False)
    assert "as a Pad before the pool" in caught.value.hint


def test_external_weights_that_are_too_short_are_named_whatever_opens_them(repaconv):
    nodes, weights = conv_and_norm()
    model = write(nodes, weights, {"y": (F, ["N", 4, "H", "W"])})
    onnx.save(model, "whole.onnx")
    onnx.save(model, "short.onnx", save_as_external_data=True, location="short.data", size_threshold=0)
    whole = Path("short.data").read_bytes()
    Path("short.data").write_bytes(whole[:100])
    commands = "fold short.onnx", "bench short.onnx", "compare whole.onnx short.onnx", "compare short.onnx whole.onnx"
    for command in commands:
        code, _, said = repaconv(*command.split())
        assert code == 4, command
        assert f"short.data, which has 100 bytes of the {len(whole):,} that they take. (onnx.invalid)" in said, command


def test_a_negative_variance_is_named():
    """Its outputs are NaN in every graph, of which a comparison shows nothing."""
    nodes, weights = conv_and_norm()
    write(nodes, {**weights, "v": np.array([1, -1, 1, 1], np.float32)}, {"y": (F, ["N", 4, "H", "W"])})
    with pytest.raises(Refused, match=r"v, a variance of net.onnx, has negative values") as caught:
        rc.fold("net.onnx")
    assert caught.value.code == "onnx.negative-variance"


def test_images_larger_than_memory_are_reported_as_such(repaconv):
    nodes, weights = conv_and_norm()
    write(nodes, weights, {"y": (F, ["N", 4, "H", "W"])}, inputs={"x": (F, ["N", 3, 1 << 40, 8])})
    code, _, said = repaconv("fold", "net.onnx")
    assert code == 3
    assert "there is not enough memory to run net.onnx: Unable to allocate" in said
    assert "(environment.memory)" in said


def test_a_newer_file_format_is_reported_as_such():
    nodes, weights = conv_and_norm()
    model = write(nodes, weights, {"y": (F, ["N", 4, "H", "W"])})
    model.ir_version = 99
    onnx.save(model, "net.onnx")
    with pytest.raises(Refused, match="ir_version 99 is higher") as caught:
        rc.fold("net.onnx")
    assert "write a lower model.ir_version" in caught.value.hint
