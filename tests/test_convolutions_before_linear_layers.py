"""affine: a 1x1 convolution and the linear layer that reads the mean of its pixels become one layer, if that costs no
more.
"""

from __future__ import annotations

import numpy as np
import pytest
from folded_operators import operators_after_folding
from test_fold_onnx import graph

RANDOM = np.random.default_rng(0)
NUMBERS = {
    **{"k": RANDOM.standard_normal((12, 6, 1, 1)), "b": RANDOM.standard_normal(12), "axes": np.array([2, 3])},
    **{"g": RANDOM.standard_normal((10, 12)), "h": RANDOM.standard_normal(10), "row": np.array([0, 12])},
    "grouped": RANDOM.standard_normal((12, 3, 1, 1)),
}
HEAD = ("Gemm", "f g h", "y", {"transB": 1})
ROWS = {
    "pool": [("GlobalAveragePool", "c", "p"), ("Flatten", "p", "f")],
    "mean": [("ReduceMean", "c axes", "p"), ("Reshape", "p row", "f")],
    "mean without its axes": [("ReduceMean", "c axes", "f", {"keepdims": 0})],
    "window": [("AveragePool", "c", "p", {"kernel_shape": [4, 5], "strides": [4, 5]}), ("Squeeze", "p axes", "f")],
}


def kinds(*rows, outputs=("y",), **more):
    """The operators after folding, which compute the same in float64."""
    x = RANDOM.standard_normal((2, 6, 4, 5))
    model = graph([("Relu", "x", "a"), *rows], NUMBERS | more, {"x": x.shape}, outputs, opset=18)
    return operators_after_folding(model, x)


@pytest.mark.parametrize("layer", [("Conv", "a k b", "c"), ("Conv", "a k", "c")], ids=["bias", "no bias"])
@pytest.mark.parametrize("row", ROWS)
def test_a_convolution_and_a_layer_of_the_mean_of_its_pixels_are_one(layer, row):
    found = kinds(layer, *ROWS[row], HEAD)
    assert "Conv" not in found
    assert found.count("Gemm") == 1


@pytest.mark.parametrize(
    ("layer", "head", "more"),
    [
        (("Conv", "a grouped b", "c", {"group": 2}), HEAD, {}),
        (("Conv", "a k b", "c", {"strides": [2, 2]}), HEAD, {}),
        (("Conv", "a k b", "c", {"pads": [1, 1, 1, 1]}), HEAD, {}),
        (("Conv", "a thin", "c"), ("MatMul", "f wide", "y"), {"thin": np.ones((2, 6, 1, 1)), "wide": np.ones((2, 9))}),
    ],
    ids=["groups", "strides", "padding", "one for both would multiply more"],
)
def test_they_stay_two(layer, head, more):
    found = kinds(layer, *ROWS["mean without its axes"], head, **more)
    assert "Conv" in found


@pytest.mark.parametrize("shape", [(2, 6, 12, 12), (2, 6, 12)])
def test_a_mean_over_the_channels_is_no_row_of_them(shape):
    """As many pixels as channels: the mean has the shape of a row."""
    kernel = NUMBERS["k"].reshape(12, 6, *[1] * (len(shape) - 2))
    rows = [("Relu", "x", "a"), ("Conv", "a k b", "c"), ("ReduceMean", "c axes", "f", {"keepdims": 0}), HEAD]
    numbers = NUMBERS | {"k": kernel, "axes": np.arange(1, len(shape) - 1)}
    model = graph(rows, numbers, {"x": shape}, ("y",), opset=18)
    assert "Conv" in operators_after_folding(model, RANDOM.standard_normal(shape))


def test_a_convolution_whose_image_or_row_is_read_elsewhere_stays():
    for value in ("c", "f"):
        rows = [("Conv", "a k b", "c"), *ROWS["mean without its axes"], HEAD, ("Sin", value, "y2")]
        assert "Conv" in kinds(*rows, outputs=("y", "y2"))
