"""clip: a maximum and a minimum with numbers are a Clip, or a Relu; what is not quite that stays."""

from __future__ import annotations

import numpy as np
import pytest
from folded_operators import operators_after_folding
from test_fold_onnx import graph

RANDOM = np.random.default_rng(0)
NUMBERS = {
    **{f"{number}": np.array(float(number)) for number in (0, 1, 6)},
    **{
        "-1": np.array([[-1.0]]),
        "deep": np.zeros((1, 1, 1, 1, 1)),
        "nan": np.array(np.nan),
        "whole": np.array(0),
        "half": np.array(0, np.float16),
        "each": RANDOM.standard_normal((3, 1, 1)),
    },
}


def kinds(rows, shape=(2, 3, 6, 5)):
    model = graph(rows, NUMBERS, {"x": shape}, ("y",), opset=13)
    return operators_after_folding(model, 4 * RANDOM.standard_normal((2, 3, 6, 5)))


@pytest.mark.parametrize("shape", [(2, 3, 6, 5), ("n", 3, "h", "w")])
@pytest.mark.parametrize(
    "rows",
    [
        [("Max", "x 0", "a"), ("Min", "a 6", "y")],
        [("Relu", "x", "a"), ("Min", "6 a", "y")],
        [("Min", "6 x", "a"), ("Max", "-1 a", "y")],
        [("Min", "x 1", "a"), ("Relu", "a", "y")],
    ],
)
def test_a_maximum_and_a_minimum_are_a_clip(rows, shape):
    assert kinds(rows, shape) == ["Clip"]


def test_a_maximum_with_zero_is_a_relu():
    assert kinds([("Max", "x 0", "y")]) == ["Relu"]


@pytest.mark.parametrize(("element_type", "zero", "operator"), [(7, "whole", "Max"), (10, "half", "Relu")])
def test_integers_stay_and_half_precision_does_not(element_type, zero, operator):
    rows = [("Cast", "x", "a", {"to": element_type}), ("Max", f"a {zero}", "b"), ("Cast", "b", "y", {"to": 11})]
    assert kinds(rows) == ["Cast", operator, "Cast"]


def test_relu6_is_part_of_a_hard_swish():
    numbers = NUMBERS | {"3": np.array(3.0), "k": RANDOM.standard_normal((4, 3, 1, 1))}
    rows = [("Conv", "x k", "c"), ("Add", "c 3", "a"), ("Max", "a 0", "b"), ("Min", "b 6", "d"), ("Mul", "c d", "e")]
    model = graph([*rows, ("Div", "e 6", "y")], numbers, {"x": (2, 3, 6, 5)}, ("y",), opset=14)
    assert operators_after_folding(model, RANDOM.standard_normal((2, 3, 6, 5))) == ["Conv", "HardSwish"]


@pytest.mark.parametrize(
    "rows",
    [
        [("Max", "x 6", "a"), ("Min", "a 0", "y")],
        [("Min", "x -1", "a"), ("Relu", "a", "y")],
        [("Max", "x 1", "a"), ("Max", "a 6", "y")],
        [("Max", "x each", "a"), ("Min", "a 6", "y")],
        [("Max", "x nan", "a"), ("Min", "a 6", "y")],
        [("Max", "x 1 6", "y")],
        [("Exp", "x", "z"), ("Max", "x z 0", "y")],
        [("Max", "x deep", "y")],
        [("Max", "x 1", "a"), ("Min", "a 6", "b"), ("Add", "a b", "y")],
    ],
    ids=[
        "crossed",
        "negative",
        "two maxima",
        "numbers of each channel",
        "NaN",
        "of three",
        "of two values and a number",
        "another axis",
        "read elsewhere",
    ],
)
def test_what_stays(rows):
    assert kinds(rows) == [operator for operator, *_ in rows]
