"""Aggregate node times by module, with FLOPs and the share of peak performance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from repaconv.graph.onnx_files import flops_of
from repaconv.results import ModuleTime, NodeTime, Profile


class Event(NamedTuple):
    """One execution of a node: name (``module/Operator_n``), operator, microseconds, input and output shapes."""

    name: str
    operator: str
    us: float
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]


def profile_of(
    events: Iterable[Event], runs: int, *, end_to_end_ms: float, peak_gflops: float, order: Mapping[str, int]
) -> Profile:
    """Aggregate the profiler events of several runs.

    Args:
        events: The events of all runs.
        runs: Number of runs.
        end_to_end_ms: Latency of one inference without the profiler.
        peak_gflops: Rate of one large matrix product on this machine, with the same threads.
        order: Position of each node in the graph, by name.
    """
    spent: dict[str, float] = {}
    first: dict[str, Event] = {}
    for event in events:
        spent[event.name] = spent.get(event.name, 0.0) + event.us / 1e3 / runs
        first.setdefault(event.name, event)
    total = sum(spent.values())
    nodes = tuple(
        NodeTime(
            name=name,
            module=name.rpartition("/")[0],
            operator=first[name].operator,
            mean_ms=round(milliseconds, 6),
            share=round(milliseconds / total, 6),
            flops=flops_of(first[name].operator, first[name].inputs, first[name].outputs),
        )
        for name, milliseconds in sorted(spent.items(), key=lambda pair: order.get(pair[0], len(order)))
    )
    return Profile(
        runs=runs,
        total_ms=round(total, 6),
        end_to_end_ms=round(end_to_end_ms, 6),
        peak_gflops=round(peak_gflops, 3),
        gflops=round(sum(node.flops for node in nodes) / total / 1e6, 3),
        share_of_peak=round(sum(node.flops for node in nodes) / end_to_end_ms / 1e6 / peak_gflops, 4),
        nodes=nodes,
        modules=tuple(_rolled_up(nodes, total, peak_gflops)),
    )


def events_of(kernels: Iterable[Mapping[str, Any]], weights: Mapping[str, tuple[tuple[int, ...], ...]]) -> list[Event]:
    """Convert ONNX Runtime's profiler events, named ``<node>_kernel_time``.

    Args:
        kernels: The events.
        weights: Shapes of each node's constants; the profile lacks those that were prepacked.
    """

    def shapes(given: Any) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(shape) for entry in given or () for shape in entry.values())

    found = []
    for kernel in kernels:
        name = str(kernel["name"]).removesuffix("_kernel_time")
        inputs = shapes(kernel["args"].get("input_type_shape"))
        found.append(
            Event(
                name=name,
                operator=str(kernel["args"]["op_name"]),
                us=float(kernel["dur"]),
                inputs=inputs + tuple(shape for shape in weights.get(name, ()) if shape not in inputs),
                outputs=shapes(kernel["args"].get("output_type_shape")),
            )
        )
    return found


def _rolled_up(nodes: Sequence[NodeTime], total: float, peak: float) -> Iterable[ModuleTime]:
    """Sum the nodes of the layers of each module: ``blocks.0.attn`` has its qkv, scores and proj."""
    spent: dict[str, float] = {}
    flops: dict[str, int] = {}
    for node in nodes:
        module = parent_of(node.module)
        spent[module] = spent.get(module, 0.0) + node.mean_ms
        flops[module] = flops.get(module, 0) + node.flops
    for module, milliseconds in spent.items():
        rate = flops[module] / milliseconds / 1e6 if milliseconds else 0.0
        yield ModuleTime(
            module=module,
            mean_ms=round(milliseconds, 6),
            share=round(milliseconds / total, 6),
            flops=flops[module],
            gflops=round(rate, 3),
            share_of_peak=round(rate / peak, 4),
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
        told = f"{module.mean_ms:.3f} ms" + (f", {module.share_of_peak:.0%} of peak" if module.flops else "")
        ink = f'y="{y + 11}" fill="currentColor"'
        lines.append(f'<text x="{label - 6}" text-anchor="end" {ink}>{escape(module.module or "-")}</text>')
        box = f'x="{label}" y="{y}" width="{length:.1f}" height="{row - 5}"'
        lines.append(f'<rect {box} fill="#2563eb" fill-opacity="{shade:.2f}"/>')
        lines.append(f'<text x="{label + length + 6:.1f}" {ink}>{told}</text>')
    return "\n".join([*lines, "</svg>", ""])
