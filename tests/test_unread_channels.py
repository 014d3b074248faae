"""unread-channels: channels that are zero or unread are dropped from convolutions of any size, together with all that
computes them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from test_fold_onnx import graph

from repaconv.graph.models_in_onnx_ir import rewritten
from repaconv.rewrites.fold.fold_pipeline import FOLDS
from repaconv.verification.float64_graphs import ReferenceEvaluation

RANDOM = np.random.default_rng(0)
SHAPE = (2, 8, 7, 6)
SAME = {"pads": [1, 1, 1, 1]}
DEPTHWISE = {**SAME, "group": 6}


def without(numbers, rows=(), columns=()):
    """The numbers with zeros in these rows and columns."""
    numbers = numbers.copy()
    numbers[list(rows)] = 0
    if columns:
        numbers[:, list(columns)] = 0
    return numbers


FIRST, SECOND, BACK = (RANDOM.standard_normal(shape) for shape in ((6, 8, 3, 3), (4, 6, 3, 3), (8, 6, 3, 3)))
NUMBERS = {
    "first": FIRST,
    "first_pruned": without(FIRST, rows=(1, 3)),
    "second": SECOND,
    "second_pruned": without(SECOND, columns=(2, 4)),
    "third": RANDOM.standard_normal((3, 4, 3, 3)),
    "back_pruned": without(BACK, columns=(0, 5)),
    "up_pruned": np.swapaxes(without(RANDOM.standard_normal((4, 6, 2, 2)), columns=(0, 1, 2)), 0, 1),
    "depthwise": RANDOM.standard_normal((6, 1, 3, 3)),
    "bias": RANDOM.standard_normal(6),
    "bias_pruned": without(RANDOM.standard_normal(6), rows=(1, 3)),
    "half": np.array(0.5),
    "low": np.array(-0.4),
    "high": np.array(0.3),
    "wide": RANDOM.standard_normal((5, 6, 1, 1)),
    "spatial": np.array([2, 3]),
    "slope": RANDOM.standard_normal((6, 1, 1)),
    "shift": RANDOM.standard_normal((1, 6, 1, 1)),
    "begin": np.array([1]),
    "end": np.array([4]),
    "axis": np.array([1]),
    "places": np.array([5, 0, 3]),
    "place": np.array(2),
    "parts": np.array([3, 1, 2]),
    "gamma": without(RANDOM.standard_normal(6), rows=(0,)),
    "beta": without(RANDOM.standard_normal(6), rows=(0,)),
    "mean": RANDOM.standard_normal(6),
    "variance": RANDOM.random(6) + 0.5,
    "no_region": np.array([], np.float64),
    "scales": np.array([1, 1, 2, 2], np.float32),
    "sizes": np.array([2, 6, 9, 11]),
    "pixels": np.array([9, 11]),
}


def weights_after_folding(rows, shape=SHAPE, outputs=("y",), numbers=NUMBERS, operators=("Conv", "ConvTranspose")):
    """The shapes of the weights of all layers; all outputs are the same in float64."""
    model = graph(rows, numbers, {"x": shape}, outputs, opset=18)
    after, _ = rewritten(model, FOLDS)
    onnx.checker.check_model(after, full_check=True)
    x = RANDOM.standard_normal(SHAPE)
    before, behind = (ReferenceEvaluation(each).run({"x": x}) for each in (model, after))
    for name, right in before.items():
        assert right.any()
        np.testing.assert_allclose(behind[name], right, rtol=0, atol=1e-12 * np.abs(right).max())
    found = {weight.name: weight for weight in after.graph.initializer}
    read = [name for node in after.graph.node if node.op_type in operators for name in node.input[1:2]]
    return [numpy_helper.to_array(found[name]).shape for name in dict.fromkeys(read)]


@pytest.mark.parametrize("shape", [SHAPE, ("n", 8, "h", "w")])
@pytest.mark.parametrize(
    "between",
    [
        [("Relu", "a", "b")],
        [("Sigmoid", "a", "s"), ("Mul", "a s", "b")],
        [("PRelu", "a slope", "b")],
        [("MaxPool", "a", "b", {"kernel_shape": [2, 2]})],
        [("Relu", "a", "r"), ("Resize", "r no_region scales", "b")],
        [("Relu", "a", "r"), ("Conv", "r depthwise", "d", DEPTHWISE), ("Relu", "d", "b")],
        [("Relu", "a", "r"), ("GlobalAveragePool", "r", "g"), ("Sigmoid", "g", "s"), ("Mul", "r s", "b")],
    ],
    ids=["relu", "silu", "prelu", "pool", "resize", "depthwise", "attention"],
)
def test_channels_that_are_zero_are_dropped(between, shape):
    found = weights_after_folding(
        [("Conv", "x first_pruned bias_pruned", "a", SAME), *between, ("Conv", "b second", "y", SAME)], shape
    )
    assert (4, 8, 3, 3) in found
    assert (4, 4, 3, 3) in found


@pytest.mark.parametrize(
    ("sizes", "how"), [("sizes", {}), ("pixels", {"axes": [2, 3]}), ("pixels", {"axes": [-2, -1], "mode": "linear"})]
)
def test_channels_that_are_zero_are_dropped_before_a_resize_by_sizes(sizes, how):
    rows = [("Conv", "x first_pruned bias_pruned", "a", SAME), ("Relu", "a", "r")]
    rows += [("Resize", f"r no_region no_scales {sizes}", "b", how), ("Conv", "b second", "y", SAME)]
    numbers = NUMBERS | {"no_scales": np.array([], np.float32)}
    assert weights_after_folding(rows, numbers=numbers) == [(4, 8, 3, 3), (4, 4, 3, 3)]


ROWS = {
    "pool": (1, [("GlobalAveragePool", "b", "p"), ("Flatten", "p", "f")]),
    "squeeze": (1, [("GlobalMaxPool", "b", "p"), ("Squeeze", "p spatial", "f")]),
    "mean": (1, [("ReduceMean", "b spatial", "f", {"keepdims": 0})]),
    "all pixels": (42, [("Flatten", "b", "f")]),
    "reshape": (42, [("Reshape", "b row", "f")]),
}


@pytest.mark.parametrize(("act", "shape"), [("Relu", SHAPE), ("Sigmoid", SHAPE), ("Sigmoid", ("n", 8, 7, 6))])
@pytest.mark.parametrize(
    "layer", [("MatMul", "f w", "y"), ("Gemm", "f v h", "y", {"transB": 1})], ids=["MatMul", "Gemm"]
)
@pytest.mark.parametrize("row", ROWS)
def test_channels_of_an_image_that_a_linear_layer_reads_as_a_row(act, shape, layer, row):
    pixels, rows = ROWS[row]
    weight = RANDOM.standard_normal((6 * pixels, 3))
    numbers = NUMBERS | {"w": weight, "v": weight.T, "h": RANDOM.standard_normal(3), "row": np.array([-1, 6 * pixels])}
    rows = [("Conv", "x first_pruned bias", "a", SAME), (act, "a", "b"), *rows, layer]
    found = weights_after_folding(rows, shape, numbers=numbers, operators=("Conv", "Gemm", "MatMul"))
    assert found == [(4, 8, 3, 3), (4 * pixels, 3)]


def test_channels_whose_weights_in_the_linear_layer_are_zero():
    weight = RANDOM.standard_normal((6, 42, 3)) * np.array([1, 0, 1, 1, 0, 1]).reshape(6, 1, 1)
    rows = [("Conv", "x first bias", "a", SAME), ("Relu", "a", "b"), ("Flatten", "b", "f"), ("MatMul", "f w", "y")]
    found = weights_after_folding(rows, numbers=NUMBERS | {"w": weight.reshape(252, 3)}, operators=("Conv", "MatMul"))
    assert found == [(4, 8, 3, 3), (168, 3)]


@pytest.mark.parametrize(
    ("rows", "outputs"),
    [
        ([("Flatten", "b", "f"), ("MatMul", "f w", "y"), ("Sin", "f", "z")], ("y", "z")),
        ([("Transpose", "b", "t", {"perm": [0, 2, 3, 1]}), ("Flatten", "t", "f"), ("MatMul", "f w", "y")], ("y",)),
        ([("ReduceMean", "b one", "f", {"keepdims": 0}), ("MatMul", "f u", "y")], ("y",)),
    ],
)
def test_channels_of_a_row_that_is_read_otherwise_stay(rows, outputs):
    numbers = NUMBERS | {"w": RANDOM.standard_normal((252, 3)), "u": RANDOM.standard_normal((6, 3))}
    rows = [("Conv", "x first_pruned bias_pruned", "a", SAME), ("Relu", "a", "b"), *rows]
    numbers["one"] = np.array([1])
    assert (6, 8, 3, 3) in weights_after_folding(rows, outputs=outputs, numbers=numbers)


def test_channels_that_the_next_weight_ignores_are_dropped():
    rows = [("Conv", "x first bias", "a", SAME), ("Sigmoid", "a", "b"), ("Conv", "b second_pruned", "y", SAME)]
    assert weights_after_folding(rows) == [(4, 8, 3, 3), (4, 4, 3, 3)]


def test_a_batch_norm_that_gives_zero_drops_its_channel():
    rows = [
        ("Conv", "x first", "a", SAME),
        ("Relu", "a", "r"),
        ("BatchNormalization", "r gamma beta mean variance", "n"),
        ("Relu", "n", "b"),
        ("Conv", "b second", "y", SAME),
    ]
    assert weights_after_folding(rows) == [(5, 8, 3, 3), (4, 5, 3, 3)]


@pytest.mark.parametrize("shape", [SHAPE, ("n", 8, "h", "w")])
@pytest.mark.parametrize(
    "between",
    [
        [("Relu", "a", "b")],
        [("Sigmoid", "a", "b")],
        [("Add", "a shift", "t"), ("Sigmoid", "t", "s"), ("Mul", "t s", "b")],
        [("Clip", "a low high", "c"), ("Div", "c half", "d"), ("Sub", "shift d", "b")],
        [("MaxPool", "a", "p", {"kernel_shape": [2, 2], "pads": [0, 0, 1, 1]}), ("Neg", "p", "b")],
        [("Relu", "a", "r"), ("Conv", "r depthwise bias", "d", DEPTHWISE), ("Tanh", "d", "b")],
        [("BatchNormalization", "a gamma bias mean variance", "n"), ("HardSwish", "n", "b")],
        [("ReduceMean", "a spatial", "m"), ("Max", "m shift", "b")],
    ],
    ids=["relu", "sigmoid", "sum", "clip", "pool", "depthwise", "batch-norm", "mean"],
)
def test_channels_that_are_one_number_go_into_the_bias_of_a_layer_that_does_not_pad(between, shape):
    first = "first_pruned bias_pruned" if between[0] == ("Relu", "a", "r") else "first_pruned bias"
    rows = [("Conv", f"x {first}", "a", SAME), *between, ("Conv", "b wide", "y")]
    left = 3 if between[0][0] == "BatchNormalization" else 4  # it scales one more channel by zero
    found = weights_after_folding(rows, shape)
    assert (left, 8, 3, 3) in found
    assert (5, left, 1, 1) in found


def test_a_channel_that_a_layer_computes_of_numbers_alone_is_a_number():
    """Of the inputs that this channel's weights read, each is one number."""
    mixed = without(RANDOM.standard_normal((5, 6, 1, 1)), rows=(2,))
    mixed[2, [1, 3], 0, 0] = 0.7, -0.4
    rows = [("Conv", "x first_pruned bias", "a", SAME), ("Sigmoid", "a", "b"), ("Conv", "b mixed", "c")]
    rows += [("Sigmoid", "c", "d"), ("Conv", "d last", "y")]
    numbers = NUMBERS | {"mixed": mixed, "last": RANDOM.standard_normal((3, 5, 1, 1))}
    assert weights_after_folding(rows, numbers=numbers) == [(4, 8, 3, 3), (4, 4, 1, 1), (3, 4, 1, 1)]


