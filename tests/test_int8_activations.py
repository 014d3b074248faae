"""Activations between int8 layers in 8 bits: which are replaced, by what, and the error next to that of int8 alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, numpy_helper
from test_blocked_channel_layouts import silu
from test_speed_rewrites import Graph

import repaconv
from repaconv.core.errors import UsageProblem
from repaconv.graph.element_type_conversion import retyped
from repaconv.onnx_export.fp16_and_int8 import Int8, to_int8
from repaconv.onnx_export.fp32_layer_selection import nodes_kept_in_fp32
from repaconv.stages.shared.lower_precision import int8_for
from repaconv.stages.shared.target_lookup import load_target


def images(seed):
    return {"x": np.random.default_rng(seed).standard_normal((8, 8, 6, 8)).astype(np.float32)}


CALLS, OTHERS = [images(0), images(1)], images(2)


def layer(graph, x, out, read, size=1, *, scale=1.0, seed=0):
    random = np.random.default_rng([seed, out, read])
    weight = random.standard_normal((out, read, size, size)) * scale / np.sqrt(read * size**2)
    return graph("Conv", x, weight, random.standard_normal(out) * scale / 2, pads=[size // 2] * 4)


def between(activation, *, scale=1.0, size=1, outputs=lambda made: ()):
    """Two convolutions with an activation between them, in float32."""
    graph = Graph(x=[8, 6, 8])
    made = activation(graph, layer(graph, "x", 16, 8, size, scale=scale))
    model = graph.model(layer(graph, made, 4, 16, size, seed=1), *outputs(graph.nodes))
    return retyped(model, {TensorProto.DOUBLE: TensorProto.FLOAT})


def erf_gate(graph, x):
    return graph("Add", graph("Erf", graph("Div", x, np.array(2**0.5))), np.array(1.0))


def gelu_by_erf(graph, x):
    return graph("Mul", graph("Mul", x, erf_gate(graph, x)), np.array(0.5))


def relu6(graph, x):
    return graph("Clip", graph("Add", x, np.array(3.0)), np.array(0.0), np.array(6.0))


def hard_swish_by_clip(graph, x):
    return graph("Div", graph("Mul", x, relu6(graph, x)), np.array(6.0))


def spike(graph, x):
    """2 x sigmoid(x), and a peak around 0 that no value but 0 reaches."""
    narrow = graph("Exp", graph("Mul", graph("Mul", x, x), np.array(-1e6)))
    return graph("Add", graph("Mul", x, graph("Sigmoid", x)), narrow)


REPLACED = {
    "gelu": lambda graph, x: graph("Gelu", x),
    "gelu by tanh": lambda graph, x: graph("Gelu", x, approximate="tanh"),
    "gelu by erf": gelu_by_erf,
    "quick gelu": lambda graph, x: graph("Mul", x, graph("Sigmoid", graph("Mul", np.array(1.702), x))),
    "silu": silu,
    "hard-swish": lambda graph, x: graph("HardSwish", x),
    "hard-swish by hard-sigmoid": lambda graph, x: graph("Mul", x, graph("HardSigmoid", x, alpha=1 / 6)),
    "hard-swish by clip": hard_swish_by_clip,
    "twice gelu": lambda graph, x: graph("Mul", x, erf_gate(graph, x)),  # as folded before a layer that halves it
    "six times hard-swish": lambda graph, x: graph("Mul", x, relu6(graph, x)),
}
REMAINING = {
    "relu": lambda graph, x: graph("Relu", x),
    "leaky": lambda graph, x: graph("LeakyRelu", x, alpha=0.1),
    "tanh": lambda graph, x: graph("Tanh", x),
    "sigmoid": lambda graph, x: graph("Sigmoid", x),
    "elu": lambda graph, x: graph("Elu", x),
    "affine": lambda graph, x: graph("Add", graph("Mul", x, np.array(2.0)), np.array(1.0)),
    "of two values": lambda graph, x: graph("Mul", x, graph("Sigmoid", layer(graph, x, 16, 16, seed=3))),
    "slopes of channels": lambda graph, x: graph("Mul", x, graph("Sigmoid", graph("Mul", x, np.ones((16, 1, 1))))),
    "of no activation": lambda graph, x: x,
    "negative": lambda graph, x: graph("Neg", silu(graph, x)),
    "growing": lambda graph, x: graph("Sub", graph("Exp", x), np.array(1.0)),
    "a peak": spike,
    "not a number at 0": lambda graph, x: graph("Mul", x, graph("Reciprocal", x)),
}


def operators(model, path):
    """Operators of the graph as ONNX Runtime runs it."""
    settings = onnxruntime.SessionOptions()
    settings.optimized_model_filepath, settings.log_severity_level = str(path), 4
    onnxruntime.InferenceSession(model.SerializeToString(), settings)
    return [node.op_type for node in onnx.load(path).graph.node]


def output(model, feeds=None):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds or OTHERS)[0].astype(float)


def quantized(model, keep=(), **how):
    return to_int8(model, CALLS, keep, Int8(**how))


def slopes(model):
    """The factors with which the inputs of gates are scaled."""
    numbers = {weight.name: numpy_helper.to_array(weight) for weight in model.graph.initializer}
    made_by = {name: node for node in model.graph.node for name in node.output}
    found = []
    for node in model.graph.node:
        if node.op_type in ("Sigmoid", "Add"):
            gate = made_by[node.input[0]]
            (plain,) = (
                other
                for other in model.graph.node
                if other.op_type == "DequantizeLinear" and other.input[0] == gate.input[0] and other is not gate
            )
            found.append(float(numbers[gate.input[1]] / numbers[plain.input[1]]))
    return found


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("activation", REPLACED.values(), ids=REPLACED)
def test_an_activation_between_int8_layers_is_computed_in_8_bits(activation, scale, size, tmp_path):
    model = between(activation, scale=scale, size=size)
    plain, low = quantized(model), quantized(model, activations=True)
    onnx.checker.check_model(low, full_check=True)
    run = operators(low, tmp_path / "run.onnx")
    assert {"QLinearSigmoid", "QLinearAdd"}.intersection(run)
    assert run.count("QLinearMul") == 1
    assert run.count("QuantizeLinear") == 1  # of the input
    exact = output(model)
    error, least = (np.sqrt(np.mean(np.square(output(each) - exact))) for each in (low, plain))
    assert error < 1.3 * least


@pytest.mark.parametrize("activation", REMAINING.values(), ids=REMAINING)
def test_what_two_8_bit_steps_do_not_compute_remains(activation):
    model = between(activation)
    assert quantized(model, activations=True) == quantized(model)


def test_the_slope_is_fitted_to_the_numbers_that_occur():
    assert slopes(quantized(between(REPLACED["silu"]), activations=True)) == [pytest.approx(1, abs=0.02)]
    assert slopes(quantized(between(REPLACED["hard-swish"]), activations=True)) == [pytest.approx(1 / 6)]
    narrow, wide = (
        slopes(quantized(between(REPLACED["gelu"], scale=scale), activations=True))[0] for scale in (0.3, 3)
    )
    assert 1.55 < narrow < 1.7 < wide < 1.85  # at 0 the slope of GELU's gate is 1.596


def test_what_something_else_reads_remains():
    model = between(silu, outputs=lambda nodes: [nodes[1].output[0]])  # sigmoid(x)
    assert quantized(model, activations=True) == quantized(model)


def test_activations_of_layers_in_float32_and_of_symmetric_int8_remain():
    model = between(silu)
    for node in model.graph.node:
        if node.op_type == "Conv":
            kept = [node.name]
            assert quantized(model, kept, activations=True) == quantized(model, kept)
    for how in ({"symmetric": True}, {"by": "onnxruntime-symmetric"}):
        assert quantized(model, activations=True, **how) == quantized(model, **how)


def test_a_node_that_stays_in_float32_keeps_its_activation():
    model = between(silu)
    for operator in ("Sigmoid", "Mul"):
        kept = [node.name for node in model.graph.node if node.op_type == operator]
        assert quantized(model, kept, activations=True) == quantized(model)
    assert nodes_kept_in_fp32(model, ["n1"], "int8", activations=True) == ["n1"]
    with pytest.raises(UsageProblem, match="matches no layer that int8 changes"):
        nodes_kept_in_fp32(model, ["n1"], "int8")
    layers = [node.name for node in model.graph.node if node.op_type == "Conv"]
    with pytest.raises(UsageProblem, match="keeps every layer in FP32"):
        nodes_kept_in_fp32(model, layers, "int8", activations=True)


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_the_mean_stays_since_pooling_sums_over_pixels(activation):
    model = between(REPLACED[activation], size=3)
    model.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("pooled", TensorProto.FLOAT, None))
    model.graph.node.append(
        onnx.helper.make_node("ReduceMean", [model.graph.node[-1].output[0]], ["pooled"], axes=None)
    )
    model.graph.node[-1].ClearField("attribute")
    shares = [{name: values * share for name, values in OTHERS.items()} for share in np.linspace(0.5, 1, 11, dtype="f")]
    graphs = model, quantized(model), quantized(model, activations=True)
    exact, plain, low = (np.array([output(each, feeds) for feeds in shares]) for each in graphs)
    assert np.linalg.norm(low - exact) < 5 * np.linalg.norm(plain - exact)  # with other slopes 11 times as large


@pytest.mark.parametrize("largest", [1e7, 1e30])
def test_values_that_the_8_bit_sum_cannot_hold_stay_in_float32(largest, recwarn):
    model = between(REPLACED["hard-swish"], scale=largest)
    assert quantized(model, activations=True) == quantized(model)
    assert not [warning for warning in recwarn if "int8_activations" in warning.filename]


def test_the_default_domain_may_be_written_out():
    model = between(silu)
    model.opset_import[0].domain = "ai.onnx"
    low = quantized(model, activations=True)
    assert sum(node.op_type == "Sigmoid" for node in low.graph.node) == 1
    assert len(low.graph.node) > len(quantized(model).graph.node)


def test_an_activation_whose_factor_a_fold_moved_is_computed_in_8_bits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("gelu by erf", "hard-swish by clip"):
        onnx.save(between(REPLACED[name]), "given.onnx")
        run = repaconv.fold("given.onnx", out=name.replace(" ", "-"))
        folded = onnx.load(next(Path(run.output_files[0]).parent.glob("*.folded.onnx")))
        low = quantized(folded, activations=True)
        assert "QLinearMul" in operators(low, tmp_path / "run.onnx"), name


def test_an_activation_that_a_subgraph_reads_remains():
    model = between(silu)
    sigmoid = next(node.output[0] for node in model.graph.node if node.op_type == "Sigmoid")
    branch = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", [sigmoid], ["inner"])],
        "branch",
        [],
        [onnx.helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)],
    )
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "condition"))
    model.graph.node.append(
        onnx.helper.make_node("If", ["condition"], ["chosen"], then_branch=branch, else_branch=branch)
    )
    model.graph.output.append(onnx.helper.make_tensor_value_info("chosen", TensorProto.FLOAT, None))
    low = quantized(model, activations=True)
    assert sum(node.op_type == "Sigmoid" for node in low.graph.node) == 1
    assert sigmoid in {name for node in low.graph.node for name in node.output}


def test_only_targets_of_onnx_runtime_compute_activations_in_8_bits():
    by_target = {name: int8_for(load_target(name)).activations for name in ("x86-64", "arm64", "x86-64-openvino", "t4")}
    assert by_target == {"x86-64": True, "arm64": True, "x86-64-openvino": False, "t4": False}
