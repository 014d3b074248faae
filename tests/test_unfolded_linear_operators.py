"""The report of what could not be merged reads shapes of weights, not their numbers."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from planted_graph_faults import F, Net

from repaconv.graph.models_in_onnx_ir import read
from repaconv.rewrites.fold.unfolded_linear_operators import unfolded_operators

WIDE = np.ones((8, 64))


def test_weights_are_not_read():
    rows = [
        ("MatMul", "x wide", "a"),
        ("Tanh", "a", "t"),
        ("MatMul", "a back", "b"),
        ("Concat", "t b", "y", {"axis": 2}),
    ]
    model = read(Net(rows, {"wide": WIDE, "back": WIDE.T}, {"x": (F, ("n", 4, 8))}, {"y": F}).model())
    found = list(unfolded_operators(model))
    assert len(found) == 1
    assert "the value between them is also read by Tanh" in found[0]

    def fails() -> ir.TensorProtocol:
        raise AssertionError("a weight was read")

    for value in model.graph.initializers.values():
        known = value.const_value
        assert known is not None
        value.const_value = ir.LazyTensor(fails, known.dtype, known.shape)
    assert list(unfolded_operators(model)) == found