@pytest.mark.parametrize(("attributes", "left"), [({"group": 6}, 4), (DEPTHWISE, 6)], ids=["no border", "border"])
def test_numbers_pass_a_convolution_of_each_channel_that_does_not_pad(attributes, left):
    rows = [("Conv", "x first_pruned bias", "a", SAME), ("Sigmoid", "a", "b")]
    rows += [("Conv", "b depthwise bias", "d", attributes), ("Tanh", "d", "e"), ("Conv", "e wide", "y")]
    assert weights_after_folding(rows)[0] == (left, 8, 3, 3)


def test_channels_that_are_one_number_stay_before_a_border():
    """There the next layer reads zeros."""
    rows = [("Conv", "x first_pruned bias", "a", SAME), ("Sigmoid", "a", "b"), ("Conv", "b second", "y", SAME)]
    assert weights_after_folding(rows) == [(6, 8, 3, 3), (4, 6, 3, 3)]


@pytest.mark.parametrize(("zeros", "left"), [(30, 4), (20, 16), (16, 16), (10, 32)])
def test_channels_that_fill_a_block_stay(zeros, left):
    """Runtimes compute 4, 8 or 16 channels together: 22 of 32 take longer than all 32."""
    first, second = RANDOM.standard_normal((32, 8, 3, 3)), RANDOM.standard_normal((4, 32, 3, 3))
    numbers = {"a": without(first, rows=range(zeros)), "b": second}
    rows = [("Conv", "x a", "c", SAME), ("Relu", "c", "r"), ("Conv", "r b", "y", SAME)]
    assert weights_after_folding(rows, numbers=numbers) == [(left, 8, 3, 3), (4, left, 3, 3)]


