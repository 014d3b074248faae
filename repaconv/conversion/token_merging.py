"""Token merging (ToMe) for a network that was not trained for it: PYRA's merging, without its modulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

import torch
from torch import nn

from repaconv.backbones.vit import ViTConfig
from repaconv.checkpoints import Checkpoint
from repaconv.core.errors import UsageProblem
from repaconv.methods.pyra import METHOD
from repaconv.methods.pyra.merging_schedules import parse_schedule
from repaconv.verification.model_runners import with_weights


def schedule_of(schedule: str | None, keep: float | None, config: ViTConfig) -> str:
    """Return the number of merged tokens per block as the method's setting, from ``schedule`` or from ``keep``.

    With ``keep``, the merged tokens are distributed equally over all blocks but the last, after which merging saves
    nothing; the remainder goes to earlier blocks.

    Raises:
        UsageProblem: If neither or both are given, ``keep`` is not between 0 and 1, or the schedule does not have one
            number per block.
    """
    if (schedule is None) == (keep is None):
        raise UsageProblem(
            f"{'neither' if schedule is None else 'both'} --schedule {'nor' if schedule is None else 'and'} --keep "
            "given.",
            hint="Give --schedule 16,16,... (tokens merged in each block), --keep 0.6, or --speedup 1.5.",
            code="convert.schedule",
        )
    if schedule is not None or keep is None:
        read_schedule(schedule or "", config)
        return schedule or ""
    patches, depth = config.grid[0] * config.grid[1], len(config.blocks)
    if not 0 < keep < 1:
        raise UsageProblem(
            f"--keep {keep:g} is not between 0 and 1.",
            hint="It is the fraction of the patches that remain.",
            code="convert.schedule",
        )
    wanted = round((1 - keep) * patches)
    merged = next(total for total in range(wanted, -1, -1) if _is_possible(_spread(total, depth), patches))
    if merged < wanted:
        least = ceil(100 * (1 - merged / patches)) / 100
        raise UsageProblem(
            f"--keep {keep:g} is too small: a block can merge at most half of its patches, so that {depth} blocks keep "
            f"{patches - merged} of {patches}.",
            hint=f"Give --keep {least:g} or more." if least < 1 else "Convert a network with more blocks.",
            code="convert.schedule",
        )
    return schedule_text(_spread(merged, depth))


def _spread(total: int, depth: int) -> list[int]:
    """Spread merged tokens equally over all blocks but the last."""
    each, more = divmod(total, max(depth - 1, 1))
    return [*(each + (index < more) for index in range(depth - 1)), 0]


def _is_possible(schedule: Sequence[int], patches: int) -> bool:
    """Whether no block merges more than half of its patches."""
    for merged in schedule:
        if merged > patches // 2:
            return False
        patches -= merged
    return True


def read_schedule(schedule: str, config: ViTConfig) -> tuple[int, ...]:
    """Parse a schedule: the number of merged tokens per block.

    Raises:
        UsageProblem: If it is neither one number per block nor a name that the method knows.
    """
    patches, depth = config.grid[0] * config.grid[1], len(config.blocks)
    try:
        return parse_schedule(schedule, depth, vars(config))
    except ValueError as problem:
        raise UsageProblem(
            f"--schedule {schedule}: {problem}.",
            hint=(
                "Give the tokens merged in each block, one number per block: "
                f"{schedule_text([patches // (2 * depth)] * (depth - 1) + [0])}."
            ),
            code="convert.schedule",
        ) from None


def schedule_text(schedule: Sequence[int]) -> str:
    """Return a schedule as the method's setting: numbers separated by commas."""
    return ",".join(map(str, schedule))


def with_merging(checkpoint: Checkpoint, settings: Mapping[str, str]) -> tuple[nn.Module, tuple[int, ...]]:
    """Return the network with merging in float32, and its schedule, as ``settings`` describe.

    Raises:
        Refused: If the network has one output vector per patch, or more tokens are to merge than there are.
    """
    reading = METHOD.read(checkpoint, settings)
    (schedule,) = (fact.value for fact in reading.facts if fact.name == "schedule")
    return with_weights(reading.module(), reading.tensors, torch.float32), tuple(schedule)
