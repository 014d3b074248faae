"""Measure the peak performance of this CPU with the runtime whose latency is to be estimated."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from repaconv.benchmark.machine_fingerprint import fingerprint
from repaconv.engines.contract import SessionSpec
from repaconv.results import Limits

if TYPE_CHECKING:
    import onnx

    from repaconv.engines.contract import Array, Engine

ROWS, WIDTH = 256, 512
"""Size of the product whose rate is the peak, [256, 512] x [512, 512]. It is short, so it is seldom interrupted."""
WIDE = 4096
"""Width of the matrix that is read for a single row: 64 MiB, more than caches hold."""
SHORT, LONG = 16, 80
"""Numbers of nodes in two chains of tiny products. The difference of their times is the cost of nodes."""
CALLS = 50


def measured_limits(engine: Engine, precision: str, threads: int, *, typed_here: bool = True) -> Limits:
    """Measure peak throughput, memory bandwidth and the cost of a node, each the best of 50 inferences.

    Args:
        engine: A runtime that loads graphs on this CPU.
        precision: The precision to measure in addition to fp32, which parts of any graph may use.
        threads: Threads per inference.
        typed_here: Whether the graph has this precision; else the runtime computes a float32 graph in it.

    Raises:
        EnvironmentProblem: If the runtime does not support the precision on this CPU.
    """

    def best_s(graph: onnx.ModelProto, asked: str = "fp32") -> float:
        session = engine.open(graph.SerializeToString(), SessionSpec(threads=threads, precision=asked))
        feeds = {port.name: np.ones([int(n or 0) for n in port.shape], dtype=port.dtype) for port in session.inputs}
        return _best(session, feeds)

    flops = 2 * ROWS * WIDTH * WIDTH
    peaks: dict[Any, float] = {"fp32": flops / best_s(_product(ROWS, WIDTH)) / 1e12}
    if precision != "fp32":
        graph = _product(ROWS, WIDTH, precision if typed_here else "fp32")
        peaks[precision] = flops / best_s(graph, "fp32" if typed_here else precision) / 1e12
    nodes = best_s(_product(1, 8, count=LONG)) - best_s(_product(1, 8, count=SHORT))
    return Limits(
        device=str(fingerprint(()).get("cpu")),
        peak_tflops={name: round(peak, 6) for name, peak in peaks.items()},
        bandwidth_gb_s=round(4 * WIDE * WIDE / best_s(_product(1, WIDE)) / 1e9, 3),
        launch_us=round(max(nodes, 0.0) / (LONG - SHORT) * 1e6, 3),
        source=(
            f"measured here by {engine.name} {engine.version()} on {threads} thread(s): one product of {ROWS} rows by "
            f"{WIDTH} x {WIDTH}, one row by a matrix of 64 MiB, and a chain of the smallest products",
        ),
    )


def _best(session: Any, feeds: dict[str, Array]) -> float:
    """Return the time of the fastest inference in seconds."""
    best = float("inf")
    for _ in range(CALLS):
        begin = time.perf_counter()
        session.run(feeds)
        best = min(best, time.perf_counter() - begin)
    return best


def _product(rows: int, width: int, precision: str = "fp32", *, count: int = 1) -> onnx.ModelProto:
    """Build a chain of ``count`` products of rows and a square matrix; for int8 one, with Q/DQ nodes."""
    from onnx import TensorProto, helper, numpy_helper

    quantised = precision == "int8"
    kind = {"fp16": TensorProto.FLOAT16, "int8": TensorProto.UINT8}.get(precision, TensorProto.FLOAT)
    dtype = {"fp16": np.float16, "int8": np.int8}.get(precision, np.float32)
    mean: Array = np.full((width, width), 1 if quantised else 1 / width, dtype=dtype)  # avoids overflow
    constants = [numpy_helper.from_array(mean, "w")]
    if quantised:
        kept = {"scale": np.float32(1 / 64), "zero": np.uint8(0), "middle": np.int8(0)}
        constants += [numpy_helper.from_array(np.asarray(value), name) for name, value in kept.items()]
        nodes = [
            helper.make_node("DequantizeLinear", ["x0", "scale", "zero"], ["x"], "x"),
            helper.make_node("DequantizeLinear", ["w", "scale", "middle"], ["v"], "v"),
            helper.make_node("MatMul", ["x", "v"], ["y"], "product"),
            helper.make_node("QuantizeLinear", ["y", "scale", "zero"], ["x1"], "y"),
        ]
    else:
        nodes = [helper.make_node("MatMul", [f"x{n}", "w"], [f"x{n + 1}"], f"product{n}") for n in range(count)]
    ends = [helper.make_tensor_value_info(name, kind, (rows, width)) for name in ("x0", f"x{count}")]
    graph = helper.make_graph(nodes, "limit", ends[:1], ends[1:], constants)
    made: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return made
