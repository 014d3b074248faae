"""selections: what is selected of one input of a Concat is read from that input."""

from __future__ import annotations

import numpy as np
import pytest
from folded_operators import operators_after_folding
from test_fold_onnx import graph

from repaconv.rewrites.fold import selections_of_concats

SHAPE = (2, 5, 4)
X = np.random.default_rng(0).standard_normal(SHAPE)
TOKEN = np.random.default_rng(1).standard_normal((2, 2, 4))
START = [("Tanh", "x", "a"), ("Concat", "token a x", "c", {"axis": 1})]
END = ("Softmax", "p", "y")


def kinds(*rows, outputs=("y",), shape=SHAPE, **numbers):
    """The operators after folding of places 0 and 1 of a token, 2 to 6 of a, and 7 to 11 of x."""
    weights = {"token": TOKEN} | {name: np.array(number) for name, number in numbers.items()}
    return operators_after_folding(graph(rows, weights, {"x": shape}, outputs), X)


@pytest.mark.parametrize(
    ("ends", "left"), [((2, 7), []), ((3, 7), ["Slice"]), ((2, 3), ["Slice"]), ((-10, -5), []), ((7, 2**63 - 1), None)]
)
def test_a_slice_of_one_input(ends, left):
    found = kinds(*START, ("Slice", "c f t axis", "p"), END, f=[ends[0]], t=[ends[1]], axis=[1])
    assert found == (["Softmax"] if left is None else ["Tanh", *left, "Softmax"])


def test_a_slice_of_the_first_input():
    rows = [("Tanh", "x", "a"), ("Concat", "a x", "c", {"axis": 1}), ("Slice", "c f t axis", "p"), END]
    assert kinds(*rows, f=[1], t=[4], axis=[1]) == ["Tanh", "Slice", "Softmax"]


@pytest.mark.parametrize("place", [4, [4], [2, 5, 3], [-8]])
def test_a_gather_of_one_input(place):
    assert kinds(*START, ("Gather", "c i", "p", {"axis": 1}), END, i=place) in (
        ["Tanh", "Gather", "Softmax"],
        ["Tanh", "Slice", "Softmax"],
    )


@pytest.mark.parametrize(("place", "left"), [(-1, "Exp"), (0, "Tanh")])
def test_one_of_the_values_that_a_stack_of_them_holds_is_that_value(place, left):
    """As in detectors that return what every layer of a decoder gives, and predict from the last."""
    rows = [("Tanh", "x", "a"), ("Exp", "x", "b"), ("Unsqueeze", "a zero", "c"), ("Unsqueeze", "b zero", "d")]
    rows += [("Concat", "c d", "stack", {"axis": 0}), ("Gather", "stack i", "p", {"axis": 0}), END]
    found = kinds(*rows, zero=[0], i=place)
    assert found == [left, "Softmax"]
    found = kinds(*rows, outputs=("y", "stack"), zero=[0], i=place)
    assert sorted(found) == ["Concat", "Exp", "Softmax", "Tanh", "Unsqueeze", "Unsqueeze"]


def test_a_split_into_the_inputs():
    rows = [("Split", "c s", "q r t", {"axis": 1}), ("Softmax", "r", "y"), ("Sin", "t", "y2")]
    assert sorted(kinds(*START, *rows, outputs=("y", "y2"), s=[2, 5, 5])) == ["Sin", "Softmax", "Tanh"]


def test_a_split_of_which_one_output_is_of_two_inputs_stays():
    rows = [("Split", "c s", "q r t", {"axis": 1}), ("Softmax", "q", "y"), ("Sin", "r", "y2"), ("Cos", "t", "y3")]
    found = kinds(*START, *rows, outputs=("y", "y2", "y3"), s=[4, 3, 5])
    assert sorted(found) == ["Concat", "Cos", "Sin", "Softmax", "Split", "Tanh"]


def test_views_around_both_join():
    rows = [("Tanh", "x", "a"), ("Reshape", "a flat", "b"), ("Concat", "one b", "c", {"axis": 1})]
    rows += [("Slice", "c f t axis", "d"), ("Reshape", "d back", "p"), END]
    numbers = {
        "one": np.ones((2, 1, 2)),
        "flat": [2, 10, 2],
        "back": [2, 5, 4],
        "f": [1],
        "t": [2**63 - 1],
        "axis": [1],
    }
    assert kinds(*rows, **numbers) == ["Tanh", "Softmax"]


