"""grouped-convolution: convolutions of all parts of a Split are one with groups; what is not quite that stays."""

from __future__ import annotations

import numpy as np
import pytest
from folded_operators import operators_after_folding
from test_fold_onnx import graph

RANDOM = np.random.default_rng(0)
NUMBERS = {
    **{f"w{n}": RANDOM.standard_normal((5, 4, 1, 1)) for n in range(3)},
    **{f"k{n}": RANDOM.standard_normal((4, 2, 3, 3)) for n in range(3)},
    **{f"b{n}": RANDOM.standard_normal(5) for n in range(3)},
    "wide": RANDOM.standard_normal((6, 4, 1, 1)),
}
SPLIT = ("Split", "x", "p0 p1 p2", {"axis": 1, "num_outputs": 3})
CONCAT = ("Concat", "c0 c1 c2", "y", {"axis": -3})


def kinds(rows, shape=(2, 12, 6, 5), outputs=("y",)):
    model = graph(rows, NUMBERS, {"x": shape}, outputs, opset=18)
    return operators_after_folding(model, RANDOM.standard_normal((2, 12, 6, 5)))


@pytest.mark.parametrize("shape", [(2, 12, 6, 5), ("n", 12, "h", "w")])
@pytest.mark.parametrize("biases", [("b0", "b1", "b2"), ("", "b1", ""), ("", "", "")])
def test_convolutions_of_all_parts_are_one_with_groups(shape, biases):
    convs = [("Conv", f"p{n} w{n} {bias}".strip(), f"c{n}") for n, bias in enumerate(biases)]
    assert kinds([SPLIT, *convs, CONCAT], shape) == ["Conv"]


def test_groups_strides_and_padding_stay():
    how = {"group": 2, "strides": [2, 1], "pads": [1, 0, 1, 2]}
    assert kinds([SPLIT, *[("Conv", f"p{n} k{n}", f"c{n}", how) for n in range(3)], CONCAT]) == ["Conv"]


@pytest.mark.parametrize(
    ("rows", "outputs"),
    [
        ([("Conv", "p0 w0", "c0"), ("Conv", "p1 w1", "c1"), ("Conv", "p2 wide", "c2")], ("y",)),
        ([("Conv", "p1 w0", "c0"), ("Conv", "p0 w1", "c1"), ("Conv", "p2 w2", "c2")], ("y",)),
        ([("Conv", "p0 w0", "c0"), ("Conv", "p1 w1", "c1"), ("Relu", "p2", "c2")], ("y",)),
        ([("Conv", "p0 w0", "c0"), ("Conv", "p1 w1", "c1"), ("Conv", "p2 w2", "c2")], ("y", "c1")),
        (
            [
                ("Conv", "p0 k0", "c0", {"group": 2, "pads": [1, 1, 1, 1]}),
                ("Conv", "p1 k1", "c1", {"group": 2, "pads": [1, 1, 1, 1]}),
                ("Conv", "p2 k2", "c2", {"group": 2, "pads": [2, 2, 2, 2], "dilations": [2, 2]}),
            ],
            ("y",),
        ),
    ],
    ids=["channels", "order", "no-convolution", "read-elsewhere", "dilation"],
)
def test_what_is_not_equal_stays(rows, outputs):
    found = kinds([SPLIT, *rows, CONCAT], outputs=outputs)
    assert found.count("Conv") == sum(row[0] == "Conv" for row in rows)
    assert "Split" in found
