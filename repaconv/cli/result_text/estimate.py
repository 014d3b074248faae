"""What a graph would take, and what that rests on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from repaconv.cli.result_text.common_tables import size
from repaconv.cli.text_and_json_output import out, plain, table

if TYPE_CHECKING:
    from repaconv.results import EstimateArtefact

SHOWN = 12


def show(done: EstimateArtefact) -> None:
    """The range, the nodes that take longest, the limits, and what was measured if that is known."""
    rows = table("node", "operator", "in", "low ms", "high ms", "limited by")
    for node in sorted(done.nodes, key=lambda node: -node.high_ms)[:SHOWN]:
        times = (f"{node.low_ms:.3f}", f"{node.high_ms:.3f}")
        rows.add_row(plain(node.name), plain(node.operator), node.precision, *times, node.limit)
    out().print(rows)
    out().print(
        f"[bold yellow]{done.label}[/]: [bold]{done.low_ms:.3f} to {done.high_ms:.3f} ms[/] on {plain(done.target)}, "
        f"{done.precision}, batch {done.batch}, {size(done.image_size)} px, over {len(done.nodes)} nodes"
    )
    out().print("low: products alone, at the limits; high: every node apart, at half of them, and a launch each")
    if done.measured_ms:
        low, high = done.low_ms / done.measured_ms, done.high_ms / done.measured_ms
        out().print(
            f"measured {done.measured_ms:.3f} ms ({plain(done.measurement)}): the estimate is {low:.2f} to {high:.2f} "
            "times that"
        )
    if done.note:
        out().print(plain(done.note))
    peaks = ", ".join(f"{name} {peak:g}" for name, peak in done.limits.peak_tflops.items())
    out().print(
        f"[dim]{plain(done.limits.device)}: {peaks} TFLOP/s, {done.limits.bandwidth_gb_s:g} GB/s, "
        f"{done.limits.launch_us:g} us per node; {plain('; '.join(done.limits.source))}[/]"
    )
