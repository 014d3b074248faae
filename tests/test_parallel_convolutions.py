"""Parallel convolutions become one, exactly in float64, at every border. Other branches remain."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from graph_mutants import difference, results
from test_speed_rewrites import Graph

from repaconv.graph.compute_costs import parameters
from repaconv.graph.models_in_onnx_ir import read, rewritten
from repaconv.rewrites.fold.convolution_composition import CONVOLUTION

R = np.random.default_rng(3)


def conv(graph, x, out, size, *, groups=1, width=4, bias=True, **attributes):
    weight = R.standard_normal((out, width // groups, *size))
    return graph("Conv", x, weight, *([R.standard_normal(out)] if bias else []), group=groups, **attributes)


def norm(graph, x, width=4):
    parts = [R.standard_normal(width) for _ in range(3)] + [R.random(width) + 0.5]
    return graph("BatchNormalization", x, *parts)


def joined(graph, *outputs):
    """The operators that are left, and the parameters, of the same function."""
    model = graph.model(*outputs)
    after, _ = rewritten(model, (CONVOLUTION,))
    onnx.checker.check_model(after, full_check=True)
    assert difference(results(model), results(after)) < 1e-12
    return sorted(node.op_type for node in after.graph.node), parameters(read(after))


def net(*size):
    return Graph(x=(4, *(size or ("n", 7))))


def test_a_block_of_repvgg_by_both_exporters():
    graph = net()
    wide, one = (norm(graph, conv(graph, "x", 4, (k, k), pads=[k // 2] * 4, bias=False)) for k in (3, 1))
    whole = graph("Add", graph("Add", wide, one), norm(graph, "x"))
    assert joined(graph, graph("Relu", whole)) == (["Conv", "Relu"], 4 * 4 * 9 + 4)


@pytest.mark.parametrize("operators", [("Mul", "Add"), ("Add", "Mul"), ("Mul",), ("Div", "Sub"), ("Sub",)])
@pytest.mark.parametrize("shape", [(4, 1, 1), (1,)], ids=["a number per channel", "one number"])
def test_a_norm_parallel_to_convolutions_that_an_exporter_wrote_as_scale_and_shift(operators, shape):
    """As Keras does in RepVGG."""
    graph = net()
    wide, one = (conv(graph, "x", 4, (k, k), pads=[k // 2] * 4) for k in (3, 1))
    branch = "x"
    for operator in operators:
        branch = graph(operator, branch, R.random(shape) + 0.5)
    whole = graph("Add", graph("Sub", wide, branch), one)
    assert joined(graph, graph("Relu", whole)) == (["Conv", "Relu"], 4 * 4 * 9 + 4)


def test_a_scale_parallel_to_a_convolution_that_something_else_reads_stays():
    graph = net()
    scaled = graph("Mul", "x", R.random((4, 1, 1)))
    whole = graph("Add", conv(graph, "x", 4, (3, 3), pads=[1] * 4), scaled)
    assert joined(graph, whole, graph("Relu", scaled))[0] == ["Add", "Conv", "Mul", "Relu"]


def test_a_constant_minus_an_image_parallel_to_a_convolution_is_one_with_it():
    graph = net()
    whole = graph("Add", graph("Sub", R.standard_normal((4, 1, 1)), "x"), conv(graph, "x", 4, (3, 3), pads=[1] * 4))
    assert joined(graph, whole) == (["Conv"], 4 * 4 * 9 + 4)


def test_depthwise_branches_of_mobileone_with_one_norm_after_all():
    graph = net()
    branches = [conv(graph, "x", 4, (k, k), groups=4, pads=[k // 2] * 4) for k in (3, 3, 1, 5)]
    whole = "x"
    for branch in branches:
        whole = graph("Add", branch, whole)
    assert joined(graph, norm(graph, whole)) == (["Conv"], 4 * 25 + 4)


def test_a_difference_rows_columns_and_a_pool_that_counts_its_padding():
    graph = net()
    square = conv(graph, "x", 4, (3, 3), pads=[1] * 4)
    row, column = conv(graph, "x", 4, (1, 3), pads=[0, 1, 0, 1]), conv(graph, "x", 4, (3, 1), pads=[1, 0, 1, 0])
    pool = graph("AveragePool", "x", kernel_shape=[3, 3], pads=[1] * 4, count_include_pad=1)
    whole = graph("Sub", graph("Add", row, square), graph("Add", pool, column))
    assert joined(graph, whole) == (["Conv"], 4 * 4 * 9 + 4)


def test_a_dilated_kernel_in_a_large_one():
    graph = net()
    large = conv(graph, "x", 4, (5, 5), groups=4, pads=[2] * 4)
    holes = conv(graph, "x", 4, (3, 3), groups=4, pads=[2] * 4, dilations=[2, 2])
    assert joined(graph, graph("Add", large, holes)) == (["Conv"], 4 * 25 + 4)


def test_dilated_kernels_stay_dilated():
    graph = net()
    twins = [conv(graph, "x", 4, (3, 3), groups=4, pads=[2] * 4, dilations=[2, 2]) for _ in range(2)]
    assert joined(graph, graph("Add", graph("Add", *twins), "x")) == (["Conv"], 4 * 9 + 4)


@pytest.mark.parametrize("size", [("n", "n"), (6, 7)])
def test_strides_and_uneven_borders(size):
    graph = net(*size)
    wide = conv(graph, "x", 6, (4, 4), pads=[1, 1, 2, 2], strides=[2, 2], groups=2)
    one = conv(graph, "x", 6, (1, 1), strides=[2, 2], groups=2)
    assert joined(graph, graph("Add", wide, one)) == (["Conv"], 6 * 2 * 16 + 6)


def test_only_where_it_multiplies_no_more():
    graph = net()
    depth, dense = conv(graph, "x", 4, (3, 3), groups=4, pads=[1] * 4), conv(graph, "x", 4, (1, 1))
    row, column = conv(graph, "x", 4, (1, 3), pads=[0, 1, 0, 1]), conv(graph, "x", 4, (3, 1), pads=[1, 0, 1, 0])
    whole = graph("Add", graph("Add", depth, row), graph("Add", column, dense))
    assert joined(graph, whole)[0] == ["Add", "Add", "Conv", "Conv", "Conv"]  # the 1x1 goes into one of them


def test_what_is_no_convolution_at_the_border_or_read_elsewhere_stays():
    graph = net()
    pool = graph("AveragePool", "x", kernel_shape=[3, 3], pads=[1] * 4)
    wide = conv(graph, "x", 4, (3, 3), pads=[1] * 4)
    whole = graph("Add", pool, wide)
    read_twice = conv(graph, whole, 4, (1, 1))
    found, _ = joined(graph, graph("Add", read_twice, whole), graph("Relu", read_twice))
    assert found == ["Add", "Add", "AveragePool", "Conv", "Conv", "Relu"]


@pytest.mark.parametrize("seed", range(30))
def test_random_branches(seed):
    random = np.random.default_rng(seed)
    graph, stride = (
        net(*random.choice(np.array([("n", "m"), (6, 7), (9, "n")], dtype=object))),
        int(random.integers(1, 3)),
    )
    values = ["x"] if stride == 1 else []
    for _ in range(int(random.integers(2, 6))):
        groups = int(random.choice([1, 2, 4]))
        step, size = random.integers(1, 3, 2), random.choice([1, 3, 5], 2)
        spread = [int(n) for n in step * (size - 1)]
        before = [int(random.integers(0, n + 1)) for n in spread]
        pads = [*before, *(n - b for n, b in zip(spread, before, strict=True))]
        attributes = {"pads": pads, "strides": [stride] * 2, "dilations": [int(n) for n in step]}
        value = conv(graph, "x", 4, size, groups=groups, **attributes)
        values.append(norm(graph, value) if random.random() < 0.5 else value)
    whole = values[0]
    for value in random.permutation(values[1:]):
        whole = graph(random.choice(["Add", "Sub"]), *random.permutation([whole, str(value)]).tolist())
    joined(graph, whole)


@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_what_scales_a_channel_goes_into_a_kernel_of_any_number_of_axes_and_what_scales_a_place_stays(spatial):
    ones, sizes = (1,) * spatial, (7, 6, 5)[:spatial]
    for shape in ((6, *ones), (1, 6, *ones), ()):
        graph = net(*sizes)
        scaled = graph("Mul", conv(graph, "x", 6, (3,) * spatial), R.standard_normal(shape))
        assert joined(graph, graph("Add", scaled, R.standard_normal((6, *ones))))[0] == ["Conv"]
    graph = net(*sizes)
    kept = conv(graph, "x", 6, (3,) * spatial, pads=[1] * 2 * spatial)
    assert joined(graph, graph("Mul", kept, R.standard_normal(sizes[-1:])))[0] == ["Conv", "Mul"]
