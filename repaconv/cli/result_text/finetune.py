"""How a training went, and what its network costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from repaconv.cli.result_text.common_tables import accuracy_told
from repaconv.cli.text_and_json_output import coloured, out, plain, table

if TYPE_CHECKING:
    from repaconv.results import FinetuneArtefact, Link


def show(done: FinetuneArtefact) -> None:
    """Epoch by epoch on the images that choose, then what the images that judge say."""
    rows = table("epoch", "loss", "apart", "agreement", "accuracy", "")
    for number, epoch in enumerate(done.epochs):
        cells = (
            str(number) if number else "start",
            "" if epoch.loss is None else f"{epoch.loss:.4f}",
            f"{epoch.cost:.4f}",
            "" if epoch.agreement is None else f"{epoch.agreement:.1%}",
            "" if epoch.accuracy is None else f"{epoch.accuracy:+.1%}",
            "kept" if number == done.best_epoch else "",
        )
        rows.add_row(*cells)
    out().print(rows)
    parts = done.images
    out().print(
        f"[dim]{plain(done.inputs)}: images: {parts.calibration} training, {parts.validation} validation, "
        f"{parts.test} test; "
        f"{done.precision}, learning learning rate {done.lr:g}[/]"
    )
    for what, link in (("before", done.start_evaluation), ("trained", done.evaluation)):
        if link:
            _print_judged(what, link)
    if done.evaluation:
        out().print(f"{coloured(done.verdict)}: {plain(done.evaluation.note)}")


def _print_judged(what: str, link: Link) -> None:
    if link.accuracy:
        out().print(accuracy_told(what, link.accuracy))
    if link.metrics:
        divergence = "" if link.metrics.kl_divergence is None else f", KL {link.metrics.kl_divergence:.4f}"
        out().print(f"{what}: largest error {link.metrics.norm_error:.3f} of an image's output{divergence}")
