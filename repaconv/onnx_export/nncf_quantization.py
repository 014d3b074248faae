"""Quantize to int8 with NNCF, OpenVINO's quantizer: SmoothQuant for transformers, fast bias correction, Q/DQ pairs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib.util import find_spec
from io import StringIO
from typing import TYPE_CHECKING

import numpy as np

from repaconv.core.errors import EnvironmentProblem, Refused, first_line, require_module

if TYPE_CHECKING:
    import onnx

    from repaconv.engines.contract import Feeds

INSTALLED_BY = "pip install 'repaconv[quantize]'"


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
    kept = [*keep, *nodes_around_exponentials(model)]
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
                ignored_scope=nncf.IgnoredScope(names=kept, validate=False) if kept else None,
                advanced_parameters=how,
            )
    except Exception as error:  # NNCF raises errors of many classes
        raise Refused(
            f"NNCF cannot quantize this graph: {first_line(error)}.",
            hint="Leave --quantizer out to use ONNX Runtime's quantizer.",
            code="nncf.graph",
        ) from error
    make_zero_points_unsigned(low)
    return low


def nodes_around_exponentials(model: onnx.ModelProto) -> list[str]:
    """Return the names of Exp nodes, and of the sums, products and quotients that read or write their values.

    NNCF would quantize the sum 1 + exp(-x) of `silu-as-quotient`, whose values have no range that int8 could cover.
    """
    powers = [node for node in model.graph.node if node.op_type == "Exp"]
    arithmetic = [node for node in model.graph.node if node.op_type in ("Add", "Sub", "Mul", "Div")]
    read = {name for node in powers for name in node.input}
    arguments = [node for node in arithmetic if not read.isdisjoint(node.output)]
    sums = _readers(powers, arithmetic)
    quotients = [node for node in _readers(sums, arithmetic) if node.op_type == "Div"]
    return list(dict.fromkeys(node.name for node in (*powers, *arguments, *sums, *quotients)))


def _readers(sources: Sequence[onnx.NodeProto], among: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto]:
    given = {name for node in sources for name in node.output}
    return [node for node in among if not given.isdisjoint(node.input)]


def make_zero_points_unsigned(model: onnx.ModelProto) -> None:
    """Write activations of int8 with a zero point z as uint8 with z + 128, in place: the same values are represented.

    OpenVINO (2026.4) adds a zero point to a convolution only if both are uint8 (FuseConvolutionAndZeroPoints). On CPUs
    without AMX it makes every input of a convolution uint8 itself; with AMX it keeps int8, subtracts the zero point in
    a layer of its own, and computes the convolution in float32.
    """
    import onnx

    weights = {weight.name: weight for weight in model.graph.initializer}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    outputs = {value.name for value in model.graph.output}
    changed = set[str]()
    for node in model.graph.node:
        zero = weights.get(node.input[2]) if node.op_type == "QuantizeLinear" and len(node.input) > 2 else None
        if zero is None or zero.data_type != onnx.TensorProto.INT8 or node.output[0] in outputs:
            continue
        point = onnx.numpy_helper.to_array(zero).astype(np.int16)
        dequantizing = readers.get(node.output[0], [])
        alone = len(readers[zero.name]) == 1 + len(dequantizing)  # no other value has this zero point
        if alone and point.any() and all(each.input[2:] == [zero.name] for each in dequantizing):
            zero.CopyFrom(onnx.numpy_helper.from_array((point + 128).astype(np.uint8), zero.name))
            changed |= {node.output[0], zero.name}
    for value in model.graph.value_info:
        if value.name in changed:
            value.type.tensor_type.elem_type = onnx.TensorProto.UINT8


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
