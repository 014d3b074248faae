"""winograd: 3x3 convolutions in phases, against the ONNX reference implementation in float64, and their rounding."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from test_blocked_channel_layouts import conv, silu
from test_speed_rewrites import REWRITES, Graph, changed
from torch.nn.functional import conv2d

from repaconv.graph.element_type_conversion import retyped
from repaconv.graph.models_in_onnx_ir import rewritten
from repaconv.rewrites.presets import chosen
from repaconv.rewrites.speed import winograd_convolutions

WINOGRAD = REWRITES["winograd"]
REPEAT = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}


@pytest.fixture
def small(monkeypatch):
    """Convolutions of any size are rewritten, not only those that gain."""
    monkeypatch.setattr(winograd_convolutions, "LEAST_SPEEDUP", 0)


def counted(model, operator):
    after, _ = rewritten(model, [WINOGRAD])
    return sum(node.op_type == operator for node in after.graph.node)


def dense(model):
    """Convolutions of more than one channel in the rewritten graph, by the size of their kernels."""
    after, _ = rewritten(model, [WINOGRAD])
    shapes = {weight.name: tuple(weight.dims) for weight in after.graph.initializer}
    kernels = [shapes[node.input[1]] for node in after.graph.node if node.op_type == "Conv"]
    return [kernel[2] for kernel in kernels if kernel[1] > 1]


def repeated(graph, x):
    return graph("Resize", x, "", np.array([1, 1, 2, 2], np.float32), **REPEAT)


@pytest.mark.parametrize("size", [(6, 4), (7, 5), (6, 5), (2, 2), (1, 1), (1, 8)])
@pytest.mark.parametrize("bias", [True, False])
def test_one_convolution_is_16_products(small, size, bias):
    graph = Graph(x=[3, *size])
    model = graph.model(conv(graph, "x", 5, 3, 3, bias=bias))
    assert changed(model, "winograd") == ["winograd"]
    assert dense(model) == [1] * 16


def test_padding_may_be_given_by_name(small):
    graph = Graph(x=[3, 6, 6])
    weight = np.random.default_rng(0).standard_normal((4, 3, 3, 3))
    assert changed(graph.model(graph("Conv", "x", weight, auto_pad="SAME_LOWER")), "winograd") == ["winograd"]


@pytest.mark.parametrize(
    ("size", "how"),
    [
        (3, {"strides": [2, 2]}),
        (3, {"strides": [1, 2]}),
        (3, {"dilations": [2, 2]}),
        (3, {"groups": 2}),
        (5, {}),
        (1, {}),
    ],
)
def test_other_convolutions_stay(small, size, how):
    graph = Graph(x=[4, 6, 6])
    assert changed(graph.model(conv(graph, "x", 4, 4, size, **how)), "winograd") == []


def test_images_of_unknown_size_and_computed_kernels_stay(small):
    graph = Graph(x=[4, "height", 6])
    assert changed(graph.model(conv(graph, "x", 4, 4, 3)), "winograd") == []
    graph = Graph(x=[4, 6, 6], w=[4, 3, 3])
    assert changed(graph.model(graph("Conv", "x", "w", pads=[1] * 4)), "winograd") == []


ACTIVATIONS = {
    "none": lambda graph, y: y,
    "relu": lambda graph, y: graph("Relu", y),
    "silu": silu,
    "clip": lambda graph, y: graph("Clip", y, np.array(-1.0), np.array(6.0)),
    "slopes": lambda graph, y: graph("PRelu", y, np.linspace(0.1, 0.4, 4).reshape(4, 1, 1)),
    "constant first": lambda graph, y: graph("Add", np.ones((1, 4, 6, 8)), y),
    "affine": lambda graph, y: graph("Add", graph("Mul", y, np.array(2.0)), np.arange(4.0).reshape(1, 4, 1, 1)),
    "gate": lambda graph, y: graph("Mul", y, graph("Sigmoid", graph("GlobalAveragePool", "x"))),
}


@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_images_stay_in_phases_between_convolutions(small, activation):
    graph = Graph(x=[4, 6, 8])
    y = activation(graph, conv(graph, "x", 4, 4, 3))
    model = graph.model(conv(graph, y, 4, 4, 3, seed=1))
    assert changed(model, "winograd") == ["winograd"] * 2
    assert counted(model, "Transpose") == 1  # of the output


@pytest.mark.parametrize(
    ("name", "activation"),
    [
        ("prelu-as-sum", ACTIVATIONS["slopes"]),
        ("mish-as-quotient", lambda graph, y: graph("Mul", y, graph("Tanh", graph("Softplus", y)))),
    ],
)
def test_a_slow_activation_is_rewritten_in_phases(small, name, activation):
    graph = Graph(x=[4, 6, 8])
    model = graph.model(conv(graph, activation(graph, conv(graph, "x", 4, 4, 3)), 4, 4, 3, seed=1))
    after, changes = rewritten(model, sorted([REWRITES[name], WINOGRAD], key=lambda rewrite: rewrite.order))
    assert [change.rewrite for change in changes] == ["winograd"] * 2 + [name] * 4
    assert sum(node.op_type == "Transpose" for node in after.graph.node) == 1  # of the output


def test_images_of_odd_size_are_joined_between_convolutions(small):
    graph = Graph(x=[4, 5, 8])
    y = graph("Relu", conv(graph, "x", 4, 4, 3))
    model = graph.model(graph("Add", conv(graph, y, 4, 4, 3, seed=1), y))
    assert changed(model, "winograd") == ["winograd"] * 2
    assert counted(model, "Transpose") == 2


def test_a_residual_stays_in_phases(small):
    graph = Graph(x=[4, 6, 8])
    y = "x"
    for seed in (0, 2):
        inner = graph("Relu", conv(graph, y, 4, 4, 3, seed=seed))
        y = graph("Relu", graph("Add", conv(graph, inner, 4, 4, 3, seed=seed + 1), y))
    model = graph.model(y)
    assert changed(model, "winograd") == ["winograd"] * 4
    assert counted(model, "Transpose") == 1


def test_what_something_else_reads_is_joined_for_it_alone(small):
    graph = Graph(x=[4, 6, 8])
    y = graph("Relu", conv(graph, "x", 4, 4, 3))
    z = conv(graph, y, 4, 4, 3, seed=1)
    model = graph.model(z, graph("ReduceMax", y, np.array([2, 3])), y)
    assert changed(model, "winograd") == ["winograd"] * 2
    assert counted(model, "Transpose") == 2


def test_an_output_between_convolutions_keeps_its_name(small):
    graph = Graph(x=[4, 6, 8])
    y = conv(graph, "x", 4, 4, 3)
    model = graph.model(y, conv(graph, y, 4, 4, 3, seed=1))
    assert changed(model, "winograd") == ["winograd"] * 2
    after, _ = rewritten(model, [WINOGRAD])
    assert [output.name for output in after.graph.output] == [output.name for output in model.graph.output]


def test_repeated_pixels_need_9_products(small):
    graph = Graph(x=[4, 3, 4])
    model = graph.model(conv(graph, repeated(graph, "x"), 5, 4, 3))
    assert changed(model, "winograd") == ["winograd"]
    assert dense(model) == [1] * 9
    assert counted(model, "Resize") == 0


def test_repeated_pixels_next_to_others_need_9_products(small):
    graph = Graph(x=[4, 3, 4], skip=[2, 6, 8])
    joined = graph("Concat", repeated(graph, "x"), "skip", axis=1)
    model = graph.model(conv(graph, joined, 5, 6, 3))
    assert changed(model, "winograd") == ["winograd"]
    assert dense(model) == [1] * 25


@pytest.mark.parametrize(
    "how",
    [
        {"mode": "linear"},
        {"nearest_mode": "ceil"},
        {"coordinate_transformation_mode": "half_pixel", "nearest_mode": "floor"},
        {"coordinate_transformation_mode": "align_corners"},
    ],
)
def test_other_resizes_are_not_taken_for_repeated_pixels(small, how):
    graph = Graph(x=[4, 3, 4])
    wide = graph("Resize", "x", "", np.array([1, 1, 2, 2], np.float32), **{**REPEAT, **how})
    model = graph.model(conv(graph, wide, 5, 4, 3))
    assert changed(model, "winograd") == ["winograd"]
    assert counted(model, "Resize") == 1


@pytest.mark.parametrize("mode", ["half_pixel", "pytorch_half_pixel"])
@pytest.mark.parametrize("rounding", ["round_prefer_floor", "round_prefer_ceil"])
def test_half_pixels_that_round_to_repeated_ones(small, mode, rounding):
    graph = Graph(x=[4, 3, 4])
    how = {"mode": "nearest", "coordinate_transformation_mode": mode, "nearest_mode": rounding}
    wide = graph("Resize", "x", "", np.array([1, 1, 2, 2], np.float32), **how)
    model = graph.model(conv(graph, wide, 5, 4, 3))
    assert changed(model, "winograd") == ["winograd"]
    assert counted(model, "Resize") == 0


@pytest.mark.parametrize(
    ("channels", "size", "gains"),
    [(192, 28, True), (256, 14, True), (64, 14, False), (24, 56, False), (64, 112, True), (512, 7, False)],
)
def test_a_chain_is_rewritten_where_it_is_faster(channels, size, gains):
    graph = Graph(x=[channels, size, size])
    y = "x"
    for seed in range(3):
        y = graph("Relu", conv(graph, y, channels, channels, 3, seed=seed))
    _, changes = rewritten(graph.model(y), [WINOGRAD])
    assert len(changes) == (3 if gains else 0)


def test_an_activation_of_repeated_pixels_is_applied_once(small):
    graph = Graph(x=[4, 3, 4])
    model = graph.model(conv(graph, graph("Relu", repeated(graph, "x")), 5, 4, 3))
    assert changed(model, "winograd") == ["winograd"]
    assert dense(model) == [1] * 9
    assert counted(model, "Relu") == 1


def test_a_batch_of_one_in_front_does_not_set_the_batch(small):
    graph = Graph(x=[4, 6, 8])
    y = graph("Add", np.ones((1, 4, 6, 8)), conv(graph, "x", 4, 4, 3))
    model = graph.model(conv(graph, y, 4, 4, 3, seed=1))
    assert changed(model, "winograd") == ["winograd"] * 2
    after, _ = rewritten(model, [WINOGRAD])
    images = {value.name: value.type.tensor_type.shape.dim[0] for value in after.graph.value_info}
    assert {dim.dim_value for name, dim in images.items() if "Add" in name} == {0}


def test_a_gate_from_a_convolution_is_an_image_of_its_own(small):
    graph = Graph(x=[4, 6, 8], g=[4, 1, 1])
    gate = conv(graph, "g", 4, 4, 3)
    y = graph("Mul", conv(graph, "x", 4, 4, 3, seed=1), gate)
    model = graph.model(conv(graph, y, 4, 4, 3, seed=2))
    assert changed(model, "winograd") == ["winograd"] * 3
    assert 3 not in dense(model)


def test_a_missing_bias_may_be_an_empty_name(small):
    graph = Graph(x=[4, 6, 8])
    weight = np.random.default_rng(0).standard_normal((4, 4, 3, 3))
    assert changed(graph.model(graph("Conv", "x", weight, "", pads=[1] * 4)), "winograd") == ["winograd"]


def test_convolutions_of_several_types(small):
    graph = Graph(x=[4, 6, 8])
    y = graph("Cast", conv(graph, "x", 4, 4, 3), to=onnx.TensorProto.FLOAT)
    weight = np.random.default_rng(0).standard_normal((4, 4, 3, 3)).astype(np.float32)
    after, changes = rewritten(graph.model(graph("Conv", y, weight, pads=[1] * 4)), [WINOGRAD])
    assert len(changes) == 2
    onnx.checker.check_model(after, full_check=True)


# --- random networks -----------------------------------------------------------------------------------------------


def random_network(seed):
    """Convolutions, activations, sums, Concats, pools and upsampling of images in random order."""
    random = np.random.default_rng(seed)
    height, width = (int(n) for n in random.integers(2, 9, 2))
    graph = Graph(x=[3, height, width])
    images = [("x", 3, height, width)]
    acts = list(ACTIVATIONS.values())[:4]
    for step in range(int(random.integers(3, 9))):
        value, channels, height, width = images[int(random.integers(max(0, len(images) - 3), len(images)))]
        kind = str(random.choice(["conv", "conv", "conv", "act", "add", "concat", "pool", "wide", "one"]))
        alike = [image for image in images if image[2:] == (height, width) and image[0] != value]
        if kind in ("conv", "one"):
            made = int(random.integers(1, 6))
            size = 3 if kind == "conv" else 1
            value, channels = conv(graph, value, made, channels, size, seed=step, bias=bool(step % 2)), made
        elif kind == "act":
            value = acts[int(random.integers(len(acts)))](graph, value)
        elif kind == "add" and (same := [image for image in alike if image[1] == channels]):
            value = graph("Add", value, same[-1][0])
        elif kind == "concat" and alike:
            value, channels = graph("Concat", value, alike[-1][0], axis=1), channels + alike[-1][1]
        elif kind == "pool" and min(height, width) > 1:
            value = graph("MaxPool", value, kernel_shape=[2, 2], strides=[2, 2])
            height, width = height // 2, width // 2
        elif kind == "wide" and height * width < 100:
            value, height, width = repeated(graph, value), 2 * height, 2 * width
        else:
            continue
        images.append((value, channels, height, width))
    read = {name for node in graph.nodes for name in node.input}
    shown = [value for value, *_ in images[1:] if value not in read or random.random() < 0.15]
    return graph.model(*shown)


@pytest.mark.parametrize("seed", range(60))
def test_random_networks_compute_the_same(small, seed):
    changed(random_network(seed), "winograd")


# --- precision ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "names"), [("fp32", ["winograd", "mean-as-pool"]), ("fp16", ["mean-as-pool"])])
def test_lower_precision_is_without_it(precision, names):
    found = chosen(("winograd", "mean-as-pool"), 20, precision)
    assert [rewrite.name for rewrite in found.rewrites] == names
    assert found.left_out == ()


# --- rounding ------------------------------------------------------------------------------------------------------


def test_float32_rounds_about_as_it_did():
    graph, random = Graph(x=[96, 28, 28]), np.random.default_rng(0)
    weights = [random.standard_normal((96, 96, 3, 3)).astype(np.float32) / 21 for _ in range(6)]
    y, image = "x", random.standard_normal((1, 96, 28, 28)).astype(np.float32)
    true = torch.from_numpy(image).double()
    for weight in weights:
        y = graph("Relu", graph("Conv", y, weight.astype(float), pads=[1] * 4))
        true = conv2d(true, torch.from_numpy(weight).double(), padding=1).relu()
    plain = retyped(graph.model(y), {onnx.TensorProto.DOUBLE: onnx.TensorProto.FLOAT})
    plain = onnx.shape_inference.infer_shapes(plain)
    fast, changes = rewritten(plain, [WINOGRAD])
    assert len(changes) == 6
    before, after = (rounding(model, image, true.numpy()) for model in (plain, fast))
    assert after < 2e-6
    assert after < 4 * before


def rounding(model, image, true):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": image})
    return np.abs(found - true).max() / np.abs(true).max()
