"""Convolutions of pixels that were rearranged into channels: they read the image with a larger kernel and stride."""

from __future__ import annotations

import numpy as np
import pytest
from folded_operators import operators_after_folding
from test_fold_onnx import graph

from repaconv.graph.models_in_onnx_ir import rewritten
from repaconv.rewrites.fold.fold_pipeline import FOLDS
from repaconv.rewrites.fold.space_to_depth_convolutions import SPACE_TO_DEPTH

RANDOM = np.random.default_rng(0)
SHAPE = (2, 3, 8, 12)
INTEGERS = {
    **{str(number): np.array([number]) for number in (0, 1, 2, 3, 6)},
    **{"-1": np.array([-1]), "end": np.array([2**63 - 1]), "end32": np.array([2**31 - 1])},
    **{"axes": np.array([2, 3]), "both": np.array([2, 2]), "ends": np.array([2**63 - 1] * 2)},
}
PHASES = [(0, 0), (1, 0), (0, 1), (1, 1)]
PADDED = {"pads": [1] * 4}
CONVOLUTION = [("Conv", "z w b", "c", PADDED), ("Relu", "c", "y")]


def weights(channels=12, kernel=(3, 3), groups=1):
    numbers = {"w": RANDOM.standard_normal((8, channels // groups, *kernel)), "b": RANDOM.standard_normal(8)}
    return {**INTEGERS, **numbers}


def slices(phases=PHASES, end="end"):
    """A Concat of a slice of rows, then columns, for each phase."""
    rows = []
    for row, column in phases:
        rows.append(("Slice", f"x {row} {end} 2 2", f"r{row}{column}"))
        rows.append(("Slice", f"r{row}{column} {column} {end} 3 2", f"p{row}{column}"))
    return [*rows, ("Concat", " ".join(f"p{row}{column}" for row, column in phases), "z", {"axis": 1})]


def kinds(rows, numbers=None, shape=SHAPE, outputs=("y",), image=SHAPE, opset=13):
    model = graph(rows, numbers or weights(), {"x": shape}, outputs, opset=opset)
    return operators_after_folding(model, RANDOM.standard_normal(image))


@pytest.mark.parametrize("order", [PHASES, PHASES[::-1], [(0, 1), (0, 0), (1, 1), (1, 0)]])
@pytest.mark.parametrize("shape", [SHAPE, ("B", 3, "H", "W"), (2, 3, 8, "W")], ids=["fixed", "dynamic", "one dynamic"])
def test_focus_is_one_convolution(order, shape):
    """At any size of the image, and in any order of the blocks' pixels."""
    assert kinds([*slices(order), *CONVOLUTION], shape=shape) == ["Conv", "Relu"]


def test_branches_on_the_same_blocks():
    """They are one convolution before it reads the image."""
    numbers = weights() | {"v": RANDOM.standard_normal((8, 12, 1, 1))}
    rows = [*slices(), ("Conv", "z w b", "c", PADDED), ("Conv", "z v", "d"), ("Add", "c d", "e"), ("Relu", "e", "y")]
    assert kinds(rows, numbers) == ["Conv", "Relu"]


@pytest.mark.parametrize("end", ["end32", "end"])
def test_both_axes_in_one_slice(end):
    numbers = weights() | {"ends": np.array([int(INTEGERS[end][0])] * 2)}
    numbers |= {f"s{row}{column}": np.array([row, column]) for row, column in PHASES}
    rows = [("Slice", f"x s{row}{column} ends axes both", f"p{row}{column}") for row, column in PHASES]
    rows.append(("Concat", "p00 p10 p01 p11", "z", {"axis": -3}))
    assert kinds([*rows, *CONVOLUTION], numbers) == ["Conv", "Relu"]


@pytest.mark.parametrize(
    "attributes",
    [{}, {"strides": [2, 1], "pads": [1, 0, 2, 1]}, {"strides": [2, 2], "pads": [0, 1, 0, 0]}, {"pads": [2, 2, 3, 3]}],
)
def test_strides_and_unequal_padding(attributes):
    assert kinds([*slices(), ("Conv", "z w", "y", attributes)]) == ["Conv"]


def test_blocks_along_one_axis_of_one_dimensional_data():
    rows = [("Slice", f"x {place} end 2 3", f"p{place}") for place in (2, 0, 1)]
    rows += [("Concat", "p2 p0 p1", "z", {"axis": 1}), ("Conv", "z w b", "y", {"pads": [1, 1]})]
    assert kinds(rows, weights(9, (3,)), (2, 3, 12), image=(2, 3, 12)) == ["Conv"]


def test_what_follows_and_what_comes_before_folds_as_well():
    """Pixels that are normalized, and a BatchNorm after the convolution."""
    numbers = weights() | {"m": RANDOM.standard_normal((3, 1, 1)), "s": 1 + RANDOM.random((3, 1, 1))}
    numbers |= {name: 1 + RANDOM.random(8) for name in ("g", "h", "n", "v")}
    blocks = [(operator, names.replace("x ", "k "), *rest) for operator, names, *rest in slices()]
    rows = [("Sub", "x m", "j"), ("Div", "j s", "k"), *blocks, ("Conv", "z w", "c")]
    assert kinds([*rows, ("BatchNormalization", "c g h n v", "y")], numbers) == ["Conv"]


SUM = [("ReduceMax", "z", "m", {"keepdims": 0}), ("Add", "c m", "y")]
NOT_FOLDED = {
    "a pixel twice": [
        *slices()[:-1],
        *[("Concat", "p00 p10 p01 p00", "z", {"axis": 1}), *CONVOLUTION],
    ],
    "read elsewhere": [*slices(), *CONVOLUTION[:1], *SUM],
    "dilated": [*slices(), ("Conv", "z w b", "y", {"dilations": [2, 2], "pads": [2] * 4})],
    "slices that end early": [*slices(end="6"), *CONVOLUTION],
    "slices that begin late": [*slices([(2, 2), (3, 2), (2, 3), (3, 3)]), *CONVOLUTION],
    "along batches": [
        *[("Slice", f"x {place} end 0 2", f"p{place}") for place in (0, 1)],
        *[("Concat", "p0 p1 p0 p1", "z", {"axis": 1}), *CONVOLUTION],
    ],
}


@pytest.mark.parametrize("rows", NOT_FOLDED.values(), ids=NOT_FOLDED)
def test_what_stays(rows):
    after = kinds(rows)
    assert {"Slice", "Split"} & {*after}
    assert "Concat" in after


def test_the_values_of_blocks_that_the_graph_outputs_stay():
    assert "Concat" in kinds([*slices(), *CONVOLUTION], outputs=("y", "z"))


def test_groups_of_channels_stay():
    rows = [*slices(), ("Conv", "z w b", "y", {"group": 2})]
    assert "Concat" in kinds(rows, weights(groups=2))


def test_slices_of_a_dynamic_size_that_end_before_its_end_stay():
    """From 1 to the last but one, every second: how many there are depends on whether the size is even."""
    after = kinds([*slices(end="-1"), *CONVOLUTION], shape=("B", 3, "H", "W"), image=(2, 3, 9, 13))
    assert "Concat" in after


# --- Views and the operator.


def unshuffled(block, attributes, perm=(0, 1, 3, 5, 2, 4), kernel=(1, 1)):
    """A convolution of blocks of pixels by Reshape, Transpose, Reshape, as `nn.PixelUnshuffle` is exported."""
    apart = [2, 3, 8 // block, block, 12 // block, block]
    numbers = weights(3 * block**2, kernel) | {"apart": np.array(apart)}
    numbers["whole"] = np.array([2, 3 * block**2, 8 // block, 12 // block])
    rows = [("Reshape", "x apart", "a"), ("Transpose", "a", "t", {"perm": perm})]
    return [*rows, ("Reshape", "t whole", "z"), ("Conv", "z w b", "y", attributes)], numbers


@pytest.mark.parametrize(("block", "attributes"), [(2, {}), (4, {}), (2, {"strides": [2, 1], "pads": [1, 0, 1, 1]})])
def test_a_pixel_unshuffle_before_a_1x1_convolution(block, attributes):
    assert kinds(*unshuffled(block, attributes)) == ["Conv"]


@pytest.mark.parametrize("perm", [(0, 3, 5, 1, 2, 4), (0, 5, 1, 3, 2, 4)])
def test_an_order_of_channels_of_ones_own(perm):
    """The place in the block before the channel (TResNet, TensorFlow)."""
    assert kinds(*unshuffled(2, {}, perm)) == ["Conv"]


def test_the_operator_space_to_depth():
    rows = [("SpaceToDepth", "x", "z", {"blocksize": 2}), ("Conv", "z w b", "y")]
    assert kinds(rows, weights(12, (1, 1))) == ["Conv"]
    assert kinds(rows, weights(12, (3, 3))) == ["SpaceToDepth", "Conv"]


@pytest.mark.parametrize("perm", [(0, 1, 3, 5, 2, 4), (0, 3, 5, 1, 2, 4), (0, 5, 1, 3, 2, 4)])
@pytest.mark.parametrize(("block", "attributes"), [(2, {}), (4, PADDED), (2, {**PADDED, "strides": [2, 1]})])
def test_a_pixel_unshuffle_before_a_3x3_convolution_is_the_operator(block, attributes, perm):
    assert kinds(*unshuffled(block, attributes, perm, (3, 3))) == ["SpaceToDepth", "Conv"]


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("attributes", [PADDED, {}])
def test_a_scale_before_rearranged_pixels_goes_into_the_convolution(attributes, shifted):
    """A shift does, too, unless the convolution is padded."""
    rows, numbers = unshuffled(2, attributes, kernel=(3, 3))
    numbers |= {"m": RANDOM.standard_normal((3, 1, 1)), "s": 1 + RANDOM.random((3, 1, 1))}
    before = [("Div", "x s", "d"), ("Sub", "d m", "n")] if shifted else [("Div", "x s", "n")]
    rows = [*before, ("Reshape", "n apart", "a"), *rows[1:]]
    stays = ["BatchNormalization"] if shifted and attributes else []
    assert kinds(rows, numbers) == [*stays, "SpaceToDepth", "Conv"]


def test_a_scale_that_makes_channels_of_one_stays():
    rows, numbers = unshuffled(2, PADDED, kernel=(3, 3))
    numbers["s"] = 1 + RANDOM.random((3, 1, 1))
    rows = [("Mul", "x s", "n"), ("Reshape", "n apart", "a"), *rows[1:]]
    assert kinds(rows, numbers, (2, 1, 8, 12), image=(2, 1, 8, 12)) == ["Mul", "SpaceToDepth", "Conv"]


def test_blocks_of_another_height_than_width_stay():
    numbers = weights(18) | {"apart": np.array([2, 3, 4, 2, 4, 3]), "whole": np.array([2, 18, 4, 4])}
    rows = [("Reshape", "x apart", "a"), ("Transpose", "a", "t", {"perm": [0, 1, 3, 5, 2, 4]})]
    rows += [("Reshape", "t whole", "z"), ("Conv", "z w b", "y", PADDED)]
    assert kinds(rows, numbers) == ["Reshape", "Transpose", "Reshape", "Conv"]


@pytest.mark.parametrize("perm", [[0, 1, 2, 5, 4, 3], [0, 1, 5, 3, 4, 2], [0, 4, 3, 5, 2, 1]])
def test_views_whose_rows_are_no_rows_of_blocks_stay(perm):
    shape = (2, 3, 8, 8)
    turned = [(2, 3, 2, 4, 2, 4)[axis] for axis in perm]
    numbers = {
        "apart": np.array([2, 3, 2, 4, 2, 4]),
        "whole": np.array([2, turned[1] * turned[2] * turned[3], *turned[4:]]),
    }
    numbers |= {"w": RANDOM.standard_normal((8, int(numbers["whole"][1]), 1, 1))}
    rows = [("Reshape", "x apart", "a"), ("Transpose", "a", "t", {"perm": perm})]
    rows += [("Reshape", "t whole", "z"), ("Conv", "z w", "y")]
    assert "Transpose" in kinds(rows, numbers, shape, image=shape)


def test_what_is_reported():
    _, changes = rewritten(graph([*slices(), *CONVOLUTION], weights(), {"x": SHAPE}, ("y",), opset=13), FOLDS)
    (change,) = [one for one in changes if one.rewrite == SPACE_TO_DEPTH.name]
    assert change.description == "3x3 on blocks of pixels -> 6x6 with stride 2x2"
