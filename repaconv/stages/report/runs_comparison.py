"""`report A B C`: compare several runs on one page, one row per run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from repaconv.core import run_folder
from repaconv.core.errors import UsageProblem
from repaconv.core.file_replacement import replace_artifact, require_replaceable, write_page
from repaconv.core.progress import Progress, silent
from repaconv.results import Accuracy, BenchArtefact, Link, Report, ReportRow, RunsReport
from repaconv.stages.report.stage import PAGES, gather, require_format
from repaconv.stages.shared.option_dataclasses import with_checked_paths
from repaconv.stages.shared.result_provenance import made_by, with_files


@with_checked_paths
def compare_runs(
    several: Sequence[str | Path],
    *,
    format: str = "html",
    out: str | Path | None = None,
    progress: Progress = silent,
) -> RunsReport:
    """Write one page that compares several runs: verification, size, accuracy, speed, and a link to each run's report.

    Args:
        several: The run folders.
        format: ``html``, ``markdown`` or ``json``.
        out: The file; ``runs.html``, ``.md`` or ``.json`` in the folder that contains all runs when None.
        progress: A function that is called with each step's name, the units done and their total.

    Raises:
        UsageProblem: If one is not a run folder, there is only one, or there is no such format.
    """
    from repaconv.stages.report import page_rendering as page

    require_format(format, [each for each in PAGES if each != "card"])
    several = [several] if isinstance(several, (str, Path)) else several
    taken = [run_folder.find_run(Path(each)) for each in dict.fromkeys(map(str, several))]
    if len(taken) < 2:
        raise UsageProblem(
            "a comparison needs at least two runs.", hint="Name several: repaconv report A B.", code="report.one"
        )
    above = Path(os.path.commonpath([each.folder.resolve() for each in taken]))
    target = Path(out) if out else above / PAGES[format].replace("report", "runs")
    rows = []
    for done, run in enumerate(taken):
        progress(run.folder.name, done, len(taken))
        rows.append(row_of(run.folder.resolve().name, gather(run, None), _page_of(run, target)))
    failed = any(row.verdict == "failed" for row in rows)
    found = RunsReport(made_by=made_by(), verdict="failed" if failed else "passed", rows=tuple(rows))
    if format == "json":
        require_replaceable(target, found.stage)
        replace_artifact(target, found)
    else:
        write_page(target, page.runs_html(found) if format == "html" else page.runs_markdown(found))
    return with_files(found, [each.fold_json for each in taken], [target])


def _page_of(run: run_folder.Run, target: Path) -> str:
    """The path of the run's own report, if it has one, relative to the comparison page."""
    own = run.folder / PAGES["html"]
    return Path(os.path.relpath(own, target.parent)).as_posix() if own.is_file() else ""


def row_of(title: str, found: Report, page: str) -> ReportRow:
    """The table row of a run."""
    exact = [link for link in found.links if link.metrics and link.tolerance and link.tolerance.kind == "exact"]
    single = [link.metrics.max_rel_error for link in exact if link.metrics and link.name not in ("fold", "recorded")]
    row = ReportRow(
        title=title,
        called=found.folded.called,
        page=page,
        verdict=found.verdict,
        open=len(found.open),
        worst_fold=found.worst_fold,
        worst_single=max(single, default=None),
        saved=found.folded.saved,
        accuracy=_accuracy(exact),
        lower=tuple(_agreement_by_precision(found.links).items()),
    )
    return _with_latency(row, found.benches[0]) if found.benches else row


def _accuracy(exact: Sequence[Link]) -> Accuracy | None:
    return next((link.accuracy for link in reversed(exact) if link.accuracy), None)


def _agreement_by_precision(links: Sequence[Link]) -> dict[str, float]:
    """The smallest share of unchanged top-1 predictions, by precision."""
    shares: dict[str, float] = {}
    for link in links:
        lossy = link.tolerance is not None and link.tolerance.kind == "lossy"
        if lossy and link.metrics and link.metrics.top1_agreement is not None:
            shares[link.name] = min(shares.get(link.name, 1.0), link.metrics.top1_agreement)
    return shares


def _with_latency(row: ReportRow, bench: BenchArtefact) -> ReportRow:
    after, *others = bench.latencies
    many = "s" if bench.threads > 1 else ""
    return row.model_copy(
        update={
            "target": f"{bench.target}, {bench.precision}, {bench.threads} thread{many}, batch {bench.batch}",
            "before_ms": others[0].p50_ms if others else None,
            "after_ms": after.p50_ms,
            "ratio": bench.ratio,
            "quality": bench.quality.verdict,
            "reasons": tuple(bench.quality.reasons),
        }
    )
