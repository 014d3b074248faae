"""concats: a Concat that reads another one along the same axis joins what that joins."""

from __future__ import annotations

import numpy as np
import pytest
from folded_operators import operators_after_folding
from test_fold_onnx import graph

X = np.random.default_rng(0).standard_normal((2, 3, 4, 4))
JOINED = [("Sin", "x", "a"), ("Cos", "x", "b"), ("Abs", "x", "c"), ("Concat", "a b", "d", {"axis": 1})]


def kinds(rows, outputs=("y",)):
    return operators_after_folding(graph([*JOINED, *rows], {}, {"x": ("n", 3, "h", 4)}, outputs), X)


@pytest.mark.parametrize("axis", [1, -3])
def test_two_concats_are_one(axis):
    assert kinds([("Concat", "d c", "y", {"axis": axis})]) == ["Sin", "Cos", "Abs", "Concat"]


def test_three_concats_are_one_and_a_value_may_be_in_it_twice():
    rows = [("Concat", "c d b", "e", {"axis": 1}), ("Concat", "x e e2", "y", {"axis": 1})]
    rows.insert(0, ("Concat", "a c", "e2", {"axis": 1}))
    assert kinds(rows) == ["Sin", "Cos", "Abs", "Concat"]


@pytest.mark.parametrize(
    ("rows", "outputs"),
    [
        ([("Concat", "x c", "e", {"axis": 1}), ("Concat", "d e", "y", {"axis": 3})], ("y",)),
        ([("Concat", "d c", "y", {"axis": 1}), ("Exp", "d", "z")], ("y", "z")),
        ([("Concat", "d c", "y", {"axis": 1})], ("y", "d")),
        ([("Concat", "d c d", "y", {"axis": 1})], ("y",)),
    ],
    ids=["another axis", "read elsewhere", "an output", "read twice"],
)
def test_what_stays(rows, outputs):
    assert kinds(rows, outputs) == [operator for operator, *_ in (*JOINED, *rows)]
