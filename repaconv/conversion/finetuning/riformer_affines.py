"""riformer: replace a PoolFormer's pooling by affines, trained by module imitation (sec. 4.4 of the paper)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from repaconv.checkpoints import Checkpoint
from repaconv.conversion.finetuning.distillation_targets import recorded_outputs
from repaconv.conversion.finetuning.original_networks import PoolFormer
from repaconv.conversion.finetuning.training_plan import TrainingPlan, UntrainedNetwork, metadata_of
from repaconv.conversion.plain_vit import map_batches
from repaconv.methods.riformer.checkpoint_reading import read
from repaconv.verification.model_runners import with_weights

LEARNING_RATE = 2e-3


@torch.no_grad()
def initialize(
    original: PoolFormer, images: Tensor, record: Mapping[str, Any], settings: Mapping[str, str]
) -> UntrainedNetwork:
    """Fit each affine A(z) - z to pool(z) - z by least squares.

    Args:
        original: The PoolFormer.
        images: [N, C, H, W] to fit to.
        record: The other contents of its checkpoint.
        settings: The user's settings.
    """
    tensors = {name: tensor.float().clone() for name, tensor in original.reading.tensors.items()}
    for name in [name for name in tensors if name.endswith("token_mixer.affine.weight")]:
        block = name.removesuffix(".token_mixer.affine.weight")
        pooled, z = _seen(original, block, images)
        slope = ((pooled * z).mean(0) - pooled.mean(0) * z.mean(0)) / z.var(0, correction=0).clamp_min(1e-12)
        tensors[name] = slope.float().view(-1, 1, 1, 1)
        tensors[f"{block}.token_mixer.affine.bias"] = (pooled.mean(0) - slope * z.mean(0)).float()
    metadata = {
        name: json.dumps(record[name], sort_keys=True, default=str) for name in ("meta", "args") if name in record
    }
    return UntrainedNetwork(
        net=with_weights(original.reading.module(), tensors, torch.float32),
        tensors=tensors,
        metadata=metadata,
        settings={name: value for name, value in settings.items() if name != "pool_size"},
        description="all weights taken over; the affines fitted to the pooling they stand for",
    )


def _seen(original: PoolFormer, block: str, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return pool(z) and z of a block over all positions, [positions, C] in float64."""
    mixer = f"{block}.token_mixer"
    norm = f"{block}.norm1"
    with recorded_outputs(original.net, (norm, mixer)) as heard:

        def both(some: Tensor) -> Tensor:
            original.net(some)
            return torch.stack([heard[mixer] + heard[norm], heard[norm]], 1)

        pooled, z = map_batches(both, images).double().unbind(1)
    return pooled.movedim(1, -1).flatten(0, 2), z.movedim(1, -1).flatten(0, 2)


def training_plan(checkpoint: Checkpoint, settings: Mapping[str, str]) -> TrainingPlan:
    """Return the training plan: blocks and mixers imitate the PoolFormer's (eqs. 6 and 8), and so do relations between
    positions of the blocks' outputs (eq. 7)."""
    reading = read(checkpoint, settings)
    net = with_weights(reading.module(), reading.tensors, torch.float32)
    mixers = [name for name, _ in net.named_modules() if name.endswith("token_mixer")]
    blocks = [name.removesuffix(".token_mixer") for name in mixers]
    return TrainingPlan(
        net=net,
        rate=LEARNING_RATE,
        imitated=tuple((name, name) for name in (*blocks, *mixers)),
        related=tuple((name, name) for name in blocks),
        metadata=metadata_of(checkpoint),
        reading=reading,
    )
