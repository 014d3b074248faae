"""slices: two in series along different axes are one."""

from __future__ import annotations

import numpy as np
import pytest
from folded_operators import operators_after_folding
from onnx import TensorProto
from test_fold_onnx import graph

from repaconv.graph.models_in_onnx_ir import rewritten
from repaconv.rewrites.fold.fold_pipeline import FOLDS
from repaconv.rewrites.fold.slices_in_series import SLICES

SHAPE = (2, 5, 6, 7)
X = np.random.default_rng(0).standard_normal(SHAPE)
NUMBERS = {"zero": [0], "one": [1], "two": [2], "three": [3], "last": [-1], "four": [4], "least": [-9], "both": [1, 3]}
NUMBERS |= {"begin": [0, 1], "end": [3, 5], "steps": [2, 2], "minus": [-2]}
WEIGHTS = {name: np.array(numbers) for name, numbers in NUMBERS.items()}


def kinds(rows, outputs=("y",), shape=SHAPE, folds=(SLICES,)):
    return operators_after_folding(graph(rows, WEIGHTS, {"x": shape}, outputs), X, folds)


@pytest.mark.parametrize("shape", [SHAPE, ("n", "c", "h", "w")])
@pytest.mark.parametrize(
    "rows",
    [
        [("Slice", "x zero three one", "a"), ("Slice", "a one four two", "y")],
        [("Slice", "x zero three one", "a"), ("Slice", "a last least three last", "y")],
        [("Slice", "x one three", "a"), ("Slice", "a begin end both steps", "y")],
        [("Slice", "x zero one three", "a"), ("Slice", "a zero one one", "b"), ("Slice", "b zero one minus", "y")],
    ],
    ids=["two", "backwards", "without axes", "three"],
)
def test_slices_of_other_axes(rows, shape):
    assert kinds(rows, shape=shape) == ["Slice"]


@pytest.mark.parametrize(
    ("rows", "outputs"),
    [
        ([("Slice", "x zero three one", "a"), ("Slice", "a zero two one", "y")], ("y",)),
        ([("Slice", "x zero three one", "a"), ("Slice", "a zero two two", "y")], ("y", "a")),
        ([("Slice", "x zero three one", "a"), ("Slice", "a zero two two", "y"), ("Sin", "a", "z")], ("y", "z")),
    ],
    ids=["one axis", "an output", "read elsewhere"],
)
def test_what_stays(rows, outputs):
    assert kinds(rows, outputs) == [row[0] for row in rows]
    assert rewritten(graph(rows, WEIGHTS, {"x": SHAPE}, outputs), (SLICES,))[1] == []


COMPUTED = [("Cast", "w", "c", {"to": TensorProto.INT64})]
FIRST, SECOND = ("Slice", "x zero three one", "a"), ("Slice", "a one four two", "y")


@pytest.mark.parametrize(
    "rows",
    [
        [*COMPUTED, ("Slice", "x zero c one", "a"), SECOND],
        [*COMPUTED, FIRST, ("Slice", "a zero c two", "y")],
        [*COMPUTED, ("Reshape", "x c", "v"), ("Slice", "v zero three one", "a"), SECOND],
    ],
    ids=["the first end", "the second end", "the rank"],
)
def test_slices_of_computed_parts_stay(rows):
    model = graph(rows, WEIGHTS, {"x": SHAPE, "w": ("k",) if rows[1][0] == "Reshape" else (1,)})
    after, changes = rewritten(model, (SLICES,))
    assert changes == []
    assert [node.op_type for node in after.graph.node] == [row[0] for row in rows]


def test_slices_after_two_that_stay():
    rows = [("Slice", "x zero four two", "s"), ("Slice", "s one three two", "z"), FIRST, SECOND]
    assert kinds(rows, ("y", "z")) == ["Slice"] * 3


def test_a_crop_of_rows_and_columns_is_one():
    rows = [
        ("Sin", "x", "s"),
        ("Slice", "s zero three two", "a"),
        ("Slice", "a zero four three", "b"),
        ("Tan", "b", "y"),
    ]
    assert kinds(rows, folds=FOLDS) == ["Sin", "Slice", "Tan"]
