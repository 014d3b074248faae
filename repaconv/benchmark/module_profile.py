"""Aggregate node times by module and by kind of layer, with FLOPs, bytes and the limits of the cores."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from math import prod
from typing import Any, NamedTuple

from repaconv.benchmark.roofline import Layer, Limits, is_product, roofline_of
from repaconv.graph.onnx_files import flops_of
from repaconv.results import ModuleTime, NodeTime, Profile


class Event(NamedTuple):
    """One execution of a node: name (``module/Operator_n``), operator, microseconds, input and output shapes.

    Attributes:
        precision: See `repaconv.results.NodeTime`.
        bytes: Bytes of all inputs and outputs.
        flops: Operations, if the runtime's shapes do not show them.
    """

    name: str
    operator: str
    us: float
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    precision: str = "fp32"
    bytes: int = 0
    flops: int | None = None

    @property
    def operations(self) -> int:
        """Operations, 2 for each MAC."""
        return flops_of(self.operator, self.inputs, self.outputs) if self.flops is None else self.flops


def profile_of(
    events: Iterable[Event], runs: int, *, end_to_end_ms: float, limits: Limits, order: Mapping[str, int]
) -> Profile:
    """Aggregate the profiler events of several runs.

    Args:
        events: The events of all runs.
        runs: Number of runs.
        end_to_end_ms: Latency of one inference without the profiler.
        limits: What the same cores reach.
        order: Position of each node in the graph, by name.
    """
    by_node: dict[str, list[Event]] = {}  # in a loop a node has several events a run
    for event in events:
        by_node.setdefault(event.name, []).append(event)
    layers = {
        name: Layer(
            by_node[name][0].operator,
            sum(event.us for event in by_node[name]) / 1e3 / runs,
            round(sum(event.operations for event in by_node[name]) / runs),
            round(sum(event.bytes for event in by_node[name]) / runs),
            by_node[name][0].precision,
        )
        for name in sorted(by_node, key=lambda name: order.get(name, len(order)))
    }
    total = sum(layer.ms for layer in layers.values())
    nodes = tuple(_node(name, layer, total, limits) for name, layer in layers.items())
    flops, peak = sum(node.flops for node in nodes), limits.product_gflops()
    return Profile(
        runs=runs,
        total_ms=round(total, 6),
        end_to_end_ms=round(end_to_end_ms, 6),
        peak_gflops=round(peak, 3),
        gflops=round(_ratio(flops, total) / 1e6, 3),
        share_of_peak=round(flops / end_to_end_ms / 1e6 / peak, 4),
        nodes=nodes,
        modules=tuple(_rolled_up(nodes, total, peak)),
        roofline=roofline_of(list(layers.values()), limits, end_to_end_ms),
    )


def _node(name: str, layer: Layer, total: float, limits: Limits) -> NodeTime:
    limit, limited_by = layer.limit(limits)
    return NodeTime(
        name=name,
        module=name.rpartition("/")[0],
        operator=layer.operator,
        mean_ms=round(layer.ms, 6),
        share=round(_ratio(layer.ms, total), 6),
        flops=layer.flops,
        bytes=layer.bytes,
        precision=layer.precision,
        group=layer.group,
        limit_ms=round(limit, 6),
        limited_by=limited_by,
    )


def _ratio(part: float, whole: float) -> float:
    """The ratio; 0 of nothing: a runtime may remove every node, or count less than a microsecond for each."""
    return part / whole if whole else 0.0


def events_of(kernels: Iterable[Mapping[str, Any]], weights: Mapping[str, tuple[tuple[int, ...], ...]]) -> list[Event]:
    """Convert profiler events as ONNX Runtime writes them, named ``<node>_kernel_time``.

    Args:
        kernels: The events.
        weights: Shapes of each node's constants; the profile lacks those that were prepacked.
    """
    found = []
    for kernel in kernels:
        name, details = str(kernel["name"]).removesuffix("_kernel_time"), kernel["args"]
        given, made = (_typed(details.get(f"{side}_type_shape")) for side in ("input", "output"))
        inputs = tuple(shape for _, shape in given)
        packed = tuple(shape for shape in weights.get(name, ()) if shape not in inputs)
        operator = str(details["op_name"])
        low = any(kind in INT8 and len(shape) > 1 for kind, shape in given) or any(part in operator for part in ON_INT8)
        precision = "int8" if low else PRECISIONS.get(given[0][0] if given else "", "fp32")
        found.append(
            Event(
                name=name,
                operator=operator,
                us=float(kernel["dur"]),
                inputs=inputs + packed,
                outputs=tuple(shape for _, shape in made),
                precision=str(details.get("precision", precision)),
                bytes=sum(_width(kind) * prod(shape) for kind, shape in (*given, *made))
                + (1 if low else 4) * sum(map(prod, packed)),
                flops=details.get("flops"),
            )
        )
    return found


INT8 = ("uint8", "int8", "u8", "i8")
ON_INT8 = ("QLinear", "Integer", "DynamicQuantizeMatMul", "QGemm")
"""Parts of the names of ONNX Runtime's products whose prepacked weights are int8."""
PRECISIONS = {"float16": "fp16", "f16": "fp16", "bfloat16": "bf16", "bf16": "bf16"}


