"""How much a graph multiplies: the first thing that tells a hopeless form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from repaconv.graphs.graph import dims
from repaconv.onnxfile import flops_of

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir


def macs_of(proto: onnx.ModelProto) -> int:
    """Multiply-accumulates of one image in matrix products, convolutions and attention; free sizes count as 1."""
    import onnx_ir as ir
    from onnx_ir.passes.common import ShapeInferencePass

    model = ir.from_proto(proto)
    ShapeInferencePass()(model)
    return sum(flops_of(node.op_type, _shapes(node.inputs), _shapes(node.outputs)) for node in model.graph) // 2


def _shapes(values: tuple[ir.Value | None, ...]) -> list[tuple[int, ...]]:
    return [tuple(dim or 1 for dim in shape) for value in values if (shape := dims(value)) is not None]
