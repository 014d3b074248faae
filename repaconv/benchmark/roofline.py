"""How far a profiled network is from the limit of its core: peak throughput and bandwidth, measured by its runtime.

A layer cannot take less than its operations at the peak of their precision, nor less than its bytes at the bandwidth
(the roofline model: Williams, Waterman, Patterson 2009). What it takes beyond both is removable, by a better kernel or
by a graph without the layer. What its bytes take is not: only a graph that moves fewer bytes removes that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from repaconv.benchmark.peak_throughput_graphs import opened, product_graph
from repaconv.graph.operator_facts import ARITHMETIC, MOVES, REDUCTIONS, UNARY
from repaconv.results import Bandwidth, LayerGroup, ProductPeak, Roofline

if TYPE_CHECKING:
    import onnx

    from repaconv.engines.contract import Engine

# --- What a layer is. Names of ONNX, of ONNX Runtime's fused operators and of OpenVINO's layers.

PRODUCTS = "products"
ACTIVATED = "products with an activation"
"""Products into which the runtime fused the activation that follows: the time of both cannot be told apart."""
BETWEEN = "between layers"
"""What an inference takes beyond the sum of its layers."""
MULTIPLYING = ("Conv", "MatMul", "Gemm", "FullyConnected", "Attention", "MHA")
"""Parts of the names of operators that multiply matrices; OpenVINO's and ONNX Runtime's include these."""
GROUPS: dict[str, tuple[str, ...]] = {
    "norms": ("Normalization", "MVN", "NormalizeL2", "LRN", "LpNorm"),
    "quantize": ("QuantizeLinear", "DequantizeLinear", "FakeQuantize"),
    "layout": ("Reorder", "Concat", "Pad", "Expand", "Tile", "DepthToSpace", "SpaceToDepth", "StridedSlice", "Cast"),
    "activations": ("Gelu", "Softmax", "HSwish", "Swish", "PRelu", "Clamp", "Clip", "Silu", "Mish", "LogSoftmax"),
    "pooling": ("Pool", "Reduce"),
    "elementwise": ("Eltwise", "Subgraph", "Multiply", "Subtract", "Divide", "Sum", "Pow", "Where", "Max", "Min"),
}
"""By group, parts of the names of its operators; the first that fits counts."""
EXACT = {
    **dict.fromkeys((*MOVES, "Convert", "Squeeze", "Unsqueeze", "GatherND", "GatherElements", "Permute"), "layout"),
    **dict.fromkeys(UNARY, "activations"),
    **dict.fromkeys((*ARITHMETIC, "Max", "Min"), "elementwise"),
    **dict.fromkeys(REDUCTIONS, "pooling"),
}
"""The group of operators with these names."""
OTHER = "other"


def group_of(operator: str) -> str:
    """Return the group of a layer by its operators, joined by ``+`` where the runtime fused several.

    A layer that multiplies matrices is a product. Otherwise its most expensive part decides, and a layer that only
    changes values and also quantizes them counts by what it changes.
    """
    parts = operator.split("+")
    if any(name in part for part in parts if part not in EXACT for name in MULTIPLYING):
        return ACTIVATED if any(_group(part) == "activations" for part in parts) else PRODUCTS
    groups = {_group(part) for part in parts}
    return next((name for name in ("norms", "activations", "elementwise", "pooling") if name in groups), None) or min(
        groups
    )


def _group(operator: str) -> str:
    if operator in EXACT:
        return EXACT[operator]
    return next((group for group, names in GROUPS.items() if any(name in operator for name in names)), OTHER)


def is_product(group: str) -> bool:
    """Return whether layers of this group multiply matrices."""
    return group in (PRODUCTS, ACTIVATED)


# --- The limits of the core.

ROWS, WIDTH = 512, 1024
"""Size of the matrix product, [512, 1024] x [1024, 1024]."""
SIDE, CHANNELS = 28, 256
"""Size of the convolution: 3 x 3, from 256 to 256 channels of 28 x 28 pixels."""
COPIED = (2**18, 2**20, 2**22, 2**26)
"""Bytes that are read and written by the copies whose rate is the bandwidth: those of caches, and of memory."""
ROUNDS = 20
"""Rounds in which the network and every limit run in turn."""


class Limits(NamedTuple):
    """Limits of the cores in use, measured by the runtime of the network.

    Attributes:
        peaks: The rate of each large product.
        bandwidth: The rates of copying, by the number of bytes, ascending.
    """

    peaks: tuple[ProductPeak, ...]
    bandwidth: tuple[Bandwidth, ...]

    def gflops(self, precision: str) -> float:
        """Return the peak of a precision, that of float32 where it was not measured."""
        known = {each.precision: each.gflops for each in sorted(self.peaks, key=lambda each: each.gflops)}
        return known.get(precision) or known["fp32"]

    def product_gflops(self) -> float:
        """Return the rate of the large float32 matrix product."""
        return next(each.gflops for each in self.peaks if (each.operator, each.precision) == ("MatMul", "fp32"))

    def arithmetic_ms(self, flops: int, precision: str) -> float:
        """Return the milliseconds of operations at the peak."""
        return flops / self.gflops(precision) / 1e6

    def memory_ms(self, moved: int) -> float:
        """Return the milliseconds of moving so many bytes, by the rates of the nearest amounts that were measured."""
        if not moved:
            return 0.0
        sizes, rates = ([getattr(each, name) for each in self.bandwidth] for name in ("bytes", "gb_s"))
        return float(moved / np.interp(np.log(moved), np.log(sizes), rates) / 1e6)


def measured_limits(engine: Engine, precisions: Iterable[str], threads: int, network: Callable[[], Any]) -> Limits:
    """Measure large products by the runtime of a network, and the bandwidth, in turn with the network.

    So all of them meet the same clock and the same neighbors. The fastest run counts. The bandwidth is that of one
    thread times the threads: no layer moves its bytes faster.

    Args:
        engine: The runtime.
        precisions: Precisions of the network's products in addition to fp32.
        threads: Threads per inference.
        network: Runs one inference of the network.
    """
    flops: dict[Literal["MatMul", "Conv"], int] = {
        "MatMul": 2 * ROWS * WIDTH * WIDTH,
        "Conv": 2 * (SIDE * CHANNELS * 3) ** 2,
    }
    names = [(operator, precision) for precision in dict.fromkeys(("fp32", *precisions)) for operator in flops]
    products = {name: opened(engine, _product(*name), name[1], threads) for name in names}
    halves = {moved: np.ones((2, moved // 2), dtype=np.uint8) for moved in COPIED}
    copies = {moved: partial(np.copyto, *pair) for moved, pair in halves.items()}
    runs: dict[Any, Callable[[], Any]] = {**products, **copies}
    fastest = dict.fromkeys(runs, float("inf"))
    for _ in range(ROUNDS):
        network()
        for name, run in runs.items():
            for _again in range(2):  # the first brings its data back into the caches
                begin = time.perf_counter()
                run()
                fastest[name] = min(fastest[name], time.perf_counter() - begin)
    return Limits(
        tuple(
            ProductPeak(
                operator=operator,
                precision=precision,
                gflops=round(flops[operator] / fastest[operator, precision] / 1e9, 3),
            )
            for operator, precision in names
        ),
        tuple(Bandwidth(bytes=moved, gb_s=round(threads * moved / fastest[moved] / 1e9, 3)) for moved in COPIED),
    )


def _product(operator: Literal["MatMul", "Conv"], precision: str) -> onnx.ModelProto:
    """Build a large product. The runtime lowers a float32 graph to bf16 itself; fp16 and int8 are in the graph."""
    if operator == "MatMul":
        return product_graph(operator, (ROWS, WIDTH), (WIDTH, WIDTH), precision)
    return product_graph(operator, (1, CHANNELS, SIDE, SIDE), (CHANNELS, CHANNELS, 3, 3), precision, pads=[1, 1, 1, 1])


# --- The network next to its limits.

AT_LIMIT_SHARE = 0.9
"""A network whose products alone, at the limit, take this share of its latency is at the limit."""


class Layer(NamedTuple):
    """A layer of a profile: its time, its operations and the bytes that it reads and writes."""

    operator: str
    ms: float
    flops: int
    bytes: int
    precision: str

    @property
    def group(self) -> str:
        """Its group."""
        return group_of(self.operator)

    def limit(self, limits: Limits) -> tuple[float, str]:
        """Return the milliseconds that it takes at least, at most its time, and what sets them."""
        bounds = {
            "arithmetic": limits.arithmetic_ms(self.flops, self.precision) if is_product(self.group) else 0.0,
            "memory": limits.memory_ms(self.bytes),
        }
        which = max(bounds, key=lambda name: bounds[name])
        return min(bounds[which], self.ms), which if bounds[which] else ""


def roofline_of(layers: Sequence[Layer], limits: Limits, end_to_end_ms: float) -> Roofline:
    """Compare a profile with the limits, by group of layers.

    Args:
        layers: The layers, each with its mean time.
        limits: The limits of the cores, measured in turn with the network.
        end_to_end_ms: Latency of one inference without the profiler.
    """
    found: dict[str, list[Layer]] = {}
    for layer in layers:
        found.setdefault(layer.group, []).append(layer)
    groups = [_summed(name, members, limits, end_to_end_ms) for name, members in found.items()]
    if (rest := end_to_end_ms - sum(layer.ms for layer in layers)) > 0:
        empty = Layer(BETWEEN, rest, 0, 0, "")
        groups.append(_summed(BETWEEN, [empty], limits, end_to_end_ms).model_copy(update={"layers": 0}))
    groups.sort(key=lambda group: -group.mean_ms)
    limit = sum(group.limit_ms for group in groups if is_product(group.group))
    most = max(groups, key=lambda group: group.removable_ms, default=None)
    share = limit / end_to_end_ms
    return Roofline(
        peaks=limits.peaks,
        bandwidth=limits.bandwidth,
        limit_ms=round(limit, 6),
        share_of_limit=round(share, 4),
        at_limit=share >= AT_LIMIT_SHARE,
        largest_removable=most.group if most and share < AT_LIMIT_SHARE else "",
        groups=tuple(groups),
    )


def _summed(name: str, members: Sequence[Layer], limits: Limits, end_to_end_ms: float) -> LayerGroup:
    bounds = [layer.limit(limits) for layer in members]
    total = sum(layer.ms for layer in members)
    at_least = sum(ms for ms, _ in bounds)
    return LayerGroup(
        group=name,
        layers=len(members),
        mean_ms=round(total, 6),
        share=round(total / end_to_end_ms, 6),
        arithmetic_ms=round(sum(ms for ms, which in bounds if which == "arithmetic"), 6),
        memory_ms=round(sum(ms for ms, which in bounds if which == "memory"), 6),
        limit_ms=round(at_least, 6),
        removable_ms=round(total - at_least, 6),
    )
