"""Training plan for a network converted by dwconv: all weights are trained, and each block imitates the original's."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from repaconv.checkpoints import Checkpoint
from repaconv.conversion.finetuning.training_plan import TrainingPlan, metadata_of
from repaconv.methods.dwconv.checkpoint_reading import read_or_plain_vit
from repaconv.verification.model_runners import with_weights

LEARNING_RATE = 6e-5
"""Maximum learning rate. The start is good already: with ten times this rate it is lost faster than it is improved."""


def training_plan(checkpoint: Checkpoint, settings: Mapping[str, str]) -> TrainingPlan:
    """Return the training plan of a converted checkpoint. Blocks after a token merging imitate no block."""
    reading = read_or_plain_vit(checkpoint, settings)
    apart = [index for index, block in enumerate(reading.blocks) if not block.merged]
    blocks = tuple((f"blocks.{index}", f"blocks.{index}") for index in apart)
    return TrainingPlan(
        net=with_weights(reading.module(), reading.tensors, torch.float32),
        rate=LEARNING_RATE,
        imitated=blocks,
        moving=False,
        whitened=True,
        metadata=metadata_of(checkpoint),
        reading=reading,
    )
