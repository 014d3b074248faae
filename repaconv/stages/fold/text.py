"""Results of `fold` as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from repaconv.core.terminal import PRINTED_ROWS, colored, is_verbose, plain, stdout, table
from repaconv.stages.report.page_rendering import saved
from repaconv.stages.shared.result_tables import costs, count_text, links, print_hidden_rows, size_text

if TYPE_CHECKING:
    from repaconv.results import GraphFold, MethodFold

WITHOUT = "not compared in float64: nothing here computes in float64 what its operators compute in ONNX Runtime"


def show_fold(done: MethodFold | GraphFold) -> None:
    """Print the images that a folded network takes, and its certificate or its changes of the graph."""
    from repaconv.results import MethodFold

    _images(done)
    _checkpoint(done) if isinstance(done, MethodFold) else _graph(done)


def _images(done: MethodFold | GraphFold) -> None:
    """Print the image size, the preprocessing and the output that gives classes, with the source of each."""
    from repaconv.verification.image_files import preprocessing_text

    if done.image_size is None:
        return
    fact = next((fact for fact in done.facts if fact.name == "image_size"), None)
    by = f"from {fact.source}" if fact else "as the network was trained"
    by = f"[yellow]assumed[/]: {plain(fact.source)}; --set image_size=N" if fact and fact.assumed else plain(by)
    stdout().print(f"image size: {size_text(done.image_size)} pixels ({by})")
    if done.preprocessing:
        stdout().print(f"images: {plain(preprocessing_text(done.preprocessing, done.image_size, done.image_channels))}")
    else:
        why = next((f"{fact.source} says {fact.against}" for fact in done.facts if fact.name == "preprocessing"), "")
        why = why or "preprocessing unknown"
        stdout().print(f"images: {plain(why)}; for image files give --set mean=... --set std=... (for pixels 0 to 255)")
    scores = getattr(done, "scores", None)
    if scores and scores.assumed:
        stdout().print(
            f"classes: if images have labels, the output {plain(scores.text)} is taken as the scores of "
            f"{scores.classes} classes, because of its shape. --set classes={scores.classes} confirms that, "
            "--set classes=0 says no"
        )


def _checkpoint(done: MethodFold) -> None:
    """Print a summary of the certificate, and what the fold saves."""
    from repaconv.results.link_reasons import limit_in_words

    rows = table("module", "folded", "float64 difference")
    steps = sorted(done.certificate, key=lambda step: -step.max_rel_error)
    for step in done.certificate if is_verbose() else steps[:PRINTED_ROWS]:
        own = f" ({limit_in_words(step.allowed or 0.0)} allowed: {plain(step.reason)})" if step.reason else ""
        rows.add_row(step.module, "; ".join(step.folded), f"{step.max_rel_error:.1e}{own}")
    stdout().print(rows)
    print_hidden_rows("folds, which differ by less", len(steps))
    stdout().print(costs(done.training, done.deploy))
    _not_folded(done)
    exact = [step for step in done.certificate if not step.reason]
    worst = max((step.max_rel_error for step in exact), default=0.0)
    allowed = max((step.allowed or 0.0 for step in exact), default=0.0)
    others = len(done.certificate) - len(exact)
    text = f"every fold within {limit_in_words(allowed)}, the worst {worst:.1e} (float64)"
    text += f"; {others} within a tolerance of their own, as above" if others else ""
    stdout().print(f"{colored(done.verdict)}: {text}")


def _shortened(sentence: str) -> str:
    """Shorten a sentence to the first places that it names; all of them with -v."""
    places = sentence.split("; ")
    if is_verbose() or len(places) <= PRINTED_ROWS:
        return sentence
    return f"{'; '.join(places[:PRINTED_ROWS])}; and {len(places) - PRINTED_ROWS} more, with -v"


def _not_folded(done: MethodFold | GraphFold) -> None:
    for sentence in done.not_folded:
        stdout().print(f"[yellow]not folded:[/] {plain(_shortened(sentence))}")


def _graph(done: GraphFold) -> None:
    """Print the recognized network, every change of the graph, the costs before and after, and the comparisons."""
    from repaconv.results import NetworkFold
    from repaconv.sources.named_architectures import CONFIG

    if isinstance(done, NetworkFold) and done.known:
        but = f", but for {done.known.differs}" if done.known.differs else ""
        stdout().print(
            f"taken for {plain(done.arch)}: the names and shapes of all its tensors are the same{plain(but)}"
        )
    if config := next((fact for fact in done.facts if fact.name == CONFIG and fact.assumed), None):
        stdout().print(f"configuration: {plain(str(config.value))} ([yellow]assumed[/]: {plain(config.source)})")
    if done.changes:
        changes = table("rewrite", "place", "what was done")
        for change in done.changes if is_verbose() else done.changes[:PRINTED_ROWS]:
            changes.add_row(change.rewrite, plain(change.place), plain(change.description))
        stdout().print(changes)
        print_hidden_rows("changes", len(done.changes))
    counts = table("", "before", "after", "saved")
    rows = [
        ("parameters", done.parameters),
        ("nodes", done.nodes),
        *([(done.macs_counted, done.macs)] if done.macs else []),
    ]
    for name, (before, after) in rows:
        counts.add_row(name, f"{before:,}", f"{after:,}", saved(before, after, 2))
    stdout().print(counts)
    if done.changes and isinstance(done, NetworkFold) and done.exporting and done.exporting.description:
        stdout().print(plain(f"{done.exporting.description}, before this fold"))
    _not_folded(done)
    if done.links:
        stdout().print(links(done.links))
    where = f"compared by {done.float64}" if done.float64 else WITHOUT
    where = "nothing could be compared, see above" if done.verdict == "not verified" else where
    summary = plain(done.unchanged) or f"{count_text(len(done.changes), 'change')}, opset {done.opset}"
    stdout().print(f"{colored(done.verdict)}: {summary}; {where}")
