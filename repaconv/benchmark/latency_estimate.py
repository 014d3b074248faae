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

from collections.abc import Iterable
from typing import Literal

from repaconv.core.errors import UsageProblem
from repaconv.graph.compute_costs import Work
from repaconv.results import Limits, NodeEstimate

REACHED = 0.5
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
    parts: dict[Limit, float] = {"arithmetic": usual / REACHED, "memory": memory / REACHED, "launch": launch}
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
