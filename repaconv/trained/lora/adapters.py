"""The adapters that stand in a checkpoint, and the checkpoint beneath them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from repaconv.artefacts import Fact
from repaconv.checkpoint import Checkpoint, require_sound
from repaconv.errors import Refused
from repaconv.trained.knobs import Knobs
from repaconv.trained.lora.layer import Adapter
from repaconv.trained.lora.untold import read_merged, read_scales

_FACTORS = (
    re.compile(r"^(?P<at>.+)\.LoRA_(?P<factor>[ab])\.weight$"),  # official: the layer is `at`.qkv
    re.compile(r"^(?P<at>.+)\.lora_(?P<factor>[AB])(?:\.(?P<name>\w+))??(?:\.weight)?$"),
)
_UNKNOWN = re.compile(r"lora_(?:magnitude_vector|embedding_[AB])")
_SAVED = re.compile(r"^(?P<at>.+)\.modules_to_save\.\w+\.(?P<what>\w+)$")
_PREFIX = "base_model.model."


def require_base(checkpoint: Checkpoint) -> None:
    """Refuse a file that holds adapters alone, as PEFT saves them.

    Raises:
        Refused: Saying how to get the whole model.
    """
    adapters = adapter_names(checkpoint)
    if adapters and len(adapters) == len(checkpoint.tensors):
        raise Refused(
            f"{checkpoint.path} contains LoRA adapters only, without the base weights.",
            hint="Save the state_dict() of the whole model: base weights and adapters.",
            code="lora.alone",
        )


def adapter_names(checkpoint: Checkpoint) -> dict[str, re.Match[str]]:
    """The keys of adapters, taken apart."""
    found = {}
    for name in checkpoint.tensors:
        if match := next((match for pattern in _FACTORS if (match := pattern.match(name))), None):
            found[name] = match
    return found


def _weight_name(match: re.Match[str]) -> str:
    """The adapted weight as `without_adapters` names it."""
    at = match["at"].removeprefix(_PREFIX)
    return f"{at}.qkv.weight" if match["factor"] in "ab" else f"{at}.weight"


def without_adapters(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint beneath the adapters, as if it had been saved without; ``record`` counts them."""
    adapters = adapter_names(checkpoint)
    if not adapters:
        return checkpoint
    saved = {match["at"] for name in checkpoint.tensors if (match := _SAVED.match(name))}
    tensors, names = {}, {}
    for name, tensor in checkpoint.tensors.items():
        if name in adapters or any(name.startswith(f"{at}.original_module.") for at in saved):
            continue
        short = _SAVED.sub(r"\g<at>.\g<what>", name).replace(".base_layer.", ".").removeprefix(_PREFIX)
        tensors[short], names[short] = tensor, checkpoint.names[name]
    layers = len({_weight_name(match) for match in adapters.values()})
    return replace(checkpoint, tensors=tensors, names=names, record={**checkpoint.record, "lora_layers": layers})


def with_merged(base: Checkpoint, adapters: list[Adapter]) -> Checkpoint:
    """The checkpoint with W + s B A in place of every adapted weight."""
    weights = {adapter.weight: adapter.merged(base.tensors[adapter.weight]) for adapter in adapters}
    return replace(base, tensors={**base.tensors, **weights})


def read_adapters(checkpoint: Checkpoint, knobs: Knobs) -> list[Adapter]:
    """The adapters that are still to be added: none where the file's weights hold them already.

    Raises:
        Refused: If they are of another kind, ambiguous, half, misshaped, or no one tells what no tensor does.
    """
    _require_plain(checkpoint)
    base, pairs = without_adapters(checkpoint), _pairs(checkpoint)
    official = {_weight_name(match) for match in adapter_names(checkpoint).values() if match["factor"] in "ab"}
    others = {weight: pair for weight, pair in pairs.items() if weight not in official}
    ranks = {len(pair["a"]) for pair in others.values() if "a" in pair and pair["a"].ndim == 2}
    merged = read_merged(checkpoint, knobs, others)
    scales = read_scales(checkpoint, knobs, ranks, merged=merged)
    if official:
        source = "LoRA_a, LoRA_b: the official code has no other"
        knobs.facts.append(Fact(name="lora_scale", value=1.0, source=source))
    if official and not ranks:
        source = "LoRA_a, LoRA_b: the official code never merges them"
        knobs.facts.append(Fact(name="lora_merged", value="no", source=source))
    adapters = [_adapter(weight, pair, base, None if weight in official else scales) for weight, pair in pairs.items()]
    return [adapter for adapter in adapters if adapter.weight in official or not merged]


