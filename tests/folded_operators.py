"""The operators of a graph after folding, and the comparison of its outputs with those of the original graph."""

from __future__ import annotations

import numpy as np
import onnx

from repaconv.graph.models_in_onnx_ir import rewritten
from repaconv.rewrites.fold.fold_pipeline import FOLDS
from repaconv.verification.float64_graphs import ReferenceEvaluation


def operators_after_folding(model: onnx.ModelProto, x: np.ndarray, folds=FOLDS) -> list[str]:
    """The operators in order; all outputs for this input are the same in float64."""
    after, _ = rewritten(model, folds)
    require_same_outputs(model, after, x)
    return [node.op_type for node in after.graph.node]


def require_same_outputs(model: onnx.ModelProto, after: onnx.ModelProto, x: np.ndarray, rtol: float = 1e-12) -> None:
    """Check that the second graph is valid, and that all outputs for this input are the same in float64.

    ``rtol`` is relative to an output's largest number.
    """
    onnx.checker.check_model(after, full_check=True)
    right, found = (ReferenceEvaluation(each).run({"x": x}) for each in (model, after))
    assert right
    for name, numbers in right.items():
        atol = rtol * np.abs(numbers).max() if rtol else 0  # infinite numbers must be equal
        np.testing.assert_allclose(found[name], numbers, rtol=0, atol=atol)
