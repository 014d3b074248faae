"""reductions: two of one kind in series are one along the axes of both."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from folded_operators import operators_after_folding
from onnx import TensorProto
from test_fold_onnx import graph

from repaconv.graph.models_in_onnx_ir import rewritten
from repaconv.graph.operator_facts import REDUCTIONS
from repaconv.rewrites.fold.reductions_in_series import IN_SERIES

SHAPE = (2, 3, 4, 5)
X = np.random.default_rng(0).standard_normal(SHAPE)


def reduced(kind, axes, keepdims, *more, opset=20, outputs=("y",), batch=SHAPE[0], dtype=TensorProto.DOUBLE):
    """A graph that reduces along these axes, one after the other, by this operator."""
    rows, weights, value = [("Abs", "x", "z")], {}, "z"
    for number, axis in enumerate(axes):
        out = "y" if number + 1 == len(axes) else f"v{number}"
        given = {} if keepdims[number] is None else {"keepdims": keepdims[number]}
        as_input = opset >= 18 or kind == "ReduceSum"
        weights |= {f"a{number}": np.array(axis)} if as_input else {}
        rows.append(
            (kind, f"{value} a{number}" if as_input else value, out, given | ({} if as_input else {"axes": axis}))
        )
        value = out
    return graph([*rows, *more], weights, {"x": (batch, *SHAPE[1:])}, outputs, opset, dtype)


@pytest.mark.parametrize("opset", [13, 20])
@pytest.mark.parametrize("keepdims", [0, 1, None])
@pytest.mark.parametrize("kind", REDUCTIONS)
def test_reductions_of_one_kind(kind, keepdims, opset):
    keeps = keepdims != 0
    for axes in ([[2], [3 if keeps else 2]], [[3], [2 if keeps else -1]], [[1, -1], [1]]):
        model = reduced(kind, axes, [keepdims] * 2, opset=opset, batch="n")
        assert operators_after_folding(model, X) == ["Abs", kind]


def test_three_of_a_kind():
    assert operators_after_folding(reduced("ReduceMean", [[1], [2], [3]], [1] * 3), X) == ["Abs", "ReduceMean"]


@pytest.mark.parametrize(
    "model",
    [
        reduced("ReduceMean", [[2], [2]], [0, 1]),
        reduced("ReduceMean", [[2], [3]], [1, 1], ("Sin", "v0", "y2"), outputs=("y", "y2")),
        reduced("ReduceMean", [[2], [3]], [1, 1], outputs=("y", "v0")),
        reduced("ReduceMean", [[2], [3]], [1, 1], dtype=TensorProto.INT64),
    ],
    ids=["an axis that only one keeps", "a reader of the first", "the first an output", "integers"],
)
def test_both_stay_with(model):
    after, _ = rewritten(model, [IN_SERIES])
    onnx.checker.check_model(after, full_check=True)
    assert [node.op_type for node in after.graph.node].count("ReduceMean") == 2
