"""inspect: what a checkpoint is, before any work is done."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repaconv.backbones.image_size_check import require_size
from repaconv.core import plugins
from repaconv.core.errors import Refused, SettingNeeded
from repaconv.results import BlockCost, Inspection
from repaconv.sources.architecture_recognition import known_networks
from repaconv.sources.method_detection import choose_method, understood
from repaconv.stages.shared.common_checks import contradictions
from repaconv.stages.shared.fetched_files import weights_here
from repaconv.stages.shared.pinned_files import read_hashed

if TYPE_CHECKING:
    from torch import nn

    from repaconv.checkpoints import Checkpoint
    from repaconv.method_api.contract import Reading


def inspect(
    checkpoint: str | Path,
    *,
    weights: str | None = None,
    settings: Mapping[str, str] | None = None,
    sha256: str | None = None,
) -> Inspection:
    """Describe a checkpoint without running anything in it.

    Raises:
        Refused: If the file is unsafe or damaged, has no weights, or its hash is not ``sha256``.
    """
    found = read_hashed(Path(weights_here(checkpoint)), weights, sha256, built=False)
    seen = _seen(found, settings or {})
    found.require_unchanged()
    return seen


def _seen(found: Checkpoint, settings: Mapping[str, str]) -> Inspection:
    """What it holds, and what is understood of it."""
    seen = Inspection(
        origin=found.origin, sets=found.sets, placeholders=found.placeholders, method=None, form=None, reason=""
    )
    try:
        method, detection = choose_method(found, "auto")
    except Refused as error:
        return seen.model_copy(update={"reason": error.message, "networks": known_networks(found)})
    told = {"form": detection.form, "reason": detection.reason, "confidence": detection.confidence}
    seen = seen.model_copy(update={"method": method.name, **told})
    try:
        reading = understood(method, found, settings)
    except Refused as error:
        lacks = {error.name: error.example} if isinstance(error, SettingNeeded) else {}
        return seen.model_copy(
            update={"problems": (f"{error.message} {error.hint}".strip(),), "missing_settings": lacks}
        )
    return seen.model_copy(update=_understood(found, method.name, reading))


def _understood(found: Checkpoint, method: str, reading: Reading) -> dict[str, Any]:
    """What is known of a checkpoint that was read whole: its facts, and what both of its forms cost."""
    from repaconv.backbones.parameter_and_mac_counts import cost_of, costs_by_block
    from repaconv.checkpoints import claimed_accuracy

    backbone = plugins.load(plugins.BACKBONES, reading.backbone)
    size = backbone.image_size(reading.config, reading.preprocessing.image_size)
    require_size(backbone, reading.config, *size)
    shape = (reading.config.in_channels, *size)

    def deploy() -> nn.Module:
        module: nn.Module = backbone.deploy(reading.config)
        return module

    before, after = costs_by_block(reading.module, shape), costs_by_block(deploy, shape)
    return {
        "backbone": reading.backbone,
        "facts": (*reading.facts, *claimed_accuracy(found.record)),
        "problems": contradictions(reading.facts),
        "applied": (method, *reading.applied),
        "training": cost_of(reading.module, shape),
        "deploy": cost_of(deploy, shape),
        "blocks": tuple(
            BlockCost(name=name, training=cost, deploy=after[name]) for name, cost in before.items() if name in after
        ),
    }
