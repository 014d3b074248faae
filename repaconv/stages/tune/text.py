"""Text output of `tune`."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from repaconv.core.errors import first_names
from repaconv.core.terminal import is_verbose, plain, relative_path, stdout, table
from repaconv.stages.shared.result_tables import print_images_and_classes

if TYPE_CHECKING:
    from repaconv.results import Candidate, Deployment, Link, TuneArtefact

MOST_ROWS = 12
MOST_NAMED_MODULES = 3


def show_tune(done: TuneArtefact) -> None:
    """Print the fastest configurations, their losses, and the winner."""
    labeled = any(_accuracy_change(row.link) for row in done.candidates)
    of_task = next((row.link.task for row in done.candidates if row.link and row.link.task), None)
    accuracy = [of_task.accuracy.metric if of_task and of_task.accuracy else "accuracy"] if labeled else []
    changed = "changed" if of_task else "changed top-1"
    rows = table("runtime", "precision", "rewrites", "speedup", "MiB", changed, *accuracy, "result")
    said = ""
    for row in _shown(done):
        found = row.ratio.cell if row.ratio else "1" if row.deployment == done.baseline else ""
        lost = "" if row.disagreement is None else f"{row.disagreement:.2%}"
        how, memory = row.deployment, f"{row.memory_bytes / 2**20:,.0f}" if row.memory_bytes is not None else ""
        right = [_accuracy_change(row.link)] if labeled else []
        form, description = _differences_from_baseline(how, done), plain(row.description)
        if description == said and description.startswith("skipped: "):
            description = "skipped: as above"
        else:
            said = description
        rows.add_row(plain(how.runtime), how.precision, form, found, memory, lost, *right, description)
    stdout().print(rows)
    for skipped in done.skipped:
        stdout().print(f"[yellow]skipped[/]: {plain(skipped)}")
    best, seconds = done.deployment, f"{done.note}, {done.seconds:.0f} s then" if done.note else f"{done.seconds:.0f} s"
    seconds += "" if done.complete else f"; not all was measured in {done.budget_s:.0f} s, a larger --budget resumes"
    exact = "exact, float32" if best.precision == "fp32" else f"[yellow]lossy[/], {best.precision}"
    gain = f"; {done.ratio.text('it', 'the default')}" if done.ratio else ""
    what = "the fastest" if done.ratio is None or done.ratio.conclusive else "taken"
    stdout().print(
        f"{what} for {done.objective} on {plain(done.target)}: [bold]{plain(best.runtime)}[/], {exact}, "
        f"{_differences_from_baseline(best, done)}{gain} ({seconds})"
    )
    if done.disagreement is not None:
        other = "" if best.precision != "fp32" else "the rejected choice has "
        accurate = f", {''.join(accuracy)} {found}" if (found := _accuracy_change(done.link)) else ""
        what = done.link.task.changed if done.link and done.link.task else "changed top-1 predictions"
        stdout().print(f"{other}{done.disagreement:.2%} {what} on the test images{accurate}")
    if done.images:
        stdout().print(f"[dim]by {plain(done.images)}[/]")
    print_images_and_classes(done.image_preprocessing, done.scores)
    if done.graph_size == "dynamic":
        stdout().print("the graphs take any image size; more rewrites apply to those of one: --image-size N")
    if done.output_files:
        file = plain(shlex.quote(relative_path(done.output_files[0])))
        given = dict(zip(done.options, done.options[1:], strict=False)).get("--target", done.target)
        target = "" if given == "x86-64" else f" --target {plain(shlex.quote(given))}"
        stdout().print(f"use it: repaconv export{target} --preset {file}; build and bench take the same options")


def _accuracy_change(link: Link | None) -> str:
    """The change in accuracy against FP32, if the images have labels."""
    if link and link.task and link.task.accuracy:
        return f"{-link.task.accuracy.drop:+.2%}"
    return f"{link.accuracy.difference:+.2%}" if link and link.accuracy else ""


def _shown(done: TuneArtefact) -> list[Candidate]:
    """The winner, then the others by speed; all with -v, else the first of those that were more than measured once."""
    winner, *others = done.candidates
    others = [row for row in others if row.ratio or row.link or row.description.startswith(("skipped", "left"))]
    others.sort(key=lambda row: -(row.ratio.median if row.ratio else 0.0))
    if is_verbose():
        return [winner, *others]
    return [winner, *[row for row in others if row.description != "measured"][:MOST_ROWS]]


def _differences_from_baseline(way: Deployment, done: TuneArtefact) -> str:
    """Differences of a configuration from the baseline: rewrites, quantizer, FP32 layers, settings, streams, batch
    size.
    """
    baseline = done.baseline
    default = "the default preset" + (", limited by --rewrites" if "--rewrites" in done.options else "")
    more = [f"+{name}" for name in way.rewrites if name not in baseline.rewrites]
    less = [f"-{name}" for name in baseline.rewrites if name not in way.rewrites]
    rewrites = " ".join([*more, *less]) or default
    kept = f"float32: {first_names(way.fp32_modules, MOST_NAMED_MODULES)}" if way.fp32_modules else ""
    streams = f"{way.streams} streams of {way.threads} thread(s)" if way.streams > 1 else ""
    batch = f"batch {way.batch}" if way.batch != baseline.batch else ""
    by = f"int8 by {way.quantizer}" if way.quantizer else ""
    return plain("; ".join(filter(None, [rewrites, by, kept, *way.settings, streams, batch])))
