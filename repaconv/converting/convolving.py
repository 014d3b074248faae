"""Attention to convolution, from a budget or a number of blocks to a network that is measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from repaconv.artefacts import Origin, Tried
from repaconv.converting import heads
from repaconv.converting.asked import Blocks
from repaconv.converting.choosing import Rig, as_many_as_allowed, converted, single_errors
from repaconv.converting.fitting import Head, How
from repaconv.converting.parting import Parted
from repaconv.converting.plain import Plain, Reading
from repaconv.converting.scoring import Scores, score_streams
from repaconv.errors import GateFailed
from repaconv.methods.dwconv.mixers import FORMAT
from repaconv.progress import Progress
from repaconv.proof.budget import Budget


class Found(NamedTuple):
    """A converted network, and how it was found.

    Attributes:
        net: In float32.
        reading: Its blocks and weights.
        scores: Of the original.
        order: Of the blocks, where they were chosen.
        heads: BLOCK.HEAD, where single ones were replaced.
        tried: What was measured on the way; the last is this network.
        refitted: Kept blocks whose W^O was fitted anew.
        ridge: Of all its fits, None without one.
        condition: The largest.
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


def convolved(
    plain: Plain, how: How, blocks: Blocks, criterion: str, parted: Parted, budget: Budget, progress: Progress
) -> Found:
    """Choose, convert, measure on the images that choose. Blocks behind which tokens merge are not chosen.

    Raises:
        GateFailed: If the budget allows no block at all.
    """
    progress("score", 0, 0)
    rig = Rig.of(plain, parted)
    scores = score_streams(rig.fitting, how.kernel)
    order: tuple[int, ...] = ()
    tried: tuple[Tried, ...] = ()
    chosen = blocks.named
    if blocks.single:
        how = replace(how, heads=blocks.heads or _heads(rig, how, blocks.number or 0, scores, criterion, progress))
        chosen = tuple(sorted({block for block, _ in how.heads}))
    elif not chosen and criterion == "error":
        scores = scores.with_errors(single_errors(rig, how, progress))
        order = scores.by_error
    elif not chosen:
        order = scores.by_sigma
    order = tuple(block for block in order if how.takes(block))
    chosen = chosen or order[: blocks.enough(order) if blocks.enough else blocks.number or 0]
    if not chosen:
        chosen, tried = as_many_as_allowed(rig, how, order, budget, progress)
        _require_some(chosen, tried)
    progress("convert", 0, 0)
    found = converted(rig, how, chosen, budget)
    made, last = found.made, found.tried
    conditions = [number for several in made.conditions.values() for number in several]
    return Found(
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


def _heads(rig: Rig, how: How, number: int, scores: Scores, criterion: str, progress: Progress) -> tuple[Head, ...]:
    """The first of all heads that stand before what merges."""
    order = heads.by_sigma(scores) if criterion == "sigma" else heads.by_error(rig.fitting, how, progress)
    return tuple(sorted([each for each in order if how.takes(each[0])][:number]))


def _require_some(chosen: tuple[int, ...], tried: tuple[Tried, ...]) -> None:
    if not chosen:
        least = tried[0]
        raise GateFailed(
            f"the budget allows no block: replacing block {least.blocks[0]} alone keeps only {least.agreement:.1%} "
            "of the top-1 predictions.",
            hint="Allow a larger loss, give more images, or try --kind static.",
            code="convert.budget",
        )


_OF_THE_ORIGINAL = ("image_size", "trained_size", "pos_resize", "num_heads", "pool", "norm_eps", "full_conv")
"""Settings that the converted checkpoint's own metadata says."""


def settings_for(given: Mapping[str, str]) -> dict[str, str]:
    """The user's settings that a converted checkpoint still needs."""
    return {name: value for name, value in given.items() if name not in _OF_THE_ORIGINAL}


def metadata(reading: Reading, parent: Origin, record: Mapping[str, Any]) -> dict[str, str]:
    """What the converted checkpoint says of itself: its layout, its architecture, where it is from."""
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
