"""Values that are computed alike: of the same values, by the same operators, with the same constants up to rounding."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from test_fold_onnx import graph

from repaconv.graph.equal_computations import are_computed_alike
from repaconv.graph.models_in_onnx_ir import read

RANDOM = np.random.default_rng(0)
K, F = RANDOM.standard_normal((6, 6, 1, 1)), RANDOM.standard_normal((6, 1, 1))
NUMBERS = {
    **{"k": K, "grouped": K[:, :2], "f": F, "near": F * (1 + 2 * np.finfo(np.float64).eps), "far": F * (1 + 1e-13)},
    **{"g": F.reshape(1, 6, 1, 1), "b": F.reshape(-1), "s": [3, 3]},
    **{str(at): np.array([at]) for at in (0, 1, 3, 4)},
    **{"012": np.arange(3), "021": np.array([0, 2, 1]), "first": np.array(0)},
}
HALF = {"axis": 1}
ALIKE = {
    "a factor on the other side of rounding": (["Mul x f"], ["Mul x near"]),
    "one behind the other": (["Mul x f", "Sin ."], ["Mul x near", "Sin ."]),
    "a convolution with its defaults": (
        ["Conv x k"],
        [("Conv x k", {"strides": [1, 1], "dilations": [1, 1], "pads": [0] * 4, "group": 1, "kernel_shape": [1, 1]})],
    ),
    "an axis from the end": ([("Concat x x", {"axis": 1})], [("Concat x x", {"axis": -3})]),
    "a slice and a gather": (["Slice x 0 3 1"], [("Gather x 012", HALF)]),
    "a slice and a part": (["Slice x 0 3 1"], [("Split x s", HALF)]),
}
APART = {
    "another factor": (["Mul x f"], ["Mul x far"]),
    "a factor of another shape": (["Mul x f"], ["Mul x g"]),
    "another operator": (["Sin x"], ["Cos x"]),
    "an input and a value": (["Sin x"], []),
    "the other way round": (["Sin x", "Sub . x"], ["Sin x", "Sub x ."]),
    "of other values": (["Sin x", "Mul . f"], ["Cos x", "Mul . f"]),
    "another attribute": ([("LeakyRelu x", {"alpha": 0.1})], [("LeakyRelu x", {"alpha": 0.2})]),
    "with a bias": (["Conv x k"], ["Conv x k b"]),
    "other strides": (["Conv x k"], [("Conv x k", {"strides": [2, 2]})]),
    "other padding": (["Conv x k"], [("Conv x k", {"pads": [0, 0, 0, 1]})]),
    "another axis": ([("Concat x x", {"axis": 1})], [("Concat x x", {"axis": 2})]),
    "other channels": (["Slice x 0 3 1"], ["Slice x 1 4 1"]),
    "another order of channels": ([("Gather x 012", HALF)], [("Gather x 021", HALF)]),
    "channels of another value": (["Sin x", "Slice . 0 3 1"], ["Cos x", "Slice . 0 3 1"]),
    "the same places of another axis": (["Slice x 0 3 1"], ["Slice x 0 3 3"]),
    "one without the axis": ([("Gather x 0", HALF)], [("Gather x first", HALF)]),
    "a selection and another operator": (["Slice x 0 3 1"], ["Sin x"]),
    "random numbers": ([("RandomNormalLike x", {})], [("RandomNormalLike x", {})]),
}


def values(*chains):
    """The last value of each chain of operators."""
    rows, ends = [], []
    for chain, steps in enumerate(chains):
        end = "x"
        for place, step in enumerate(steps):
            text, attributes = step if isinstance(step, tuple) else (step, {})
            operator, *names = text.split()
            written = f"v{chain}_{place}"
            outputs = f"{written} {written}b" if operator == "Split" else written
            rows.append((operator, " ".join(end if name == "." else name for name in names), outputs, attributes))
            end = written
        ends.append(end)
    names = " ".join(row[1] for row in rows).split()
    weights = {name: np.asarray(number) for name, number in NUMBERS.items() if name in names}
    made = graph(rows, weights, {"x": (2, 6, 8, 8)}, [end for end in ends if end != "x"])
    onnx.checker.check_model(made)
    model = read(made)
    found = {value.name: value for node in model.graph for value in node.outputs}
    return [found.get(end, model.graph.inputs[0]) for end in ends]


@pytest.mark.parametrize("case", ALIKE)
def test_values_that_are_computed_alike(case):
    one, other = values(*ALIKE[case])
    assert one is not other
    assert are_computed_alike(one, other)
    assert are_computed_alike(other, one)


@pytest.mark.parametrize("case", APART)
def test_values_that_are_not(case):
    one, other = values(*APART[case])
    assert not are_computed_alike(one, other)
    assert not are_computed_alike(other, one)


def test_another_output_of_an_operator_and_no_value():
    one, other = values([("Split x s", HALF)], [])
    part = one.producer().outputs[1]
    assert not are_computed_alike(one, part)
    assert not are_computed_alike(one, None)
    assert not are_computed_alike(None, one)
    assert are_computed_alike(None, None)
    assert are_computed_alike(other, other)
