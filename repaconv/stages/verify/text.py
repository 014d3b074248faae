"""Results of `verify` as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from repaconv.core.terminal import colored, is_verbose, plain, stdout
from repaconv.stages.shared.result_tables import accuracy_text, label, links, locations, print_task_accuracies

if TYPE_CHECKING:
    from repaconv.results import Link, VerifyArtefact


def show_verify(done: VerifyArtefact) -> None:
    """Print every link with its verdict, the accuracies, and where a link fails."""
    stdout().print(links(done.links, for_scale=done.for_scale))
    _print_accuracies(done.links)
    print_task_accuracies(done.links)
    if any(link.accuracy for link in done.links):
        for claim in done.claims:
            stdout().print(f"claimed: accuracy {claim.value:.2%} by {plain(claim.source)}")
    locations(done.links)
    if done.preprocessing:
        stdout().print(f"[dim]images: {plain(done.preprocessing)}[/]")
    if done.labels:
        what = "labels" if any(link.task for link in done.links) else "classes"
        stdout().print(f"[dim]{what}: {plain(done.labels)}[/]")
    policy = f"; version {done.policy} of the tolerances" if is_verbose() else ""
    stdout().print(f"{colored(done.verdict)}: {plain(_by_verdict(done))}{policy}")


def _by_verdict(done: VerifyArtefact) -> str:
    """The links by verdict, and the images on which they were run."""
    ran = [link for link in done.links if link.metrics or link.task]
    words = []
    failed = {label(link, done.links) for link in done.links if link.verdict == "failed"}
    for verdict in ("passed", "failed"):
        for inputs in dict.fromkeys(link.inputs for link in ran):
            names = [label(link, done.links) for link in ran if (link.verdict, link.inputs) == (verdict, inputs)]
            # A model has a row per output and one for its task: it passed only if all of them did.
            names = [name for name in names if verdict == "failed" or name not in failed]
            if names:
                words.append(f"{_listed(names)} {verdict} on {inputs or done.inputs}")
    unrun = [link for link in done.links if link.verdict == "failed" and not (link.metrics or link.task)]
    words += [f"{label(link, done.links)} failed" for link in unrun]
    missing = [label(link, done.links) for link in done.links if link.verdict == "not verified"]
    return "; ".join([*words, *([f"not verified: {_listed(missing)}"] if missing else [])])


def _listed(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def _print_accuracies(links: Sequence[Link]) -> None:
    for link in links:
        if found := link.accuracy:
            stdout().print(accuracy_text(label(link, links), found))
