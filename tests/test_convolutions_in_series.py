"""Convolutions in series become one if that takes no more multiplications, exactly in float64; scales before them are
absorbed.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from graph_mutants import difference, results
from test_parallel_convolutions import conv, joined, net, norm
from test_speed_rewrites import Graph

from repaconv.graph.canonical_form import normalize
from repaconv.graph.models_in_onnx_ir import read, rewritten
from repaconv.rewrites.fold.convolution_composition import CONVOLUTION
from repaconv.rewrites.fold.fold_pipeline import FOLDS
from repaconv.rewrites.fold.unfolded_linear_operators import unfolded_operators

R = np.random.default_rng(5)


def macs(model):
    """Multiplications that the weights of convolutions and products take, an image of the size that shapes tell."""
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.value_info}
    shapes |= {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.output}
    weights = {one.name: list(one.dims) for one in model.graph.initializer}
    found = 0
    for node in model.graph.node:
        if node.op_type == "Conv":
            found += int(np.prod(weights[node.input[1]]) * np.prod(shapes[node.output[0]][2:]))
    return found


def folded(graph, *outputs):
    """The operators that are left after all folds, and what the fold says was left."""
    model = graph.model(*outputs)
    after, _ = rewritten(model, FOLDS)
    onnx.checker.check_model(after, full_check=True)
    assert difference(results(model), results(after)) < 1e-12
    seen = read(after)
    normalize(seen)
    return sorted(node.op_type for node in after.graph.node), " ".join(unfolded_operators(seen))


def test_a_pointwise_after_and_before_a_kernel():
    graph = net()
    thin = conv(graph, conv(graph, "x", 8, (3, 3), pads=[1] * 4, strides=[2, 2]), 2, (1, 1), width=8)
    assert joined(graph, thin) == (["Conv"], 2 * 4 * 9 + 2)
    graph = net()
    wide = conv(graph, conv(graph, "x", 40, (1, 1), bias=False), 3, (3, 3), width=40, pads=[1] * 4)
    assert joined(graph, wide) == (["Conv"], 3 * 4 * 9 + 3)


def test_a_bias_does_not_reach_the_border_and_a_thin_layer_between_stays():
    graph = net()
    biased = conv(graph, conv(graph, "x", 40, (1, 1)), 3, (3, 3), width=40, pads=[1] * 4)
    assert joined(graph, biased)[0] == ["Conv", "Conv"]
    graph = net()
    unpadded = conv(graph, conv(graph, "x", 40, (1, 1)), 3, (3, 3), width=40)
    assert joined(graph, unpadded) == (["Conv"], 3 * 4 * 9 + 3)
    graph = net()
    thin = conv(graph, conv(graph, "x", 1, (1, 1), bias=False), 9, (3, 3), width=1)
    assert joined(graph, thin)[0] == ["Conv", "Conv"]


def test_a_depthwise_kernel_before_a_pointwise_layer_stays():
    graph = net()
    depth = conv(graph, "x", 4, (3, 3), groups=4, pads=[1] * 4)
    assert joined(graph, conv(graph, depth, 4, (1, 1)))[0] == ["Conv", "Conv"]


def test_what_several_read_or_is_an_output_stays():
    graph = net()
    first = conv(graph, "x", 8, (3, 3), pads=[1] * 4)
    assert joined(graph, conv(graph, first, 2, (1, 1), width=8), graph("Relu", first))[0] == ["Conv", "Conv", "Relu"]
    graph = net()
    first = conv(graph, "x", 8, (3, 3), pads=[1] * 4)
    assert joined(graph, conv(graph, first, 2, (1, 1), width=8), first)[0] == ["Conv", "Conv"]


def test_branches_of_a_diverse_block():
    graph = net()
    branches = [norm(graph, conv(graph, "x", 4, (k, k), pads=[k // 2] * 4)) for k in (3, 1)]
    branches.append(norm(graph, conv(graph, conv(graph, "x", 4, (1, 1), bias=False), 4, (3, 3), pads=[1] * 4)))
    plain = graph("AveragePool", conv(graph, "x", 4, (1, 1), bias=False), kernel_shape=[3, 3], pads=[1] * 4,
                  count_include_pad=1)  # fmt: skip
    whole = norm(graph, plain)
    for branch in branches:
        whole = graph("Add", whole, branch)
    assert joined(graph, graph("Relu", whole)) == (["Conv", "Relu"], 4 * 4 * 9 + 4)


@pytest.mark.parametrize("operator", ["Mul", "Div", "BatchNormalization", "Add", "Sub"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_scale_before_convolutions(operator, padded):
    graph = net()
    x = graph("Relu", "x")
    vector = R.random((4, 1, 1)) + 0.5
    scaled = norm(graph, x) if operator == "BatchNormalization" else graph(operator, x, vector)
    pads = [1] * 4 if padded else [0] * 4
    outputs = [conv(graph, scaled, 4, (3, 3), groups=g, pads=pads, strides=[2, 2]) for g in (1, 2)]
    found, _ = joined(graph, *outputs)
    gone = not padded or operator in ("Mul", "Div")
    assert found == sorted(["Conv", "Conv", "Relu", *([] if gone else [operator])])
    if not gone:
        assert "to which the shift before it is not added" in folded(graph, *outputs)[1]


@pytest.mark.parametrize("groups", [1, 2])
def test_a_transposed_convolution_absorbs_layers_after_it(groups):
    graph = net()
    weight, bias = R.standard_normal((4, 6 // groups, 3, 3)), R.standard_normal(6)
    up = graph("ConvTranspose", "x", weight, bias, group=groups, strides=[2, 2], pads=[1] * 4, output_padding=[1, 1])
    scaled = graph("Mul", norm(graph, up, 6), R.random((6, 1, 1)))
    assert joined(graph, graph("Relu", scaled))[0] == ["ConvTranspose", "Relu"]


class Row:
    """A random graph of convolutions, scales and pools, mostly in a row; of a free height, or not."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)
        self.free = self.random.random() < 0.3
        self.graph = net("n" if self.free else 5, 8)
        self.values = {"x": 4}
        for _ in range(int(self.random.integers(2, 6))):
            rank = int(self.random.random() < 0.2) and int(self.random.integers(len(self.values)))
            value = list(self.values)[-1 - rank]
            self.add(self.random.choice(["conv", "norm", "scale", "pool", "up"], p=[0.6, 0.1, 0.15, 0.1, 0.05]), value)

    def add(self, kind, value):
        width, graph, random = self.values[value], self.graph, self.random
        if kind == "conv":
            self.conv(value)
        elif kind == "norm":
            self.values[norm(graph, value, width)] = width
        elif kind == "scale":
            operator = random.choice(["Mul", "Sub", "Add"])
            self.values[graph(operator, value, random.random((width, 1, 1)) + 0.5)] = width
        elif kind == "pool":
            counted = int(random.integers(2))
            size = {"kernel_shape": [1, 2], "pads": [0, 1, 0, int(random.integers(2))]}
            self.values[graph("AveragePool", value, count_include_pad=counted, **size)] = width
        else:
            self.values[graph("ConvTranspose", value, R.standard_normal((width, 4, 2, 2)), R.standard_normal(4))] = 4

    def conv(self, value):
        random, width = self.random, self.values[value]
        out, groups = int(random.choice([2, 16])), int(random.choice([1, 1, 2]))
        size = (1 if self.free else int(random.choice([1, 1, 3])), int(random.choice([1, 1, 2, 3])))
        attributes = {"auto_pad": "SAME_UPPER"}
        if random.random() < 0.9:
            pads = [int(n) for n in random.integers(0, 2, 4) * (random.random() < 0.3)]
            strides = [int(n) for n in random.choice([1, 1, 2], 2)]
            attributes = {"pads": pads, "strides": strides, "dilations": random.integers(1, 3, 2).tolist()}
        bias = bool(random.random() < 0.3)
        new = conv(self.graph, value, out, size, groups=groups, width=width, bias=bias, **attributes)
        self.values[new] = out

    def model(self):
        values = list(self.values)[1:]
        ends = [value for value in values[:-1] if self.random.random() < 0.05]
        return self.graph.model(*ends, values[-1])


