"""The only place that prints: results to stdout as text or JSON, everything else to stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repaconv.errors import RepaconvError
from repaconv.files import finite

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from repaconv.artefacts import (
        BenchArtefact,
        BlockCost,
        BuildArtefact,
        BundleArtefact,
        CollectArtefact,
        Cost,
        ExportArtefact,
        FileInspection,
        FoldArtefact,
        GateReport,
        Inspection,
        Link,
        OnnxFoldArtefact,
        PaperTable,
        Profile,
        Record,
        Report,
        SweepArtefact,
        Tolerance,
        TuneArtefact,
        VerifyArtefact,
    )

SCHEMA_VERSION = 1


def out() -> Console:
    """Where results go."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=not sys.stdout.isatty(), width=None if sys.stdout.isatty() else 200)


def err() -> Console:
    """Where everything else goes."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


def envelope(command: str, exit_code: int, data: Any, errors: Iterable[RepaconvError] = ()) -> None:
    """Print the JSON envelope, the same for success and for every failure."""
    statuses = {0: "ok", 1: "failed", 5: "inconclusive"}
    found = [{"code": error.code, "message": error.message, "hint": error.hint} for error in errors]
    whole = {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "status": statuses.get(exit_code, "error"),
        "exit_code": exit_code,
        "data": data,
        "errors": found,
    }
    sys.stdout.write(json.dumps(finite(whole), indent=2, sort_keys=True, allow_nan=False) + "\n")


def error(problem: RepaconvError) -> None:
    """One sentence, and what to do about it."""
    console = err()
    console.print(f"[bold red]error:[/] {_plain(problem.message)} [dim]({problem.code})[/]")
    if problem.hint:
        console.print(f"[bold]hint:[/] {_plain(problem.hint)}")


def plain_data(record: Record) -> dict[str, Any]:
    """An artefact for the envelope, with the files it took and wrote."""
    data: dict[str, Any] = record.model_dump(mode="json")
    for name in ("took", "wrote"):
        if hasattr(record, name):
            data[name] = list(getattr(record, name))
    return data


@contextmanager
def progress(*, quiet: bool) -> Iterator[Any]:
    """A function (what, done, in all) that draws on a terminal and does nothing elsewhere."""
    if quiet or not sys.stderr.isatty() or os.environ.get("CI"):
        yield lambda what, done, total: None
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err(), transient=True) as bars:
        task = bars.add_task("", total=None)
        yield lambda what, done, total: bars.update(task, description=what, completed=done, total=total or None)


def files(took: Iterable[str], wrote: Iterable[str], *, quiet: bool) -> None:
    """Which files a stage took and wrote, to stderr."""
    if quiet:
        return
    console = err()
    for verb, names in (("took", took), ("wrote", wrote)):
        for name in names:
            console.print(f"[dim]{verb:>5}[/] {_plain(_short(name))}")


def overridden(unverified: Iterable[str]) -> None:
    """What was not proved, or contradicts the checkpoint, and was taken all the same."""
    for told in unverified:
        out().print(f"[bold yellow]taken all the same:[/] {_plain(told)}")


def file_inspection(seen: FileInspection) -> None:
    """What a graph or an engine says of itself."""
    table = _table("", "", "source")
    table.add_row("kind", seen.kind, f"{seen.bytes:,} bytes")
    for fact in seen.facts:
        table.add_row(_plain(fact.name), _value(fact.value), _plain(fact.source))
    out().print(table)
    for problem in seen.problems:
        out().print(f"[bold red]caution:[/] {_plain(problem)}")


def inspection(seen: Inspection) -> None:
    """What a checkpoint holds."""
    table = _table("", "", "source")
    origin = seen.origin
    table.add_row("container", origin.container, f"{origin.bytes:,} bytes")
    table.add_row("weights", origin.weights, origin.weights_reason)
    for other in seen.sets:
        if other.path != origin.weights:
            table.add_row("also there", other.path, f"{other.tensors} tensors, {other.parameters:,} numbers")
    if origin.stripped:
        table.add_row("prefixes taken off", ", ".join(origin.stripped), "keys")
    for name in seen.placeholders:
        table.add_row("not built", name, "a global of the pickle; nothing was run")
    table.add_row(
        "method", seen.method or "unknown", f"{seen.confidence}: {seen.reason}" if seen.method else seen.reason
    )
    if len(seen.applied) > 1:
        table.add_row("folds", ", ".join(seen.applied), "keys")
    if seen.form:
        table.add_row("form", seen.form, "keys")
    if seen.backbone:
        table.add_row("backbone", seen.backbone, "")
    for fact in seen.facts:
        against = f"; but {fact.against}" if fact.against else ""
        table.add_row(fact.name, _value(fact.value), f"{fact.source}{against}")
    out().print(table)
    if seen.training and seen.deploy:
        if seen.blocks:
            out().print(_blocks(seen.blocks))
        out().print(_costs(seen.training, seen.deploy))
    for problem in seen.problems:
        out().print(f"[bold red]cannot be folded:[/] {_plain(problem)}")


def folding(done: FoldArtefact) -> None:
    """The certificate, summed up, and what the fold saves."""
    table = _table("module", "folded", "float64 difference")
    for step in done.certificate:
        own = f" ({step.allowed:.0e} allowed: {_plain(step.reason)})" if step.reason else ""
        table.add_row(step.module, "; ".join(step.folded), f"{step.max_rel_error:.1e}{own}")
    out().print(table)
    out().print(_costs(done.training, done.deploy))
    exact = [step for step in done.certificate if not step.reason]
    worst = max((step.max_rel_error for step in exact), default=0.0)
    allowed = max((step.allowed or 0.0 for step in exact), default=0.0)
    others = len(done.certificate) - len(exact)
    told = f"every fold within {allowed:.0e}, the worst {worst:.1e} (float64)"
    told += f"; {others} within a tolerance of their own, as above" if others else ""
    out().print(f"{_verdict(done.verdict)}: {told}")


def onnx_folding(done: OnnxFoldArtefact) -> None:
    """Every change of the graph, what it costs before and after, and the links."""
    if done.changes:
        table = _table("rewrite", "place", "what was done")
        for change in done.changes:
            table.add_row(change.rewrite, _plain(change.place), _plain(change.told))
        out().print(table)
    costs = _table("", "before", "after", "saved")
    rows = [
        ("parameters", done.parameters),
        ("nodes", done.nodes),
        *([("MACs a call", done.macs)] if done.macs else []),
    ]
    for name, (before, after) in rows:
        costs.add_row(name, f"{before:,}", f"{after:,}", f"{1 - after / before:.2%}" if before else "")
    out().print(costs)
    for sentence in done.left:
        out().print(f"[yellow]left alone:[/] {_plain(sentence)}")
    if done.links:
        out().print(_links(done.links))
    told = f"{len(done.changes)} changes, opset {done.opset}" if done.payload else "nothing to fold, nothing written"
    out().print(f"{_verdict(done.verdict)}: {told}")


def verification(done: VerifyArtefact) -> None:
    """Every link with its verdict, what labels say, and where a link fails."""
    out().print(_links(done.links, for_scale=done.for_scale))
    _print_accuracies(done.links)
    if any(link.accuracy for link in done.links):
        for claim in done.claims:
            out().print(f"claimed: accuracy {claim.value:.2%} by {_plain(claim.source)}")
    _print_locations(done.links)
    if done.preprocessing:
        out().print(f"[dim]images: {_plain(done.preprocessing)}[/]")
    if done.labels:
        out().print(f"[dim]classes: {_plain(done.labels)}[/]")
    out().print(f"{_verdict(done.verdict)} on {_plain(done.inputs)}, policy {done.policy}")


def exporting(done: ExportArtefact) -> None:
    """The graph and its links."""
    out().print(_links(done.links))
    _print_locations(done.links)
    if done.precision != "fp32":
        out().print(f"[yellow]lossy[/]: {done.precision}, measured on {_plain(done.calibration)}")
        for what, names in (("in float32 for their range", done.islands), ("not in " + done.precision, done.in_float)):
            if names:
                out().print(f"{len(names)} nodes {what}: {_plain(', '.join(names[:8]))}{' ...' if names[8:] else ''}")
    for sentence in done.violations:
        out().print(f"[bold red]{_plain(done.target)} does not take[/] {_plain(sentence)}")
    if done.rewrites:
        out().print(f"written as {_plain(done.form)} form: {_form(done.rewrites)}, {len(done.changes)} changes")
    simplified = f"simplified by {done.simplifier}" if done.simplified else "not simplified"
    shape = f"batch {done.batch}, image size {_size(done.image_size)}"
    pixels = ", takes pixels" if done.preprocessing else ""
    out().print(f"{_verdict(done.verdict)}: opset {done.opset}, {done.nodes} nodes, {simplified}, {shape}{pixels}")


def tuning(done: TuneArtefact) -> None:
    """The forms that were measured, and the winner."""
    table = _table("form", "times as fast as the default", "rounds", "")
    for row in done.candidates:
        if row.ratio is not None or row.rewrites == done.rewrites:
            found = f"{row.ratio.median:.3f} ({row.ratio.low:.3f} to {row.ratio.high:.3f})" if row.ratio else "1"
            table.add_row(_form(row.rewrites), found, str(row.rounds), row.told)
    out().print(table)
    for low in done.lowered:
        gain = f", {low.ratio.median:.3f} times as fast as float32" if low.ratio else ""
        other = "" if low.disagreement is None else f"{low.disagreement:.2%} of {low.images} images differ"
        words = f" ({_plain(low.link.note)})" if low.link else ""
        out().print(f"[yellow]lossy[/]: {low.precision}: {other}{gain}: {low.told}{words}")
    seconds = f"{done.note}, {done.seconds:.0f} s then" if done.note else f"{done.seconds:.0f} s"
    seconds += "" if done.complete else f"; not all was measured in {done.budget_s:.0f} s, a larger --budget goes on"
    out().print(f"the fastest form on {_plain(done.target)}: [bold]{_form(done.rewrites)}[/] ({seconds})")
    if done.precision != "fp32":
        out().print(f"and in {done.precision}: repaconv export --onnx --precision {done.precision}")
    out().print("take it: repaconv fold CHECKPOINT --form FILE")


def _form(rewrites: tuple[str, ...]) -> str:
    return _plain(" + ".join(rewrites) or "as exported")


def building(done: BuildArtefact) -> None:
    """The engine, the types of what computes in it, and how it compares where it runs here."""
    if done.links:
        out().print(_links(done.links))
    types = ", ".join(f"{count} {name}" for name, count in done.layer_types.items())
    gpu = f", compute capability {done.compute_capability}" if done.compute_capability else ""
    size = f"{done.payload.bytes:,} bytes, {done.runtime}{gpu}"
    out().print(f"{_verdict(done.verdict)}: {_plain(done.payload.path)}, {size}")
    out().print(f"asked for {done.precision}: {_plain(types)}")
    out().print(f"[yellow]{_plain(done.note)}[/]")


def bundling(done: BundleArtefact) -> None:
    """What to do with a bundle."""
    out().print(
        f"{_plain(done.payload.path)}: {done.payload.bytes:,} bytes for {done.target}, "
        f"TensorRT {done.runtime_version}, {done.precision}, with {_plain(done.inputs)}"
    )
    out().print("on the board: tar xzf it and python3 run.py; then here: repaconv collect result.tar.gz")


def collecting(done: CollectArtefact) -> None:
    """The board's engine: what it computes, in what, and how fast."""
    out().print(_links(done.links))
    times = done.latency
    out().print(
        f"{_plain(done.target)}, {_plain(done.runtime)}, batch {done.batch}: GPU p50 {times.p50_ms:.3f} ms, "
        f"p95 {times.p95_ms:.3f}, p99 {times.p99_ms:.3f}, {len(times.samples_ms)} runs"
    )
    out().print(f"precision {_verdict(done.precision_proof)}: {_plain(done.note)}")
    if done.fused_attentions:
        out().print(f"{done.fused_attentions} kernels compute a whole attention")
    slowest = sorted(done.profile, key=lambda row: -row.mean_ms)[:5]
    if slowest and slowest[0].mean_ms:
        table = _table("slowest layers", "mean ms")
        for row in slowest:
            table.add_row(_plain(row.name), f"{row.mean_ms:.4f}")
        out().print(table)
    out().print(f"{_verdict(done.verdict)}, measured on the board by its own trtexec")


