"""Which blocks to replace: by measured error, by the paper's Sigma, and how many a budget allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from repaconv.artefacts import Tried
from repaconv.converting.fitting import How, fitted
from repaconv.converting.judging import Budget, Judge
from repaconv.converting.normal import RIDGES
from repaconv.converting.parting import Parted
from repaconv.converting.places import Place
from repaconv.converting.plain import Plain, mapped
from repaconv.converting.sequence import Converted, convert
from repaconv.progress import Progress


def single_errors(plain: Plain, how: How, images: Tensor, judge: Judge, progress: Progress) -> tuple[float, ...]:
    """Of each block, what replacing it alone costs on the judge's images: one fit and half a forward pass a block."""
    errors: list[float] = []
    with torch.inference_mode():
        fitting, seen = mapped(plain.net.embed, images), mapped(plain.net.embed, judge.part.images)
        for index, block in enumerate(plain.blocks):
            progress("measure blocks", index, len(plain.blocks))
            module = fitted(Place(plain, index, fitting, fitting), how).module
            errors.append(judge.error(mapped(lambda x, i=index, m=module: plain.rest(x, i, m), seen)))
            if index + 1 < len(plain.blocks):
                fitting, seen = mapped(block, fitting), mapped(block, seen)
    return tuple(errors)


def as_many_as_allowed(
    plain: Plain, how: How, order: Sequence[int], parted: Parted, judge: Judge, budget: Budget, progress: Progress
) -> tuple[tuple[int, ...], tuple[Tried, ...]]:
    """The longest beginning of the order that the budget allows, and all that were measured: one beyond it, if any."""
    tried: list[Tried] = []
    for count in range(1, len(order) + 1):
        progress("convert within the budget", count - 1, len(order))
        chosen = tuple(sorted(order[:count]))
        found = convert(plain, chosen, how, parted.fitting.images)
        tried.append(judge.tried(found.net, chosen, budget))
        if not tried[-1].within:
            break
    allowed = [each.blocks for each in tried if each.within]
    return allowed[-1] if allowed else (), tuple(tried)


class Chosen(NamedTuple):
    """A conversion by what did best on the images that choose, and what it cost there before they were fitted, too."""

    made: Converted
    how: How
    tried: Tried


def converted(plain: Plain, how: How, blocks: Sequence[int], parted: Parted, judge: Judge, budget: Budget) -> Chosen:
    """The conversion of these blocks, by the judge's images: its ridge, and whether the FFNs' last layers, too, and W^O
    of the others are fitted anew.

    What is chosen is then fitted to these images, too: the ones that say what it costs in the end are others.
    """
    chosen = tuple(sorted(blocks))

    def cost(how: How, *, refit: bool = False) -> Tried:
        made = convert(plain, chosen, how, parted.fitting.images, refit=refit)
        return judge.tried(made.net, chosen, budget)

    if how.fit != "squares":
        return Chosen(convert(plain, chosen, how, parted.fitting.images), how, cost(how))
    ways = {ridge: cost(replace(how, ridge=ridge)) for ridge in RIDGES}
    ridge = min(RIDGES, key=lambda each: ways[each].error)
    how, tried, refit = replace(how, ridge=ridge), ways[ridge], False
    with_ffn = cost(replace(how, ffn=True))
    if with_ffn.error < tried.error:
        how, tried = replace(how, ffn=True), with_ffn
    if _stay_behind(chosen, len(plain.blocks)):
        again = cost(how, refit=True)
        refit = again.error < tried.error
        tried = again if refit else tried
    images = torch.cat([parted.fitting.images, parted.choosing.images])
    return Chosen(convert(plain, chosen, how, images, refit=refit), how, tried)


def _stay_behind(chosen: Sequence[int], depth: int) -> bool:
    """Whether a block stays behind one that does not."""
    return set(range(min(chosen), depth)) != set(chosen)
