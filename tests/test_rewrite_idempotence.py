"""affine: a second pass of the rewrite changes nothing, and a pass never writes more operators than before."""

from __future__ import annotations

import numpy as np
import pytest
from folded_operators import operators_after_folding
from test_fold_onnx import graph

from repaconv.graph.compute_costs import known_macs
from repaconv.graph.models_in_onnx_ir import read, rewritten
from repaconv.rewrites.fold.fold_pipeline import FOLDS

RANDOM = np.random.default_rng(0)
WEIGHTS = {
    **{"w": RANDOM.standard_normal((4, 4)), "v": RANDOM.standard_normal((4, 4)), "b": RANDOM.standard_normal(4)},
    **{"t": RANDOM.standard_normal((12, 5)), "u": RANDOM.standard_normal((12, 5)), "s": RANDOM.standard_normal(4)},
    **{"k": np.eye(3, 2).reshape(3, 2, 1, 1), "l": RANDOM.standard_normal((3, 2, 1, 1)), "half": np.array([2, 2])},
    **{
        "column": RANDOM.standard_normal((4, 1)),
        "twice": np.array([0, 0]),
        "around": np.array([0, 0, 0, 2, 0, 0, 0, 0]),
    },
    **{"few": RANDOM.standard_normal(3), "begin": np.array([2]), "end": np.array([5]), "axis": np.array([2])},
    **{"w0": RANDOM.standard_normal(4), "narrow": RANDOM.standard_normal((4, 2)), "few_b": RANDOM.standard_normal(2)},
    **{name: RANDOM.standard_normal((2, 4)) for name in ("w1", "w2", "w3")},
}
TOKENS, IMAGE = (2, 3, 4), (2, 4, 3, 3)
CASES = {
    "a part twice": (
        [("Relu", "x", "r"), ("Concat", "x r", "c", {"axis": 2}), ("Concat", "r c", "y", {"axis": -1})],
        ["Relu", "Concat"],
    ),
    "a scaled part between others": (
        [("Relu", "x", "r"), ("Mul", "r s", "m"), ("Concat", "r m x", "y", {"axis": 2})],
        ["Relu", "Mul", "Concat"],
    ),
    "equal layers of a Concat": (
        [
            *[("Relu", "x", "r"), ("Tanh", "x", "h"), ("Concat", "x r h", "c", {"axis": 2})],
            *[("MatMul", "c t", "a"), ("MatMul", "c t", "d"), ("MatMul", "c u", "e")],
            *[("Sigmoid", "a", "f"), ("Softplus", "d", "g"), ("Mul", "f g", "i"), ("Mul", "i e", "y")],
        ],
        ["Relu", "Tanh", "Concat", "MatMul", "MatMul", "Sigmoid", "Softplus", "Mul", "Mul"],
    ),
    "a norm and a LayerScale before a sum": (
        [
            *[("Relu", "x", "r"), ("LayerNormalization", "r s b", "n"), ("Mul", "n w0", "m"), ("Sub", "r m", "a")],
            *[("Sigmoid", "a", "h"), ("Mul", "a h", "y")],
        ],
        ["Relu", "LayerNormalization", "Sub", "Sigmoid", "Mul"],
    ),
    "one bias before three layers without": (
        [
            *[("Relu", "x", "r"), ("MatMul", "r narrow", "a"), ("Add", "a few_b", "c")],
            *[("MatMul", f"c w{number}", f"p{number}") for number in (1, 2, 3)],
            *[("Mul", "p1 p2", "q"), ("Mul", "q p3", "y")],
        ],
        ["Relu", "MatMul", "Add", "MatMul", "MatMul", "MatMul", "Mul", "Mul"],
    ),
    "a product and a scaled value": (
        [
            *[("Tanh", "x", "h"), ("Mul", "h s", "m"), ("MatMul", "x w", "a"), ("Add", "a b", "c")],
            ("Concat", "c a m", "y", {"axis": 2}),
        ],
        ["Tanh", "Mul", "MatMul", "Add", "Concat"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_no_more_operators(name):
    rows, expected = CASES[name]
    model = graph(rows, WEIGHTS, {"x": TOKENS}, ("y",), opset=17)
    assert sorted(operators_after_folding(model, RANDOM.standard_normal(TOKENS))) == sorted(expected)


def test_rows_of_zeros_do_not_make_a_sum_of_a_concat():
    rows = [("Relu", "x", "r"), ("Split", "r half", "p q", {"axis": 1})]
    rows += [("Conv", "p k", "a"), ("Conv", "q l", "b_"), ("Concat", "a b_", "y", {"axis": 1})]
    model = graph(rows, WEIGHTS, {"x": IMAGE}, ("y", "q"), opset=17)
    after, _ = rewritten(model, FOLDS)
    assert known_macs(read(after)) <= known_macs(read(model))
    assert "Add" not in operators_after_folding(model, RANDOM.standard_normal(IMAGE))


@pytest.mark.parametrize(
    "rows",
    [
        [("Relu", "x", "r"), ("MatMul", "r column", "a"), ("Gather", "a twice", "y", {"axis": 2})],
        [
            *[("Relu", "x", "r"), ("Pad", "r wide", "p"), ("Slice", "p begin end axis", "c")],
            ("Mul", "c few", "y"),
        ],
    ],
    ids=["Gather of a product", "Pad, Slice, Mul"],
)
def test_it_is_written_once(rows):
    weights = {**WEIGHTS, "wide": np.array([0, 0, 0, 0, 0, 2])}
    _, changes = rewritten(graph(rows, weights, {"x": TOKENS}, ("y",), opset=17), FOLDS)
    assert len(changes) <= 1