def measuring(done: BenchArtefact) -> None:
    """Latencies and their ratio."""
    table = _table("", "p50 ms", "p90 ms", "p95 ms", "p99 ms", "engine")
    for row in done.latencies:
        times = (f"{value:.3f}" for value in (row.p50_ms, row.p90_ms, row.p95_ms, row.p99_ms))
        table.add_row(_plain(row.name), *times, _plain(f"{row.engine}, {row.precision}"))
    out().print(table)
    if found := done.ratio:
        out().print(
            f"{found.subject} is [bold]{found.median:.3f}[/] times as fast as {found.other} "
            f"({found.confidence:.0%} interval {found.low:.3f} to {found.high:.3f}; "
            f"rounds' p10..p90 {found.p10:.3f}..{found.p90:.3f}): {found.verdict}"
        )
    if done.agreement and done.agreement.metrics:
        link, seen = done.agreement, done.agreement.metrics
        words = f" ({_plain(link.note)})" if link.note else ""
        allowed = f", {_allowed(link.tolerance)} is allowed" if link.tolerance else ""
        out().print(f"their outputs differ by {seen.max_rel_error:.1e}{allowed}: {_verdict(link.verdict)}{words}")
    if kept := done.regression:
        out().print(f"{_plain(kept.told)}: {_verdict(kept.verdict)}")
    told = "; ".join(done.quality.reasons) or "nothing speaks against it"
    out().print(f"measurement {_verdict(done.quality.verdict)}: {_plain(told)}")
    if done.profile:
        profiling(done.profile)
    if done.protocol:
        out().print(f"protocol {_plain(done.protocol)}")
    if done.note:
        out().print(_plain(done.note))
    cores = ", ".join(map(str, done.machine.get("cores_used") or [])) or "not pinned"
    out().print(
        f"[dim]{_plain(str(done.machine.get('cpu')))}, {done.runtime}, {done.threads} thread(s) on core(s) {cores}, "
        f"batch {done.batch}, {_size(done.image_size)} px, {done.rounds} interleaved rounds after {done.warmup_rounds} "
        f"of warm-up, load {done.machine.get('load_1min')}[/]"
    )


