"""grouped-convolution: convolutions of all parts of a Split are one with groups; what is not quite that stays."""

from __future__ import annotations

import numpy as np
import pytest
from folded_operators import operators_after_folding
from onnx import numpy_helper
from test_fold_onnx import graph

from repaconv.graph.models_in_onnx_ir import rewritten
from repaconv.rewrites.fold.fold_pipeline import FOLDS

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


def test_they_are_composed_with_the_layer_that_reads_them_and_others():
    numbers = {**NUMBERS, "z": RANDOM.standard_normal((3, 27, 1, 1))}
    rows = [("Relu", "x", "r"), ("Sigmoid", "x", "h"), ("Split", "r", *SPLIT[2:])]
    rows += [*[("Conv", f"p{n} w{n}", f"c{n}") for n in range(3)], (*CONCAT[:2], "c", CONCAT[3])]
    rows += [("Concat", "c h", "d", {"axis": 1}), ("Conv", "d z", "o"), ("Relu", "o", "y")]
    x = RANDOM.standard_normal((2, 12, 6, 5))
    model = graph(rows, numbers, {"x": x.shape}, opset=18)
    assert sorted(operators_after_folding(model, x)) == ["Add", "Conv", "Conv", "Relu", "Relu", "Sigmoid"]
    after, _ = rewritten(model, FOLDS)
    assert sum(numpy_helper.to_array(weight).size for weight in after.graph.initializer) == 2 * 3 * 12


def test_layers_of_slices_are_one_with_groups():
    numbers = {**NUMBERS, **{f"at{n}": np.array([4 * n]) for n in range(4)}, "one": np.array([1])}
    rows = [("Slice", f"x at{n} at{n + 1} one", f"p{n}") for n in range(3)]
    rows += [*[("Conv", f"p{n} w{n}", f"c{n}") for n in range(3)], CONCAT]
    model = graph(rows, numbers, {"x": (2, 12, 6, 5)}, opset=18)
    assert operators_after_folding(model, RANDOM.standard_normal((2, 12, 6, 5))) == ["Conv"]


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
