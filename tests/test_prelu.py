"""prelu: an activation of two slopes that is written as several operators is one; what is not quite that stays."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from folded_operators import operators_after_folding
from onnx import TensorProto, helper
from test_fold_onnx import graph

from repaconv.graph.models_in_onnx_ir import rewritten
from repaconv.rewrites.fold.prelu_operator import PRELU

RANDOM = np.random.default_rng(0)
SHAPE = (2, 4, 3, 5)
NUMBERS = {"tenth": 0.125, "half": 0.5, "two": 2.0, "most": 0.6, "least": 0.4, "zero": 0.0, "inf": np.inf}
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
        ([*LEFT, ("Mul", "two down", "d"), ("Sub", "up d", "s"), ("Mul", "s two", "y")], ["LeakyRelu", "Mul"]),
    ],
    ids=["Keras", "facenet", "TensorFlow", "quotient", "max", "min", "pix2pix", "relu", "abs", "multiple"],
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


def test_integers_stay():
    nodes = [helper.make_node(kind, read.split(), [write]) for kind, read, write in LEFT]
    nodes.append(helper.make_node("Sub", ["up", "down"], ["y"]))
    ends = [helper.make_tensor_value_info(name, TensorProto.INT32, SHAPE) for name in "xy"]
    opset = [helper.make_opsetid("", 18)]
    model = helper.make_model(helper.make_graph(nodes, "integers", ends[:1], ends[1:]), opset_imports=opset)
    onnx.checker.check_model(model, full_check=True)
    assert rewritten(model, (PRELU,))[1] == []


def test_many_sums_in_a_row():
    rows = [("Add", f"{'x' if not place else f's{place - 1}'} x", f"s{place}") for place in range(2000)]
    assert len(kinds([*rows, ("Relu", "s1999", "y")])) == 2001