def profiling(found: Profile) -> None:
    """The modules that take longest, and how near the limit the whole is."""
    table = _table("module", "ms", "share", "GFLOP/s", "of peak")
    for row in sorted(found.modules, key=lambda row: -row.mean_ms)[:12]:
        rates = (f"{row.gflops:.1f}", f"{row.share_of_peak:.0%}") if row.flops else ("", "")
        table.add_row(_plain(row.module or "-"), f"{row.mean_ms:.3f}", f"{row.share:.1%}", *rates)
    out().print(table)
    out().print(
        f"nodes take {found.total_ms:.3f} ms of {found.end_to_end_ms:.3f} end to end; the whole runs at "
        f"[bold]{found.share_of_peak:.0%}[/] of {found.peak_gflops:.0f} GFLOP/s, what one large matrix product reaches"
    )


def told(sentence: str) -> None:
    """One line to stderr, of what goes on."""
    err().print(_plain(sentence))


def sweeping(done: SweepArtefact) -> None:
    """The matrix."""
    table = _table("model", "target", "precision", "batch", "p50 ms", "p95 ms", "measurement", "worker", "")
    for row in done.rows:
        times = ("" if value is None else f"{value:.3f}" for value in (row.p50_ms, row.p95_ms))
        again = f"attempt {row.attempts}" if row.attempts > 1 else ""
        cells = (row.precision, str(row.batch), *times, row.quality, _plain(row.worker), _plain(row.problem or again))
        table.add_row(_plain(row.model), row.target, *cells)
    out().print(table)
    measured = sum(not row.problem for row in done.rows)
    out().print(f"{_verdict(done.verdict)}: {measured} of {len(done.rows)} measured, {done.resumed} from before")


