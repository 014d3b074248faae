"""report: everything that a run holds, as one page."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from repaconv import runs
from repaconv.artefact import (
    BenchArtefact,
    BuildArtefact,
    CollectArtefact,
    ExportArtefact,
    FoldArtefact,
    Link,
    PaperTable,
    Report,
    VerifyArtefact,
)
from repaconv.errors import RepaconvError, UsageProblem
from repaconv.files import read_artefact, stage_of
from repaconv.pipeline.baselines import history_of
from repaconv.pipeline.common import Progress, made_by, silent, with_files
from repaconv.pipeline.exports import exports_of
from repaconv.pipeline.tables import table
from repaconv.replacing import put, require_ours, write_page
from repaconv.variants import Variant, dotted

if TYPE_CHECKING:
    from repaconv.artefact import Artefact

SUFFIXES = {"html": ".html", "markdown": ".md", "json": ".json"}


def report(
    run: str | Path | None = None,
    *,
    format: str = "html",
    out: str | Path | None = None,
    paper: bool = True,
    progress: Progress = silent,
) -> Report:
    """Put a run on one page: what was proved, what it saves, how fast it is, and how to make every figure again.

    Args:
        run: The run's folder; the newest when None.
        format: ``html``, ``markdown`` or ``json``.
        out: The file; ``report.html``, ``.md`` or ``.json`` of the run when None.
        paper: Also the paper's own figures beside ours, where the method brings them.
        progress: See `Progress`.

    Raises:
        UsageProblem: If there is no run, or no such format.
    """
    from repaconv.pages import report as page

    if format not in SUFFIXES:
        raise UsageProblem(
            f"there is no format {format!r}.", hint=f"Known: {', '.join(SUFFIXES)}.", code="report.format"
        )
    taken = runs.find_run(Path(run) if run else None)
    found = _gathered(taken, _paper(taken, progress) if paper else None)
    target = Path(out) if out else taken.folder / f"report{SUFFIXES[format]}"
    if format == "json":
        require_ours(target, "report")
        put(target, found)
    else:
        html = format == "html"
        write_page(target, page.html(found, _pictures(taken, found)) if html else page.markdown(found))
    return with_files(found, [taken.fold_json], [target])


def _gathered(taken: runs.Run, paper: PaperTable | None) -> Report:
    folded = read_artefact(taken.fold_json, FoldArtefact)
    same = folded.payload.sha256
    verified = read_artefact(taken.verify_json, VerifyArtefact) if taken.verify_json.is_file() else None
    if verified is not None and verified.model_sha256 != same:
        verified = None
    exports = [each.artefact for each in exports_of(taken, folded)]
    models = {exported.payload.sha256 for exported in exports}
    benches = _all(taken.folder / runs.BENCH, "bench", BenchArtefact)
    built = _all(taken.folder / runs.BUILD, "build", BuildArtefact)
    builds = [each for each in built if each.onnx_sha256 in models]
    collected = _all(taken.folder / runs.BUILD, "collect", CollectArtefact)
    links: list[Link] = [*(verified.links if verified else ())]
    links += [link for exported in exports for link in exported.links]
    links += [link for build in builds for link in build.links]
    links += [link for board in collected for link in board.links]
    parts: list[Artefact] = [folded, *([verified] if verified else []), *exports, *benches, *builds, *collected]
    before_after: list[tuple[str, float, float]] = [
        ("parameters", folded.training.parameters, folded.deploy.parameters),
        ("MACs an image", folded.training.macs, folded.deploy.macs),
        ("bytes of weights", folded.origin.bytes, folded.payload.bytes),
    ]
    return Report(
        made_by=made_by(),
        verdict="failed" if any(part.verdict == "failed" for part in parts) else "passed",
        unverified=tuple(dict.fromkeys(word for part in parts for word in part.unverified)),
        title=f"{Path(folded.origin.path).stem}: {folded.method}",
        folded=folded,
        verified=verified,
        exports=tuple(exports),
        benches=tuple(benches),
        builds=tuple(builds),
        collected=tuple(collected),
        links=tuple({link.model_dump_json(): link for link in links}.values()),
        before_after=tuple(before_after),
        worst_fold=max((step.max_rel_error for step in folded.certificate), default=0.0),
        open=tuple(_open(verified, exports, benches, links)),
        paper=paper,
        commands=tuple(_commands(folded, verified, exports, benches, builds)),
    )


def _all(folder: Path, stage: str, kind: type) -> list:  # type: ignore[type-arg]
    """Artefacts of a stage in a folder, by name."""
    return [read_artefact(path, kind) for path in sorted(folder.glob("*.json")) if stage_of(path) == stage]


def _open(
    verified: VerifyArtefact | None, exports: list[ExportArtefact], benches: list[BenchArtefact], links: list[Link]
) -> list[str]:
    """What nobody has looked at, so that nothing is taken for proved by being absent."""
    found = [f"{link.name} was not run ({link.note})" for link in links if link.verdict == "not verified"]
    if verified is None:
        found.append("no verification of these weights: repaconv verify")
    elif not any(link.name == "recorded" for link in verified.links):
        found.append("no official output to compare with: verify --inputs recorded.npz")
    if not exports:
        found.append("no ONNX model: repaconv export --onnx")
    if not benches:
        found.append("no latency: repaconv bench")
    found += [f"the latency on {each.target} is {each.quality.verdict}" for each in benches if _doubted(each)]
    return found


def _doubted(measured: BenchArtefact) -> bool:
    return measured.quality.verdict != "trusted"


def _commands(
    folded: FoldArtefact,
    verified: VerifyArtefact | None,
    exports: list[ExportArtefact],
    benches: list[BenchArtefact],
    builds: list[BuildArtefact],
) -> list[str]:
    """As they would be typed."""
    settings = [word for name, value in folded.settings.items() for word in ("--set", f"{name}={value}")]
    settings += ["--force"] if folded.unverified else []
    lines = [["fold", Path(folded.origin.path).name, "--method", folded.method, *settings]]
    for exported in exports:
        lines.append(["export", *Variant.of(exported, folded).options.split()])
    if verified is not None:
        name, _, rest = verified.inputs.partition(" (")
        given = ["--inputs", name] if rest and name.endswith(".npz") else []
        lines.append(["verify", *given])
    for build in builds:
        lines.append(["build", "--target", build.target, "--precision", build.precision])
    for bench in benches:
        words = ["bench", "--target", bench.target, "--threads", str(bench.threads), "--batch", str(bench.batch)]
        lines.append([*words, "--rounds", str(bench.rounds), *(["--profile"] if bench.profile else [])])
    lines.append(["report"])
    return [f"repaconv {shlex.join(words)}" for words in lines]


def _paper(taken: runs.Run, progress: Progress) -> PaperTable | None:
    """None where the method brings none, or is not installed here."""
    try:
        return table(read_artefact(taken.fold_json, FoldArtefact).method, progress=progress)
    except RepaconvError:
        return None


def _pictures(taken: runs.Run, found: Report) -> dict[str, str]:
    from repaconv.measure.profile import bars_svg
    from repaconv.pages.report import history_svg
    from repaconv.proof.curve import drift_svg

    pictures = {}
    for link in found.verified.links if found.verified else ():
        if link.location and link.location.drift:
            pictures[f"drift-{link.name}{dotted(link.variant)}"] = drift_svg(link)
    for measured in found.benches:
        if measured.profile:
            pictures[f"profile-{measured.variant}"] = bars_svg(measured.profile)
        if history := history_of(taken.history(measured.variant)):
            pictures[f"history-{measured.variant}"] = history_svg(history)
    return pictures
