"""Text output of `score`, `convert` and `finetune`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from repaconv.core.terminal import colored, plain, stdout, table
from repaconv.stages.shared.result_tables import accuracy_text

if TYPE_CHECKING:
    from rich.table import Table

    from repaconv.results import (
        BlockScore,
        ConvertArtefact,
        FinetuneArtefact,
        Link,
        ScoreArtefact,
        SpeedTarget,
        SpeedTrial,
        Trade,
        Tried,
    )


# Training


def show_finetune(done: FinetuneArtefact) -> None:
    """Print every epoch on the validation split, then the evaluation on the test split."""
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
    stdout().print(rows)
    parts = done.images
    stdout().print(
        f"[dim]{plain(done.inputs)}: images: {parts.calibration} training, {parts.validation} validation, "
        f"{parts.test} test; "
        f"{done.precision}, learning rate {done.lr:g}[/]"
    )
    for what, link in (("before", done.start_evaluation), ("trained", done.evaluation)):
        if link:
            _print_evaluation(what, link)
    if done.evaluation:
        stdout().print(f"{colored(done.verdict)}: {plain(done.evaluation.note)}")


def _print_evaluation(what: str, link: Link) -> None:
    if link.accuracy:
        stdout().print(accuracy_text(what, link.accuracy))
    if link.metrics:
        divergence = "" if link.metrics.kl_divergence is None else f", KL {link.metrics.kl_divergence:.4f}"
        stdout().print(f"{what}: largest error {link.metrics.norm_error:.3f} of an image's output{divergence}")


# Scores


def show_score(done: ScoreArtefact) -> None:
    """Print a row per block, then both rankings."""
    stdout().print(scores(done.blocks, done.kernel))
    stdout().print(f"by Σ, the paper's order: {', '.join(map(str, done.by_sigma))}")
    if done.by_error:
        stdout().print(f"by measured error:       {', '.join(map(str, done.by_error))}")
    stdout().print(
        f"[dim]{plain(done.inputs)}, {done.images} of them; locality is within {done.kernel} x {done.kernel}, "
        f"{done.uniform:.3f} if attention were the same everywhere[/]"
    )


def scores(blocks: Iterable[BlockScore], kernel: int | None) -> Table:
    """Table of the scores by block; Σ also with its range over the heads."""
    rows = table("block", "Σ", "of heads", "locality", "invariance", "entropy", "error if replaced alone")
    for block in blocks:
        sigmas = [head.sigma for head in block.heads]
        error = "" if block.error is None else f"{block.error:.4f}"
        numbers = (f"{value:.3f}" for value in (block.locality, block.invariance, block.entropy))
        rows.add_row(str(block.block), f"{block.sigma:.1f}", f"{min(sigmas):.1f} to {max(sigmas):.1f}", *numbers, error)
    return rows


# Conversion


def show_convert(done: ConvertArtefact) -> None:
    """Print scores, what was tried, and the evaluation on the test split."""
    if done.scores:
        stdout().print(scores(done.scores, done.kernel))
        _print_tried(done.tried)
        where = f"blocks {', '.join(map(str, done.blocks))} of {len(done.scores)}"
        if done.heads:
            where = f"heads {', '.join(done.heads)} of {sum(len(block.heads) for block in done.scores)}"
        refitted = f"; W^O of {', '.join(map(str, done.refitted))} fitted anew" if done.refitted else ""
        solved = f"; ridge {done.ridge:g}, condition {done.condition:.1e}" if done.ridge and done.condition else ""
        stdout().print(
            f"{where} -> {done.kind}{f' {done.kernel}x{done.kernel}' if done.kernel else ''}{refitted}{solved}"
        )
    if done.description:
        stdout().print(f"{done.method}, untrained: {plain(done.description)}")
    if done.schedule:
        stdout().print(f"tokens that merge, block by block: {', '.join(map(str, done.schedule))}")
    if done.speed_target:
        _print_speed_target(done.speed_target)
    if done.trade:
        _print_trade(done.trade)
    parts = done.images
    stdout().print(
        f"[dim]{plain(done.inputs)}: images: {parts.calibration} calibration, {parts.validation} validation, "
        f"{parts.test} test[/]"
    )
    if done.evaluation.accuracy:
        stdout().print(accuracy_text(done.evaluation.name, done.evaluation.accuracy))
    metrics = done.evaluation.metrics
    if metrics:
        divergence = "" if metrics.kl_divergence is None else f", KL {metrics.kl_divergence:.4f}"
        stdout().print(f"largest error {metrics.norm_error:.3f} of an image's output{divergence}")
    stdout().print(f"{colored(done.verdict)}: {plain(done.evaluation.note)}")


def _print_speed_target(target: SpeedTarget) -> None:
    rows = table("merged or replaced", "speedup, 95%")
    for each in sorted(target.speed_trials, key=lambda each: each.speed.median):
        rows.add_row(*_speed_cells(each))
    stdout().print(rows)
    stdout().print(plain(target.text))


def _print_trade(trade: Trade) -> None:
    rows = table("conversion", "merged or replaced", "speedup, 95%", "error", "agreement")
    for each in sorted((trade.taken, *trade.others), key=lambda each: each.speed.median):
        kept = each.tried
        named = f"{each.kind}, chosen" if each is trade.taken else each.kind
        share = "" if kept is None or kept.agreement is None else f"{kept.agreement:.1%}"
        error = "" if kept is None else f"{kept.error:.3f}"
        rows.add_row(named, *_speed_cells(each), error, share)
    stdout().print(rows)
    stdout().print(f"[dim]on {trade.target}, {plain(trade.machine)}; errors and shares are of the validation split[/]")


def _speed_cells(each: SpeedTrial) -> tuple[str, str]:
    """Its blocks or schedule, and its speedup."""
    several = [", ".join(map(str, numbers)) for numbers in (each.blocks, each.schedule) if numbers]
    return "; ".join(several), each.speed.cell


def _print_tried(tried: tuple[Tried, ...]) -> None:
    rows = table("blocks replaced", "error", "agreement", "accuracy", "budget")
    for each in tried:
        shares = ("" if value is None else f"{value:+.1%}" if n else f"{value:.1%}" for n, value in
                  enumerate((each.agreement, each.accuracy)))  # fmt: skip
        within = {None: "", True: "within", False: "beyond"}[each.within]
        rows.add_row(", ".join(map(str, each.blocks)), f"{each.error:.3f}", *shares, within)
    stdout().print(rows)
