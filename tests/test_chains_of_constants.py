"""constants: constants in series are one, whatever their shapes, unless the graph would hold more numbers."""

from __future__ import annotations

from itertools import product

import numpy as np
import onnx
import pytest
from folded_operators import operators_after_folding
from onnx import TensorProto
from test_fold_onnx import graph

from repaconv.graph.models_in_onnx_ir import rewritten
from repaconv.rewrites.fold.chains_of_constants import CONSTANTS
from repaconv.rewrites.fold.fold_pipeline import FOLDS

RANDOM = np.random.default_rng(0)
SHAPE = (2, 3, 4, 5)
MASK, OTHER, LARGER = (RANDOM.uniform(1, 2, shape) for shape in ((2, 1, 4, 5), (4, 5), (2, 3, 4, 5)))


def kinds(rows, weights, outputs=("y",)):
    """The operators after folding, which compute the same in float64."""
    return operators_after_folding(graph(rows, weights, {"x": SHAPE}, outputs), RANDOM.standard_normal(SHAPE))


def sides(operator, constants):
    """Nodes in series, each with its constant at either place."""
    for places in product((0, 1), repeat=len(constants)):
        value, rows = "z", [("Exp", "x", "z")]
        for number, (name, place) in enumerate(zip(constants, places, strict=True)):
            out = "y" if number + 1 == len(constants) else f"v{number}"
            rows.append((operator[number], f"{name} {value}" if place == 0 else f"{value} {name}", out))
            value = out
        yield rows


@pytest.mark.parametrize("operators", [*product(("Add", "Sub"), repeat=2), ("Add", "Sub", "Sub")])
def test_sums(operators):
    for rows in sides(operators, "cde"[: len(operators)]):
        assert len(kinds(rows, {"c": MASK, "d": OTHER, "e": LARGER})) == 2


@pytest.mark.parametrize("operators", [*product(("Mul", "Div"), repeat=2)])
def test_products(operators):
    for rows in sides(operators, "cd"):
        whole = operators[1] == "Div" and rows[2][1].startswith("d")
        assert len(kinds(rows, {"c": MASK, "d": OTHER})) == 2 + whole


@pytest.mark.parametrize("second", [("Mul", "v s", "y"), ("Div", "v s", "y")])
@pytest.mark.parametrize("first", [("MatMul", "c z", "v"), ("MatMul", "z k", "v")])
def test_a_number_after_a_product_with_a_constant(first, second):
    weights = {"c": RANDOM.standard_normal((3, 6, 4)), "k": RANDOM.standard_normal((3, 5, 2)), "s": np.array([[0.3]])}
    assert kinds([("Exp", "x", "z"), first, second], weights) == ["Exp", "MatMul"]


@pytest.mark.parametrize("second", [("Mul", "v s", "y"), ("Div", "v s", "y")])
@pytest.mark.parametrize(
    ("first", "shape"), [("z w", (5, 4)), ("w z", (2, 5)), ("z w", (4,)), ("w z", (5,)), ("z c", (4,))]
)
def test_a_number_with_more_axes_than_the_product_stays(first, shape, second):
    numbers = {"w": np.ones(shape[::-1]), "c": np.ones(4), "s": np.full((1, 1, 1), 0.3)}
    x = RANDOM.standard_normal(shape)
    model = graph([("Exp", "x", "z"), ("MatMul", first, "v"), second], numbers, {"x": shape})
    assert operators_after_folding(model, x) == ["Exp", "MatMul", second[0]]


def test_a_mask_that_several_layers_add_twice():
    rows = [("Exp", "x", "z"), ("Add", "z c", "1"), ("Add", "1 c", "2"), ("Softmax", "2", "3")]
    rows += [("Add", "c 3", "4"), ("Add", "4 c", "5"), ("Softmax", "5", "y")]
    model = graph(rows, {"c": MASK}, {"x": SHAPE})
    assert operators_after_folding(model, RANDOM.standard_normal(SHAPE)).count("Add") == 2
    assert sum(np.prod(each.dims) for each in rewritten(model, FOLDS)[0].graph.initializer) == MASK.size


STAYS = {
    "a result that is larger than both": {"c": RANDOM.standard_normal((4, 1)), "d": RANDOM.standard_normal((3, 1, 5))},
    "a sum that is infinite": {"c": np.full(MASK.shape, -3e38), "d": np.full(OTHER.shape, -3e38)},
    "infinities that cancel": {"c": np.full(MASK.shape, -np.inf), "d": np.full(OTHER.shape, np.inf)},
}


@pytest.mark.parametrize("case", STAYS)
def test_constants_stay_with(case):
    rows = [("Exp", "x", "z"), ("Add", "z c", "v"), ("Add", "v d", "y")]
    after, _ = rewritten(graph(rows, STAYS[case], {"x": SHAPE}), [CONSTANTS])
    assert [node.op_type for node in after.graph.node].count("Add") == 2


def test_a_large_constant_that_is_read_elsewhere_stays():
    rows = [("Exp", "x", "z"), ("Add", "z c", "v"), ("Add", "v d", "y"), ("Mul", "x c", "y2")]
    assert kinds(rows, {"c": LARGER, "d": OTHER}, ("y", "y2")).count("Add") == 2


def test_constants_that_other_operators_merge_to_another_constant_stay():
    rows = [("Exp", "x", "z"), ("Add", "z c", "v"), ("Add", "v d", "y")]
    rows += [("Sin", "x", "w"), ("Mul", "w c", "u"), ("Mul", "u d", "y2")]
    assert sorted(kinds(rows, {"c": LARGER, "d": OTHER}, ("y", "y2"))) == ["Add", "Add", "Exp", "Mul", "Mul", "Sin"]


def test_the_bias_of_a_layer_stays_next_to_positions():
    rows = [("MatMul", "x w", "1"), ("Add", "1 b", "2"), ("Add", "2 p", "3"), ("Softmax", "3", "y")]
    numbers = {"w": RANDOM.standard_normal((5, 6)), "b": RANDOM.standard_normal(6), "p": RANDOM.standard_normal((4, 6))}
    assert kinds(rows, numbers).count("Add") == 2


def test_infinite_masks_and_half_precision():
    rows = [("Exp", "x", "z"), ("Add", "z c", "v"), ("Add", "v d", "y")]
    for most, kept in ((np.inf, 1), (65504, 2)):
        given = {"c": np.full(MASK.shape, -most, np.float16), "d": np.full(OTHER.shape, -most, np.float16)}
        model = graph(rows, given, {"x": SHAPE}, kind=TensorProto.FLOAT16)
        after, _ = rewritten(model, [CONSTANTS])
        onnx.checker.check_model(after, full_check=True)
        assert [node.op_type for node in after.graph.node].count("Add") == kept


@pytest.mark.parametrize(("factor", "kept"), [(1e-4, 2), (1e-2, 1)])
def test_factors_whose_product_half_precision_does_not_have_in_full(factor, kept):
    rows = [("Exp", "x", "z"), ("Mul", "z c", "v"), ("Mul", "v c", "y")]
    model = graph(rows, {"c": np.array(factor, np.float16)}, {"x": SHAPE}, kind=TensorProto.FLOAT16)
    after, _ = rewritten(model, [CONSTANTS])
    assert [node.op_type for node in after.graph.node].count("Mul") == kept
