"""Token merging (ToMe) for a network that was not trained for it: PYRA's merging, without its modulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from repaconv.backbones.vit import ViTConfig
from repaconv.checkpoints import Checkpoint
from repaconv.core.errors import UsageProblem
from repaconv.methods.pyra import METHOD
from repaconv.methods.pyra.merging_schedules import parse_schedule
from repaconv.verification.model_runners import weighted


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
    each, more = divmod(round((1 - keep) * patches), max(depth - 1, 1))
    return schedule_text([*(each + (index < more) for index in range(depth - 1)), 0])


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
    return weighted(reading.module(), reading.tensors, torch.float32), tuple(schedule)