def test_numbers_of_channels_that_fill_a_block_are_added_once():
    """Of 20 channels that are one number, 16 are dropped and in the bias of the next layer; 4 are still computed."""
    first, second = RANDOM.standard_normal((32, 8, 3, 3)), RANDOM.standard_normal((4, 32, 3, 3))
    numbers = {"a": without(first, rows=range(20)), "bias": RANDOM.standard_normal(32), "b": second}
    rows = [("Conv", "x a bias", "c", SAME), ("Sigmoid", "c", "r"), ("Conv", "r b", "y")]
    assert weights_after_folding(rows, numbers=numbers) == [(16, 8, 3, 3), (4, 16, 3, 3)]


def test_a_residual_branch_gets_narrower_inside_only():
    rows = [
        ("Conv", "x first bias", "a", SAME),
        ("Relu", "a", "b"),
        ("Conv", "b back_pruned", "c", SAME),
        ("Add", "c x", "s"),
        ("Relu", "s", "y"),
    ]
    assert weights_after_folding(rows) == [(4, 8, 3, 3), (8, 4, 3, 3)]


def test_a_transposed_convolution_drops_channels_as_well():
    rows = [
        ("Conv", "x first bias", "a", SAME),
        ("Relu", "a", "b"),
        ("ConvTranspose", "b up_pruned", "y", {"strides": [2, 2]}),
    ]
    assert weights_after_folding(rows) == [(3, 8, 3, 3), (3, 4, 2, 2)]


