"""What Keras writes for a dynamic batch: heads in one axis with the batch, and Reshapes to products of sizes."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from test_fold_onnx import graph
from test_hard_swish import single

import repaconv as rc
from repaconv.graph.canonical_form import normalize
from repaconv.graph.models_in_onnx_ir import read, tidy, write
from repaconv.verification.float64_graphs import ReferenceEvaluation

RANDOM = np.random.default_rng(0)
N, H, E = 5, 3, 4
NUMBERS = {
    **{f"w{name}": RANDOM.standard_normal((H * E, H * E)) for name in "qkv"},
    **{"01": np.array([0, 1]), "2": np.array([2]), "-1": np.array([-1]), "e": np.array([E]), "n": np.array([N])},
    **{
        "n,n": np.array([N, N]),
        "n,e": np.array([N, E]),
        "heads": np.array([-1, N, H, E]),
        "rows": np.array([-1, N, H * E]),
    },
    "scale": np.array(0.5),
}
HEADS = [
    row
    for name in "qkv"
    for row in [
        ("MatMul", f"x w{name}", f"{name}0"),
        ("Reshape", f"{name}0 heads", f"{name}1"),
        ("Transpose", f"{name}1", f"{name}2", {"perm": [0, 2, 1, 3]}),
        ("Shape", f"{name}2", f"{name}s"),
        ("Gather", f"{name}s 01", f"{name}b"),
        ("ReduceProd", f"{name}b", f"{name}p"),
        ("Concat", f"{name}p -1 e", f"{name}t", {"axis": 0}),
        ("Reshape", f"{name}2 {name}t", name),
    ]
]
ATTENTION = [
    *(*HEADS, ("Transpose", "k", "turned", {"perm": [0, 2, 1]}), ("MatMul", "q turned", "a")),
    *(("Max", "qb kb", "b"), ("Concat", "b n,n", "bt", {"axis": 0}), ("Reshape", "a bt", "scores")),
    *(("Mul", "scores scale", "scaled"), ("Softmax", "scaled", "p")),
    *(("Concat", "qp n,n", "pt", {"axis": 0}), ("Reshape", "p pt", "flat"), ("MatMul", "flat v", "o")),
    *(("Concat", "b n,e", "apart_shape", {"axis": 0}), ("Reshape", "o apart_shape", "apart")),
    *(("Transpose", "apart", "back", {"perm": [0, 2, 1, 3]}), ("Reshape", "back rows", "y")),
]


def network(rows, *batch, opset=17, **more):
    model = graph(rows, NUMBERS | more, {"x": (*batch, N, H * E)}, opset=opset)
    return onnx.shape_inference.infer_shapes(model)


def kinds(model, *shapes):
    """The operators in canonical form, which compute the same at every batch."""
    found = read(model)
    normalize(found)
    tidy(found)
    after = write(found)
    for shape in shapes:
        x = {"x": RANDOM.standard_normal(shape)}
        before, behind = (ReferenceEvaluation(each).run(x)["y"] for each in (model, after))
        np.testing.assert_allclose(behind, before, rtol=0, atol=1e-12)
    return [node.op_type for node in after.graph.node]


@pytest.mark.parametrize("batch", ["B", 2])
def test_attention_of_flattened_heads_is_one_of_heads(batch):
    shapes = [(size, N, H * E) for size in ((1, 2, 3) if batch == "B" else (batch,))]
    found = kinds(network(ATTENTION, batch), *shapes)
    assert sorted({*found}) == ["MatMul", "Mul", "Reshape", "Softmax", "Transpose"]
    assert found.count("MatMul") == 5
    assert found.count("Reshape") == found.count("Transpose") == 4


def test_a_batch_of_one_is_no_factor_of_the_first_axis():
    assert kinds(network(ATTENTION, 1), (1, N, H * E)).count("MatMul") == 5


def test_heads_that_lie_differently_stay_flat():
    rows = [*HEADS, ("Transpose", "k2", "k3", {"perm": [1, 0, 2, 3]}), ("Reshape", "k3 kt", "k4")]
    rows += [("Transpose", "k4", "k5", {"perm": [0, 2, 1]}), ("MatMul", "q k5", "y")]
    assert "Reshape" in kinds(network(rows, "B"), (1, N, H * E), (2, N, H * E))


def test_a_view_that_others_read_stays_flat():
    rows = [*HEADS, ("Transpose", "k", "k3", {"perm": [0, 2, 1]}), ("MatMul", "q k3", "a"), ("Sin", "q", "r")]
    rows += [("MatMul", "a r", "y")]
    assert kinds(network(rows, "B"), (2, N, H * E)).count("MatMul") == 4


@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("opset", [13, 18])
def test_a_product_of_sizes_is_known(keepdims, opset):
    rows = [("Shape", "x", "s"), ("Gather", "s 01", "g"), ("ReduceProd", "g", "p", {"keepdims": keepdims})]
    rows += [] if keepdims else [("Reshape", "p -1", "p1")]
    rows += [("Concat", f"{'p' if keepdims else 'p1'} -1", "t", {"axis": 0}), ("Reshape", "x t", "y")]
    assert kinds(network(rows, "B", opset=opset), (1, N, H * E), (3, N, H * E)) == ["Reshape"]


@pytest.mark.parametrize("operator", ["Max", "Min"])
def test_the_larger_of_two_sizes_is_known_if_they_are_equal(operator):
    ends = [("Concat", "m n e2", "t", {"axis": 0}), ("Reshape", "x t", "y")]
    same = [("Shape", "x", "s"), ("Gather", "s 0", "g"), (operator, "g g", "m"), *ends]
    other = [("Shape", "x", "s"), ("Gather", "s 0", "g"), (operator, "g e", "m"), *ends]
    more = {"0": np.array([0]), "e2": np.array([-1])}
    assert kinds(network(same, "B", **more), (2, N, H * E)) == ["Reshape"]
    assert operator in kinds(network(other, "B", **more), (4, N, H * E))


def test_a_file_with_a_dynamic_batch_is_verified():
    onnx.save(single(network(ATTENTION, "B")), "net.onnx")
    done = rc.fold("net.onnx", measure=False)
    assert done.verdict == "passed"
    assert "Shape" not in done.operators