def _typed(entries: Any) -> list[tuple[str, tuple[int, ...]]]:
    return [(kind, tuple(shape)) for entry in entries or () for kind, shape in entry.items()]


def _width(kind: str) -> int:
    """Bytes of a type, named as ONNX Runtime (``float``, ``int64``) or OpenVINO (``f32``, ``u8``) does."""
    bits = re.search(r"\d+$", kind)
    return {"float": 4, "double": 8}.get(kind, max(1, int(bits[0]) // 8) if bits else 1)


def _rolled_up(nodes: Sequence[NodeTime], total: float, peak: float) -> Iterable[ModuleTime]:
    """Sum the nodes of the layers of each module: ``blocks.0.attn`` has its qkv, scores and proj."""
    spent: dict[str, float] = {}
    flops: dict[str, int] = {}
    limit: dict[str, float] = {}
    for node in nodes:
        module = parent_of(node.module)
        spent[module] = spent.get(module, 0.0) + node.mean_ms
        flops[module] = flops.get(module, 0) + node.flops
        limit[module] = limit.get(module, 0.0) + node.limit_ms * is_product(node.group)
    for module, milliseconds in spent.items():
        rate = _ratio(flops[module], milliseconds) / 1e6
        yield ModuleTime(
            module=module,
            mean_ms=round(milliseconds, 6),
            share=round(_ratio(milliseconds, total), 6),
            flops=flops[module],
            gflops=round(rate, 3),
            share_of_peak=round(rate / peak, 4),
            limit_ms=round(limit[module], 6),
        )


def parent_of(module: str) -> str:
    """Return ``blocks.0.attn`` for ``blocks.0.attn.qkv``; a module at a higher level is returned unchanged."""
    names = module.split(".")
    return ".".join(names[:-1]) if len(names) > 3 else module


def bars_svg(profile: Profile) -> str:
    """Draw one bar per module in the order of the network; its width is the time, its shade the share of the peak."""
    row, label, width = 18, 200, 560
    largest = max((module.mean_ms for module in profile.modules), default=1.0) or 1.0
    height = row * len(profile.modules) + 30
    box = f'viewBox="0 0 {label + width + 160} {height}" font-family="sans-serif" font-size="11" role="img"'
    title = "<title>milliseconds by module; darker is nearer the peak</title>"
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {box}>{title}']
    for number, module in enumerate(profile.modules):
        y = number * row + 4
        length = max(1.0, width * module.mean_ms / largest)
        shade = 0.25 + 0.75 * min(1.0, module.share_of_peak)
        text = f"{module.mean_ms:.3f} ms" + (f", {module.share_of_peak:.0%} of peak" if module.flops else "")
        ink = f'y="{y + 11}" fill="currentColor"'
        lines.append(f'<text x="{label - 6}" text-anchor="end" {ink}>{escape(module.module or "-")}</text>')
        box = f'x="{label}" y="{y}" width="{length:.1f}" height="{row - 5}"'
        lines.append(f'<rect {box} fill="#2563eb" fill-opacity="{shade:.2f}"/>')
        lines.append(f'<text x="{label + length + 6:.1f}" {ink}>{text}</text>')
    return "\n".join([*lines, "</svg>", ""])
