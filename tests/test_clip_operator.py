"""clip: a maximum and a minimum with numbers are a Clip, or a Relu; what limits nothing goes; other nodes stay."""

from __future__ import annotations

import numpy as np
import pytest
from folded_operators import operators_after_folding
from onnx import TensorProto, helper
from test_fold_onnx import graph

from repaconv.graph.models_in_onnx_ir import rewritten
from repaconv.rewrites.fold.clip_operator import CLIP

RANDOM = np.random.default_rng(0)
NUMBERS = {
    **{f"{number}": np.array(float(number)) for number in (0, 1, 6)},
    **{
        "-1": np.array([[-1.0]]),
        "deep": np.zeros((1, 1, 1, 1, 1)),
        "nan": np.array(np.nan),
        "whole": np.array(0),
        "half": np.array(0, np.float16),
        "yes": RANDOM.random((6, 5)) > 0.5,
        "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1]),
        "none": np.zeros(0),
        "twice": np.array([1, 1, 2, 2], np.float32),
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
        [("Max", "x 1", "a"), ("Max", "a 6", "y")],
        [("Relu", "x", "a"), ("Clip", "a 0 6", "y")],
        [("Clip", "x 0 6", "a"), ("Relu", "a", "y")],
        [("Clip", "x -1", "a"), ("Clip", "a 0 6", "b"), ("Clip", "b  1", "y")],
        [("Max", "x 1", "a"), ("Max", "a 0", "b"), ("Min", "b 6", "y")],
    ],
)
def test_a_maximum_and_a_minimum_are_a_clip(rows, shape):
    assert kinds(rows, shape) == ["Clip"]


def test_a_maximum_with_zero_is_a_relu():
    assert kinds([("Max", "x 0", "y")]) == ["Relu"]


def test_two_relus_are_one():
    assert kinds([("Relu", "x", "a"), ("Relu", "a", "y")]) == ["Relu"]


POOL = {"kernel_shape": [2, 2], "strides": [2, 2]}
APART = {"kernel_shape": [2, 2], "dilations": [6, 6], "pads": [1] * 4}
PADDED = POOL | {"pads": [1] * 4, "count_include_pad": 1}


@pytest.mark.parametrize(
    "rows",
    [
        [("Relu", "x", "a"), ("Sigmoid", "x", "b"), ("Add", "a b", "c"), ("Relu", "c", "y")],
        [("Relu", "x", "a"), ("MaxPool", "a", "b", POOL), ("Relu", "b", "y")],
        [("Exp", "x", "a"), ("AveragePool", "a", "b", POOL), ("Relu", "b", "y")],
        [("Clip", "x -1 1", "a"), ("Sin", "a", "b"), ("Concat", "a b", "c", {"axis": 1}), ("Clip", "c -1 6", "y")],
        [("Sigmoid", "x", "a"), ("Mul", "a 6", "b"), ("Clip", "b 0 6", "y")],
        [("Mul", "x x", "a"), ("Max", "a 0", "y")],
        [("Relu", "x", "a"), ("Neg", "a", "b"), ("Where", "yes a b", "c"), ("Relu", "a", "d"), ("Add", "c d", "y")],
        [
            ("Abs", "x", "a"),
            ("Pad", "a pads", "b"),
            ("Transpose", "b", "c", {"perm": [0, 2, 3, 1]}),
            ("Relu", "c", "y"),
        ],
    ],
    ids=["sum", "maxima", "means", "concatenated", "product", "square", "one of two", "views"],
)
def test_what_is_within_the_limits_already_is_not_limited(rows):
    kept = [operator for operator, *_ in rows]
    kept.reverse()
    kept.remove(next(operator for operator in kept if operator in ("Relu", "Clip", "Max")))
    assert kinds(rows) == kept[::-1]


@pytest.mark.parametrize(
    "rows",
    [
        [("Relu", "x", "a"), ("Neg", "x", "b"), ("Add", "a b", "c"), ("Relu", "c", "y")],
        [("Sigmoid", "x", "a"), ("Pad", "a pads -1", "b"), ("Relu", "b", "y")],
        [("Clip", "x 1 6", "a"), ("AveragePool", "a", "b", PADDED), ("Clip", "b 1 6", "y")],
        [("Clip", "x 1 6", "a"), ("MaxPool", "a", "b", APART), ("Clip", "b 1 6", "y")],
        [("Relu", "x", "a"), ("Resize", "a none twice", "b", {"mode": "cubic"}), ("Relu", "b", "y")],
        [("Sigmoid", "x", "a"), ("Mul", "a x", "b"), ("Relu", "b", "y")],
        [("Tanh", "x", "a"), ("Clip", "a 0 1", "y"), ("Relu", "a", "z"), ("Sin", "z", "y2")],
    ],
    ids=["sum", "padding", "mean with padding", "maxima with gaps", "cubic", "product", "read by two"],
)
def test_what_may_be_outside_of_the_limits_is_limited(rows):
    assert kinds(rows) == [operator for operator, *_ in rows]


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
        [("Clip", "x 6 0", "a"), ("Relu", "a", "y")],
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
        "a Clip to nothing",
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


def test_what_a_dropout_scales_is_limited():
    """In training mode it multiplies what it keeps."""
    rows = [("Sigmoid", "x", "a"), ("Dropout", "a 0.5 on", "b"), ("Clip", "b 0 1", "c"), ("Tanh", "c", "y")]
    model = graph(rows, NUMBERS | {"0.5": np.array(0.5), "on": np.array(True)}, {"x": (2, 15)}, ("y",))
    assert [node.op_type for node in rewritten(model, [CLIP])[0].graph.node] == [operator for operator, *_ in rows]


def test_a_number_of_many_axes_stays_next_to_a_value_of_unknown_rank():
    """The number adds axes to the value."""
    rows = [("Reshape", "x sizes", "a"), ("Max", "deep a", "b"), ("Tanh", "b", "y")]
    model = graph(rows, NUMBERS, {"x": (2, 15)}, ("y",))
    sizes = helper.make_tensor_value_info("sizes", TensorProto.INT64, ["rank"])
    model.graph.input.append(sizes)
    assert [node.op_type for node in rewritten(model, [CLIP])[0].graph.node] == [operator for operator, *_ in rows]
