"""Convert attention to convolutions: choose the blocks or heads, convert them, measure the loss."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from repaconv.conversion.block_conversion import BlockContext
from repaconv.conversion.block_selection import (
    SelectionData,
    best_conversion,
    most_blocks_within_budget,
    single_block_errors,
)
from repaconv.conversion.conversion_option_parsing import RequestedBlocks
from repaconv.conversion.head_scores import Scores, score_activations
from repaconv.conversion.image_splits import ImageSplits
from repaconv.conversion.kernel_fitting import ConversionSettings, Head, convolution, fit_kernels
from repaconv.conversion.original_activations import OriginalActivations
from repaconv.conversion.plain_vit import PlainViT, Reading, batches
from repaconv.core.errors import GateFailed
from repaconv.core.progress import Progress
from repaconv.methods.dwconv.token_mixer_reading import FORMAT
from repaconv.results import Origin, Tried
from repaconv.verification.accuracy_budget import Budget

# Ranking single heads; the other heads of a block keep their attention


def heads_by_error(activations: OriginalActivations, how: ConversionSettings, progress: Progress) -> tuple[Head, ...]:
    """Return all heads, the cheapest to replace first: by the error that the best kernel alone adds to the residual
    stream."""
    plain, errors = activations.plain, dict[Head, float]()
    with torch.inference_mode():
        for index in range(len(plain.blocks)):
            progress("measure heads", index, len(plain.blocks))
            into, mixed = activations.at(index)
            context = BlockContext(plain, index, into, mixed, into)
            found = fit_kernels(context, context.values, how, (some for (some,) in batches(mixed)))
            fit = convolution(context, context.values, found.kernels, found.mean)
            outputs = context.proj[:-1].view(plain.heads, -1, plain.config.width)  # W^O of each head, [h, dh, d]
            lost = torch.zeros(plain.heads, dtype=torch.float64)
            for x, right in batches(into, mixed):
                difference = (right - fit(x) - found.bias).view(*x.shape[:2], plain.heads, -1)
                lost += torch.einsum("bnhc,hcd->hbnd", difference, outputs).double().square().sum((1, 2, 3))
            share = lost / context.middle.double().square().sum()
            errors |= {(index, head): float(error) for head, error in enumerate(share)}
    return tuple(sorted(errors, key=errors.__getitem__))


def heads_by_sigma(scores: Scores) -> tuple[Head, ...]:
    """Return all heads by the paper's Sigma_h, the smallest first."""
    sigmas = {(block.block, n): head.sigma for block in scores.blocks for n, head in enumerate(block.heads)}
    return tuple(sorted(sigmas, key=sigmas.__getitem__))


# The conversion of a network


class ConvertedNetwork(NamedTuple):
    """A converted network, and how it was chosen.

    Attributes:
        net: The network in float32.
        reading: Its blocks and weights.
        scores: The head scores of the original network.
        order: The ranking of the blocks, if they were chosen by it.
        heads: The replaced heads as BLOCK.HEAD, if single heads were replaced.
        tried: The choices of blocks that were measured; the last is this network.
        refitted: Indices of kept blocks whose W^O was refitted.
        ridge: The ridge parameter of all its fits; None if it has no least-squares fit.
        condition: The largest condition number of its fits; None if it has none.
    """

    net: nn.Module
    reading: Reading
    scores: Scores
    order: tuple[int, ...]
    heads: tuple[str, ...]
    tried: tuple[Tried, ...]
    refitted: tuple[int, ...]
    ridge: float | None
    condition: float | None


