"""Two models beside each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from repaconv.cli.result_text.common_tables import accuracy_told, links
from repaconv.cli.text_and_json_output import coloured, out, plain, rows

if TYPE_CHECKING:
    from repaconv.results import CompareArtefact


def show(done: CompareArtefact) -> None:
    """How large both are, how far apart their outputs, and which is faster where that was measured."""
    ends = (done.reference, done.candidate)
    latencies = {row.sha256: row for row in done.measured.latencies} if done.measured else {}
    header = ("", "runs in", "precision", "bytes", "parameters", "nodes", *(("p50 ms",) if latencies else ()))
    lines = []
    for end in ends:
        counts = ("" if count is None else f"{count:,}" for count in (end.bytes, end.parameters, end.nodes))
        took = latencies.get(end.sha256)
        lines.append((end.name, end.engine, end.precision, *counts, *((f"{took.p50_ms:.3f}",) if took else ())))
    rows(header, lines)
    out().print(links(done.links))
    for link in done.links:
        if link.accuracy:
            out().print(accuracy_told(link.name, link.accuracy))
    if done.measured and done.measured.ratio:
        out().print(f"{plain(done.measured.compared)}; measurement {coloured(done.measured.quality.verdict)}")
    out().print(f"{coloured(done.verdict)} on {plain(done.inputs)}")
