"""Check a graph against the operators and features that a target's parser does not support."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from repaconv.graph.onnx_files import opset_of, subgraphs_of
from repaconv.graph.operator_facts import DEFAULT_DOMAIN, NCHWC, operators_of

if TYPE_CHECKING:
    import onnx

FORBIDDEN = ("topk-from-a-value", "scatter-add", "float64", "dynamic-batch", "zero-points", "uint8")


def violations(
    model: onnx.ModelProto,
    opset: int,
    unsupported_ops: Collection[str],
    forbids: Collection[str],
    domains: Collection[str] = (),
) -> list[str]:
    """Return one sentence for each unsupported feature in a graph; empty if the target supports it.

    Args:
        model: The graph.
        opset: The newest opset that the parser supports.
        unsupported_ops: Operators that it does not support.
        forbids: Some of `FORBIDDEN`.
        domains: Supported operator domains other than ONNX's own.
    """
    own = {*DEFAULT_DOMAIN, *(function.domain for function in model.functions)}
    bodies = (model.graph.node, *(function.node for function in model.functions))
    asked = {domain for nodes in bodies for domain in operator_domains(nodes)}
    found = [
        operators_of(domain) + "; fold and export the file from before that" * (domain == NCHWC)
        for domain in sorted(asked - own - set(domains))
    ]
    newest = opset_of(model)
    if newest > opset:
        found.append(f"opset {newest}, it reads up to {opset}")
    used = {node.op_type for node in model.graph.node if node.domain in DEFAULT_DOMAIN}
    found += [f"operator {name}" for name in sorted(used & set(unsupported_ops))]
    found += _forbidden_nodes(model, forbids)
    found += _forbidden_types(model, forbids)
    return found


def _forbidden_nodes(model: onnx.ModelProto, forbids: Collection[str]) -> Iterator[str]:
    """Yield what nodes do that the target forbids."""
    from onnx import numpy_helper

    weights = {weight.name: weight for weight in model.graph.initializer}
    constants = set(weights)
    constants |= {name for node in model.graph.node if node.op_type == "Constant" for name in node.output}
    for node in model.graph.node:
        if "topk-from-a-value" in forbids and node.op_type == "TopK" and node.input[1] not in constants:
            yield f"{node.name}: TopK with a k that is computed"
        adds = any(entry.name == "reduction" and entry.s not in (b"", b"none") for entry in node.attribute)
        if "scatter-add" in forbids and node.op_type.startswith("Scatter") and adds:
            yield f"{node.name}: a scatter that adds"
        if "zero-points" in forbids and node.op_type == "QuantizeLinear" and len(node.input) > 2:
            zero_point = weights.get(node.input[2])
            if zero_point is None or numpy_helper.to_array(zero_point).any():
                yield f"{node.name}: a zero point that is not 0"


def _forbidden_types(model: onnx.ModelProto, forbids: Collection[str]) -> Iterator[str]:
    """Yield types of weights and inputs, and dynamic dimensions, that the target forbids; the first of each kind."""
    from onnx import TensorProto

    doubles = [weight.name for weight in model.graph.initializer if weight.data_type == TensorProto.DOUBLE]
    if "float64" in forbids and doubles:
        yield f"float64 in {doubles[0]}"
    pixels = [entry.name for entry in model.graph.input if entry.type.tensor_type.elem_type == TensorProto.UINT8]
    if "uint8" in forbids and pixels:
        yield f"pixels in uint8 ({pixels[0]})"
    free = [entry.name for entry in model.graph.input if any(d.dim_param for d in entry.type.tensor_type.shape.dim[:1])]
    if "dynamic-batch" in forbids and free:
        yield f"a dynamic batch in {free[0]}"


def operator_domains(nodes: Iterable[onnx.NodeProto]) -> Iterator[str]:
    """Yield the domains of operators, including those in subgraphs."""
    for node in nodes:
        yield node.domain
        for graph in subgraphs_of(node):
            yield from operator_domains(graph.node)
