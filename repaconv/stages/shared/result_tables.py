"""Tables and phrases of several results' text output: links, costs, presets, sizes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from repaconv.core.terminal import PRINTED_ROWS, colored, is_verbose, plain, stdout, table
from repaconv.stages.report.page_rendering import saved

if TYPE_CHECKING:
    from rich.table import Table

    from repaconv.results import Accuracy, BenchArtefact, Cost, Link, ThroughputArtefact

OUTPUT = ", output "
"""Text before the output's name, in the reference or candidate of a link about one of several outputs."""

ROUNDING, ROUNDING_TOLD = "FP32 rounding", "for comparison: what FP32 rounding alone changes; no limit"
"""Name and description of `VerifyArtefact.for_scale`, which is not a link."""


def links(links: Iterable[Link], for_scale: dict[str, Any] | None = None) -> Table:
    """Table of links: verdict, error and tolerance; with -v all numbers."""
    if is_verbose():
        return _all_numbers(links, for_scale or {})
    rows = table("verdict", "link", "candidate", "max rel", "allowed")
    for narrow in ("verdict", "link", "max rel", "allowed"):
        next(column for column in rows.columns if column.header == narrow).no_wrap = True
    compared, given = tuple(links), set[str]()
    for link in compared:
        reason = link.tolerance.rtol_reason if link.tolerance else ""
        limit = "" if reason in given else link.limit_text  # the same reason is given once; each row has its limit
        given.add(reason)
        error, *_ = _numbers_of(link)
        exact = link.tolerance is None or link.tolerance.kind == "exact"
        text = link.tolerance.description if link.tolerance else ""
        notes = [f"on {link.inputs}" if link.inputs else "", link.note, limit, link.lossy_text]
        note = "; ".join(filter(None, notes))
        of = link.reference.partition(OUTPUT)[2] if OUTPUT not in link.candidate else ""
        candidate = plain(link.candidate + (OUTPUT + of if of else "")) + (f"\n[dim]{plain(note)}[/]" if note else "")
        rows.add_row(colored(link.verdict), plain(label(link, compared)), candidate, error, text if exact else "lossy")
    for name, metrics in (for_scale or {}).items():
        rows.add_row(
            "not evaluated", ROUNDING, f"{plain(name)}\n{ROUNDING_TOLD}", _numbers(metrics)[0], "", style="dim"
        )
    return rows


def _all_numbers(links: Iterable[Link], for_scale: dict[str, Any]) -> Table:
    rows = table("link", "candidate", "against", "max rel", "max abs", "cosine", "top-1", "allowed", "verdict")
    for link in links:
        numbers = _numbers_of(link)
        allowed = link.tolerance.description if link.tolerance else ""
        note = "; ".join(filter(None, [f"on {link.inputs}" if link.inputs else "", link.note, link.limit_text]))
        verdict = colored(link.verdict) + (f" ({plain(note)})" if note else "")
        rows.add_row(link.name, plain(link.candidate), plain(link.reference), *numbers, allowed, verdict)
    for name, metrics in for_scale.items():
        candidate, _, reference = name.partition(" against ")
        text = f"not evaluated ({ROUNDING_TOLD})"
        rows.add_row(ROUNDING, candidate, reference, *_numbers(metrics), "", text, style="dim")
    return rows


def label(link: Link, links: Iterable[Link]) -> str:
    """The name of a link, with the name of its export if several links share the name: int8 (int8.keep-head)."""
    several = len({other.variant for other in links if other.name == link.name}) > 1
    return f"{link.name} ({link.variant})" if several and link.variant not in ("", link.name) else link.name


def print_hidden_rows(kind: str, count: int) -> None:
    """Print how many rows are not shown."""
    if count > PRINTED_ROWS and not is_verbose():
        stdout().print(f"[dim]{count - PRINTED_ROWS} more {kind}: -v shows all[/]")


def _numbers_of(link: Link) -> tuple[str, str, str, str]:
    """A link may pass although nothing was measured in FP32: in float64 alone."""
    if link.verdict == "passed" and link.metrics is None:
        return "not measured", "", "", ""
    return _numbers(link.metrics)


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


def locations(links: Iterable[Link]) -> None:
    """Print the first layer that differs, of links that failed."""
    for link in links:
        if link.location and link.verdict == "failed":
            where, why = link.location.module, plain(link.location.reason)
            kept = f"; --keep-fp32 {plain(where)} keeps it in FP32" if link.name in ("fp16", "bf16", "int8") else ""
            text = (
                f" first different at [bold]{plain(where)}[/]: {why}{kept}"
                if where
                else f": no single layer found as the cause ({why})"
            )
            stdout().print(f"[bold red]{link.name}[/]{text}")


def count_text(count: int, noun: str) -> str:
    """A count with its noun, singular or plural: 1 change, 2 changes."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def accuracy_text(name: str, found: Accuracy) -> str:
    """The accuracies of reference and candidate on the same images; with -v, also McNemar's test."""
    chance = (
        f"; only the reference is right on {found.only_reference}, only the candidate on {found.only_candidate}, "
        f"McNemar p = {found.p_value:.2g}"
    )
    return (
        f"{name}: accuracy {found.reference:.2%} -> {found.candidate:.2%} on {found.images} images; difference "
        f"{found.difference:+.2%} (95% interval {found.low:+.2%} to {found.high:+.2%}{chance if is_verbose() else ''})"
    )


def print_task_accuracies(links: Iterable[Link]) -> None:
    """Print the metric against labels of both networks, of links in a task."""
    for link in links:
        if link.task and (found := link.task.accuracy):
            stdout().print(
                f"{plain(link.name)}: {found.metric} {found.reference:.2%} -> {found.candidate:.2%} on {found.images} "
                f"images with labels; loss {found.drop:+.2%} (95% interval {found.low:+.2%} to {found.high:+.2%})"
            )


def costs(training: Cost, deploy: Cost) -> Table:
    """Table of the costs before and after the fold, and the saving."""
    rows = table("", "training form", "deploy form", "saved")
    for name, before, after in (
        ("parameters", training.parameters, deploy.parameters),
        ("MACs per image", training.macs, deploy.macs),
    ):
        rows.add_row(name, f"{before:,}", f"{after:,}", saved(before, after, 2))
    return rows


def print_images_and_classes(images: str, classes: str = "") -> None:
    """Print how images were preprocessed, and what the classes of the scores are, where that is known."""
    for what, description in (("images", images), ("classes", classes)):
        if description:
            stdout().print(f"[dim]{what}: {plain(description)}[/]")


def preset_text(rewrites: tuple[str, ...]) -> str:
    """A rewrite preset by its rewrites."""
    return plain(" + ".join(rewrites) or "as exported")


def size_text(found: Any) -> str:
    """An image size as text; text stays as it is."""
    return found if isinstance(found, str) else "x".join(map(str, found))


def rounds_text(done: BenchArtefact | ThroughputArtefact) -> str:
    """The number of rounds and of session loads, in words."""
    return f"{done.rounds} interleaved rounds" + (
        f" in {done.session_loads} session loads" if done.session_loads > 1 else ""
    )
