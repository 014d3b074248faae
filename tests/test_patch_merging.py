"""patch-merging: tokens of a block become channels by views, in the order in which the network concatenates them."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from folded_operators import operators_after_folding
from test_fold_onnx import graph

RANDOM = np.random.default_rng(0)
SWIN = [(0, 0), (1, 0), (0, 1), (1, 1)]
VIEWS = ["Reshape", "Transpose", "Reshape"]


def kinds(
    places,
    lengths=(2, 2),
    shape=(2, 6, 4, 3),
    *,
    at_once=False,
    axis=-1,
    batch=None,
    sides=None,
    more=(),
    ends=(2**63 - 1,),
):
    """The operators after folding a Concat of slices that begin at these places."""
    rows, weights, parts = [("Tanh", "x", "z")], {}, []
    for number, place in enumerate(places):
        steps = [[*zip(place, lengths, range(1, 1 + len(lengths)), strict=True)]]
        value = "z"
        for group in steps if at_once else [[one] for one in steps[0]]:
            given = [
                [start for start, *_ in group],
                [*ends] * len(group),
                [a for *_, a in group],
                [s for _, s, _ in group],
            ]
            names = [f"{['first', 'end', 'axes', 'step'][i]}{len(weights)}" for i in range(4)]
            weights |= {name: np.array(numbers) for name, numbers in zip(names, given, strict=True)}
            rows.append(("Slice", f"{value} {' '.join(names)}", f"{value}{number}"))
            value = rows[-1][2]
        parts.append(value)
    rows += [("Concat", " ".join(parts), "y", {"axis": axis}), *more]
    model = graph(
        rows, weights, {"x": (batch or shape[0], *(sides or shape[1:-1]), shape[-1])}, ("y", *(row[2] for row in more))
    )
    return [kind for kind in operators_after_folding(model, RANDOM.standard_normal(shape)) if kind != "Tanh"]


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("batch", [None, "n"])
@pytest.mark.parametrize("places", [SWIN, sorted(SWIN)])
def test_every_second_row_and_column(places, batch, at_once):
    assert kinds(places, batch=batch, at_once=at_once) == VIEWS


@pytest.mark.parametrize(
    ("lengths", "shape"),
    [
        ((3, 2), (1, 6, 4, 3)),
        ((2,), (2, 6, 3)),
        ((1, 2), (2, 3, 4, 1)),
        ((2, 1, 2), (2, 4, 3, 2, 5)),
        ((2, 2), (2, 2, 2, 1)),
    ],
)
def test_blocks_of_other_sizes(lengths, shape):
    found = kinds([*product(*map(range, lengths))], lengths, shape)
    assert {*found} <= {*VIEWS}
    assert len(found) <= len(VIEWS)


def test_views_that_come_before_join():
    rows = [("Reshape", "x s", "z"), *[("Slice", f"z f{i} e a t", f"p{i}") for i in (0, 1)]]
    rows += [("Concat", "p0 p1", "c", {"axis": -1}), ("Reshape", "c u", "v"), ("MatMul", "v w", "y")]
    weights = {
        name: np.array(numbers) for name, numbers in {"s": [2, 6, 2, 3], "u": [2, 6, 6], "f0": [0], "f1": [1]}.items()
    }
    weights |= {"e": np.array([2]), "a": np.array([2]), "t": np.array([2]), "w": RANDOM.standard_normal((6, 4))}
    found = operators_after_folding(graph(rows, weights, {"x": (2, 12, 3)}), RANDOM.standard_normal((2, 12, 3)))
    assert found == ["Reshape", "MatMul"]


STAYS = {
    "another order": {"places": [(0, 0), (1, 1), (0, 1), (1, 0)]},
    "one place twice": {"places": [(0, 0), (1, 0), (0, 1), (0, 1)]},
    "three of four": {"places": SWIN[:3]},
    "another axis": {"places": SWIN, "axis": 2},
    "a row that is left out": {"places": SWIN, "ends": (4,), "shape": (2, 6, 6, 3)},
}


@pytest.mark.parametrize("case", STAYS)
def test_slices_stay_if_there_is(case):
    assert "Concat" in kinds(**STAYS[case])


@pytest.mark.parametrize("sides", [("h", 4), (6, "w"), ("h", "w")])
def test_slices_of_an_image_of_dynamic_size_stay(sides):
    assert "Concat" in kinds(SWIN, sides=sides)


def test_slices_that_are_read_elsewhere_stay():
    assert "Concat" not in (found := kinds(SWIN, more=[("Sin", "z3", "y2")]))
    assert "Slice" in found