def test_two_maxima_around_views_and_a_concat_are_one():
    rows = [("Tanh", "x", "a"), ("ReduceMax", "a two", "m"), ("Reshape", "m flat", "b")]
    rows += [("Concat", "one b", "c", {"axis": 1}), ("Slice", "c f t one1", "d"), ("Reshape", "d back", "e")]
    numbers = {"two": [2], "flat": [2, 5], "back": [2, 5, 1], "f": [1], "t": [6], "one1": [1], "one": np.ones((2, 1))}
    assert kinds(*rows, ("ReduceMax", "e one1", "y"), **numbers) == ["Tanh", "ReduceMax"]


@pytest.mark.parametrize("ends", [(1, 3), (2, 8)])
def test_a_slice_of_two_inputs_stays(ends):
    assert "Concat" in kinds(*START, ("Slice", "c f t axis", "p"), END, f=[ends[0]], t=[ends[1]], axis=[1])


def test_a_slice_along_another_axis_stays():
    assert "Concat" in kinds(*START, ("Slice", "c f t axis", "p"), END, f=[1], t=[3], axis=[0])


def test_lengths_that_are_dynamic():
    rows = [*START, ("Slice", "c f t axis", "p"), END]
    assert "Concat" in kinds(*rows, shape=(2, "n", 4), f=[2], t=[7], axis=[1])


def test_sizes_are_read_once_for_all_slices_of_a_concat(monkeypatch):
    count = 60
    parts = [("Tanh" if at % 2 else "Sin", "x", f"p{at}") for at in range(count)]
    rows = [*parts, ("Concat", " ".join(f"p{at}" for at in range(count)), "c", {"axis": 1})]
    ends = {f"e{at}": [5 * at] for at in range(count + 1)} | {"axis": [1]}
    rows += [("Slice", f"c e{at} e{at + 1} axis", f"s{at}") for at in range(count)]
    rows += [("Softmax", f"s{at}", f"y{at}") for at in range(count)]
    numbers = {name: np.array(number) for name, number in ends.items()}
    outputs = [f"y{at}" for at in range(count)]
    read, sizes = [], selections_of_concats.sizes
    monkeypatch.setattr(selections_of_concats, "sizes", lambda value: read.append(value) or sizes(value))
    found = operators_after_folding(graph(rows, numbers, {"x": SHAPE}, outputs), X)
    assert not {"Concat", "Slice"} & set(found)
    assert len(read) < 10 * count


@pytest.mark.parametrize(
    ("places", "left"),
    [
        ([1, 2, 3, 4], ["Split", "Sin", "Concat", "Softmax"]),
        ([0, 1], ["Split", "Sin", "Concat", "Softmax"]),
        ([1, 2], ["Concat", "Gather", "Sin", "Slice", "Softmax"]),
        ([4, 3, 2, 1], ["Concat", "Gather", "Sin", "Slice", "Softmax"]),
    ],
    ids=["the end", "the beginning", "the middle", "backwards"],
)
def test_an_assignment_to_the_end_or_the_beginning_is_a_concat_with_the_rest(places, left):
    """As in MViT: ``x[:, 1:] += y`` is an assignment of what was added, and one more of the same to itself."""
    start, end = min(places), max(places) + 1
    numbers = {"axis": [1], "start": [start], "end": [end], "places": np.array(places)[:, None]}
    turned = {"perm": [1, 0, 2]}
    rows = []
    for number, x in enumerate(("x", "a0")):
        rows += [
            ("Slice", f"{x} start end axis", f"s{number}"),
            *([("Sin", "s0", "w0")] if not number else [("Identity", "s1", "w1")]),
            ("Transpose", x, f"t{number}", turned),
            ("Transpose", f"w{number}", f"u{number}", turned),
            ("ScatterND", f"t{number} places u{number}", f"b{number}"),
            ("Transpose", f"b{number}", f"a{number}", turned),
        ]
        if "Gather" in left:
            break
    found = kinds(*rows, ("Softmax", rows[-1][2], "y"), **numbers)
    assert sorted(found) == sorted(left)
