"""Resize as it was before opset 11: raised to what folds read, and in float64, it is what ONNX Runtime makes of it."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from repaconv.algebra.image_resizing import resized
from repaconv.graph.opset_upgrade import upgraded
from repaconv.verification.float64_graphs import REFERENCE, Float64

LARGER = ([1, 1, 2, 7], [1, 1, 1.5, 2.5])


def resizing(kind, opset, mode, scales):
    """Then a convolution, so that no runtime has it in float64."""
    at, held = ["x"], {"w": np.random.default_rng(1).standard_normal((3, 2, 1, 1))}
    how = {"scales": [float(scale) for scale in scales]}
    if opset > 7:
        at, held, how = ["x", "scales"], {**held, "scales": np.array(scales)}, {}
    nodes = [helper.make_node(kind, at, ["z"], mode=mode, **how), helper.make_node("Conv", ["z", "w"], ["y"])]
    weights = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in held.items()]
    values = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, s)] for n, s in (("x", [1, 2, 7, 9]), ("y", None))]
    graph = helper.make_graph(nodes, "one", *values, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=4)


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize(
    ("kind", "opset", "scales"),
    [
        *[("Upsample", opset, scales) for opset in (7, 9) for scales in LARGER],
        *[("Resize", 10, scales) for scales in (*LARGER, [1, 1, 0.5, 0.4])],
    ],
)
def test_an_old_resize_stays_what_it_is(kind, opset, scales, mode):
    old = resizing(kind, opset, mode, scales)
    x = np.random.default_rng(0).standard_normal((1, 2, 7, 9)).astype(np.float32)
    right, new = (
        onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0] for model in (old, upgraded(old))
    )
    np.testing.assert_array_equal(new, right)
    for model in (old, upgraded(old)):
        exact = Float64(model)
        assert exact.told == REFERENCE
        np.testing.assert_allclose(exact.run({"x": x})["y"], right, rtol=1e-5, atol=1e-5)


def test_whole_places_are_whole():
    """2 pixels as 98: 49 times a 49th is a little less than 1."""
    x = np.arange(2.0)[None]
    how = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    np.testing.assert_array_equal(resized(x, [1.0, 49.0], None, how), x.repeat(49, 1))
