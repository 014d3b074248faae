"""flattened-tokens: a Gemm between Reshapes that flatten tokens and restore them is a linear layer on tokens."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from test_fold_onnx import graph

from repaconv.graph.models_in_onnx_ir import rewritten
from repaconv.rewrites.fold.fold_pipeline import FOLDS
from repaconv.verification.float64_graphs import ReferenceEvaluation

RANDOM = np.random.default_rng(0)
WEIGHTS = {
    "w": RANDOM.standard_normal((8, 6)), "turned": RANDOM.standard_normal((6, 8)), "b": RANDOM.standard_normal(6),
    "v": RANDOM.standard_normal((6, 8)), "c": RANDOM.standard_normal(8), "scale": RANDOM.standard_normal(6),
    "row": np.int64([-1, 8]), "back": np.int64([-1, 5, 6]), "row6": np.int64([-1, 6]), "last": np.int64([-1, 5, 8]),
    "other": np.int64([-1, 10, 3]), "few": np.int64([-1, 4]), "quarter": np.int64([-1, 10, 6]),
    "apart": np.int64([-1, 1, 6]),
    "narrow": RANDOM.standard_normal((4, 6)),
}  # fmt: skip
LAYER = [("Reshape", "x row", "f"), ("Gemm", "f w b", "g"), ("Reshape", "g back", "h")]


def operators(rows, shape=("N", 5, 8)) -> list[str]:
    """The operators after folding, which compute the same."""
    model = graph(rows, WEIGHTS, {"x": shape})
    after, _ = rewritten(model, FOLDS)
    onnx.checker.check_model(after, full_check=True)
    image = {"x": RANDOM.standard_normal([3 if isinstance(size, str) else size for size in shape])}
    given, found = (ReferenceEvaluation(each).run(image)["y"] for each in (model, after))
    assert given.shape == found.shape
    np.testing.assert_allclose(found, given, rtol=0, atol=1e-12 * np.abs(given).max())
    return sorted(node.op_type for node in after.graph.node)


@pytest.mark.parametrize("shape", [("N", 5, 8), (3, 5, 8)])
@pytest.mark.parametrize("layer", [("Gemm", "f w b", "g"), ("Gemm", "f turned b", "g", {"transB": 1, "alpha": 0.5})])
def test_the_layer_acts_on_tokens(shape, layer):
    assert operators([LAYER[0], layer, LAYER[2], ("Sigmoid", "h", "y")], shape) == ["Add", "MatMul", "Sigmoid"]


def test_what_follows_is_folded_into_it():
    """Between both layers there was no product of tokens, but two Reshapes and an activation."""
    second = [("Relu", "h", "i"), ("Reshape", "i row6", "j"), ("Gemm", "j v c", "k"), ("Reshape", "k last", "y")]
    assert operators([*LAYER, *second]) == ["Add", "Add", "MatMul", "MatMul", "Relu"]


@pytest.mark.parametrize(
    "rows",
    [
        [*LAYER[:2], ("Reshape", "g other", "h"), ("Sigmoid", "h", "y")],  # channels are split
        [("Reshape", "x few", "f"), ("Gemm", "f narrow b", "g"), ("Reshape", "g quarter", "h"), ("Sigmoid", "h", "y")],
        [*LAYER[:2], ("Reshape", "g apart", "h"), ("Sigmoid", "h", "y")],  # tokens are images
        [*LAYER, ("ReduceMax", "g", "most", {"keepdims": 0}), ("Add", "h most", "y")],  # rows are read as well
    ],
)
def test_other_reshapes_stay(rows):
    assert "Gemm" in operators(rows)


def test_targets_that_onnx_runtime_named_get_other_names():
    """It names the target of Reshapes that it merges after one of them, without a look at what the graph has."""
    shapes = {"fused_new_shape": np.int64([-1, 10, 4])}
    rows = [("Relu", "x", "r"), ("Relu", "r", "s"), ("Reshape", "s fused_new_shape", "y")]
    model = graph(rows, shapes, {"x": ("N", 5, 8)})
    after, _ = rewritten(model, FOLDS)
    assert all(not weight.name.endswith("_new_shape") for weight in after.graph.initializer)
