"""Estimate the latency of a graph on a device that is not available, from the device's limits.

A node takes the larger of two times: its operations at the peak throughput of their type, and its bytes at the memory
bandwidth (the roofline model: Williams, Waterman, Patterson 2009). The sum over the nodes is a range:

- low: only products (Conv, MatMul, Gemm, Attention) take time, each at the limit. Everything else is fused into them,
and there is no launch or synchronization overhead.

- high: no node is fused. Each reads its inputs, writes its outputs, reaches half of either limit, and costs a launch.

No runtime is faster than low, unless weights or activations stay in a cache. High is not a bound: a kernel that reaches
less than half of the limit (small batches, depthwise convolutions, a throttled board) takes longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

from repaconv.benchmark.machine_fingerprint import fingerprint
from repaconv.benchmark.peak_throughput_graphs import opened, product_graph
from repaconv.core.errors import UsageProblem
from repaconv.graph.compute_costs import Work
from repaconv.results import Limits, NodeEstimate

if TYPE_CHECKING:
    import onnx

    from repaconv.engines.contract import Engine

REACHED_SHARE = 0.5
"""Share of the limits that a node reaches at the high end."""

Limit = Literal["arithmetic", "memory", "launch"]


def estimated(works: Iterable[Work], limits: Limits) -> tuple[NodeEstimate, ...]:
    """Estimate the time of each node. Unknown operations and bytes count as 0.

    Raises:
        UsageProblem: If the limits lack the peak for the type of a product.
    """
    return tuple(_node(work, limits) for work in works)


def unknown(works: Iterable[Work]) -> str:
    """Describe which operators the estimate omits; empty if there are none."""
    names = sorted({work.operator for work in works if work.flops is None or work.bytes is None})
    return f"left out, as nothing is known of what they cost: {', '.join(names)}" if names else ""


def _node(work: Work, limits: Limits) -> NodeEstimate:
    flops, moved = work.flops or 0, work.bytes or 0
    memory = moved / limits.bandwidth_gb_s / 1e6
    launch = limits.launch_us / 1e3
    fastest, usual = ((flops / peak / 1e9) for peak in _peaks(work, limits)) if flops else (0.0, 0.0)
    parts: dict[Limit, float] = {
        "arithmetic": usual / REACHED_SHARE,
        "memory": memory / REACHED_SHARE,
        "launch": launch,
    }
    return NodeEstimate(
        name=work.name,
        operator=work.operator,
        precision=work.precision,
        flops=flops,
        bytes=moved,
        low_ms=max(fastest, memory) if work.multiplies else 0.0,
        high_ms=max(parts["arithmetic"], parts["memory"]) + launch,
        limit=max(parts, key=lambda part: parts[part]),
    )


def _peaks(work: Work, limits: Limits) -> tuple[float, float]:
    """Return the largest and the usual peak in TFLOP/s; float32 may be multiplied in TF32 if the device supports it."""
    peaks = {str(name): peak for name, peak in limits.peak_tflops.items()}
    if work.precision not in peaks:
        raise UsageProblem(
            f"the peak throughput of {limits.device} in {work.precision} is unknown, and {work.name} computes in it.",
            hint=f"Known precisions: {', '.join(peaks)}. Your own target file may state it under [limits.peak_tflops].",
            code="estimate.precision",
        )
    usual = peaks[work.precision]
    return max(usual, peaks.get("tf32", 0.0)) if work.precision == "fp32" else usual, usual


# --- Measure the peak performance of this CPU with the runtime whose latency is to be estimated.

ROWS, WIDTH = 256, 512
"""Size of the product whose rate is the peak, [256, 512] x [512, 512]. It is short, so it is seldom interrupted."""
WIDE_MATRIX = 4096
"""Width of the matrix that is read for a single row: 64 MiB, more than caches hold."""
SHORT, LONG = 16, 80
"""Numbers of nodes in two chains of tiny products. The difference of their times is the cost of nodes."""
REPETITIONS = 50


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
        return _best(opened(engine, graph, asked, threads))

    flops = 2 * ROWS * WIDTH * WIDTH
    peaks: dict[Any, float] = {"fp32": flops / best_s(_product(ROWS, WIDTH)) / 1e12}
    if precision != "fp32":
        graph = _product(ROWS, WIDTH, precision if typed_here else "fp32")
        peaks[precision] = flops / best_s(graph, "fp32" if typed_here else precision) / 1e12
    nodes = best_s(_product(1, 8, count=LONG)) - best_s(_product(1, 8, count=SHORT))
    return Limits(
        device=str(fingerprint(()).get("cpu")),
        peak_tflops={name: round(peak, 6) for name, peak in peaks.items()},
        bandwidth_gb_s=round(4 * WIDE_MATRIX * WIDE_MATRIX / best_s(_product(1, WIDE_MATRIX)) / 1e9, 3),
        launch_us=round(max(nodes, 0.0) / (LONG - SHORT) * 1e6, 3),
        source=(
            f"measured here by {engine.name} {engine.version()} on {threads} thread(s): one product of {ROWS} rows by "
            f"{WIDTH} x {WIDTH}, one row by a matrix of 64 MiB, and a chain of the smallest products",
        ),
    )


def _best(run: Callable[[], Any]) -> float:
    """Return the time of the fastest inference in seconds."""
    best = float("inf")
    for _ in range(REPETITIONS):
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
    return best


def _product(rows: int, width: int, precision: str = "fp32", *, count: int = 1) -> onnx.ModelProto:
    return product_graph("MatMul", (rows, width), (width, width), precision, count=count)
