"""Choose the blocks to replace: measure the error of each, and how many blocks a budget allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from repaconv.conversion.block_conversion import BlockContext
from repaconv.conversion.conversion_evaluation import Evaluation
from repaconv.conversion.image_splits import ImageSplits
from repaconv.conversion.kernel_fitting import ConversionSettings, convert_block
from repaconv.conversion.least_squares import MANY_ROWS, RIDGES
from repaconv.conversion.original_activations import OriginalActivations
from repaconv.conversion.plain_vit import PlainViT, map_batches
from repaconv.conversion.sequential_conversion import Converted, convert
from repaconv.core.progress import Progress
from repaconv.results import Tried
from repaconv.verification.accuracy_budget import Budget


class SelectionData(NamedTuple):
    """What blocks are chosen with: activations of the original on the calibration and validation images, on the
    calibration images alone (``fitting``), and the evaluation on the validation images."""

    activations: OriginalActivations
    fitting: OriginalActivations
    evaluation: Evaluation

    @classmethod
    def of(cls, plain: PlainViT, splits: ImageSplits) -> SelectionData:
        """Compute it for a network."""
        count = len(splits.calibration.images)
        activations = OriginalActivations(plain, torch.cat([splits.calibration.images, splits.validation.images]))
        evaluation = Evaluation(activations.outputs()[count:], splits.validation, logits=plain.config.classes > 0)
        return cls(activations, activations.first(count), evaluation)

    def tried(self, made: Converted, blocks: tuple[int, ...], budget: Budget) -> Tried:
        """Measure the loss of a conversion of these blocks on the validation images."""
        first = min(blocks)
        seen = self.activations.at(first).into[len(self.fitting) :]
        with torch.inference_mode():
            return self.evaluation.tried(map_batches(lambda x: made.net.rest(x, first), seen), blocks, budget)

    @property
    def ridges(self) -> tuple[float, ...]:
        """The ridge parameters to try: both if there are many tokens per unknown, else only the usual one."""
        config = self.activations.plain.config
        many = len(self.fitting) * config.grid[0] * config.grid[1] >= MANY_ROWS * config.width
        return RIDGES if many else RIDGES[:1]


def single_block_errors(selection: SelectionData, how: ConversionSettings, progress: Progress) -> tuple[float, ...]:
    """Return the error on the validation images of replacing each block alone (one fit, half a forward pass each)."""
    errors: list[float] = []
    plain = selection.activations.plain
    with torch.inference_mode():
        for index in range(len(plain.blocks)):
            progress("measure blocks", index, len(plain.blocks))
            into, mixed = selection.fitting.at(index)
            module = convert_block(BlockContext(plain, index, into, mixed, into), how).module
            seen = map_batches(module, selection.activations.at(index).into[len(into) :])
            errors.append(selection.evaluation.error(map_batches(partial(plain.net.rest, start=index + 1), seen)))
    return tuple(errors)


def most_blocks_within_budget(
    selection: SelectionData, how: ConversionSettings, order: Sequence[int], budget: Budget, progress: Progress
) -> tuple[tuple[int, ...], tuple[Tried, ...]]:
    """Return the longest prefix of the ranking that the budget allows, and all measured prefixes."""
    tried: list[Tried] = []
    for count in range(1, len(order) + 1):
        progress("convert within the budget", count - 1, len(order))
        chosen = tuple(sorted(order[:count]))
        tried.append(selection.tried(convert(selection.fitting, chosen, how), chosen, budget))
        if not tried[-1].within:
            break
    allowed = [each.blocks for each in tried if each.within]
    return allowed[-1] if allowed else (), tuple(tried)


class BestConversion(NamedTuple):
    """The best conversion by the validation images, and its loss there before it was also fitted to them."""

    made: Converted
    how: ConversionSettings
    tried: Tried


def best_conversion(
    selection: SelectionData, how: ConversionSettings, blocks: Sequence[int], budget: Budget
) -> BestConversion:
    """Convert these blocks. The validation images decide the ridge parameter, whether to refit the last FFN layers, and
    whether to refit W^O of the other blocks.

    The chosen conversion is then fitted to the validation images as well. Its loss is measured on the test split.
    """
    chosen = tuple(sorted(blocks))

    def cost(how: ConversionSettings, *, refit: bool = False) -> Tried:
        return selection.tried(convert(selection.fitting, chosen, how, refit=refit), chosen, budget)

    if how.fit != "squares":
        return BestConversion(convert(selection.fitting, chosen, how), how, cost(how))
    ways = {ridge: cost(replace(how, ridge=ridge)) for ridge in selection.ridges}
    ridge = min(ways, key=lambda each: ways[each].error)
    how, tried, refit = replace(how, ridge=ridge), ways[ridge], False
    with_ffn = cost(replace(how, ffn=True))
    if with_ffn.error < tried.error:
        how, tried = replace(how, ffn=True), with_ffn
    if _has_kept_block_after(chosen, len(selection.activations.plain.blocks)):
        again = cost(how, refit=True)
        refit = again.error < tried.error
        tried = again if refit else tried
    return BestConversion(convert(selection.activations, chosen, how, refit=refit), how, tried)


def _has_kept_block_after(chosen: Sequence[int], depth: int) -> bool:
    """Return whether a block is kept after a block that is replaced."""
    return set(range(min(chosen), depth)) != set(chosen)
