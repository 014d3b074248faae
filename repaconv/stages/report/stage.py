"""`report`: write everything that a run contains as one page."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv.core import run_folder
from repaconv.core.errors import Refused, RepaconvError, UsageProblem, did_you_mean
from repaconv.core.export_variants import dotted
from repaconv.core.file_replacement import replace_artifact, require_replaceable, write_page
from repaconv.core.files import lock_folder, read_artefact, stage_of
from repaconv.core.progress import Progress, silent
from repaconv.core.sharded_checkpoint import is_unchanged_checkpoint
from repaconv.results import (
    BenchArtefact,
    BuildArtefact,
    BundleArtefact,
    Change,
    CollectArtefact,
    ConvertArtefact,
    EstimateArtefact,
    ExportArtefact,
    FinetuneArtefact,
    FoldArtefact,
    FoldStep,
    Link,
    MethodFold,
    PaperTable,
    Report,
    ThroughputArtefact,
    VerifyArtefact,
)
from repaconv.stages.bench.latency_baselines import history_of
from repaconv.stages.paper_table.stage import table
from repaconv.stages.shared.exports_of_run import exports_of
from repaconv.stages.shared.option_dataclasses import with_checked_paths
from repaconv.stages.shared.result_provenance import made_by, with_files
from repaconv.stages.verify.link_to_unconverted_network import conversion_of, training_of

if TYPE_CHECKING:
    from repaconv.results import Artefact

PAGES = {"html": "report.html", "markdown": "report.md", "json": "report.json", "card": "README.md"}
"""File name of each format in the run folder."""


@with_checked_paths
def report(
    run: str | Path | None = None,
    *,
    format: str = "html",
    out: str | Path | None = None,
    paper: bool = True,
    progress: Progress = silent,
) -> Report:
    """Write one page about a run: verification, savings, speed, and the commands that reproduce every figure.

    Args:
        run: The run folder; the newest run when None.
        format: ``html``, ``markdown``, ``json``, or ``card``: a model card for a model hub.
        out: The file; ``report.html``, ``.md`` or ``.json`` of the run, or its ``README.md``, when None.
        paper: Also show the figures of the paper, if the method has them.
        progress: A function that is called with each step's name, the units done and their total.

    Raises:
        UsageProblem: If there is no run, or no such format.
    """
    from repaconv.stages.report import page_rendering as page

    require_format(format)
    taken = run_folder.find_run(Path(run) if run else None)
    target = Path(out) if out else taken.folder / PAGES[format]
    with lock_folder(taken.folder):
        found = gather(taken, _paper(taken, progress) if paper and format != "card" else None)
        if format == "json":
            require_replaceable(target, "report")
            replace_artifact(target, found)
        else:
            pictures = _pictures(taken, found) if format == "html" else {}
            write_page(target, page.RENDERERS[format](found, pictures))
    return with_files(found, [taken.fold_json], [target])


def require_format(format: str, known: Collection[str] = PAGES) -> None:
    """Refuse an unknown format.

    Raises:
        UsageProblem: If the format is unknown.
    """
    if format not in known:
        raise UsageProblem(
            f"there is no format {format!r}.",
            hint=f"{did_you_mean(format, known)}Known: {', '.join(known)}.",
            code="report.format",
        )


def gather(taken: run_folder.Run, paper: PaperTable | None) -> Report:
    """Collect the results of a run's current fold and graphs, and what was not verified or measured."""
    folded = run_folder.fold_of(taken)
    held = _current_results(taken, folded)
    verified, exports, builds = held.verified, held.exports, held.builds
    changed = _changed_files(taken, folded, exports, builds)
    links: list[Link] = [*(verified.links if verified else ())]
    links += [link.model_copy(update={"variant": exported.variant}) for exported in exports for link in exported.links]
    links += [link for build in builds for link in build.links]
    links += [link for board in held.collected for link in board.links]
    converted, trained = conversion_of(taken, folded), training_of(taken, folded)
    parts: list[Artefact] = [
        *filter(None, (converted, trained)),
        folded,
        *([verified] if verified else []),
        *exports,
        *held.benches,
        *builds,
    ]
    parts += held.collected
    _, before, after = folded.saved[0]
    before_after: list[tuple[str, float, float]] = [
        *folded.saved,
        # a checkpoint may be in half precision: its file size cannot be compared with an FP32 file's
        ("bytes of weights in FP32", 4 * before, 4 * after),
    ]
    return Report(
        made_by=made_by(),
        verdict="failed" if changed or any(part.verdict == "failed" for part in parts) else "passed",
        unverified=tuple(dict.fromkeys(word for part in parts for word in part.unverified)),
        title=f"{run_folder.utf8_stem(Path(folded.origin.path))}: {folded.called}",
        converted=converted,
        trained=trained,
        folded=folded,
        verified=verified,
        exports=tuple(exports),
        benches=tuple(held.benches),
        throughputs=tuple(held.throughputs),
        estimates=tuple(held.estimates),
        builds=tuple(builds),
        collected=tuple(held.collected),
        links=tuple({link.model_dump_json(): link for link in links}.values()),
        before_after=tuple(before_after),
        worst_fold=_worst_fold_error(folded, links),
        open=(*changed, *held.gone, *_not_verified(folded, held, links)),
        paper=paper,
        commands=tuple(_commands(taken, folded, held, converted, trained)),
    )


