"""Rewrites that let a runtime use blocked channel layouts: hand-written convolutional graphs, in float64."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from test_speed_rewrites import REWRITES, Graph, changed

from repaconv.core.plugins import TARGETS, load
from repaconv.graph.models_in_onnx_ir import rewritten


def conv(graph, x, out, read, size=1, *, groups=1, bias=True, seed=0, **how):
    random = np.random.default_rng([seed, out, read])
    weight = random.standard_normal((out, read // groups, size, size))
    given = (random.standard_normal(out),) if bias else ()
    return graph("Conv", x, weight, *given, group=groups, pads=[size // 2] * 4, **how)


def silu(graph, x):
    return graph("Mul", x, graph("Sigmoid", x))


def widths(model, *names):
    """Channels out, in of a group, and groups of every convolution behind the rewrites."""
    after, _ = rewritten(model, [REWRITES[name] for name in names])
    shapes = {weight.name: tuple(weight.dims) for weight in after.graph.initializer}
    convs = [node for node in after.graph.node if node.op_type == "Conv"]
    groups = [next((entry.i for entry in node.attribute if entry.name == "group"), 1) for node in convs]
    return [(*shapes[node.input[1]][:2], count) for node, count in zip(convs, groups, strict=True)]


# --- whole-blocks --------------------------------------------------------------------------------------------------


def depthwise(width, act="Relu", between=None, shown=False):
    graph = Graph(x=[3, 6, 5])
    y = conv(graph, graph(act, conv(graph, "x", width, 3, bias=False)), width, width, 3, groups=width)
    y = silu(graph, y) if between is None else between(graph, y)
    return graph.model(conv(graph, y, 5, width), *([y] if shown else []))


def test_channels_that_are_taken_each_are_whole_blocks():
    model = depthwise(14)
    assert changed(model, "whole-blocks") == ["whole-blocks"]
    assert widths(model, "whole-blocks") == [(16, 3, 1), (16, 1, 16), (5, 16, 1)]
    assert changed(depthwise(16), "whole-blocks") == []
    assert changed(depthwise(4), "whole-blocks") == []  # would be twice as many
    assert changed(depthwise(20), "whole-blocks") == []  # read in blocks as it is
    assert widths(depthwise(26), "whole-blocks-16") == [(32, 3, 1), (32, 1, 32), (5, 32, 1)]


@pytest.mark.parametrize(
    "between",
    [
        lambda graph, y: graph("Clip", y, np.array(-1.0), np.array(6.0)),
        lambda graph, y: graph("Mul", y, np.array(0.5)),
        lambda graph, y: graph("MaxPool", y, kernel_shape=[2, 2]),
        lambda graph, y: graph("AveragePool", y, kernel_shape=[2, 2]),
        lambda graph, y: graph("ReduceMean", y, np.array([-1, 2])),
        lambda graph, y: graph("Resize", y, "", np.array([1, 1, 2, 2], np.float32), mode="nearest"),
        lambda graph, y: graph("Add", y, conv(graph, "x", 14, 3, seed=1)),
    ],
)
def test_what_acts_on_every_channel_by_itself_may_lie_between(between):
    assert changed(depthwise(14, between=between), "whole-blocks") == ["whole-blocks"]


@pytest.mark.parametrize(
    "between",
    [
        lambda graph, y: graph("Log", graph("Add", graph("Abs", y), np.array(1.0))),
        lambda graph, y: graph("Softmax", y, axis=1),
        lambda graph, y: graph("Mul", y, np.ones((14, 1, 1))),
        lambda graph, y: graph("ReduceMean", y, np.array([1])) and y,
        lambda graph, y: graph("Transpose", graph("Transpose", y, perm=[0, 2, 3, 1]), perm=[0, 3, 1, 2]),
        lambda graph, y: graph("Concat", y, conv(graph, "x", 14, 3, seed=1), axis=0),
        lambda graph, y: graph("Add", y, conv(graph, "x", 1, 3, seed=1)),
        lambda graph, y: graph("Div", y, y),
    ],
)
def test_else_channels_stay(between):
    assert changed(depthwise(14, between=between), "whole-blocks") == []


def test_channels_that_are_shown_or_given_stay():
    assert changed(depthwise(14, shown=True), "whole-blocks") == []
    graph = Graph(x=[14, 4, 4])
    assert changed(graph.model(conv(graph, conv(graph, "x", 14, 14, 3, groups=14), 3, 14)), "whole-blocks") == []


def test_a_sum_on_the_way_round_is_widened_with_all_that_it_adds():
    graph = Graph(x=[3, 5, 5])
    y = conv(graph, "x", 18, 3, 3)
    for seed in (1, 2):
        y = graph("Add", y, conv(graph, graph("Relu", y), 18, 18, 3, seed=seed))
    model = graph.model(conv(graph, y, 4, 18))
    assert changed(model, "whole-blocks") == ["whole-blocks"]
    assert widths(model, "whole-blocks") == [(24, 3, 1), (24, 24, 1), (24, 24, 1), (4, 24, 1)]


def squeezed(width, channels=24, image=(4, 5), act=silu):
    """x g(mean(x)) between convolutions."""
    graph = Graph(x=[3, *image])
    x = graph("Relu", conv(graph, "x", channels, 3, 3))
    small = act(graph, conv(graph, graph("ReduceMean", x, np.array([2, 3])), width, channels))
    gate = graph("Sigmoid", conv(graph, small, channels, width))
    return graph.model(conv(graph, graph("Mul", gate, x), 3, channels))


def test_what_is_squeezed_to_one_place_is_whole_blocks_of_every_cpu():
    model = squeezed(6)
    assert changed(model, "whole-blocks") == ["whole-blocks"]
    assert widths(model, "whole-blocks")[1:3] == [(16, 24, 1), (24, 16, 1)]


def test_channels_that_a_branch_reads_stay():
    graph = Graph(x=[3, 6, 5])
    y = conv(graph, conv(graph, "x", 14, 3), 14, 14, 3, groups=14)
    model = graph.model(conv(graph, y, 5, 14))
    inside = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", [y], ["taken"])],
        "branch",
        [],
        [onnx.helper.make_tensor_value_info("taken", 11, None)],
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(True), "always"))
    chosen = onnx.helper.make_node("If", ["always"], ["shown"], then_branch=inside, else_branch=inside)
    model.graph.node.append(chosen)
    model.graph.output.append(onnx.helper.make_tensor_value_info("shown", 11, ["batch", 14, 6, 5]))
    _, changes = rewritten(model, [REWRITES["whole-blocks"]])
    assert changes == []


# --- whole-groups --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "groups", "joined", "wide"),
    [(4, 6, 2, 0), (2, 8, 4, 8), (1, 8, 0, 0), (3, 8, 0, 0), (4, 4, 2, 4), (4, 3, 0, 0), (8, 2, 0, 2), (16, 2, 0, 0)],
)
def test_narrow_groups_are_joined_to_whole_ones(width, groups, joined, wide):
    graph = Graph(x=[width * groups, 5, 4])
    model = graph.model(conv(graph, "x", width * groups, width * groups, 3, groups=groups))
    for name, block, together in (("whole-groups", 8, joined), ("whole-groups-16", 16, wide)):
        assert changed(model, name) == ([name] if together else [])
        if together:
            assert widths(model, name) == [(width * groups, block, groups // together)]


# --- gate-as-image -------------------------------------------------------------------------------------------------


def test_a_gate_is_as_large_as_its_image_where_both_lie_in_blocks():
    assert changed(squeezed(16), "gate-as-image") == ["gate-as-image"]
    assert changed(squeezed(6), "gate-as-image") == ["gate-as-image"]  # fewer than a block are read in order
    assert changed(squeezed(10), "gate-as-image") == []  # computed in order
    assert changed(squeezed(10), "whole-blocks", "gate-as-image") == ["whole-blocks", "gate-as-image"]
    assert changed(squeezed(16, image=(4, 1)), "gate-as-image") == []
    assert changed(squeezed(16), "mean-as-pool", "gate-as-image") == ["mean-as-pool", "gate-as-image"]


def test_a_gate_that_no_convolution_makes_stays():
    graph = Graph(x=[3, 4, 4], g=[16, 1, 1])
    assert changed(graph.model(graph("Mul", "g", conv(graph, "x", 16, 3))), "gate-as-image") == []


# --- conv-each -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", [silu, lambda graph, x: graph("Relu", x), lambda _, x: x], ids=["silu", "relu", "none"])
def test_a_convolution_that_is_split_is_one_for_each_part(act):
    def model(axis=1, bias=True, shown=False):
        graph = Graph(x=[3, 6, 5])
        y = act(graph, conv(graph, "x", 12, 3, 3, bias=bias))
        parts = graph("Split", y, np.array([8, 4]) if axis == 1 else np.array([3, 3]), outputs=2, axis=axis)
        return graph.model(*(graph("Relu", part) for part in parts), *([y] if shown else []))

    assert changed(model(), "conv-each") == ["conv-each"]
    assert widths(model(), "conv-each") == [(8, 3, 1), (4, 3, 1)]
    assert changed(model(bias=False), "conv-each") == ["conv-each"]
    assert changed(model(axis=2), "conv-each") == changed(model(shown=True), "conv-each") == []


@pytest.mark.parametrize("size", [1, 3])
def test_a_convolution_whose_parts_become_tokens_is_one_for_each_part(size):
    """As queries, keys and values of YOLO12; OpenVINO copies the parts of a Split before a Reshape."""

    def model(reshaped=True, axis=1, shown=False):
        graph = Graph(x=[6, 6, 6])
        y = conv(graph, "x", 6, 6, size)
        parts = graph("Split", y, np.array([1, 2, 3]), outputs=3, axis=axis)
        first = graph("Reshape", parts[0], np.array([0, -1])) if reshaped else graph("Relu", parts[0])
        return graph.model(first, graph("Relu", parts[1]), graph("Relu", parts[2]), *([y] if shown else []))

    assert changed(model(), "linear-each") == ["linear-each"] * (size == 1)
    assert changed(model(axis=-3), "linear-each") == ["linear-each"] * (size == 1)
    for other in (model(reshaped=False), model(axis=2), model(shown=True)):
        assert changed(other, "linear-each") == []


def test_openvino_divides_no_convolution_whose_parts_stay_images():
    target = load(TARGETS, "x86-64-openvino")
    for family in ("avx2", "avx512-bf16", "amx", ""):
        names = target.form("network", family)
        assert "conv-each" not in names
        assert {"linear-each", "concat-parts"} <= set(names)
        assert ("silu-as-quotient" in names) == (family == "amx")  # where it was measured
        assert ("static-silu-as-quotient" in names) == (family == "avx512-bf16")
        assert ("attention-op" in names) == (family not in ("amx", "avx512-bf16"))
    assert {*target.form("network", "amx"), "attention-op"} == {*target.forms["default"], "silu-as-quotient"}
    assert "silu-as-quotient" in target.rewrites_for(target.form("network", "amx"), "int8")
    assert "static-silu-as-quotient" in target.rewrites_for(target.form("network", "avx512-bf16"), "int8")


SLOW_KERNELS = ("mish-as-quotient", "prelu-as-sum", "softmax-as-quotient", "lrn-as-conv", "resize-as-matmul")
"""Measured with AVX2 and AVX-512."""


@pytest.mark.parametrize(
    ("family", "forms"),
    [
        ("avx2", {"conv-each", "whole-groups", "whole-blocks", "gate-as-image", *SLOW_KERNELS}),
        ("avx512-bf16", {"conv-each", "whole-groups-16", "whole-blocks-16", "gate-as-image", *SLOW_KERNELS}),
    ],
)
def test_a_cpu_level_has_those_of_its_blocks_in_its_default_preset(family, forms):
    target = load(TARGETS, "x86-64")
    assert set(target.form("network", family)) - set(target.form("network")) == forms
    assert target.form("pyra", family) == target.form("pyra")
