"""What the forms of the methods differ in while they are trained; the loop is one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from repaconv.checkpoints import Checkpoint
from repaconv.method_api.contract import Reading

Metadata = dict[str, str]
"""What a checkpoint of ours says of itself, as safetensors has it."""


def metadata_of(checkpoint: Checkpoint) -> Metadata:
    """What is said of it in a file of ours."""
    told = {name: checkpoint.record[name] for name in ("meta", "args") if name in checkpoint.record}
    return {name: json.dumps(value, sort_keys=True, default=str) for name, value in told.items()}


def _nothing(_net: nn.Module, _share: float) -> None:
    """What most courses change on the way."""


@dataclass(frozen=True, kw_only=True)
class Course:
    """How one net in training form is trained.

    Attributes:
        net: It, with the weights that it starts from, in float32.
        rate: The largest learning rate, where the user says none.
        at: Told (net, share of the training that is done) before every step; at 1 the net is as it will fold.
        imitated: Modules of the net and of the original whose outputs are to be alike, by name.
        related: The same, of maps whose positions are to resemble each other as the original's do.
        moving: Whether images are moved a little, anew in every epoch; a start that is near already is lost by it.
        whitened: Whether linear layers learn in coordinates of their own; see
        `repaconv.conversion.finetuning.training_loop`. faster: Parameters that learn at another rate, as a multiple,
        by name. besides: Tensors of the finished checkpoint that are no weights.
        metadata: Of the finished checkpoint.
        reading: As the file was understood.
    """

    net: nn.Module
    rate: float
    at: Callable[[nn.Module, float], None] = _nothing
    imitated: tuple[tuple[str, str], ...] = ()
    related: tuple[tuple[str, str], ...] = ()
    moving: bool = True
    whitened: bool = False
    faster: Mapping[str, float] = field(default_factory=dict)
    besides: Mapping[str, Tensor] = field(default_factory=dict)
    metadata: Metadata = field(default_factory=dict)
    reading: Reading


@dataclass(frozen=True, kw_only=True)
class Formed:
    """An ordinary network in the untrained training form of a method.

    Attributes:
        net: In the form that will fold, in float32: what it is worth before any training.
        tensors: As a checkpoint of the method has them.
        metadata: Of that checkpoint.
        settings: What it does not say, for whoever reads it.
        told: What was taken over, and what was fitted, in words.
    """

    net: nn.Module
    tensors: Mapping[str, Tensor]
    metadata: Metadata
    settings: Mapping[str, str]
    told: str
