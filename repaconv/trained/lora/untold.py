"""What no tensor tells of adapters: whether their weights hold them already, and by how much they are scaled."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from repaconv.checkpoint import Checkpoint
from repaconv.errors import Refused
from repaconv.trained.knobs import Knobs, one_of

KNOBS = ("lora_alpha", "lora_merged", "lora_rslora")
"""The knobs that are read here; the method sees the others."""

_PEFT = re.compile(r"^base_model\.model\.|\.base_layer\.|\.lora_[AB]\.\w+\.weight$")


def read_merged(checkpoint: Checkpoint, knobs: Knobs, pairs: Mapping[str, Mapping[str, Tensor]]) -> bool:
    """Whether W holds s B A already, for adapters of PEFT and loralib; takes the knob ``lora_merged``.

    Raises:
        Refused: If they are loralib's, and neither the file nor the user tells.
    """
    if not pairs:
        return False
    found, source = _said_merged(checkpoint.record)
    if found is None and not any(bool(pair["b"].any()) for pair in pairs.values() if "b" in pair):
        found, source = "no", "every B is zero: either way the same"
    if found is None and any(_PEFT.search(name) for name in checkpoint.tensors):
        found, source = "no", "PEFT's names: it merges only where merge_adapter() is called, which no key tells"
        return knobs.take("lora_merged", one_of("yes", "no"), "no", found, source, free=True) == "yes"
    if found is None and "lora_merged" not in knobs:
        raise Refused(
            "no tensor shows whether the adapters are already merged into the base weights: loralib merges them in "
            "eval() and removes them in train().",
            hint=(
                "Give --set lora_merged=yes if the checkpoint was saved after eval(), or =no if it was saved after "
                "train()."
            ),
            code="lora.merged",
        )
    return knobs.take("lora_merged", one_of("yes", "no"), "no", found, source) == "yes"


def _said_merged(record: Mapping[str, Any]) -> tuple[str | None, str]:
    """What the file says of merging, and where; ``merge_weights=False`` is loralib's way to never merge."""
    for place in ("lora_config", "peft_config", "config", "args", "meta", ""):
        said = record.get(place) if place else record
        if isinstance(said, Mapping):
            for key in ("lora_merged", "merged"):
                if isinstance(said.get(key), bool):
                    return "yes" if said[key] else "no", f"{place}.{key}".lstrip(".")
            if said.get("merge_weights") is False:
                return "no", f"{place}.merge_weights".lstrip(".")
    return None, ""


def read_scales(checkpoint: Checkpoint, knobs: Knobs, ranks: set[int], *, merged: bool) -> dict[int, float]:
    """alpha / r for every rank, or alpha / sqrt(r); from --set, the file, or PEFT's configuration beside it.

    Where the adapters are merged already no scale is needed, and 0 stands for it.
    """
    if merged:
        knobs.asked("lora_alpha", _finite)
        knobs.asked("lora_rslora", one_of("yes", "no"))
    if merged or not ranks:
        return dict.fromkeys(ranks, 0.0)
    config, where = _config(checkpoint)
    _require_uniform(config, where, ranks)
    said = config.get("lora_alpha")
    found = float(said) if isinstance(said, (int, float)) and not isinstance(said, bool) else None
    why = "no tensor tells the alpha that LoRA's scale alpha / r needs"
    alpha = knobs.need("lora_alpha", _finite, "16", why, found, where)
    told = ("yes" if config["use_rslora"] else "no") if "use_rslora" in config else None
    rslora = knobs.take("lora_rslora", one_of("yes", "no"), "no", told, where)
    return {rank: alpha / (math.sqrt(rank) if rslora == "yes" else rank) for rank in ranks}


def _require_uniform(config: Mapping[str, Any], where: str, ranks: set[int]) -> None:
    """Refuse a configuration by which alpha / r is not what was trained, or which is not of this file."""
    rank, pattern = config.get("r"), config.get("rank_pattern")
    if config.get("alpha_pattern") or config.get("use_dora"):
        raise Refused(
            f"{where} has {'use_dora' if config.get('use_dora') else 'an alpha_pattern'}: its adapters are not W + "
            "B A alpha / r with one alpha.",
            hint="Merge them with the library that made them (merge_and_unload), and fold the merged checkpoint.",
            code="lora.kind",
        )
    if isinstance(rank, int) and not pattern and ranks - {rank}:
        raise Refused(
            f"{where} gives the rank {rank}, but the adapters have {', '.join(map(str, sorted(ranks)))}.",
            hint="The configuration belongs to other adapters. Put the right one next to the file.",
            code="lora.config",
        )


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("not a finite number")
    return value


def _config(checkpoint: Checkpoint) -> tuple[Mapping[str, Any], str]:
    record = checkpoint.record
    for name in ("peft_config", "lora_config", "config", "args", "meta"):
        place = record.get(name)
        inner = next(iter(place.values()), None) if isinstance(place, Mapping) and "default" in place else place
        if isinstance(inner, Mapping) and "lora_alpha" in inner:
            return inner, name
    if "lora_alpha" in record:
        return record, "the file"
    beside = checkpoint.path.parent / "adapter_config.json"
    try:
        found = json.loads(beside.read_text())
    except (OSError, ValueError):
        return {}, ""
    return (found, beside.name) if isinstance(found, dict) else ({}, "")