@pytest.mark.parametrize(
    ("rows", "count"),
    [
        ([("Relu", "a", "r"), ("Slice", "r begin end axis", "y")], 3),
        ([("Relu", "a", "r"), ("Gather", "r places", "y", {"axis": 1})], 3),
        ([("Sigmoid", "a", "r"), ("Gather", "r place", "y", {"axis": 1})], 1),
        (
            [
                ("Split", "a parts", "p q r", {"axis": 1}),
                ("Relu", "q", "s"),
                ("Sigmoid", "r", "t"),
                ("Mul", "s t", "y"),
            ],
            3,
        ),
        ([("Split", "a", "p q", {"axis": 1, "num_outputs": 2}), ("Relu", "q", "y")], 3),
    ],
    ids=["slice", "gather", "gather-one", "split", "split-evenly"],
)
def test_channels_that_no_selection_reads_are_dropped(rows, count):
    assert weights_after_folding([("Conv", "x first bias", "a", SAME), *rows]) == [(count, 8, 3, 3)]


@pytest.mark.parametrize(
    "rows",
    [
        [("Slice", "r begin end axis", "s"), ("Gather", "s swapped", "g", {"axis": 1})],
        [("Gather", "r places", "s", {"axis": 1}), ("Split", "s ends", "u v", {"axis": 1}), ("Neg", "v", "g")],
        [
            ("Split", "r parts", "u v t", {"axis": 1}),
            ("Concat", "t u", "s", {"axis": 1}),
            ("Gather", "s swapped", "g", {"axis": 1}),
        ],
    ],
    ids=["slice", "gather", "split"],
)
def test_a_selection_of_selected_channels(rows):
    """Of the channels of the first selection, too, some are not read; a Softmax reads what the second one gives."""
    numbers = {**NUMBERS, "swapped": np.array([2, 0]), "ends": np.array([1, 2])}
    first = [("Conv", "x first bias", "a", SAME), ("Tanh", "a", "r")]
    found = weights_after_folding([*first, *rows, ("Softmax", "g", "y", {"axis": 1})], numbers=numbers)
    assert found == [(2, 8, 3, 3)]