def _worst_fold_error(folded: FoldArtefact, links: Sequence[Link]) -> float:
    """The largest float64 difference of the fold: of its parts if there is a certificate, otherwise of the whole."""
    if isinstance(folded, MethodFold):
        return max((step.max_rel_error for step in folded.certificate), default=0.0)
    return max((link.metrics.max_rel_error for link in links if link.name == "fold" and link.metrics), default=0.0)


class _CurrentResults(NamedTuple):
    """The results in a run that belong to its current fold and graphs; ``gone`` names those that do not."""

    verified: VerifyArtefact | None
    exports: list[ExportArtefact]
    benches: list[BenchArtefact]
    throughputs: list[ThroughputArtefact]
    estimates: list[EstimateArtefact]
    builds: list[BuildArtefact]
    bundles: list[BundleArtefact]
    collected: list[CollectArtefact]
    gone: list[str]


def _current_results(taken: run_folder.Run, folded: FoldArtefact) -> _CurrentResults:
    """Read the run's results, and select by hash those of its current files."""
    exports = [each.artefact for each in exports_of(taken, folded)]
    models = {each.payload.sha256 for each in exports}
    build, bench = taken.folder / run_folder.BUILD, taken.folder / run_folder.BENCH
    builds, old_builds = _split(
        _results_of_stage(build, "build", BuildArtefact), lambda each: each.onnx_sha256 in models
    )
    bundles, _ = _split(_results_of_stage(build, "bundle", BundleArtefact), lambda each: each.onnx_sha256 in models)
    sent = {each.bundle_sha256 for each in bundles}
    collected, other = _split(
        _results_of_stage(build, "collect", CollectArtefact), lambda each: each.bundle_sha256 in sent
    )
    files = models | {each.payload.sha256 for each in builds}
    benches, old = _split(
        _results_of_stage(bench, "bench", BenchArtefact), lambda each: each.latencies[0].sha256 in files
    )
    many, _ = _split(
        _results_of_stage(bench, "throughput", ThroughputArtefact), lambda each: each.rows[0].sha256 in files
    )
    estimates, _ = _split(_results_of_stage(bench, "estimate", EstimateArtefact), lambda each: each.sha256 in models)
    gone = [f"the engine {each.variant}" for each in old_builds]
    gone += [f"the latency of {each.variant}" for each in old]
    gone += [f"the board's result {each.variant}" for each in other]
    verified = read_artefact(taken.verify_json, VerifyArtefact) if taken.verify_json.is_file() else None
    if verified is not None and verified.model_sha256 != folded.payload.sha256:
        verified = None
    if verified is not None:
        links, stale = _split(verified.links, lambda link: link.sha256 in ("", *files))
        gone += [f"the link {link.name} of {link.candidate}" for link in stale]
        verified = verified.model_copy(update={"links": tuple(links)})
    parts = [f"{what} is of a file that the run no longer has" for what in gone]
    return _CurrentResults(verified, exports, benches, many, estimates, builds, bundles, collected, parts)


def _split(given: Iterable[Any], is_present: Callable[[Any], bool]) -> tuple[list[Any], list[Any]]:
    found: tuple[list[Any], list[Any]] = ([], [])
    for each in given:
        found[not is_present(each)].append(each)
    return found


def _changed_files(
    taken: run_folder.Run, folded: FoldArtefact, exports: list[ExportArtefact], builds: list[BuildArtefact]
) -> list[str]:
    """Files that were changed after their verification."""
    engines = run_folder.Run(taken.folder / run_folder.BUILD)
    looks: list[Callable[[], Path]] = [lambda: taken.payload(folded.payload)]
    looks += [partial(run_folder.onnx_model_of, taken, each) for each in exports]
    looks += [partial(engines.payload, each.payload) for each in builds]
    found = []
    for look in looks:
        try:
            look()
        except Refused as problem:
            found.append(problem.message.rstrip("."))
    return found