def convert_attention(
    plain: PlainViT,
    how: ConversionSettings,
    blocks: RequestedBlocks,
    criterion: str,
    splits: ImageSplits,
    budget: Budget,
    progress: Progress,
) -> ConvertedNetwork:
    """Choose the blocks, convert them, and measure the loss on the validation split. Blocks after a token merging are
    not chosen.

    Raises:
        GateFailed: If the budget does not allow replacing any block.
    """
    progress("score", 0, 0)
    selection = SelectionData.of(plain, splits)
    scores = score_activations(selection.fitting, how.kernel)
    order: tuple[int, ...] = ()
    tried: tuple[Tried, ...] = ()
    chosen = blocks.named
    if blocks.single:
        how = replace(
            how, heads=blocks.heads or _first_heads(selection, how, blocks.number or 0, scores, criterion, progress)
        )
        chosen = tuple(sorted({block for block, _ in how.heads}))
    elif not chosen and criterion == "error":
        scores = scores.with_errors(single_block_errors(selection, how, progress))
        order = scores.by_error
    elif not chosen:
        order = scores.by_sigma
    order = tuple(block for block in order if how.takes(block))
    chosen = chosen or order[: blocks.enough(order) if blocks.enough else blocks.number or 0]
    if not chosen:
        chosen, tried = most_blocks_within_budget(selection, how, order, budget, progress)
        _require_some(chosen, tried, budget, "top-1 predictions" if plain.config.classes else "nearest images")
    progress("convert", 0, 0)
    found = best_conversion(selection, how, chosen, budget)
    made, last = found.made, found.tried
    conditions = [number for several in made.conditions.values() for number in several]
    return ConvertedNetwork(
        net=made.net,
        reading=made.reading,
        scores=scores,
        order=order,
        heads=tuple(f"{block}.{head}" for block, head in how.heads),
        tried=(*(each for each in tried if each.blocks != last.blocks), last),
        refitted=made.refitted,
        ridge=found.how.ridge if how.fit == "squares" else None,
        condition=max(conditions, default=None),
    )


def _first_heads(
    selection: SelectionData, how: ConversionSettings, number: int, scores: Scores, criterion: str, progress: Progress
) -> tuple[Head, ...]:
    """Return the first heads of the ranking that are before the first token merging."""
    order = heads_by_sigma(scores) if criterion == "sigma" else heads_by_error(selection.fitting, how, progress)
    return tuple(sorted([each for each in order if how.takes(each[0])][:number]))


def _require_some(chosen: tuple[int, ...], tried: tuple[Tried, ...], budget: Budget, what: str) -> None:
    """Refuse a budget that allows no block; ``what`` is what agrees: predictions or nearest images."""
    if not chosen:
        least = tried[0]
        drop = "" if budget.max_accuracy_drop is None or least.accuracy is None else f"{least.accuracy:+.1%}"
        raise GateFailed(
            f"the budget allows no block: replacing block {least.blocks[0]} alone keeps {least.agreement:.1%} of the "
            f"{what}{f' and changes the accuracy by {drop}' if drop else ''}.",
            hint="Allow a larger loss, give more images, or try --kind static.",
            code="convert.budget",
        )


_SETTINGS_IN_METADATA = ("image_size", "trained_size", "pos_resize", "num_heads", "pool", "norm_eps", "full_conv")
"""Settings that are in the metadata of the converted checkpoint."""


def settings_for(given: Mapping[str, str]) -> dict[str, str]:
    """Return the user's settings that a converted checkpoint still needs."""
    return {name: value for name, value in given.items() if name not in _SETTINGS_IN_METADATA}


def metadata(reading: Reading, parent: Origin, record: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata of the converted checkpoint: its format, its architecture, and the hash of the original."""
    config = reading.config
    arch = {
        "img_size": list(config.image_size),
        "num_heads": reading.blocks[0].mixer.heads,
        "norm_eps": config.norm_eps,
        **({"global_pool": config.pool} if config.pool != "distilled" else {}),
    }
    schedule = [0 if block.merged is None else block.merged.r for block in reading.blocks]
    if any(schedule):
        arch["schedule"] = schedule
    args = record.get("args")
    meta = {"format": FORMAT, "arch": arch, "converted_from": parent.sha256}
    return {
        "meta": json.dumps(meta, sort_keys=True),
        **({"args": json.dumps(dict(args), sort_keys=True, default=str)} if isinstance(args, Mapping) else {}),
    }
