"""Which blocks to replace: by measured error, by the paper's Sigma, and how many a budget allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from repaconv.conversion.block_activations import Place
from repaconv.conversion.conversion_evaluation import Judge
from repaconv.conversion.image_splits import Parted
from repaconv.conversion.kernel_fitting import How, fitted
from repaconv.conversion.least_squares import MANY, RIDGES
from repaconv.conversion.original_activations import Streams
from repaconv.conversion.plain_vit import Plain, mapped
from repaconv.conversion.sequential_conversion import Converted, convert
from repaconv.core.progress import Progress
from repaconv.results import Tried
from repaconv.verification.accuracy_budget import Budget


class Rig(NamedTuple):
    """What is chosen by: the original's streams on the images that fit, then those that choose, and its judge there."""

    streams: Streams
    fitting: Streams
    judge: Judge

    @classmethod
    def of(cls, plain: Plain, parted: Parted) -> Rig:
        """Of a network."""
        count = len(parted.calibration.images)
        streams = Streams(plain, torch.cat([parted.calibration.images, parted.validation.images]))
        judge = Judge(streams.outputs()[count:], parted.validation, logits=plain.config.classes > 0)
        return cls(streams, streams.first(count), judge)

    def tried(self, made: Converted, blocks: tuple[int, ...], budget: Budget) -> Tried:
        """What a conversion of these blocks costs on the images that choose."""
        first = min(blocks)
        seen = self.streams.at(first).into[len(self.fitting) :]
        with torch.inference_mode():
            return self.judge.tried(mapped(lambda x: made.net.rest(x, first), seen), blocks, budget)

    @property
    def ridges(self) -> tuple[float, ...]:
        """Those that are worth trying."""
        config = self.streams.plain.config
        many = len(self.fitting) * config.grid[0] * config.grid[1] >= MANY * config.width
        return RIDGES if many else RIDGES[:1]


def single_errors(rig: Rig, how: How, progress: Progress) -> tuple[float, ...]:
    """Of each block, what replacing it alone costs on the judge's images: one fit and half a forward pass a block."""
    errors: list[float] = []
    plain = rig.streams.plain
    with torch.inference_mode():
        for index in range(len(plain.blocks)):
            progress("measure blocks", index, len(plain.blocks))
            into, mixed = rig.fitting.at(index)
            module = fitted(Place(plain, index, into, mixed, into), how).module
            seen = mapped(module, rig.streams.at(index).into[len(into) :])
            errors.append(rig.judge.error(mapped(partial(plain.net.rest, start=index + 1), seen)))
    return tuple(errors)


def as_many_as_allowed(
    rig: Rig, how: How, order: Sequence[int], budget: Budget, progress: Progress
) -> tuple[tuple[int, ...], tuple[Tried, ...]]:
    """The longest beginning of the order that the budget allows, and all that were measured: one beyond it, if any."""
    tried: list[Tried] = []
    for count in range(1, len(order) + 1):
        progress("convert within the budget", count - 1, len(order))
        chosen = tuple(sorted(order[:count]))
        tried.append(rig.tried(convert(rig.fitting, chosen, how), chosen, budget))
        if not tried[-1].within:
            break
    allowed = [each.blocks for each in tried if each.within]
    return allowed[-1] if allowed else (), tuple(tried)


class Chosen(NamedTuple):
    """A conversion by what did best on the images that choose, and what it cost there before they were fitted, too."""

    made: Converted
    how: How
    tried: Tried


def converted(rig: Rig, how: How, blocks: Sequence[int], budget: Budget) -> Chosen:
    """The conversion of these blocks, by the judge's images: its ridge, and whether the FFNs' last layers, too, and W^O
    of the others are fitted anew.

    What is chosen is then fitted to these images, too: the ones that say what it costs in the end are others.
    """
    chosen = tuple(sorted(blocks))

    def cost(how: How, *, refit: bool = False) -> Tried:
        return rig.tried(convert(rig.fitting, chosen, how, refit=refit), chosen, budget)

    if how.fit != "squares":
        return Chosen(convert(rig.fitting, chosen, how), how, cost(how))
    ways = {ridge: cost(replace(how, ridge=ridge)) for ridge in rig.ridges}
    ridge = min(ways, key=lambda each: ways[each].error)
    how, tried, refit = replace(how, ridge=ridge), ways[ridge], False
    with_ffn = cost(replace(how, ffn=True))
    if with_ffn.error < tried.error:
        how, tried = replace(how, ffn=True), with_ffn
    if _stay_behind(chosen, len(rig.streams.plain.blocks)):
        again = cost(how, refit=True)
        refit = again.error < tried.error
        tried = again if refit else tried
    return Chosen(convert(rig.streams, chosen, how, refit=refit), how, tried)


def _stay_behind(chosen: Sequence[int], depth: int) -> bool:
    """Whether a block stays behind one that does not."""
    return set(range(min(chosen), depth)) != set(chosen)
