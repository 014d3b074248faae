"""Text output of `sweep`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from repaconv.core.terminal import colored, plain, stdout, table

if TYPE_CHECKING:
    from repaconv.results import SweepArtefact


def show_sweep(done: SweepArtefact) -> None:
    """Print the results as a table."""
    rows = table("model", "target", "precision", "batch", "p50 ms", "p95 ms", "measurement", "worker", "")
    for row in done.rows:
        times = ("" if value is None else f"{value:.3f}" for value in (row.p50_ms, row.p95_ms))
        again = f"attempt {row.attempts}" if row.attempts > 1 else ""
        cells = (row.precision, str(row.batch), *times, row.quality, plain(row.worker), plain(row.problem or again))
        rows.add_row(plain(row.model), row.target, *cells)
    stdout().print(rows)
    measured = sum(not row.problem for row in done.rows)
    unclear = sum(row.quality == "inconclusive" for row in done.rows)
    verdict = "inconclusive" if unclear and done.verdict == "passed" else done.verdict
    summary = f"{measured} of {len(done.rows)} measured, {unclear} of them inconclusive, {done.resumed} from before"
    stdout().print(f"{colored(verdict)}: {summary}")