def test_channels_are_dropped_along_a_chain_of_layers():
    """Of the last layer one channel is read, for which the layer before it computes all, and before a slice three."""
    rows = [
        ("Conv", "x first bias", "a", SAME),
        ("Relu", "a", "r"),
        ("Slice", "r begin end axis", "s"),
        ("Concat", "s s", "d", {"axis": 1}),
        ("Conv", "d second", "b", SAME),
        ("Tanh", "b", "t"),
        ("Conv", "t third", "c", SAME),
        ("Gather", "c place", "y", {"axis": 1}),
    ]
    assert weights_after_folding(rows) == [(3, 8, 3, 3), (4, 3, 3, 3), (1, 4, 3, 3)]


def test_a_weight_that_two_layers_read_stays_shared():
    rows = [
        ("MaxPool", "x", "p", {"kernel_shape": [1, 1], "strides": [2, 2]}),
        *[
            row
            for name in "xp"
            for row in (
                ("Conv", f"{name} first bias", f"{name}a", SAME),
                ("Tanh", f"{name}a", f"{name}b"),
                ("Conv", f"{name}b second_pruned", f"{name}y", SAME),
            )
        ],
    ]
    assert weights_after_folding(rows, outputs=("xy", "py")) == [(4, 8, 3, 3), (4, 4, 3, 3)]


@pytest.mark.parametrize(
    ("rows", "outputs"),
    [
        ([("Sigmoid", "a", "b")], ("y",)),
        ([("Add", "a shift", "b")], ("y",)),
        ([("Relu", "a", "b")], ("y", "a")),
        ([("Relu", "a", "r"), ("Softmax", "r", "b", {"axis": 1})], ("y",)),
        ([("Relu", "a", "r"), ("Conv", "x first", "c", SAME), ("Add", "r c", "b")], ("y",)),
    ],
    ids=["sigmoid", "shift", "output", "softmax", "sum"],
)
def test_channels_stay_that_are_not_zero_or_read_elsewhere(rows, outputs):
    found = weights_after_folding(
        [("Conv", "x first_pruned bias_pruned", "a", SAME), *rows, ("Conv", "b second", "y", SAME)], outputs=outputs
    )
    assert (4, 6, 3, 3) in found


TIED = RANDOM.standard_normal((6, 6, 1, 1))


@pytest.mark.parametrize(
    ("rows", "numbers"),
    [
        ([("BatchNormalization", "b gamma beta mean variance", "n"), ("Max", "n mean", "c")], {}),
        ([("Conv", "b depthwise mean", "n", DEPTHWISE), ("Max", "n mean", "c")], {}),
        ([("Conv", "b tied", "n"), ("Relu", "n", "m"), ("ConvTranspose", "m tied", "c")], {"tied": TIED}),
    ],
    ids=["norm", "bias", "tied"],
)
def test_a_constant_with_two_roles_is_narrowed_for_each(rows, numbers):
    """The mean [6] is a number for each channel in a norm, and for each column of pixels in the maximum."""
    rows = [("Conv", "x first bias", "a", SAME), ("Relu", "a", "b"), *rows, ("Conv", "c second_pruned", "y", SAME)]
    found = weights_after_folding(rows, numbers={**NUMBERS, **numbers})
    assert (4, 4, 3, 3) in found


def test_rows_of_pixels_of_one_channel_stay():
    """A Gather of one channel leaves [N, H, W], of which H is no number of channels that could be dropped."""
    rows = [
        *[("Conv", "x first bias", "a", SAME), ("Tanh", "a", "b"), ("Gather", "b place", "c", {"axis": 1})],
        *[("Tanh", "c", "d"), ("Conv", "d line", "y")],
    ]
    line = without(RANDOM.standard_normal((4, 7, 1)), columns=(2, 3))
    assert (4, 7, 1) in weights_after_folding(rows, numbers={**NUMBERS, "line": line})


def test_nodes_without_inputs_are_allowed():
    rows = [
        *[("SequenceEmpty", "", "s", {"dtype": 11}), ("Conv", "x first bias", "a", SAME), ("Relu", "a", "b")],
        *[("SequenceInsert", "s b", "t"), ("ConcatFromSequence", "t", "y", {"axis": 1})],
    ]
    after, _ = rewritten(graph(rows, NUMBERS, {"x": SHAPE}, ("y",), opset=18), FOLDS)
    assert after.graph.node[0].op_type == "SequenceEmpty"
