"""batch-norm: a scale and a shift of channels that no layer absorbs are one operator."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from folded_operators import operators_after_folding
from onnx import TensorProto
from test_fold_onnx import graph
from test_hard_swish import single

import repaconv as rc
from repaconv.graph.element_type_conversion import retyped
from repaconv.graph.models_in_onnx_ir import rewritten
from repaconv.rewrites.fold.batch_norm_operator import BATCH_NORM
from repaconv.rewrites.fold.fold_pipeline import FOLDS

RANDOM = np.random.default_rng(0)
CHANNELS = {
    **{"s": RANDOM.standard_normal((1, 4, 1, 1)), "t": RANDOM.standard_normal((4, 1, 1)), "2": np.array(2.0)},
    **{"l": RANDOM.standard_normal(5), "z": np.zeros((1, 4, 1, 1)), "k": RANDOM.standard_normal((3, 4, 3, 3))},
    **{"i": np.array([4]), "s5": RANDOM.standard_normal((1, 4, 1, 1, 1)), "t5": RANDOM.standard_normal((4, 1, 1, 1))},
    "whole": RANDOM.standard_normal((1, 4, 6, 5)),
}
SHAPE = (2, 4, 6, 5)
PADDED = {"pads": [1] * 4}


def kinds(rows, shape=SHAPE, outputs=("y",), folds=FOLDS):
    """The operators after folding, which compute the same in float64."""
    model = graph(rows, CHANNELS, {"x": shape}, outputs, opset=13)
    image = RANDOM.standard_normal([2 if size == "B" else size for size in shape])
    return operators_after_folding(model, image, folds)


@pytest.mark.parametrize("shape", [SHAPE, ("B", 4, 6, 5), (1, 4, 1, 1)], ids=["fixed", "dynamic batch", "one pixel"])
@pytest.mark.parametrize("first", ["s", "2", "z"])
def test_a_scale_and_a_shift_before_an_activation_are_one(first, shape):
    start, end = ("Sin", "x", "a"), [("Relu", "c", "d"), ("Conv", "d k", "y", PADDED)]
    for rows in (
        [start, ("Mul", f"a {first}", "b"), ("Add", "t b", "c")],
        [start, ("Mul", f"{first} a", "b"), ("Sub", "b t", "c")],
        [start, ("Mul", f"a {first}", "b"), ("Sub", "t b", "c")],
    ):
        assert kinds([*rows, *end], shape) == ["Sin", "BatchNormalization", "Relu", "Conv"]


def test_a_division_and_images_of_three_axes():
    rows = [("Sin", "x", "a"), ("Div", "a s", "b"), ("Add", "b t", "y")]
    assert kinds(rows) == ["Sin", "BatchNormalization"]
    rows = [("Sin", "x", "a"), ("Unsqueeze", "a i", "u"), ("Mul", "u s5", "b"), ("Add", "b t5", "y")]
    assert kinds(rows) == ["Sin", "Unsqueeze", "BatchNormalization"]


@pytest.mark.parametrize(
    "reader",
    [("Conv", "c k", "y", PADDED), ("GlobalAveragePool", "c", "y"), ("MaxPool", "c", "y", {"kernel_shape": [2, 2]})],
    ids=lambda row: row[0],
)
def test_two_numbers_before_a_convolution_or_pool(reader):
    """As the learned scale and shift of PP-OCRv4; nothing else says what the axis of channels is."""
    rows = [("Sin", "x", "a"), ("Mul", "a 2", "b"), ("Add", "b 2", "c")]
    assert kinds([*rows, reader], folds=[BATCH_NORM]) == ["Sin", "BatchNormalization", reader[0]]


@pytest.mark.parametrize("numbers", ["s 2", "2 t"])
def test_one_number_and_one_for_each_channel(numbers):
    scale, shift = numbers.split()
    rows = [("Sin", "x", "a"), ("Mul", f"a {scale}", "b"), ("Add", f"b {shift}", "y")]
    assert kinds(rows, folds=[BATCH_NORM]) == ["Sin", "BatchNormalization"]


def test_two_numbers_that_are_a_weight_stay():
    rows = [("Sin", "x", "a"), ("Mul", "a 2", "b"), ("Add", "b 2", "c"), ("Conv", "e c", "y")]
    weights = {**CHANNELS, "e": RANDOM.standard_normal((1, 4, 6, 5))}
    after, _ = rewritten(graph(rows, weights, {"x": SHAPE}), [BATCH_NORM])
    assert [node.op_type for node in after.graph.node] == ["Sin", "Mul", "Add", "Conv"]


OTHERS = {
    "numbers": [("Mul", "a 2", "b"), ("Add", "b 2", "y")],
    "last axis": [("Mul", "a l", "b"), ("Add", "b l", "y")],
    "per pixel": [("Mul", "a whole", "b"), ("Add", "b t", "y")],
    "shift per pixel": [("Mul", "a s", "b"), ("Add", "b whole", "y")],
    "shift first": [("Add", "a t", "b"), ("Mul", "b s", "y")],
    "reciprocal": [("Div", "s a", "b"), ("Add", "b t", "y")],
    "sum": [("Mul", "a s", "b"), ("Add", "b a", "y")],
    "twice": [("Mul", "a s", "b"), ("Add", "b b", "y")],
    "read elsewhere": [("Mul", "a s", "b"), ("Add", "b t", "c"), ("Max", "b c", "y")],
}


@pytest.mark.parametrize("rows", OTHERS.values(), ids=OTHERS)
def test_anything_else_stays(rows):
    assert "BatchNormalization" not in kinds([("Sin", "x", "a"), *rows], folds=[BATCH_NORM])


def test_no_channels_stay():
    weights = {name: np.zeros((1, 0, 1, 1)) for name in ("s", "t")}
    model = graph([("Mul", "x s", "a"), ("Add", "a t", "y")], weights, {"x": (2, 0, 6, 5)})
    assert BATCH_NORM.name not in [change.rewrite for change in rewritten(model, FOLDS)[1]]


def test_an_output_between_stays():
    rows = [("Sin", "x", "a"), ("Mul", "a s", "b"), ("Add", "b t", "y")]
    assert kinds(rows, outputs=("y", "b")) == ["Sin", "Mul", "Add"]


@pytest.mark.parametrize(("kind", "folds"), [("FLOAT16", 1), ("BFLOAT16", 0)])
def test_types(kind, folds):
    rows = [("Mul", "x s", "b"), ("Add", "b t", "y")]
    model = graph(rows, CHANNELS, {"x": SHAPE}, opset=14)
    model = retyped(model, {TensorProto.DOUBLE: getattr(TensorProto, kind)})
    assert len(rewritten(model, [BATCH_NORM])[1]) == folds


@pytest.mark.parametrize(("operator", "factor", "kind"), [("Mul", np.inf, "FLOAT"), ("Div", 1e-5, "FLOAT16")])
def test_a_factor_that_is_infinite_stays(operator, factor, kind):
    weights = {**CHANNELS, "s": np.array([1, factor, 1, 2]).reshape(1, 4, 1, 1)}
    model = graph([(operator, "x s", "b"), ("Add", "b t", "y")], weights, {"x": SHAPE}, opset=14)
    model = retyped(model, {TensorProto.DOUBLE: getattr(TensorProto, kind)})
    assert not rewritten(model, [BATCH_NORM])[1]


@pytest.mark.parametrize("opset", [9, 13, 21])
def test_a_folded_file_is_verified(opset):
    rows = [
        ("Sin", "x", "a"),
        ("Mul", "a s", "b"),
        ("Add", "b t", "c"),
        ("Relu", "c", "d"),
        ("Conv", "d k", "y", PADDED),
    ]
    onnx.save(single(graph(rows, CHANNELS, {"x": SHAPE}, opset=opset)), "net.onnx")
    done = rc.fold("net.onnx", measure=False)
    assert done.verdict == "passed"
    assert done.operators == {"BatchNormalization": 1, "Conv": 1, "Relu": 1, "Sin": 1}


NORM_NUMBERS = {"own": RANDOM.standard_normal(4), "bias": RANDOM.standard_normal(4), "scale": RANDOM.random((4, 1, 1))}
GROUP = {"num_groups": 2}


@pytest.mark.parametrize("norm", [("InstanceNormalization", {}), ("GroupNormalization", GROUP)], ids=lambda row: row[0])
@pytest.mark.parametrize(
    "after", [["Mul n scale o"], ["Add n t o"], ["Mul n scale m", "Add m t o"]], ids=["scale", "shift", "both"]
)
def test_a_scale_and_a_shift_after_a_norm_go_into_it(norm, after):
    rows = [("Sin", "x", "a"), (norm[0], "a own bias", "n", norm[1])]
    rows += [(operator, f"{x} {number}", out) for operator, x, number, out in map(str.split, after)]
    model = graph([*rows, ("Relu", "o", "y")], CHANNELS | NORM_NUMBERS, {"x": SHAPE}, opset=21)
    assert operators_after_folding(model, RANDOM.standard_normal(SHAPE)) == ["Sin", norm[0], "Relu"]


def test_a_norm_with_numbers_of_groups_stays_before_numbers_of_channels():
    numbers = {"ones": np.ones(2), "zeros": np.zeros(2), "variance": RANDOM.random(4) + 1, **NORM_NUMBERS}
    rows = [("GroupNormalization", "a ones zeros", "n", GROUP), ("BatchNormalization", "n own bias own variance", "y")]
    model = graph([("Mul", "x s", "a0"), ("Mul", "a0 s", "a"), *rows], CHANNELS | numbers, {"x": SHAPE}, opset=18)
    after, changes = rewritten(model, FOLDS)
    assert changes
    assert [node.op_type for node in after.graph.node] == ["Mul", "GroupNormalization", "BatchNormalization"]
