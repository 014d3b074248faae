"""prelu: an activation of two slopes that is written as several operators is one; what is not quite that stays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from folded_operators import operators_after_folding
from onnx import TensorProto, helper
from test_fold_onnx import graph

from repaconv.graph.models_in_onnx_ir import rewritten
from repaconv.rewrites.fold.prelu_operator import PRELU
from repaconv.sources.graph_fold import folded

RANDOM = np.random.default_rng(0)
SHAPE = (2, 4, 3, 5)
NUMBERS = {
    "tenth": 0.125,
    "half": 0.5,
    "two": 2.0,
    "most": 0.6,
    "least": 0.4,
    "zero": 0.0,
    "minus": -3.0,
    "inf": np.inf,
}
WEIGHTS = {**{name: np.array(number) for name, number in NUMBERS.items()}, "a": RANDOM.standard_normal((4, 1, 1))}
WEIGHTS["some"] = np.array([0.5, 2, -1, 1]).reshape(4, 1, 1)
LEFT = [("Relu", "x", "up"), ("Neg", "x", "n"), ("Relu", "n", "down")]
KERAS = [*LEFT, ("Mul", "a down", "d"), ("Add", "up d", "y")]
FACENET = [*LEFT, ("Neg", "down", "m"), ("Mul", "a m", "d"), ("Add", "d up", "y")]
TENSORFLOW = [("Relu", "x", "up"), ("Abs", "x", "b"), ("Sub", "x b", "s"), ("Mul", "a s", "d"), ("Mul", "d half", "e")]
TENSORFLOW += [("Add", "up e", "y")]
PIX2PIX = [("Mul", "x most", "p"), ("Abs", "x", "b"), ("Mul", "b least", "q"), ("Add", "p q", "y")]
INFINITE = [("Mul", "x inf", "i"), ("Relu", "i", "r"), ("Min", "r x", "m"), ("Mul", "x half", "h"), ("Max", "m h", "y")]


def kinds(rows, outputs=("y",), shape=SHAPE, weights=WEIGHTS):
    model = graph(rows, weights, {"x": shape}, outputs)
    return operators_after_folding(model, RANDOM.standard_normal(SHAPE), (PRELU,))


@pytest.mark.parametrize("shape", [SHAPE, ("n", 4, "h", "w")])
@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        (KERAS, ["PRelu"]),
        (FACENET, ["PRelu"]),
        (TENSORFLOW, ["PRelu"]),
        ([*LEFT, ("Div", "down two", "d"), ("Sub", "up d", "y")], ["LeakyRelu"]),
        ([("Mul", "tenth x", "t"), ("Max", "x t", "y")], ["LeakyRelu"]),
        ([("Mul", "x two", "t"), ("Min", "x t", "m"), ("Mul", "m half", "y")], ["LeakyRelu", "Mul"]),
        (PIX2PIX, ["PRelu"]),  # its slope is no float32, which the attribute of a LeakyRelu is
        ([("Abs", "x", "b"), ("Add", "b x", "s"), ("Mul", "s half", "y")], ["Relu"]),
        ([*LEFT, ("Add", "up down", "y")], ["Abs"]),
        ([("Mul", "x minus", "t"), ("Abs", "t", "b"), ("Add", "x b", "y")], ["LeakyRelu", "Mul"]),
        ([("Abs", "x", "b"), ("Mul", "b minus", "t"), ("Abs", "t", "u"), ("Add", "x u", "y")], ["LeakyRelu", "Mul"]),
        ([*LEFT, ("Mul", "two down", "d"), ("Sub", "up d", "s"), ("Mul", "s two", "y")], ["LeakyRelu", "Mul"]),
    ],
    ids=[
        "Keras",
        "facenet",
        "TensorFlow",
        "quotient",
        "max",
        "min",
        "pix2pix",
        "relu",
        "abs",
        "abs below",
        "abs of abs",
        "multiple",
    ],
)
def test_one_operator(rows, wanted, shape):
    assert sorted(kinds(rows, shape=shape)) == wanted


@pytest.mark.parametrize(
    ("rows", "outputs"),
    [
        (KERAS, ("y", "down")),
        ([*KERAS[:-1], ("Sin", "down", "z"), KERAS[-1]], ("y", "z")),
        ([("Sin", "x", "z"), *KERAS[:1], ("Neg", "z", "n"), *KERAS[2:]], ("y",)),
        ([("Mul", "x some", "t"), ("Max", "x t", "y")], ("y",)),
        ([("Mul", "x two", "t"), ("Max", "x t", "y")], ("y",)),
        ([("Mul", "x two", "t"), ("Mul", "x half", "u"), ("Add", "t u", "y")], ("y",)),
        ([("Abs", "x", "b"), ("Sub", "x b", "s"), ("Mul", "s half", "y")], ("y",)),
        ([("Div", "a x", "t"), ("Max", "x t", "y")], ("y",)),
        (INFINITE, ("y",)),
    ],
    ids=[
        "an output",
        "read elsewhere",
        "two values",
        "some are steeper",
        "steeper",
        "no activation",
        "zero above",
        "divisor",
        "infinite",
    ],
)
def test_what_stays(rows, outputs):
    assert sorted(kinds(rows, outputs)) == sorted(row[0] for row in rows)


def test_a_constant_with_more_axes_than_the_value():
    weights = {**WEIGHTS, "a": WEIGHTS["a"].reshape(1, 1, 4, 1, 1)}
    assert "PRelu" not in kinds(KERAS, weights=weights)


@pytest.mark.parametrize(
    ("up", "down"), [(1e-30, 1e30), (1e30, 1e-30), (np.inf, 1.0), (1.0, np.inf)], ids=["over", "under", "inf", "-inf"]
)
def test_slopes_that_float32_cannot_hold_stay(up, down):
    rows = [*LEFT, ("Mul", "up u", "p"), ("Mul", "down d", "m"), ("Sub", "p m", "y")]
    model = graph(rows, {"u": np.array(up), "d": np.array(down)}, {"x": SHAPE})
    assert rewritten(model, (PRELU,))[1] == []


@pytest.mark.parametrize(("kind", "folds"), [(TensorProto.DOUBLE, 0), (TensorProto.FLOAT16, 1), (TensorProto.FLOAT, 1)])
@pytest.mark.parametrize("opset", [13, 20])
def test_a_graph_in_float64_stays(kind, opset, folds):
    """ONNX Runtime has neither PRelu nor LeakyRelu of float64 in these opsets."""
    model = graph([("Add", "x x", "t"), ("Min", "x t", "y")], {}, {"x": SHAPE}, opset=opset, kind=kind)
    found = folded(Path("net.onnx"), model)
    assert [change.rewrite for change in found.changes] == [PRELU.name] * folds
    onnxruntime.InferenceSession(found.model.SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("last", ["Add", "Sub"])
def test_integers_stay(last):
    rows = [*LEFT, ("Mul", "down two", "d"), ("Div", "d two", "e"), (last, "up e", "y")]
    model = graph(rows, {"two": np.array(2, np.int32)}, {"x": SHAPE}, opset=18, kind=TensorProto.INT32)
    onnx.checker.check_model(model, full_check=True)
    assert rewritten(model, (PRELU,))[1] == []


@pytest.mark.parametrize(
    "rows",
    [
        [("Neg", "x", "n"), ("Max", "x n z", "y")],
        [("Neg", "x", "n"), ("Pow", "n n", "d"), ("Max", "x d", "y")],
        [("Neg", "x", "n"), ("Max", "n", "m"), ("Max", "x m z", "y")],
        [("Div", "two x", "t"), ("Neg", "t", "d"), ("Max", "x d", "y")],
    ],
    ids=["three", "a power", "one", "a reciprocal"],
)
def test_operators_that_are_no_two_slopes_stay(rows):
    model = graph([("Sin", "x", "z"), *rows], WEIGHTS, {"x": SHAPE})
    assert rewritten(model, (PRELU,))[1] == []


def test_the_operator_of_another_domain_stays():
    """What is called Neg there, and of which type its result is, is not known."""
    rows = [("Neg", "x", "n"), ("Max", "x n", "y")]
    model = graph(rows, {}, {"x": SHAPE})
    assert [change.rewrite for change in rewritten(model, (PRELU,))[1]] == [PRELU.name]
    model.graph.node[0].domain = "other"
    model.opset_import.append(helper.make_opsetid("other", 1))
    assert rewritten(model, (PRELU,))[1] == []
    for outputs in ("x n", "n x"):
        model.graph.node[1].input[:] = outputs.split()
        del model.graph.value_info[:]
        assert rewritten(model, (PRELU,))[1] == []


@pytest.mark.parametrize("first", [0.0, -1.0, 1.0, 0.5])
def test_a_slope_of_its_own_for_each_channel(first):
    """The slope of the first channel is one that another operator has, or the attribute of a LeakyRelu."""
    a = np.array([first, 0.3, -0.2, 0.7]).reshape(4, 1, 1)
    assert kinds(FACENET, weights={**WEIGHTS, "a": -a}) == ["PRelu"]


@pytest.mark.parametrize(("kind", "wanted"), [(TensorProto.FLOAT16, []), (TensorProto.FLOAT, [PRELU.name])])
def test_a_slope_that_only_float32_can_hold(kind, wanted):
    rows = [*LEFT, ("Mul", "down d", "m"), ("Mul", "m d", "q"), ("Sub", "up q", "y")]
    few = np.array(1e-4, helper.tensor_dtype_to_np_dtype(kind))
    model = graph(rows, {"d": few}, {"x": SHAPE}, opset=18, kind=kind)
    onnx.checker.check_model(model, full_check=True)
    assert [change.rewrite for change in rewritten(model, (PRELU,))[1]] == wanted


def test_one_activation_between_others_that_stay():
    rows = [("Abs", "x", "b"), ("Sub", "x b", "s"), ("Mul", "s half", "t")]  # no slope above zero
    rows += [("Sin", "t", "u"), ("Mul", "u tenth", "v"), ("Max", "u v", "w")]
    rows += [("Neg", "w", "n"), ("Add", "w n", "z"), ("Cos", "z", "c"), ("Mul", "c a", "d"), ("Max", "c d", "y")]
    left = kinds(rows, weights={**WEIGHTS, "a": np.full((1, 1, 1, 1, 1), 0.5)})
    assert (left.count("LeakyRelu"), left.count("Max")) == (1, 1)


def test_many_sums_in_a_row():
    rows = [("Add", f"{'x' if not place else f's{place - 1}'} x", f"s{place}") for place in range(2000)]
    assert len(kinds([*rows, ("Relu", "s1999", "y")])) == 2001
