"""finish: slices that cover a value become a Split, layers on matrices a Gemm, and equal matrices one initializer."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from folded_operators import require_same_outputs
from onnx import TensorProto, numpy_helper
from test_fold_onnx import graph

from repaconv.graph.canonical_form import LAST_AXES_KEY
from repaconv.graph.models_in_onnx_ir import read, tidy, write
from repaconv.rewrites.fold.recombination_after_folds import FINISH

RANDOM = np.random.default_rng(0)
SHAPE = (2, 6, 4, 4)
NUMBERS = {str(number): np.array([number]) for number in (-2, 0, 1, 2, 3, 4, 5, 6)}
W, V = RANDOM.standard_normal((4, 5)), RANDOM.standard_normal((20, 20))


def finished(model: onnx.ModelProto, shape=SHAPE) -> onnx.ModelProto:
    """The graph after FINISH, of which the outputs are the same."""
    made = read(model)
    assert [*FINISH.apply(made)] == []
    tidy(made)
    after = write(made)
    x = RANDOM.standard_normal([2 if isinstance(size, str) else size for size in shape])
    require_same_outputs(model, after, x)
    return after


def network(rows, outputs=("y",), shape=SHAPE, **weights):
    return graph(rows, {**NUMBERS, **weights}, {"x": shape}, outputs, opset=18)


def operators(model, shape=SHAPE):
    return [node.op_type for node in finished(model, shape).graph.node]


def cut(*ends, x="x", axis="1"):
    """Slices between these ends, and an operator of its own after each."""
    rows = [("Slice", f"{x} {a} {b} {axis}", f"s{a}{b}{axis}") for a, b in ends]
    kinds = ("Sin", "Tan", "Cos", "Exp", "Sinh")
    rows += [(kind, f"s{a}{b}{axis}", f"t{a}{b}{axis}") for kind, (a, b) in zip(kinds, ends, strict=False)]
    return rows, tuple(f"t{a}{b}{axis}" for a, b in ends)


@pytest.mark.parametrize("shape", [SHAPE, ("n", 6, "h", 4)], ids=["fixed", "dynamic"])
@pytest.mark.parametrize("ends", [((0, 2), (2, 6)), ((3, 6), (0, 1), (1, 3)), ((0, 1), (1, 2), (2, 3), (3, 4), (4, 6))])
def test_slices_that_cover_a_value_are_one_split(ends, shape):
    after = finished(network(*cut(*ends), shape=shape), shape)
    (split,) = (node for node in after.graph.node if node.op_type == "Split")
    assert "Slice" not in [node.op_type for node in after.graph.node]
    assert len(split.output) == len(ends)


@pytest.mark.parametrize(
    "ends",
    [((0, 2), (3, 6)), ((0, 3), (2, 6)), ((0, 2), (2, 5)), ((1, 3), (3, 6)), ((0, 6),), ((0, 2), (1, 3), (4, 6))],
    ids=["a gap", "an overlap", "not the end", "not the start", "all", "as many in all"],
)
def test_slices_that_do_not_cover_it_stay(ends):
    assert operators(network(*cut(*ends))).count("Slice") == len(ends)


def test_a_slice_that_is_there_twice_stays():
    rows, outputs = cut((0, 2), (2, 6))
    rows += [("Slice", "x 0 2 1", "u"), ("Exp", "u", "v")]
    assert operators(network(rows, (*outputs, "v"))).count("Slice") == 3


def test_slices_of_two_axes_and_of_slices():
    rows, outputs = cut((0, 2), (2, 6))
    more, others = cut((0, 1), (1, 4), axis="2")
    kinds = operators(network([*rows, *more], (*outputs, *others)))
    assert (kinds.count("Split"), "Slice" in kinds) == (2, False)
    inner, ends = cut((0, 1), (1, 4), x="s261", axis="2")
    kinds = operators(network([*rows, *inner], (*outputs, *ends)))
    assert (kinds.count("Split"), "Slice" in kinds) == (2, False)
    inner, ends = cut((0, 3), (3, 4), x="s261", axis="1")
    kinds = operators(network([*rows, *inner], (*outputs, *ends)))
    assert (kinds.count("Split"), "Slice" in kinds) == (2, False)


def test_a_value_that_is_covered_after_one_that_is_not():
    rows, outputs = cut((0, 2), (3, 6))
    more, others = cut((0, 1), (1, 4), axis="2")
    kinds = operators(network([*rows, *more], (*outputs, *others)))
    assert (kinds.count("Split"), kinds.count("Slice")) == (1, 2)


@pytest.mark.parametrize("axes_last", [True, False])
def test_keys_are_transposed_by_a_last_transpose_of_two_axes(axes_last):
    rows = [
        ("Transpose", "x", "t", {"perm": [0, 2, 3, 1]}),
        ("Sin", "x", "s"),
        ("Transpose", "s", "u", {"perm": [0, 2, 1, 3]}),
    ]
    made = read(network([*rows, ("MatMul", "u t", "y")], shape=(2, 6, 4, 6)))
    made.meta[LAST_AXES_KEY] = axes_last
    [*FINISH.apply(made)]
    perms = [list(node.attributes["perm"].as_ints()) for node in made.graph if node.op_type == "Transpose"]
    assert ([0, 1, 3, 2] in perms) == axes_last
    assert len(perms) == 2 + axes_last
    made = read(
        network([*rows, ("MatMul", "u t", "v"), ("Exp", "t", "z"), ("Exp", "v", "y")], ("y", "z"), (2, 6, 4, 6))
    )
    [*FINISH.apply(made)]
    assert [node.op_type for node in made.graph].count("Transpose") == 2


def test_slices_of_a_dynamic_axis_stay():
    kinds = operators(network(*cut((0, 2), (2, 6)), shape=("n", "c", 4, 4)), (2, 6, 4, 4))
    assert kinds.count("Slice") == 2


@pytest.mark.parametrize("start", ["3", "5"])
def test_backwards_slices_stay(start):
    end = str(int(start) - 3)
    backwards = [
        ("Slice", f"x {start} {end} 1 m", "a"),
        ("Slice", "x 0 3 1", "b"),
        ("Sin", "a", "y"),
        ("Tan", "b", "z"),
    ]
    assert operators(network(backwards, ("y", "z"), m=np.array([-1]))).count("Slice") == 2


B = RANDOM.standard_normal(5)


@pytest.mark.parametrize(
    ("rows", "shape", "bias", "gemm"),
    [
        ([("MatMul", "x w", "a"), ("Add", "a b", "y")], (3, 4), B, True),
        ([("MatMul", "x w", "a"), ("Add", "b a", "y")], ("n", 4), B, True),
        ([("MatMul", "x w", "a"), ("Add", "a b", "y")], (2, 3, 4), B, False),
        ([("MatMul", "x w", "a"), ("Add", "a b", "y")], (3, 4), B[None], False),
        ([("MatMul", "x w", "a"), ("Add", "a b", "y"), ("Sin", "a", "z")], (3, 4), B, False),
        ([("MatMul", "x w", "a"), ("Sub", "a b", "y")], (3, 4), B, False),
        ([("MatMul", "x w", "a"), ("Sin", "x", "s"), ("ReduceSum", "s 1", "c"), ("Add", "a c", "y")], (3, 4), B, False),
    ],
    ids=["", "bias first", "three axes", "bias of a row", "read elsewhere", "minus", "a computed bias"],
)
def test_a_layer_on_a_matrix_is_a_gemm(rows, shape, bias, gemm):
    outputs = ("y", "z") if rows[-1][2] == "z" else ("y",)
    model = network(rows, outputs, shape, w=W, b=bias)
    kinds = operators(model, (3, 4) if shape[0] == "n" else shape)
    assert ("Gemm" in kinds) == gemm
    assert ("MatMul" in kinds) != gemm


def matrices(first, second):
    rows = [("MatMul", "x first", "a"), ("Sin", "a", "b"), ("MatMul", "b second", "y")]
    after = finished(graph(rows, {"first": first, "second": second}, {"x": (3, 20)}, opset=18), (3, 20))
    return len([weight for weight in after.graph.initializer if len(weight.dims) == 2])


@pytest.mark.parametrize("place", [(0, 0), (0, 1), (10, 3), (19, 19)])
def test_equal_matrices_are_one_and_no_others(place):
    other = V.copy()
    assert matrices(V, other) == 1
    other[place] += 1e-9
    assert matrices(V, other) == 2


def test_vectors_and_matrices_of_other_shapes_and_types_stay_apart():
    zeros, types = np.zeros((20, 20)), (np.float64, np.int64)
    rows = [("Add", "x one", "a"), ("Add", "a two", "b"), ("Add", "b row", "c"), ("Cast", "whole", "d", {"to": 11})]
    rows += [("Add", "c d", "e"), ("Add", "e none", "f"), ("ReduceSum", "tall axis", "g"), ("Add", "f g", "y")]
    weights = {"one": zeros[0], "two": zeros[0], "row": zeros[:1], "whole": zeros.astype(types[1]), "none": zeros}
    weights |= {"tall": zeros.reshape(40, 10), "axis": np.array([0, 1])}
    made = read(graph(rows, weights, {"x": (20, 20)}, opset=18))
    [*FINISH.apply(made)]
    assert set(weights) <= set(made.graph.initializers)


def test_an_initializer_that_is_an_output_stays_one_and_later_ones_are_merged():
    rows = [("Add", "x vector", "o"), ("MatMul", "o first", "a"), ("Sin", "a", "b"), ("MatMul", "b second", "c")]
    rows += [("Cos", "c", "d"), ("MatMul", "d third", "y")]
    weights = {"vector": V[0], "first": V, "second": V.copy(), "third": V.copy()}
    for output in ("first", "second"):
        made = read(graph(rows, weights, {"x": (3, 20)}, ("y", output), opset=18))
        [*FINISH.apply(made)]
        assert output in made.graph.initializers
        assert len(made.graph.initializers) == 3


def test_an_initializer_that_is_an_input_stays_one():
    rows = [("MatMul", "x first", "a"), ("Sin", "a", "b"), ("MatMul", "b second", "y")]
    model = graph(rows, {"first": V, "second": V.copy()}, {"x": (3, 20), "second": (20, 20)}, opset=18)
    made = read(model)
    [*FINISH.apply(made)]
    assert {"first", "second"} <= set(made.graph.initializers)
    assert numpy_helper.to_array(model.graph.initializer[0]).dtype == np.float64
    assert model.graph.input[0].type.tensor_type.elem_type == TensorProto.DOUBLE
