"""The operators that are left of a graph after folding."""

from __future__ import annotations

import numpy as np
import onnx

from repaconv.graph.models_in_onnx_ir import rewritten
from repaconv.rewrites.fold.fold_pipeline import FOLDS
from repaconv.verification.float64_graphs import ReferenceEvaluation


def operators_after_folding(model: onnx.ModelProto, x: np.ndarray, folds=FOLDS) -> list[str]:
    """The operators in order; all outputs for this input are the same in float64."""
    after, _ = rewritten(model, folds)
    onnx.checker.check_model(after, full_check=True)
    before, behind = (ReferenceEvaluation(each).run({"x": x}) for each in (model, after))
    assert before
    for name, right in before.items():
        np.testing.assert_allclose(behind[name], right, rtol=0, atol=1e-12 * np.abs(right).max())
    return [node.op_type for node in after.graph.node]
