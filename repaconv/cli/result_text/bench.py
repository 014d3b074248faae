"""Latencies, their ratio, and how far to trust them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from repaconv.cli.result_text.common_tables import rounds_of, size
from repaconv.cli.text_and_json_output import coloured, out, plain, table

if TYPE_CHECKING:
    from repaconv.results import BenchArtefact, Profile


def show(done: BenchArtefact) -> None:
    """Latencies and their ratio."""
    rows = table("", "p50 ms", "p90 ms", "p95 ms", "p99 ms", "images/s", "engine")
    for row in done.latencies:
        times = (f"{value:.3f}" for value in (row.p50_ms, row.p90_ms, row.p95_ms, row.p99_ms))
        rate = f"{1000 * done.batch / row.p50_ms:,.1f}" if done.image_size else ""
        rows.add_row(plain(row.name), *times, rate, plain(f"{row.engine}, {row.precision}"))
    out().print(rows)
    if found := done.ratio:
        rounds = f"; rounds' p10..p90 {found.p10:.3f}..{found.p90:.3f}" if found.conclusive else ""
        out().print(plain(done.compared + rounds))
    if done.agreement and done.agreement.metrics:
        link, seen = done.agreement, done.agreement.metrics
        note = "; ".join(filter(None, [link.note, link.limit_told]))
        words = f" ({plain(note)})" if note else ""
        allowed = link.lossy_told or (f"{link.tolerance.description} is allowed" if link.tolerance else "")
        limit = f", {plain(allowed)}" if allowed else ""
        on = f" on {plain(link.inputs)}" if link.inputs else ""
        out().print(f"outputs: relative error {seen.max_rel_error:.1e}{on}{limit}: {coloured(link.verdict)}{words}")
    elif done.agreement:
        out().print(f"outputs were not compared: {plain(done.agreement.note)}")
    if done.image_preprocessing:
        out().print(f"[dim]images: {plain(done.image_preprocessing)}[/]")
    if kept := done.regression:
        out().print(f"{plain(kept.description)}: {coloured(kept.verdict)}")
    told = "; ".join(done.quality.reasons) or "no disturbance was detected"
    out().print(f"measurement {coloured(done.quality.verdict)}: {plain(told)}")
    if done.profile:
        profiling(done.profile)
    if done.protocol:
        out().print(f"protocol {plain(done.protocol)}")
    if done.note:
        out().print(plain(done.note))
    cores = ", ".join(map(str, done.machine.get("cores_used") or [])) or "not pinned"
    pixels = f"{size(done.image_size)} px, " if done.image_size else ""
    out().print(
        f"[dim]{plain(str(done.machine.get('cpu')))}, {done.runtime}, {done.threads} thread(s) on core(s) {cores}, "
        f"batch {done.batch}, {pixels}{rounds_of(done)} after {done.warmup_rounds} of warm-up, "
        f"load {done.machine.get('load_1min')}[/]"
    )


def profiling(found: Profile) -> None:
    """The modules that take longest, and how near the limit the whole is."""
    rows = table("module", "ms", "share", "GFLOP/s", "of peak")
    for row in sorted(found.modules, key=lambda row: -row.mean_ms)[:12]:
        rates = (f"{row.gflops:.1f}", f"{row.share_of_peak:.0%}") if row.flops else ("", "")
        rows.add_row(plain(row.module or "-"), f"{row.mean_ms:.3f}", f"{row.share:.1%}", *rates)
    out().print(rows)
    out().print(
        f"nodes take {found.total_ms:.3f} ms of {found.end_to_end_ms:.3f} end to end; the whole runs at "
        f"[bold]{found.share_of_peak:.0%}[/] of {found.peak_gflops:.0f} GFLOP/s, what one large matrix product reaches"
    )
