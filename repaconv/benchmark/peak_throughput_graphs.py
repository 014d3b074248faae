"""Graphs of large products, whose time in a runtime is a limit of the machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from repaconv.engines.contract import SessionSpec

if TYPE_CHECKING:
    import onnx

    from repaconv.engines.contract import Engine


def opened(engine: Engine, model: onnx.ModelProto, precision: str, threads: int) -> Callable[[], Any]:
    """Open a graph in a runtime; the result runs it once, on ones."""
    session = engine.open(model.SerializeToString(), SessionSpec(threads=threads, precision=precision))
    feeds = {port.name: np.ones([int(size or 0) for size in port.shape], dtype=port.dtype) for port in session.inputs}
    return lambda: session.run(feeds)


def product_graph(
    operator: str, shape: Sequence[int], weights: Sequence[int], precision: str, *, count: int = 1, **attributes: Any
) -> onnx.ModelProto:
    """Build a chain of ``count`` products with the same weights; for int8 one, with Q/DQ nodes.

    Args:
        operator: MatMul or Conv.
        shape: Shape of the input and of the output.
        weights: Shape of the weights.
        precision: fp16 and int8 are in the graph; of others it is a float32 graph.
        count: Number of products.
        **attributes: Attributes of the operator.
    """
    from onnx import TensorProto, helper, numpy_helper

    quantized = precision == "int8"
    kind = {"fp16": TensorProto.FLOAT16, "int8": TensorProto.UINT8}.get(precision, TensorProto.FLOAT)
    dtype = {"fp16": np.float16, "int8": np.int8}.get(precision, np.float32)
    mean = np.full(weights, 1 if quantized else 1 / prod(weights[1:]), dtype)  # avoids overflow
    constants = [numpy_helper.from_array(mean, "w")]
    if quantized:
        kept = {"scale": np.float32(1 / 64), "zero": np.uint8(0), "middle": np.int8(0)}
        constants += [numpy_helper.from_array(np.asarray(value), name) for name, value in kept.items()]
        nodes = [
            helper.make_node("DequantizeLinear", ["x0", "scale", "zero"], ["x"], "x"),
            helper.make_node("DequantizeLinear", ["w", "scale", "middle"], ["v"], "v"),
            helper.make_node(operator, ["x", "v"], ["y"], "product", **attributes),
            helper.make_node("QuantizeLinear", ["y", "scale", "zero"], ["x1"], "y"),
        ]
    else:
        steps = range(count)
        nodes = [helper.make_node(operator, [f"x{n}", "w"], [f"x{n + 1}"], f"product{n}", **attributes) for n in steps]
    ends = [helper.make_tensor_value_info(name, kind, shape) for name in ("x0", f"x{count}")]
    graph = helper.make_graph(nodes, "limit", ends[:1], ends[1:], constants)
    made: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return made
