"""common-factor: a value is multiplied once, and not multiplied by small factors and then added."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import onnx
import pytest
from test_fold_onnx import difference, graph, normal

from repaconv.graph.element_type_conversion import to_float64
from repaconv.graph.models_in_onnx_ir import rewritten
from repaconv.rewrites.fold.common_factors_of_sums import COMMON_FACTOR
from repaconv.rewrites.fold.fold_pipeline import FOLDS

NORM = [("Relu", "x", "r"), ("ReduceL2", "r pixels", "norm", {"keepdims": 1})]
WEIGHTS = {"pixels": np.array([1, 2]), "gain": normal(8), "shift": normal(8), "w": normal(8, 4), "bias": normal(4)}


def folds(rows, shape=("n", 5, 6, 8), outputs=("y",), rewrites=FOLDS):
    """The operators after the fold, which computes the same, and whether the rewrite ran."""
    model = to_float64(graph(rows, WEIGHTS, {"x": shape}, outputs))
    after, changes = rewritten(model, rewrites)
    onnx.checker.check_model(after, full_check=True)
    assert difference(model, after, normal(2, 5, 6, 8)) < 1e-12
    return [node.op_type for node in after.graph.node], "common-factor" in {change.rewrite for change in changes}


@pytest.mark.parametrize(
    "products",
    [
        [("Mul", "r norm", "p"), ("Mul", "gain p", "q"), ("Add", "q r", "y")],
        [("Mul", "norm gain", "p"), ("Mul", "p r", "q"), ("Add", "r q", "y")],
    ],
)
def test_pixels_are_multiplied_once(products):
    operators, changed = folds([*NORM, *products])
    assert changed
    assert operators == ["Relu", "ReduceL2", "Mul", "Add", "Mul"]


def test_the_shift_of_a_global_response_norm_is_in_the_way_only_until_the_next_layer_takes_it():
    rows = [*NORM, ("Mul", "r norm", "p"), ("Mul", "gain p", "q"), ("Add", "q shift", "s"), ("Add", "s r", "t")]
    operators, changed = folds([*rows, ("MatMul", "t w", "m"), ("Add", "m bias", "y")])
    assert changed
    assert operators == ["Relu", "ReduceL2", "Mul", "Add", "Mul", "MatMul", "Add"]


@pytest.mark.parametrize(
    "factors",
    [
        [("ReduceMean", "r most", "f", {"keepdims": 0}), ("Sigmoid", "f", "g")],  # of a lower rank
        [("ReduceMean", "r most", "f", {"keepdims": 1}), ("ReduceMean", "r image", "g", {"keepdims": 1})],
    ],
)
def test_each_product_of_factors_has_its_own_shape(factors, monkeypatch):
    monkeypatch.setitem(WEIGHTS, "most", np.array([0, 1, 2]))
    monkeypatch.setitem(WEIGHTS, "image", np.array([1, 2, 3]))
    rows = [("Relu", "x", "r"), *factors, ("Tanh", "f", "h"), ("Mul", "r h", "p"), ("Mul", "p f", "q")]
    operators, changed = folds([*rows, ("Mul", "q g", "s"), ("Add", "s r", "y")], shape=(2, 5, 6, 8))
    assert changed
    assert operators[-4:] == ["Mul", "Mul", "Add", "Mul"]


def test_a_chain_of_more_products_than_python_has_frames():
    names = ["r", *(f"p{number}" for number in range(1200))]
    rows = [("Mul", f"{before} gate", after) for before, after in pairwise(names)]
    rows = [("Sigmoid", "norm", "gate"), *rows, ("Add", f"{names[-1]} r", "y")]
    assert folds([*NORM, *rows], rewrites=[COMMON_FACTOR])[1]


@pytest.mark.parametrize(
    ("rows", "outputs"),
    [
        ([("Sigmoid", "x", "s"), ("Mul", "r s", "p"), ("Add", "p r", "y")], ("y",)),  # as many numbers as it has
        ([("Mul", "r norm", "p"), ("Add", "p r", "y")], ("y", "p")),  # the product is an output
        ([("Mul", "r norm", "p"), ("Add", "p r", "1"), ("Mul", "1 p", "y")], ("y",)),  # something else reads it
        ([("Mul", "r norm", "p"), ("Add", "p norm", "y")], ("y",)),  # the smaller factor is added
        ([("Mul", "x norm", "p"), ("Add", "p r", "y")], ("y",)),  # another value is added
    ],
)
def test_other_sums_stay(rows, outputs):
    assert not folds([*NORM, *rows], outputs=outputs)[1]


def test_a_factor_that_makes_the_value_larger_stays():
    rows = [("ReduceMax", "x pixels", "most", {"keepdims": 1}), ("Relu", "most", "m"), ("Sigmoid", "x", "s")]
    assert not folds([*rows, ("Mul", "m s", "p"), ("Add", "p m", "y")])[1]