def test_random_rows():
    composed = 0
    for seed in range(50):
        row = Row(seed)
        before = row.model()
        if not any(results(before)):
            continue
        after, changes = rewritten(before, (CONVOLUTION,))
        onnx.checker.check_model(after, full_check=True)
        assert difference(results(before), results(after)) < 1e-11
        composed += sum("-> Conv [" in change.description and change.description[0] == "n" for change in changes)
        if not row.free:
            assert macs(onnx.shape_inference.infer_shapes(after)) <= macs(before)
    assert composed > 5


def test_a_mean_of_tokens_comes_before_the_layer():
    graph = Graph(x=("n", 6))
    layer = graph("Add", graph("MatMul", "x", R.standard_normal((6, 8))), R.standard_normal(8))
    mean = graph("ReduceMean", layer, np.array([1]), keepdims=0)
    model = graph.model(graph("Relu", mean))
    after, _ = rewritten(model, FOLDS)
    assert difference(results(model), results(after)) < 1e-12
    assert after.graph.node[0].op_type == "ReduceMean"


@pytest.mark.parametrize("pool", ["GlobalAveragePool", "ReduceMean", "AveragePool", "padded", "dense", "read"])
def test_a_mean_of_places_comes_before_a_pointwise_convolution(pool):
    graph = net(6, 7)
    layer = conv(graph, graph("Relu", "x"), 8, (1, 1))
    if pool == "ReduceMean":
        mean = graph("ReduceMean", layer, np.array([2, 3]))
    elif pool in ("GlobalAveragePool", "read"):
        mean = graph("GlobalAveragePool", layer)
    else:
        more = {"pads": [1, 1, 1, 1], "count_include_pad": 1} if pool == "padded" else {}
        mean = graph("AveragePool", layer, kernel_shape=[2, 2], strides=[1 if pool == "dense" else 2] * 2, **more)
    model = graph.model(graph("Relu", mean), *([layer] if pool == "read" else []))
    after, _ = rewritten(model, FOLDS)
    assert difference(results(model), results(after)) < 1e-12
    order = [node.op_type for node in after.graph.node if node.op_type != "Relu"]
    stays = pool in ("padded", "dense", "read")
    assert (order[0] in ("Conv", "MatMul")) == stays
