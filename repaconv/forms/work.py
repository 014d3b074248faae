"""How much a graph multiplies: the first thing that tells a hopeless form."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir


def macs_of(proto: onnx.ModelProto) -> int:
    """Multiply-accumulates of one image in MatMul, Gemm, Conv and Attention; free sizes count as 1."""
    import onnx_ir as ir
    from onnx_ir.passes.common import ShapeInferencePass

    model = ir.from_proto(proto)
    ShapeInferencePass()(model)
    return sum(_macs(node) for node in model.graph)


def _macs(node: ir.Node) -> int:
    first, second = (_sizes(value) for value in (*node.inputs[:2], None, None)[:2])
    out = _sizes(node.outputs[0]) if node.outputs else []
    if node.op_type == "MatMul" and first:
        return prod(out) * first[-1]
    if node.op_type == "Gemm" and len(first) == 2:
        return prod(out) * first[0 if node.attributes.get_int("transA", 0) else 1]
    if node.op_type == "Conv" and second:
        return prod(out) * prod(second[1:])
    if node.op_type == "Attention" and len(first) == 3 and len(second) == 3:
        queries, keys, heads = first[1], second[1], node.attributes.get_int("q_num_heads", 1)
        shared = node.attributes.get_int("kv_num_heads", heads)
        return int(first[0] * queries * keys * (first[2] + _sizes(node.inputs[2])[2] * heads // shared))
    return 0


def _sizes(value: ir.Value | None) -> list[int]:
    if value is None or value.shape is None:
        return []
    return [dim if isinstance(dim, int) else 1 for dim in value.shape]