def adapters_fact(adapters: list[Adapter]) -> Fact:
    """How many there are, of which ranks."""
    ranks = sorted({len(adapter.a) for adapter in adapters})
    return Fact(
        name="lora", value=f"rank {', '.join(map(str, ranks))} on {len(adapters)} layers", source="keys and shapes"
    )


def _require_plain(checkpoint: Checkpoint) -> None:
    """Refuse what is beside LoRA, what is not sound, and adapters among which one would have to choose."""
    found = adapter_names(checkpoint)
    for name in checkpoint.tensors:
        if _UNKNOWN.search(name):
            raise Refused(
                f"{checkpoint.names[name]} is an adapter that is not plain LoRA.",
                hint="Merge it with the library that made it, and fold the merged checkpoint.",
                code="lora.kind",
            )
    require_sound({name: checkpoint.tensors[name] for name in found}, checkpoint.names)
    if len({match["name"] for match in found.values() if "name" in match.groupdict() and match["name"]}) > 1:
        raise Refused(
            "the file contains several adapters for the same layers.",
            hint="Save it with the one that is to be merged.",
            code="lora.ambiguous",
        )


def _pairs(checkpoint: Checkpoint) -> dict[str, dict[str, Tensor]]:
    """``a`` and ``b``, or only one of them, by the weight that they are for."""
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, match in adapter_names(checkpoint).items():
        pair, factor = pairs.setdefault(_weight_name(match), {}), match["factor"].lower()
        if factor in pair:
            raise Refused(
                f"{_weight_name(match)} has several adapters; {checkpoint.names[name]} belongs to the second.",
                hint="Save it with the one that is to be merged.",
                code="lora.ambiguous",
            )
        pair[factor] = checkpoint.tensors[name]
    return pairs


def _adapter(weight: str, pair: Mapping[str, Tensor], base: Checkpoint, scales: Mapping[int, float] | None) -> Adapter:
    """One adapter whose parts belong together; ``scales`` by rank, None for the official code's, which has none.

    Raises:
        Refused: If they do not.
    """
    layer = weight.removesuffix(".weight")
    if len(pair) < 2 or weight not in base.tensors:
        lacking = f"the adapter's {'B' if 'a' in pair else 'A'}" if len(pair) < 2 else "the weight that it is for"
        raise Refused(
            f"{layer} has an adapter, but the file lacks {lacking}.",
            hint="Save the whole model: base weights and both factors of every adapter.",
            code="lora.half",
        )
    a, b, w = pair["a"], pair["b"], base.tensors[weight]
    if a.ndim != 2 or b.ndim != 2 or w.ndim != 2 or (b.shape[0], a.shape[1]) != tuple(w.shape) or len(a) != b.shape[1]:
        raise Refused(
            f"the adapter of {layer} has factors of shape {list(a.shape)} and {list(b.shape)}, which do not fit "
            f"its weight {list(w.shape)}.",
            hint="LoRA of rank r on a linear layer has A [r, in] and B [out, r].",
            code="lora.shape",
        )
    require_sound({weight: w}, base.names)
    if not all(tensor.is_floating_point() for tensor in (a, b, w)):
        raise Refused(
            f"{layer} or its adapter is not a floating-point tensor.",
            hint="Fold the floating-point checkpoint, and quantize it afterwards.",
            code="checkpoint.dtype",
        )
    return Adapter(weight, a, b, 1.0 if scales is None else scales[len(a)])
