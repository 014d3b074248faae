"""Choose the blocks to replace: measure the error of each, and how many blocks a budget allows."""

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
    """What blocks are chosen with: activations of the original on the calibration and validation images, on the
    calibration images alone (``fitting``), and the evaluation on the validation images."""

    streams: Streams
    fitting: Streams
    judge: Judge

    @classmethod
    def of(cls, plain: Plain, parted: Parted) -> Rig:
        """Compute it for a network."""
        count = len(parted.calibration.images)
        streams = Streams(plain, torch.cat([parted.calibration.images, parted.validation.images]))
        judge = Judge(streams.outputs()[count:], parted.validation, logits=plain.config.classes > 0)
        return cls(streams, streams.first(count), judge)

    def tried(self, made: Converted, blocks: tuple[int, ...], budget: Budget) -> Tried:
        """Measure the loss of a conversion of these blocks on the validation images."""
        first = min(blocks)
        seen = self.streams.at(first).into[len(self.fitting) :]
        with torch.inference_mode():
            return self.judge.tried(mapped(lambda x: made.net.rest(x, first), seen), blocks, budget)

    @property
    def ridges(self) -> tuple[float, ...]:
        """The ridge parameters to try: both if there are many tokens per unknown, else only the usual one."""
        config = self.streams.plain.config
        many = len(self.fitting) * config.grid[0] * config.grid[1] >= MANY * config.width
        return RIDGES if many else RIDGES[:1]


def single_errors(rig: Rig, how: How, progress: Progress) -> tuple[float, ...]:
    """Return the error on the validation images of replacing each block alone (one fit, half a forward pass each)."""
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
    """Return the longest prefix of the ranking that the budget allows, and all measured prefixes."""
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
    """The best conversion by the validation images, and its loss there before it was also fitted to them."""

    made: Converted
    how: How
    tried: Tried


def converted(rig: Rig, how: How, blocks: Sequence[int], budget: Budget) -> Chosen:
    """Convert these blocks. The validation images decide the ridge parameter, whether to refit the last FFN layers, and
    whether to refit W^O of the other blocks.

    The chosen conversion is then fitted to the validation images as well. Its loss is measured on the test split.
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
    """Return whether a block is kept after a block that is replaced."""
    return set(range(min(chosen), depth)) != set(chosen)
