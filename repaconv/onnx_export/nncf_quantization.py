"""int8 by NNCF, OpenVINO's own quantizer: SmoothQuant for transformers, fast bias correction, Q/DQ pairs in ONNX."""

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


def quantised(
    model: onnx.ModelProto, calls: Sequence[Feeds], keep: Sequence[str], *, narrow: bool, symmetric: bool = False
) -> onnx.ModelProto:
    """All that OpenVINO computes in int8, products of two activations too where NNCF finds them harmless.

    Args:
        model: The float32 graph; it is left as it is.
        calls: Its inputs, by its names.
        keep: Names of nodes that stay in float32.
        narrow: Weights in 7 bits.
        symmetric: All activations about zero; else those that are not are rounded from their least to their largest.

    Raises:
        EnvironmentProblem: If NNCF is not installed.
        Refused: If NNCF does not take the graph.
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
        with redirect_stdout(StringIO()):  # its progress, which is not the user's
            low: onnx.ModelProto = nncf.quantize(
                copied,
                nncf.Dataset([dict(call) for call in calls]),
                subset_size=len(calls),
                preset=nncf.QuantizationPreset.PERFORMANCE if symmetric else nncf.QuantizationPreset.MIXED,
                model_type=nncf.ModelType.TRANSFORMER if _is_transformer(model) else None,
                ignored_scope=nncf.IgnoredScope(names=list(keep), validate=False) if keep else None,
                advanced_parameters=how,
            )
    except Exception as error:  # NNCF raises what comes
        raise Refused(
            f"NNCF cannot quantize this graph: {first_line(error)}.",
            hint="Leave --quantizer out to use ONNX Runtime's quantizer.",
            code="nncf.graph",
        ) from error
    return low


def require_nncf() -> None:
    """Refuse to go on without it, before anything takes time.

    Raises:
        EnvironmentProblem: If it is not installed.
    """
    if find_spec("nncf") is None:
        raise EnvironmentProblem("NNCF is not installed.", hint=INSTALLED_BY, code="runtime.missing")


def _is_transformer(model: onnx.ModelProto) -> bool:
    """Whether activations are multiplied by activations."""
    weights = {weight.name for weight in model.graph.initializer}
    return any(node.op_type == "MatMul" and weights.isdisjoint(node.input) for node in model.graph.node)
