"""convolution: a scale goes into all convolutions after it, also past means and past products such as a gate."""

from __future__ import annotations

import numpy as np
import pytest
from folded_operators import operators_after_folding
from onnx import TensorProto, helper
from test_fold_onnx import graph

from repaconv.graph.models_in_onnx_ir import rewritten
from repaconv.rewrites.fold.fold_pipeline import FOLDS

RANDOM = np.random.default_rng(0)
SHAPE = (2, 4, 6, 5)
NUMBERS = {
    **{"f": np.array(1.5), "s": RANDOM.standard_normal((1, 4, 1, 1)), "t": RANDOM.standard_normal((1, 4, 1, 1))},
    **{"w": RANDOM.standard_normal((3, 4, 1, 1)), "v": RANDOM.standard_normal((4, 3, 1, 1))},
    **{"k": RANDOM.standard_normal((5, 4, 3, 3)), "d": RANDOM.standard_normal((4, 1, 3, 3))},
}
START = ("Tanh", "x", "h")
GATE = [
    ("GlobalAveragePool", "a", "m"),
    ("Conv", "m w", "n"),
    ("Relu", "n", "r"),
    ("Conv", "r v", "q"),
    ("Sigmoid", "q", "g"),
]
PADDED = {"pads": [1] * 4}
END = ("Conv", "p k", "y", PADDED)


def kinds(rows, outputs=("y",), shape=SHAPE, **more):
    """The operators after folding, which compute the same in float64."""
    model = graph(rows, NUMBERS | more, {"x": shape}, outputs)
    return operators_after_folding(model, RANDOM.standard_normal(shape))


@pytest.mark.parametrize("factor", [0.0, -1.5, RANDOM.standard_normal((1, 4, 1, 1))], ids=["0", "negative", "channels"])
def test_a_scale_before_squeeze_and_excitation(factor):
    rows = [START, ("Mul", "h c", "a"), *GATE, ("Mul", "a g", "p"), END]
    assert kinds(rows, c=np.array(factor)).count("Mul") == 1


def test_a_scale_of_the_gate():
    rows = [
        START,
        *(row if row[2] != "m" else (row[0], "h", "m") for row in GATE),
        ("Mul", "g f", "e"),
        ("Mul", "e h", "p"),
        END,
    ]
    assert kinds(rows).count("Mul") == 1


def test_a_scale_before_a_mean_along_the_image():
    rows = [START, ("Mul", "h s", "a"), ("ReduceMean", "a axes", "m"), ("Conv", "m w", "y")]
    assert "Mul" not in kinds(rows, axes=np.array([2, 3]))


OTHERS = {
    "square": [("Mul", "a a", "p"), END],
    "two ways": [("Tanh", "h", "b"), ("Mul", "a b", "c"), ("GlobalAveragePool", "a", "e"), ("Mul", "c e", "p"), END],
    "read elsewhere": [
        *GATE,
        ("Mul", "a g", "p"),
        ("Conv", "p k", "z", PADDED),
        ("ReduceMax", "a", "j"),
        ("Mul", "z j", "y"),
    ],
    "added": [*GATE, ("Add", "a g", "p"), END],
    "weight": [("Conv", "x a", "y")],
    "maximum over negative factors": [("GlobalMaxPool", "a", "p"), ("Conv", "p w", "y")],
    "channels": [("Transpose", "a", "b", {"perm": [0, 2, 1, 3]}), ("Mul", "b x2", "p2"), ("Conv", "p2 k2", "y")],
}


@pytest.mark.parametrize("rows", OTHERS.values(), ids=OTHERS)
def test_what_does_not_commute_keeps_the_scale(rows):
    more = {"x2": RANDOM.standard_normal((1, 6, 4, 1)), "k2": RANDOM.standard_normal((2, 6, 1, 1))}
    found = kinds([START, ("Mul", "h s", "a"), *rows], **more)
    assert found.count("Mul") == sum(row[0] == "Mul" for row in rows) + 1


def test_a_shift_does_not_pass_a_product():
    rows = [START, ("Add", "h t", "a"), *GATE, ("Mul", "a g", "p"), END]
    assert kinds(rows).count("Add") == 1


def test_a_value_that_is_an_output_or_read_in_a_branch_keeps_its_scale():
    rows = [START, ("Mul", "h s", "a"), *GATE, ("Mul", "a g", "p"), END]
    assert kinds(rows, ("y", "p")).count("Mul") == 2
    end = [helper.make_tensor_value_info("o", TensorProto.DOUBLE, None)]
    branches = [helper.make_graph([helper.make_node("Sin", [name], ["o"])], "branch", [], end) for name in ("a", "h")]
    rows += [("ReduceMax", "x", "l", {"keepdims": 0}), ("Greater", "l zero", "if")]
    rows += [("If", "if", "z", {"then_branch": branches[0], "else_branch": branches[1]})]
    after, _ = rewritten(graph(rows, NUMBERS | {"zero": np.array(0.0)}, {"x": SHAPE}, ("y", "z")), FOLDS)
    assert sum(node.op_type == "Mul" for node in after.graph.node) == 2


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("operator", ["Mul", "Div", "BatchNormalization"])
def test_a_scale_before_a_transposed_convolution(operator, groups):
    """A shift stays before it, since it is not added beyond the border."""
    more = {"u": RANDOM.standard_normal((4, 6 // groups, 4, 4)), "one": np.ones(4), "zero": np.zeros(4)}
    names = "h one zero zero c" if operator == "BatchNormalization" else "h c"
    number = 1 + RANDOM.random((4,) if operator == "BatchNormalization" else (4, 1, 1))
    last = ("ConvTranspose", "a u", "y", {"strides": [2, 2], "pads": [1] * 4, "group": groups})
    assert kinds([START, (operator, names, "a"), last], c=number, **more) == ["Tanh", "ConvTranspose"]
    if operator == "BatchNormalization":
        names = "h one t1 zero c"
        rows = [START, (operator, names, "a"), last]
        assert kinds(rows, c=number, t1=RANDOM.standard_normal(4), **more) == ["Tanh", operator, "ConvTranspose"]


def test_a_scale_before_a_transposed_convolution_and_another_reader_stays():
    more = {"u": RANDOM.standard_normal((4, 6, 2, 2))}
    rows = [START, ("Mul", "h s", "a"), ("ConvTranspose", "a u", "y"), ("Relu", "a", "z")]
    assert "Mul" in kinds(rows, ("y", "z"), **more)
