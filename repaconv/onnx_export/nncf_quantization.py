"""Quantize to int8 with NNCF, OpenVINO's quantizer: SmoothQuant for transformers, fast bias correction, Q/DQ pairs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib.util import find_spec
from io import StringIO
from typing import TYPE_CHECKING

from repaconv.core.errors import EnvironmentProblem, Refused, first_line, require_module

if TYPE_CHECKING:
    import onnx

    from repaconv.engines.contract import Feeds

INSTALLED_BY = "pip install 'repaconv[quantise]'"


def quantize_with_nncf(
    model: onnx.ModelProto, calls: Sequence[Feeds], keep: Sequence[str], *, narrow: bool, symmetric: bool = False
) -> onnx.ModelProto:
    """Quantize all that OpenVINO computes in int8, including products of two activations.

    Args:
        model: The float32 graph; it is not modified.
        calls: Calibration inputs, by input name.
        keep: Names of nodes that stay in float32.
        narrow: Whether weights have 7 bits.
        symmetric: Whether all activations are symmetric; else NNCF also uses asymmetric ranges.

    Raises:
        EnvironmentProblem: If NNCF is not installed.
        Refused: If NNCF rejects the graph.
    """
    import onnx

    nncf = require_module("nncf", "NNCF", INSTALLED_BY)
    nncf.set_log_level(logging.ERROR)
    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    how = nncf.AdvancedQuantizationParameters(
        overflow_fix=nncf.OverflowFix.ENABLE if narrow else nncf.OverflowFix.DISABLE
    )
    try:
        with redirect_stdout(StringIO()):  # hides NNCF's progress output
            low: onnx.ModelProto = nncf.quantize(
                copied,
                nncf.Dataset([dict(call) for call in calls]),
                subset_size=len(calls),
                preset=nncf.QuantizationPreset.PERFORMANCE if symmetric else nncf.QuantizationPreset.MIXED,
                model_type=nncf.ModelType.TRANSFORMER if _is_transformer(model) else None,
                ignored_scope=nncf.IgnoredScope(names=list(keep), validate=False) if keep else None,
                advanced_parameters=how,
            )
    except Exception as error:  # NNCF raises errors of many classes
        raise Refused(
            f"NNCF cannot quantize this graph: {first_line(error)}.",
            hint="Leave --quantizer out to use ONNX Runtime's quantizer.",
            code="nncf.graph",
        ) from error
    return low


def require_nncf() -> None:
    """Check that NNCF is installed, before any long computation.

    Raises:
        EnvironmentProblem: If NNCF is not installed.
    """
    if find_spec("nncf") is None:
        raise EnvironmentProblem("NNCF is not installed.", hint=INSTALLED_BY, code="runtime.missing")


def _is_transformer(model: onnx.ModelProto) -> bool:
    """Return whether activations are multiplied by activations."""
    weights = {weight.name for weight in model.graph.initializer}
    return any(node.op_type == "MatMul" and weights.isdisjoint(node.input) for node in model.graph.node)
