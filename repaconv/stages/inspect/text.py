"""Results of `inspect` as text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from repaconv.core.terminal import plain, stdout, table, value
from repaconv.stages.report.page_rendering import saved
from repaconv.stages.shared.result_tables import costs

if TYPE_CHECKING:
    from rich.table import Table

    from repaconv.results import BlockCost, FileInspection, Inspection


def show_inspect(done: Inspection | FileInspection) -> None:
    """Print the contents of a checkpoint, an ONNX graph or an engine."""
    from repaconv.results import Inspection

    _checkpoint(done) if isinstance(done, Inspection) else _file(done)


def _checkpoint(seen: Inspection) -> None:
    """Print the contents of a checkpoint."""
    origin = seen.origin
    _hash(origin.sha256)
    rows = table("", "", "source")
    rows.add_row("container", origin.container, f"{origin.bytes:,} bytes")
    rows.add_row("checksums", origin.checksums, "")
    rows.add_row("weights", origin.weights, origin.weights_reason)
    for other in seen.sets:
        if other.path != origin.weights:
            rows.add_row("also there", other.path, f"{other.tensors} tensors, {other.parameters:,} numbers")
    if origin.stripped:
        rows.add_row("prefixes removed", ", ".join(origin.stripped), "keys")
    for place, name in enumerate(seen.placeholders):
        rows.add_row("not loaded", name, "" if place else "classes and functions that the pickle names; none was run")
    rows.add_row(
        "method", seen.method or "unknown", f"{seen.confidence}: {seen.reason}" if seen.method else seen.reason
    )
    for known in seen.networks:
        also = f", also {', '.join(known.also)}" if known.also else ""
        but = f"but for {known.differs}" if known.differs else "all of them"
        rows.add_row("network" if known.exact else "near to", known.name, f"names and shapes, {but}{also}")
    if not seen.method and not seen.networks and not any(fact.name == "architecture" for fact in seen.facts):
        rows.add_row("network", "unknown", "no published network that is known here has nearly these names and shapes")
    if len(seen.applied) > 1:
        rows.add_row("folds", ", ".join(seen.applied), "keys")
    if seen.form:
        rows.add_row("form", seen.form, "keys")
    if seen.backbone:
        rows.add_row("backbone", seen.backbone, "")
    for name, shown, source in _facts(seen):
        rows.add_row(name, shown, source)
    stdout().print(rows)
    if seen.training and seen.deploy:
        if seen.blocks:
            stdout().print(_blocks(seen.blocks))
        stdout().print(costs(seen.training, seen.deploy))
    for problem in seen.problems:
        stdout().print(f"[bold red]cannot be folded:[/] {plain(problem)}")


def _hash(digest: str) -> None:
    """Print the hash on a line of its own, from which it can be copied: a column of a table would break it."""
    stdout().print(f"SHA-256 {digest}", soft_wrap=True)


def _facts(seen: Inspection) -> list[tuple[str, str, str]]:
    """Return name, value and source of each fact; what two sources say alike is one row that names both."""
    sources: dict[tuple[str, str], list[str]] = {}
    for fact in seen.facts:
        against = f"; but {fact.against}" if fact.against else ""
        sources.setdefault((fact.name, value(fact.value)), []).append(f"{fact.source}{against}")
    return [(name, shown, "; ".join(found)) for (name, shown), found in sources.items()]


def _file(seen: FileInspection) -> None:
    """Print the facts of an ONNX graph or an engine."""
    _hash(seen.sha256)
    rows = table("", "", "source")
    rows.add_row("kind", seen.kind, f"{seen.bytes:,} bytes")
    for fact in seen.facts:
        rows.add_row(plain(fact.name), value(fact.value), plain(fact.source))
    stdout().print(rows)
    for problem in seen.problems:
        stdout().print(f"[bold red]caution:[/] {plain(problem)}")


def _blocks(blocks: Iterable[BlockCost]) -> Table:
    rows = table("block", "parameters", "deploy form", "MACs", "deploy form", "saved")
    for block in blocks:
        before, after = block.training, block.deploy
        counts = (before.parameters, after.parameters, before.macs, after.macs)
        rows.add_row(plain(block.name), *(f"{count:,}" for count in counts), saved(before.macs, after.macs))
    return rows
