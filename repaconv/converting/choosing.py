"""Which blocks to replace: by measured error, by the paper's Sigma, and how many a budget allows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from repaconv.artefacts import Tried
from repaconv.converting.fitting import How, fitted
from repaconv.converting.judging import Budget, Judge
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


def converted(
    plain: Plain, how: How, chosen: Sequence[int], parted: Parted, judge: Judge, budget: Budget
) -> tuple[Converted, Tried]:
    """The conversion of these blocks; W^O of those that stay is fitted anew where that helps on the judge's images."""
    ways = (False, True) if how.fit == "squares" and _stay_behind(chosen, len(plain.blocks)) else (False,)
    found = [convert(plain, chosen, how, parted.fitting.images, refit=refit) for refit in ways]
    tried = [judge.tried(each.net, tuple(sorted(chosen)), budget) for each in found]
    best = min(range(len(found)), key=lambda place: tried[place].error)
    return found[best], tried[best]


def _stay_behind(chosen: Sequence[int], depth: int) -> bool:
    """Whether a block stays behind one that does not."""
    return bool(chosen) and set(range(min(chosen), depth)) != set(chosen)
