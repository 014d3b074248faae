"""Images a second, what streams are worth, and how far to trust them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from repaconv.cli.result_text.common_tables import rounds_of, size
from repaconv.cli.text_and_json_output import coloured, out, plain, table

if TYPE_CHECKING:
    from repaconv.results import ThroughputArtefact


def show(done: ThroughputArtefact) -> None:
    """Every model, then the ratios."""
    rows = table("", "streams", "images/s", "p50 ms a call", "p95 ms", "engine")
    for row in done.rows:
        streams = f"{row.streams} x {row.threads} thread(s)"
        times = (f"{value:.3f}" for value in (row.p50_ms, row.p95_ms))
        rate = f"{row.images_per_second:,.1f}"
        rows.add_row(plain(row.name), streams, rate, *times, plain(f"{row.engine}, {row.precision}"))
    out().print(rows)
    for told in done.compared:
        out().print(plain(told))
    told = "; ".join(done.quality.reasons) or "no disturbance was detected"
    out().print(f"measurement {coloured(done.quality.verdict)}: {plain(told)}")
    if done.note:
        out().print(plain(done.note))
    pixels = f"{size(done.image_size)} px, " if done.image_size else ""
    out().print(
        f"[dim]{plain(str(done.machine.get('cpu')))}, batch {done.batch}, {pixels}{rounds_of(done)}, "
        f"load {done.machine.get('load_1min')}[/]"
    )