def _results_of_stage(folder: Path, stage: str, kind: type) -> list:  # type: ignore[type-arg]
    """Results of a stage in a folder, sorted by name."""
    return [read_artefact(path, kind) for path in sorted(folder.glob("*.json")) if stage_of(path) == stage]


def _not_verified(folded: FoldArtefact, held: _CurrentResults, links: list[Link]) -> list[str]:
    """Return what was not verified or measured, so that its absence is not read as a pass."""
    open_links = [link for link in links if link.verdict == "not verified"]
    found = [
        f"{each.name} {'was not run' if each.reason == 'not_run' else 'is not verified'} ({each.note})"
        for each in open_links
    ]
    if held.verified is None:
        found.append("these weights were not verified (repaconv verify)")
    else:
        ran = {link.sha256 for link in held.verified.links}
        unseen = [each for each in held.exports if each.payload.sha256 not in ran]
        found += [f"{each.payload.path} was exported after the verification (repaconv verify)" for each in unseen]
        # only a method's network is written here a second time; any other runs its own code
        if isinstance(folded, MethodFold) and not any(link.name == "recorded" for link in held.verified.links):
            found.append("no recorded output of the original code was compared (repaconv verify --inputs recorded.npz)")
    if not held.exports:
        found.append("there is no ONNX model (repaconv export)")
    if not held.benches:
        found.append("no latency was measured (repaconv bench)")
    doubted = [each for each in held.benches if each.quality.verdict != "trusted"]
    found += [f"the latency on {each.target} in {each.precision} is {each.quality.verdict}" for each in doubted]
    source = Path(folded.origin.path)
    if not is_unchanged_checkpoint(source, folded.origin.sha256):
        found.append(f"the {folded.origin_kind} {source.name} is missing or changed: this page cannot be reproduced")
    return found


def _commands(
    taken: run_folder.Run,
    folded: FoldArtefact,
    held: _CurrentResults,
    converted: ConvertArtefact | None,
    trained: FinetuneArtefact | None,
) -> list[str]:
    """The commands that reproduce the run, as typed in the current folder."""
    command, source, asked = "fold", Path(folded.origin.path), folded.options
    if converted:  # which also folds
        command, source, asked = "convert", Path(converted.parent.path), converted.options
    if trained:
        command, source, asked = "finetune", Path(trained.start.path).parent, trained.options
    elsewhere = bool(converted or trained) or taken.folder.resolve() != run_folder.default_folder(source).resolve()
    lines = [[command, _short(source), *asked, *(["-o", _short(taken.folder)] if elsewhere else [])]]
    lines += [["export", *each.options] for each in held.exports]
    lines += [["build", *each.options] for each in held.builds]
    lines += [["verify", *held.verified.options]] if held.verified else []
    lines += [["bench", *each.options] for each in (*held.benches, *held.throughputs, *held.estimates)]
    lines += [["bundle", *each.options] for each in held.bundles]
    lines += [["collect", "result.tar.gz"] for _ in held.collected]
    lines.append(["report"])
    return [f"repaconv {shlex.join(words)}" for words in lines]


def _short(path: Path) -> str:
    """The path relative to the current folder, if it is below it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _paper(taken: run_folder.Run, progress: Progress) -> PaperTable | None:
    """The paper's table; None if the method has none, or is not installed here."""
    try:
        folded = run_folder.fold_of(taken)
        return table(folded.method, progress=progress) if isinstance(folded, MethodFold) else None
    except RepaconvError:
        return None


def _pictures(taken: run_folder.Run, found: Report) -> dict[str, str]:
    from repaconv.benchmark.module_profile import bars_svg
    from repaconv.stages.report.fold_picture import fold_svg, places_of
    from repaconv.stages.report.page_rendering import history_svg
    from repaconv.stages.report.tradeoff_plots import trade_svg
    from repaconv.verification.drift_plot import drift_svg

    pictures = {}
    rows: Sequence[FoldStep | Change] = getattr(found.folded, "certificate", getattr(found.folded, "changes", ()))
    if fold := fold_svg(places_of(rows), found.title):
        pictures["fold"] = fold
    if found.converted and found.converted.other_files:
        pictures["scores"] = taken.payload(found.converted.other_files[0]).read_text("utf-8")
    if found.converted and found.converted.trade:
        pictures["trade"] = trade_svg(found.converted.trade)
    for link in found.verified.links if found.verified else ():
        if link.location and link.location.drift:
            pictures[f"drift-{link.name}{dotted(link.variant)}"] = drift_svg(link)
    for measured in found.benches:
        if measured.profile:
            pictures[f"profile-{measured.variant}"] = bars_svg(measured.profile)
        if history := history_of(taken.history(measured.variant)):
            pictures[f"history-{measured.variant}"] = history_svg(history)
    return pictures
