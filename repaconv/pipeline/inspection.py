"""inspect: what a checkpoint is, before any work is done."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from repaconv import registry
from repaconv.artefacts import BlockCost, Inspection
from repaconv.errors import Refused
from repaconv.steps.common import choose_method, contradictions, require_size

if TYPE_CHECKING:
    from torch import nn


def inspect(
    checkpoint: str | Path, *, weights: str | None = None, settings: Mapping[str, str] | None = None
) -> Inspection:
    """Say what a checkpoint holds, without running anything in it.

    Raises:
        Refused: If the file is unsafe, broken or holds no weights.
    """
    from repaconv.backbones.cost import cost_of, costs_by_block
    from repaconv.checkpoint import claimed_accuracy, read_checkpoint

    found = read_checkpoint(checkpoint, weights)
    seen = Inspection(
        origin=found.origin, sets=found.sets, placeholders=found.placeholders, method=None, form=None, reason=""
    )
    try:
        method, detection = choose_method(found, "auto")
    except Refused as error:
        return seen.model_copy(update={"reason": error.message})
    seen = seen.model_copy(
        update={
            "method": method.name,
            "form": detection.form,
            "reason": detection.reason,
            "confidence": detection.confidence,
        }
    )
    try:
        form = method.read(found, settings or {})
    except Refused as error:
        return seen.model_copy(update={"problems": (f"{error.message} {error.hint}".strip(),)})
    backbone = registry.load(registry.BACKBONES, form.backbone)
    size = backbone.image_size(form.config, form.preprocessing.image_size)
    require_size(backbone, form.config, *size)
    shape = (form.config.in_channels, *size)

    def deploy() -> nn.Module:
        module: nn.Module = backbone.deploy(form.config)
        return module

    before, after = costs_by_block(form.module, shape), costs_by_block(deploy, shape)
    return seen.model_copy(
        update={
            "backbone": form.backbone,
            "facts": (*form.facts, *claimed_accuracy(found.record)),
            "problems": contradictions(form.facts),
            "applied": (method.name, *form.applied),
            "training": cost_of(form.module, shape),
            "deploy": cost_of(deploy, shape),
            "blocks": tuple(
                BlockCost(name=name, training=cost, deploy=after[name])
                for name, cost in before.items()
                if name in after
            ),
        }
    )
