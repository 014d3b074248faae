"""Training plans: how the training-time architecture of each method is trained by the common training loop."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from repaconv.checkpoints import Checkpoint
from repaconv.method_api.contract import Reading

Metadata = dict[str, str]
"""Metadata of a checkpoint written by repaconv, as safetensors stores it."""


def metadata_of(checkpoint: Checkpoint) -> Metadata:
    """Return the metadata of a checkpoint that repaconv wrote."""
    content = {name: checkpoint.record[name] for name in ("meta", "args") if name in checkpoint.record}
    return {name: json.dumps(value, sort_keys=True, default=str) for name, value in content.items()}


def _no_change(_net: nn.Module, _share: float) -> None:
    """The default of `Course.at`: no change before a step."""


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """How one network in a training-time architecture is trained.

    Attributes:
        net: The network with its initial weights, in float32.
        rate: The maximum learning rate, unless the user gives one.
        at: Called with (net, fraction of the training) before every step; at 1, the network can be folded.
        imitated: Pairs of modules of the network and of the original, by name, whose outputs should be equal.
        related: Pairs of modules whose feature maps should have equal similarities between positions.
        moving: Whether images are augmented. A start that is already close to the original is lost by it.
        whitened: Whether linear layers are trained with whitened inputs, see
            `repaconv.conversion.finetuning.training_loop`.
        faster: Factors of the learning rate of some parameters, by name.
        besides: Tensors of the finished checkpoint that are not weights.
        metadata: Metadata of the finished checkpoint.
        reading: The reading of the checkpoint.
    """

    net: nn.Module
    rate: float
    at: Callable[[nn.Module, float], None] = _no_change
    imitated: tuple[tuple[str, str], ...] = ()
    related: tuple[tuple[str, str], ...] = ()
    moving: bool = True
    whitened: bool = False
    faster: Mapping[str, float] = field(default_factory=dict)
    besides: Mapping[str, Tensor] = field(default_factory=dict)
    metadata: Metadata = field(default_factory=dict)
    reading: Reading


@dataclass(frozen=True, kw_only=True)
class UntrainedNetwork:
    """An ordinary network in the untrained training-time architecture of a method.

    Attributes:
        net: The network in the state that can be folded, in float32, to evaluate it before training.
        tensors: The tensors of a checkpoint of the method.
        metadata: The metadata of that checkpoint.
        settings: The settings that the checkpoint does not contain.
        description: A description of the weights that were reused and those that were fitted.
    """

    net: nn.Module
    tensors: Mapping[str, Tensor]
    metadata: Metadata
    settings: Mapping[str, str]
    description: str
