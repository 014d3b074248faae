"""Weights that a graph computes from constants are computed one by one, for a session and when a graph is read."""

from __future__ import annotations

import tracemalloc

import numpy as np
import onnx
import pytest
from planted_graph_faults import INT, F, Net

from repaconv.graph import computed_weight_parts
from repaconv.graph.computed_weight_parts import split_off_computed_weights
from repaconv.graph.models_in_onnx_ir import read
from repaconv.graph.shape_folding import fold_shapes
from repaconv.verification.model_runners import load_onnx, weights_in_file

RANDOM = np.random.default_rng(11)
SHAPE = (512, 512, 3, 3)
STANDARDIZED = [
    ("Reshape", "w flat", "rows"), ("ReduceMean", "rows one", "mean"), ("Sub", "rows mean", "centered"),
    ("Mul", "centered centered", "squared"), ("ReduceMean", "squared one", "variance"),
    ("Sqrt", "variance", "deviation"), ("Div", "centered deviation", "unit"), ("Mul", "unit gain", "scaled"),
    ("Reshape", "scaled shape", "kernel"),
]  # fmt: skip


def standardized(*rows, wide: int = 512, **outputs) -> onnx.ModelProto:
    """A convolution whose kernel is standardized in every inference."""
    shape = (wide, *SHAPE[1:])
    weights = {"w": RANDOM.standard_normal(shape), "gain": RANDOM.random((wide, 1))}
    weights |= {"flat": np.array([wide, -1]), "shape": np.array(shape), "one": np.array([1])}
    nodes = [*STANDARDIZED, ("Conv", "x kernel", "c"), ("Relu", "c", "y"), *rows]
    return Net(nodes, weights, {"x": (F, (1, 512, 6, 6))}, {"y": F, **outputs}).model()


def test_a_session_is_given_computed_weights_and_computes_the_same():
    model, feeds = standardized(), {"x": RANDOM.standard_normal((1, 512, 6, 6)).astype(np.float32)}
    with weights_in_file(model) as (bare, folder):
        assert [node.op_type for node in bare.graph.node] == ["Conv", "Relu"]
        assert [weight.name for weight in bare.graph.initializer] == ["kernel"]
        found = load_onnx(bare, folder).run(feeds)
    np.testing.assert_array_equal(found["y"], load_onnx(model.SerializeToString()).run(feeds)["y"])


def test_without_fusions_a_graph_computes_its_weights_itself():
    with weights_in_file(standardized(), computed=False) as (bare, _folder):
        assert len(bare.graph.node) == len(STANDARDIZED) + 2


def test_what_is_also_an_output_and_what_others_read_remains():
    rest, parts = split_off_computed_weights(standardized(("Mul", "y mean", "z"), z=F), ["w"])
    (part,) = parts
    assert [value.name for value in part.graph.output] == ["kernel", "mean"]
    assert len(part.graph.node) == len(STANDARDIZED)
    assert not part.graph.input
    assert [node.op_type for node in rest.graph.node] == ["Conv", "Relu", "Mul"]
    rest, parts = split_off_computed_weights(standardized(kernel=F), ["w"])
    assert not parts
    assert len(rest.graph.node) == len(STANDARDIZED) + 2


def test_no_part_is_split_off_that_an_input_may_change_or_that_reads_small_constants():
    model = standardized()
    assert not split_off_computed_weights(model, ["another"])[1]
    model.graph.input.append(onnx.helper.make_tensor_value_info("w", F, SHAPE))
    assert not split_off_computed_weights(model, ["w"])[1]


def test_a_part_computes_few_weights(monkeypatch):
    model = standardized(("Mul", "y mean", "z"), z=F)
    monkeypatch.setattr(computed_weight_parts, "PART_ENTRIES", 1)
    _, parts = split_off_computed_weights(model, ["w"])
    assert [[value.name for value in part.graph.output] for part in parts] == [["kernel"], ["mean"]]


def test_intermediate_values_of_a_computed_weight_are_not_held_together():
    graph = read(standardized())
    tracemalloc.start()
    fold_shapes(graph)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    kernel = graph.graph.node(0).inputs[1].const_value
    assert len(graph.graph) == 2
    assert peak < 4.5 * kernel.nbytes


@pytest.mark.parametrize(
    ("width", "reader", "stays"),
    [
        (400, "Add", []),
        (1, "Add", ["Gather"]),  # it would add a larger share of numbers than of nodes is saved
        (400, "MatMul", ["Gather"]),  # its factor counts as a weight
    ],
)
def test_position_biases_gathered_from_a_table_are_a_constant_in_a_network_that_is_large_enough(width, reader, stays):
    """As in Swin: three heads have a bias for each pair of 49 tokens, from a table of 169 relative positions."""
    weights = {"table": RANDOM.standard_normal((169, 3)), "places": RANDOM.integers(0, 169, 49 * 49)}
    weights |= {"pairs": np.array([49, 49, 3]), "w": RANDOM.standard_normal((49, width))}
    nodes = [
        ("Gather", "table places", "rows"), ("Reshape", "rows pairs", "biases"),
        ("Transpose", "biases", "heads", {"perm": [2, 0, 1]}), (reader, "x heads", "scores"),
        ("Softmax", "scores", "shares"), ("MatMul", "shares w", "y"),
    ]  # fmt: skip
    graph = read(Net(nodes, weights, {"x": (F, (3, 49, 49))}, {"y": F}).model())
    fold_shapes(graph)
    assert [node.op_type for node in graph.graph if node.op_type == "Gather"] == stays


def test_a_node_one_of_whose_outputs_is_an_output_of_the_graph_remains():
    weights = {"w": RANDOM.standard_normal((1100, 2200))}
    nodes = [("Split", "w", "a b", {"axis": 1, "num_outputs": 2}), ("MatMul", "x a", "y")]
    model = Net(nodes, weights, {"x": (F, (2, 1100))}, {"y": F, "b": F}).model()
    feeds = {"x": RANDOM.standard_normal((2, 1100)).astype(np.float32)}
    found, right = (load_onnx(each).run(feeds) for each in (model, model.SerializeToString()))
    np.testing.assert_array_equal(found["b"], right["b"])
    np.testing.assert_allclose(found["y"], right["y"], rtol=1e-4, atol=1e-4)


def test_a_computed_value_that_is_no_tensor_remains():
    weights = {"w": RANDOM.standard_normal((1500, 1500))}
    nodes = [("SequenceConstruct", "w w", "s"), ("SequenceAt", "s i", "a"), ("MatMul", "x a", "y")]
    model = Net(nodes, weights, {"x": (F, (2, 1500)), "i": (INT, ())}, {"y": F}).model()
    feeds = {"x": RANDOM.standard_normal((2, 1500)).astype(np.float32), "i": np.array(1)}
    np.testing.assert_allclose(
        load_onnx(model).run(feeds)["y"], load_onnx(model.SerializeToString()).run(feeds)["y"], rtol=1e-4, atol=1e-4
    )