def reporting(done: Report) -> None:
    """What is on the page."""
    proved = sum(link.verdict == "passed" for link in done.links)
    out().print(
        f"{_verdict(done.verdict)}: {proved} of {len(done.links)} links passed, {len(done.benches)} measurements"
    )
    for sentence in done.open:
        out().print(f"[yellow]not shown:[/] {_plain(sentence)}")


def gating(done: GateReport) -> None:
    """Every check of every recipe, and the exit code."""
    from repaconv.cli.reports import sentence

    for recipe in done.recipes:
        table = _table("stage", "check", "verdict", "")
        for check in recipe.checks:
            table.add_row(check.stage, check.name, _verdict(check.verdict), _plain(sentence(check)))
        out().print(f"[bold]{_plain(recipe.recipe)}[/]")
        out().print(table)
    verdict = "passed" if not done.exit_code else "failed" if done.exit_code == 1 else f"exit {done.exit_code}"
    out().print(f"{_verdict(verdict)}: {len(done.recipes)} recipe{'s' if len(done.recipes) > 1 else ''}")


def paper_table(found: PaperTable) -> None:
    """Our figures beside the paper's, with a mark where they differ by more than it prints."""
    notes = list(dict.fromkeys(row.remark for row in found.rows if row.remark))
    table = _table("table", "model", "form", "parameters", "paper", found.rows[0].unit, "paper", "")
    for row in found.rows:
        ours = (row.cost.layer_macs if row.counted == "layers" else row.cost.macs) * (2 if row.unit == "FLOPs" else 1)
        mark = "" if row.agrees else f"[yellow]differs[/] ({notes.index(row.remark) + 1})"
        counts = (f"{row.cost.parameters:,}", row.parameters, f"{ours:,}", row.macs)
        table.add_row(row.table, _plain(row.model), row.form, *counts, mark)
    out().print(table)
    for number, note in enumerate(notes, 1):
        out().print(f"({number}) {_plain(note)}")
    differing = sum(not row.agrees for row in found.rows)
    out().print(
        f"{len(found.rows)} models of {_plain(found.paper)}: {len(found.rows) - differing} agree to the printed "
        f"precision, {differing} differ"
    )


