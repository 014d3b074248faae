"""The scores of a network's blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from repaconv.cli.text_and_json_output import out, plain, table

if TYPE_CHECKING:
    from rich.table import Table

    from repaconv.results import BlockScore, ScoreArtefact


def show(done: ScoreArtefact) -> None:
    """A row a block, the orders, and what the numbers are of."""
    out().print(scores(done.blocks, done.kernel))
    out().print(f"by Σ, the paper's order: {', '.join(map(str, done.by_sigma))}")
    if done.by_error:
        out().print(f"by measured error:       {', '.join(map(str, done.by_error))}")
    out().print(
        f"[dim]{plain(done.inputs)}, {done.images} of them; locality is within {done.kernel} x {done.kernel}, "
        f"{done.uniform:.3f} if attention were the same everywhere[/]"
    )


def scores(blocks: Iterable[BlockScore], kernel: int | None) -> Table:
    """What is known of every block; of Σ also the range over its heads."""
    rows = table("block", "Σ", "of heads", "locality", "invariance", "entropy", "error if replaced alone")
    for block in blocks:
        sigmas = [head.sigma for head in block.heads]
        error = "" if block.error is None else f"{block.error:.4f}"
        numbers = (f"{value:.3f}" for value in (block.locality, block.invariance, block.entropy))
        rows.add_row(str(block.block), f"{block.sigma:.1f}", f"{min(sigmas):.1f} to {max(sigmas):.1f}", *numbers, error)
    return rows
