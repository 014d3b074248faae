"""Results of `report` as text."""

from __future__ import annotations

from repaconv.core.terminal import colored, plain, print_table, stdout
from repaconv.results import Report, ReportRow, RunsReport
from repaconv.stages.shared.result_tables import count_text


def show_report(done: Report | RunsReport) -> None:
    """Print a summary of the report of one run, or one row per run of a comparison."""
    if isinstance(done, RunsReport):
        header = ("run", "verdict", "accuracy", "parameters", "speedup", "same top-1")
        print_table(header, [_row(each) for each in done.rows])
        return
    passed = sum(link.verdict == "passed" for link in done.links)
    measured = count_text(len(done.benches), "measurement")
    stdout().print(f"{colored(done.verdict)}: {passed} of {len(done.links)} links passed, {measured}")
    for sentence in done.open:
        stdout().print(f"[yellow]not verified, or not measured:[/] {plain(sentence)}")


def _row(row: ReportRow) -> tuple[str, ...]:
    accuracy, ratio = row.accuracy, row.ratio
    _, before, after = row.saved[0]
    return (
        row.title,
        row.verdict,
        f"{accuracy.reference:.1%} -> {accuracy.candidate:.1%}" if accuracy else "",
        f"{before:,.0f} -> {after:,.0f}",
        ratio.cell if ratio else "",
        ", ".join(f"{name} {kept:.1%}" for name, kept in row.lower),
    )