def rows(header: tuple[str, ...], lines: Iterable[tuple[str, ...]]) -> None:
    """A plain table."""
    table = _table(*header)
    for line in lines:
        table.add_row(*map(_plain, line))
    out().print(table)


def _links(links: Iterable[Link], for_scale: dict[str, Any] | None = None) -> Table:
    table = _table("link", "candidate", "against", "max rel", "max abs", "cosine", "top-1", "allowed", "verdict")
    for link in links:
        numbers = _numbers(link.metrics)
        allowed = _allowed(link.tolerance)
        verdict = _verdict(link.verdict) + (f" ({_plain(link.note)})" if link.note else "")
        table.add_row(link.name, _plain(link.candidate), _plain(link.reference), *numbers, allowed, verdict)
    for name, metrics in (for_scale or {}).items():
        candidate, _, reference = name.partition(" against ")
        table.add_row("for scale", candidate, reference, *_numbers(metrics), "", "not judged", style="dim")
    return table


def _allowed(tolerance: Tolerance | None) -> str:
    return "" if tolerance is None else tolerance.told


def _print_accuracies(links: Iterable[Link]) -> None:
    for link in links:
        if found := link.accuracy:
            out().print(
                f"{link.name}: accuracy {found.reference:.2%} -> {found.candidate:.2%} on {found.images} images; "
                f"difference {found.difference:+.2%} (95% interval {found.low:+.2%} to {found.high:+.2%}; right alone "
                f"{found.only_reference} and {found.only_candidate}, McNemar p = {found.p_value:.2g})"
            )


def _print_locations(links: Iterable[Link]) -> None:
    for link in links:
        if link.location and link.verdict == "failed":
            where = link.location.module or "not located"
            out().print(f"[bold red]{link.name}[/] parts at [bold]{_plain(where)}[/]: {_plain(link.location.reason)}")


def _numbers(metrics: Any) -> tuple[str, str, str, str]:
    if metrics is None:
        return "", "", "", ""
    top1 = "" if metrics.top1_agreement is None else f"{metrics.top1_agreement:.1%}"
    if metrics.top1_flips:
        top1 += f" ({metrics.top1_flips_that_matter} flips beyond noise, {metrics.top1_flips_within_noise} within)"
    elif metrics.top1_smallest_margin is not None:
        top1 += f" (margin {metrics.top1_smallest_margin:.1e})"
    if metrics.undecided:
        top1 += f" ({metrics.undecided} undecided)"
    cosine = "" if metrics.cosine is None else f"{metrics.cosine:.9f}"
    return f"{metrics.max_rel_error:.1e}", f"{metrics.max_abs_error:.1e}", cosine, top1


def _blocks(blocks: Iterable[BlockCost]) -> Table:
    table = _table("block", "parameters", "deploy form", "MACs", "deploy form", "saved")
    for block in blocks:
        before, after = block.training, block.deploy
        counts = (before.parameters, after.parameters, before.macs, after.macs)
        saved = f"{1 - after.macs / before.macs:.1%}" if before.macs else ""
        table.add_row(_plain(block.name), *(f"{count:,}" for count in counts), saved)
    return table


def _costs(training: Cost, deploy: Cost) -> Table:
    table = _table("", "training form", "deploy form", "saved")
    for name, before, after in (
        ("parameters", training.parameters, deploy.parameters),
        ("MACs an image", training.macs, deploy.macs),
    ):
        table.add_row(name, f"{before:,}", f"{after:,}", f"{1 - after / before:.2%}" if before else "")
    return table


def _table(*header: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(*header, box=box.SIMPLE_HEAD, pad_edge=False, show_header=any(header))
    for column in table.columns:
        column.overflow = "fold"
    return table


def _verdict(verdict: str) -> str:
    colour = {"passed": "green", "trusted": "green", "failed": "bold red"}.get(verdict, "yellow")
    return f"[{colour}]{verdict}[/]"


def _size(size: Any) -> str:
    return size if isinstance(size, str) else "x".join(map(str, size))


def _value(value: Any) -> str:
    return _plain(", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value))


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _short(name: str) -> str:
    path = Path(name)
    return str(path.relative_to(Path.cwd())) if path.is_absolute() and path.is_relative_to(Path.cwd()) else name
