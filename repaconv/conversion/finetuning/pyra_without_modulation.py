"""Training plan for pyra without modulation: the network's own weights are trained with merged tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from repaconv.checkpoints import Checkpoint
from repaconv.conversion.finetuning.dwconv_converted_networks import LEARNING_RATE
from repaconv.conversion.finetuning.training_plan import TrainingPlan, metadata_of
from repaconv.methods.pyra import METHOD
from repaconv.methods.pyra.merging_schedules import first_merging_block
from repaconv.verification.model_runners import with_weights


def training_plan(checkpoint: Checkpoint, settings: Mapping[str, str]) -> TrainingPlan:
    """Return the training plan of a network with token merging. Only blocks before the first merging imitate the
    original's."""
    reading = METHOD.read(checkpoint, settings)
    (schedule,) = (fact.value for fact in reading.facts if fact.name == "schedule")
    return TrainingPlan(
        net=with_weights(reading.module(), reading.tensors, torch.float32),
        rate=LEARNING_RATE,
        imitated=tuple((f"blocks.{index}", f"blocks.{index}") for index in range(first_merging_block(schedule))),
        moving=False,
        whitened=True,
        metadata=metadata_of(checkpoint),
        reading=reading,
    )
