"""Text output of `bench`, `bench --estimate`, throughput and `compare`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from repaconv.core.terminal import colored, is_verbose, plain, print_table, stdout, table
from repaconv.stages.shared.result_tables import accuracy_text, links, print_images_and_classes, rounds_text, size_text

if TYPE_CHECKING:
    from repaconv.results import (
        BenchArtefact,
        CompareArtefact,
        EstimateArtefact,
        Link,
        ModuleTime,
        NodeTime,
        Profile,
        Quality,
        Roofline,
        ThroughputArtefact,
    )

SHOWN_NODES = 12
"""Rows of a table of nodes or modules, the slowest first; -v prints the whole profile."""


# Latency


def show_bench(done: BenchArtefact) -> None:
    """Print latencies, their ratio, and the quality of the measurement."""
    print_table = table("", "p50 ms", "p90 ms", "p95 ms", "p99 ms", "images/s", "engine")
    for row in done.latencies:
        times = (f"{value:.3f}" for value in (row.p50_ms, row.p90_ms, row.p95_ms, row.p99_ms))
        rate = f"{1000 * done.batch / row.p50_ms:,.1f}" if done.image_size else ""
        print_table.add_row(plain(row.name), *times, rate, plain(f"{row.engine}, {row.precision}"))
    stdout().print(print_table)
    if found := done.ratio:
        rounds = f"; single rounds: 10th percentile {found.p10:.3f}, 90th {found.p90:.3f}"
        stdout().print(plain(done.compared + rounds * (is_verbose() and found.conclusive)))
    if done.agreement:
        _print_agreement(done.agreement)
    print_images_and_classes(done.image_preprocessing)
    if kept := done.regression:
        stdout().print(f"{plain(kept.description)}: {colored(kept.verdict)}")
    _print_quality(done.quality)
    if done.profile:
        profiling(done.profile)
    if done.protocol:
        stdout().print(f"protocol {plain(done.protocol)}")
    if done.note:
        stdout().print(plain(done.note))
    _print_conditions(done)


def _print_agreement(link: Link) -> None:
    """Print how far the outputs of both models differ, or why they were not compared."""
    on = f" on {plain(link.inputs)}" if link.inputs else ""
    if link.metrics:
        note = "; ".join(filter(None, [link.note, link.limit_text]))
        words = f" ({plain(note)})" if note else ""
        allowed = link.lossy_text or (f"{link.tolerance.description} is allowed" if link.tolerance else "")
        limit = f", {plain(allowed)}" if allowed else ""
        error = f"relative error {link.metrics.max_rel_error:.1e}"
        stdout().print(f"outputs: {error}{on}{limit}: {colored(link.verdict)}{words}")
    elif link.task:
        stdout().print(f"results: {plain(link.task.description)}{on}: {colored(link.verdict)} ({plain(link.note)})")
    else:
        stdout().print(f"outputs were not compared: {plain(link.note)}")


def _print_conditions(done: BenchArtefact) -> None:
    """Print on what and how it was measured."""
    cores = ", ".join(map(str, done.machine.get("cores_used") or [])) or "not pinned"
    pixels = f"{size_text(done.image_size)} px, " if done.image_size else ""
    rounds = f"{rounds_text(done)} after {done.warmup_rounds} of warm-up" if is_verbose() else f"{done.rounds} rounds"
    stdout().print(
        f"[dim]{plain(str(done.machine.get('cpu')))}, {done.runtime}, {done.threads} thread(s) on core(s) {cores}, "
        f"batch {done.batch}, {pixels}{rounds}, "
        f"load {done.machine.get('load_1min')}[/]"
    )


def profiling(found: Profile) -> None:
    """Print the slowest modules, and how far all layers are from the limits of the cores.

    The names of nodes need not tell modules, as in most ONNX files that PyTorch did not write: nodes are printed then.
    """
    if not any(row.module for row in found.modules):
        _print_slowest_nodes(found.nodes)
    else:
        _print_slowest_modules(found.modules)
    stdout().print(
        f"nodes take {found.total_ms:.3f} ms of {found.end_to_end_ms:.3f} end to end; the whole runs at "
        f"[bold]{found.share_of_peak:.0%}[/] of {found.peak_gflops:.0f} GFLOP/s, what one large matrix product reaches"
    )
    if found.roofline:
        roofline(found.roofline)


def _print_slowest_nodes(nodes: Sequence[NodeTime]) -> None:
    print_table = table("node", "operator", "ms", "share", "limit ms")
    for row in sorted(nodes, key=lambda row: -row.mean_ms)[: len(nodes) if is_verbose() else SHOWN_NODES]:
        limit = f"{row.limit_ms:.3f}" if row.flops else ""
        print_table.add_row(plain(row.name), plain(row.operator), f"{row.mean_ms:.3f}", f"{row.share:.1%}", limit)
    stdout().print(print_table)


def _print_slowest_modules(modules: Sequence[ModuleTime]) -> None:
    print_table = table("module", "ms", "share", "GFLOP/s", "of peak", "limit ms")
    for row in sorted(modules, key=lambda row: -row.mean_ms)[: len(modules) if is_verbose() else SHOWN_NODES]:
        rates = (f"{row.gflops:.1f}", f"{row.share_of_peak:.0%}", f"{row.limit_ms:.3f}") if row.flops else ("", "", "")
        print_table.add_row(plain(row.module or "-"), f"{row.mean_ms:.3f}", f"{row.share:.1%}", *rates)
    stdout().print(print_table)


def roofline(found: Roofline) -> None:
    """Print the time by kind of layer next to the limits, and what could be removed."""
    print_table = table("layers", "number", "ms", "share", "limit ms", "of it memory", "removable ms")
    for row in found.groups:
        times = (f"{value:.3f}" for value in (row.limit_ms, row.memory_ms, row.removable_ms))
        print_table.add_row(plain(row.group), f"{row.layers}", f"{row.mean_ms:.3f}", f"{row.share:.1%}", *times)
    stdout().print(print_table)
    stdout().print(f"limit: {plain(found.description)}")
    rates = ", ".join(f"{each.gb_s:.0f} GB/s for {each.bytes / 2**20:g} MiB" for each in found.bandwidth)
    stdout().print(f"[dim]measured here: {plain(found.peaks_text)}; copying {rates}[/]")


# Estimate


def show_estimate(done: EstimateArtefact) -> None:
    """Print the latency range, the slowest nodes, the peak figures, and a measured latency if there is one."""
    print_table = table("node", "operator", "in", "low ms", "high ms", "limited by")
    for node in sorted(done.nodes, key=lambda node: -node.high_ms)[:SHOWN_NODES]:
        times = (f"{node.low_ms:.3f}", f"{node.high_ms:.3f}")
        print_table.add_row(plain(node.name), plain(node.operator), node.precision, *times, node.limit)
    stdout().print(print_table)
    stdout().print(
        f"[bold yellow]{done.label}[/]: [bold]{done.low_ms:.3f} to {done.high_ms:.3f} ms[/] on {plain(done.target)}, "
        f"{done.precision}, batch {done.batch}, {size_text(done.image_size)} px, over {len(done.nodes)} nodes"
    )
    stdout().print(
        "low: only matrix products and convolutions take time, at the full speed of the data sheet; high: every node "
        "by itself, at half of that speed, with the time to start it"
    )
    if done.measured_ms:
        low, high = done.low_ms / done.measured_ms, done.high_ms / done.measured_ms
        stdout().print(
            f"measured {done.measured_ms:.3f} ms ({plain(done.measurement)}): the estimate is {low:.2f} to {high:.2f} "
            "times that"
        )
    if done.note:
        stdout().print(plain(done.note))
    peaks = ", ".join(f"{name} {peak:g}" for name, peak in done.limits.peak_tflops.items())
    stdout().print(
        f"[dim]{plain(done.limits.device)}: {peaks} TFLOP/s, {done.limits.bandwidth_gb_s:g} GB/s, "
        f"{done.limits.launch_us:g} us per node; {plain('; '.join(done.limits.source))}[/]"
    )


# Throughput


def show_throughput(done: ThroughputArtefact) -> None:
    """Print the throughput of every model, then the ratios."""
    print_table = table("", "streams", "images/s", "p50 ms", "p95 ms", "engine")
    for row in done.rows:
        streams = f"{row.streams} x {row.threads} thread(s)"
        times = (f"{value:.3f}" for value in (row.p50_ms, row.p95_ms))
        rate = f"{row.images_per_second:,.1f}"
        print_table.add_row(plain(row.name), streams, rate, *times, plain(f"{row.engine}, {row.precision}"))
    stdout().print(print_table)
    for comparison in done.compared:
        stdout().print(plain(comparison))
    _print_quality(done.quality)
    if done.note:
        stdout().print(plain(done.note))
    pixels = f"{size_text(done.image_size)} px, " if done.image_size else ""
    stdout().print(
        f"[dim]{plain(str(done.machine.get('cpu')))}, batch {done.batch}, {pixels}{rounds_text(done)}, "
        f"load {done.machine.get('load_1min')}[/]"
    )


# Comparison


def show_compare(done: CompareArtefact) -> None:
    """Print sizes, output differences, and latencies if they were measured."""
    ends = (done.reference, done.candidate)
    latencies = {row.sha256: row for row in done.measured.latencies} if done.measured else {}
    header = ("", "runs in", "precision", "bytes", "parameters", "nodes", *(("p50 ms",) if latencies else ()))
    lines = []
    for end in ends:
        counts = ("" if count is None else f"{count:,}" for count in (end.bytes, end.parameters, end.nodes))
        took = latencies.get(end.sha256)
        lines.append((end.name, end.engine, end.precision, *counts, *((f"{took.p50_ms:.3f}",) if took else ())))
    print_table(header, lines)
    stdout().print(links(done.links))
    for link in done.links:
        if link.accuracy:
            stdout().print(accuracy_text(link.name, link.accuracy))
    if done.measured and done.measured.ratio:
        stdout().print(plain(done.measured.compared))
        _print_quality(done.measured.quality)
    stdout().print(f"{colored(done.verdict)} on {plain(done.inputs)}")


def _print_quality(quality: Quality) -> None:
    """Print the verdict on a measurement and its reasons, several of them as a list."""
    reasons = quality.reasons or ("no disturbance was detected",)
    text = reasons[0] if len(reasons) == 1 else "".join(f"\n    - {reason}" for reason in reasons)
    stdout().print(f"measurement {colored(quality.verdict)}: {plain(text)}")
