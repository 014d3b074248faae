"""dwconv, converted already: all of it learns on, block by block beside the original."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from repaconv.checkpoints import Checkpoint
from repaconv.conversion.finetuning.training_plan import Course, metadata_of
from repaconv.methods.dwconv.reading import read_any
from repaconv.verification.model_runners import weighted

RATE = 6e-5
"""A conversion is near already: ten times as much loses it faster than it learns."""


def course(checkpoint: Checkpoint, settings: Mapping[str, str]) -> Course:
    """Of a conversion's checkpoint; blocks behind which tokens merge imitate nobody."""
    reading = read_any(checkpoint, settings)
    apart = [index for index, block in enumerate(reading.blocks) if not block.merged]
    blocks = tuple((f"blocks.{index}", f"blocks.{index}") for index in apart)
    return Course(
        net=weighted(reading.module(), reading.tensors, torch.float32),
        rate=RATE,
        imitated=blocks,
        moving=False,
        whitened=True,
        metadata=metadata_of(checkpoint),
        reading=reading,
    )
