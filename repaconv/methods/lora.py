"""Merge LoRA adapters in checkpoints of any method: W x + b + s B (A x) is one linear layer with the weight W + s B A.

A checkpoint of any method may contain such adapters. `with_adapters` wraps a method: the method reads the merged
weights, and the wrapped reading adds the adapters again, so that its module is the network as trained.

Supported are the layouts of PYRA's official code (``LoRA_a``, ``LoRA_b`` next to ``qkv``, s = 1), of PEFT
(``base_layer``, ``lora_A.default``) and of loralib (``lora_A``, ``lora_B``). PEFT and loralib scale by alpha / r, or by
alpha / sqrt(r) for rank-stabilized LoRA; no tensor shows alpha. Nor does a tensor show whether s B A was merged into W
before saving while A and B were kept: loralib merges on ``eval()``, PEFT only when it is told to.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from repaconv.checkpoints import Checkpoint, require_sound
from repaconv.core.errors import Refused
from repaconv.method_api.contract import FoldedPart, Identify, Method, Reading
from repaconv.method_api.fold_error import relative_difference
from repaconv.method_api.settings import SettingsReader, one_of
from repaconv.results import Fact, FoldStep

# One linear layer and its adapter, unmerged as trained, and merged.


@dataclass(frozen=True)
class Adapter:
    """One LoRA adapter: the name of the adapted weight, A [r, in], B [out, r] and the scale s."""

    weight: str
    a: Tensor
    b: Tensor
    scale: float

    def merged(self, weight: Tensor) -> Tensor:
        """The merged weight W + s B A, in float64."""
        return weight.double() + self.scale * (self.b.double() @ self.a.double())


class LoraLinear(nn.Linear):
    """A linear layer with its unmerged adapter, as trained; ``lora_a`` [r, in], ``lora_b`` [out, r]."""

    def __init__(self, features_in: int, features_out: int, rank: int, scale: float, *, bias: bool) -> None:
        super().__init__(features_in, features_out, bias=bias)
        self.scale = scale
        self.lora_a = nn.Parameter(torch.zeros(rank, features_in))
        self.lora_b = nn.Parameter(torch.zeros(features_out, rank))

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        low = nn.functional.linear(input, self.lora_a)
        return super().forward(input) + self.scale * nn.functional.linear(low, self.lora_b)


def attach_adapter(module: nn.Module, path: str, adapter: Adapter) -> None:
    """Replace the linear layer at ``path`` by one with the adapter, in place.

    Raises:
        Refused: If the module at ``path`` is not a linear layer.
    """
    layer = module.get_submodule(path)
    if not isinstance(layer, nn.Linear):
        raise Refused(
            f"{path} has an adapter but is not a linear layer.",
            hint="LoRA on other layers is not supported.",
            code="lora.layer",
        )
    parent, _, last = path.rpartition(".")
    bias = layer.bias is not None
    adapted = LoraLinear(layer.in_features, layer.out_features, len(adapter.a), adapter.scale, bias=bias)
    setattr(module.get_submodule(parent), last, adapted)


def adapter_fold_part(path: str, adapter: Adapter, weight: Tensor, merged: Tensor) -> FoldedPart:
    """Compare the merged weight [out, in] with weight and adapter on random input, for the fold certificate."""
    out, features = weight.shape
    with torch.device("meta"):
        unmerged = LoraLinear(features, out, len(adapter.a), adapter.scale, bias=False)
        one = nn.Linear(features, out, bias=False)
    weights = {"weight": weight, "lora_a": adapter.a, "lora_b": adapter.b}
    error = relative_difference((unmerged, weights), (one, {"weight": merged}), (5, features))
    what = (f"lora (rank {len(adapter.a)}, scale {adapter.scale:g}) -> weight",)
    return FoldedPart({}, FoldStep(module=path, folded=what, max_rel_error=error))


# Settings of adapters that no tensor shows: whether they are merged already, and their scale.

SETTINGS = ("lora_alpha", "lora_merged", "lora_rslora")
"""The settings that are read here; all others are the method's."""

_PEFT = re.compile(r"^base_model\.model\.|\.base_layer\.|\.lora_[AB]\.\w+\.weight$")


def read_merged(checkpoint: Checkpoint, reader: SettingsReader, pairs: Mapping[str, Mapping[str, Tensor]]) -> bool:
    """Whether the file's W already contains s B A, for adapters of PEFT and loralib; reads the setting ``lora_merged``.

    Args:
        checkpoint: The checkpoint with its adapters.
        reader: The user's settings.
        pairs: A and B by the name of the adapted weight.

    Raises:
        Refused: If the adapters are loralib's, and neither the file nor the user gives the setting.
    """
    if not pairs:
        return False
    found, source = _merged_in_record(checkpoint.record)
    if found is None and not any(bool(pair["b"].any()) for pair in pairs.values() if "b" in pair):
        found, source = "no", "every B is zero: either way the same"
    if found is None and any(_PEFT.search(name) for name in checkpoint.tensors):
        found, source = "no", "PEFT's names: it merges only where merge_adapter() is called, which no key tells"
        return reader.take("lora_merged", one_of("yes", "no"), "no", found, source, free=True) == "yes"
    if found is None and "lora_merged" not in reader:
        raise Refused(
            "no tensor shows whether the adapters are already merged into the base weights: loralib merges them in "
            "eval() and removes them in train().",
            hint=(
                "Give --set lora_merged=yes if the checkpoint was saved after eval(), or =no if it was saved after "
                "train()."
            ),
            code="lora.merged",
        )
    return reader.take("lora_merged", one_of("yes", "no"), "no", found, source) == "yes"


def _merged_in_record(record: Mapping[str, Any]) -> tuple[str | None, str]:
    """What the file says of merging, and where. With ``merge_weights=False`` loralib never merges."""
    for place in ("lora_config", "peft_config", "config", "args", "meta", ""):
        section = record.get(place) if place else record
        if isinstance(section, Mapping):
            for key in ("lora_merged", "merged"):
                if isinstance(section.get(key), bool):
                    return "yes" if section[key] else "no", f"{place}.{key}".lstrip(".")
            if section.get("merge_weights") is False:
                return "no", f"{place}.merge_weights".lstrip(".")
    return None, ""


def read_scales(checkpoint: Checkpoint, reader: SettingsReader, ranks: set[int], *, merged: bool) -> dict[int, float]:
    """The scale alpha / r, or alpha / sqrt(r), by rank.

    alpha is read from --set, the file, or PEFT's configuration next to it. The scale of merged adapters is not needed,
    and 0 is returned for it.
    """
    if merged:
        reader.user_value("lora_alpha", _finite)
        reader.user_value("lora_rslora", one_of("yes", "no"))
    if merged or not ranks:
        return dict.fromkeys(ranks, 0.0)
    config, where = _lora_config(checkpoint)
    _require_uniform(config, where, ranks)
    stored_alpha = config.get("lora_alpha")
    found = (
        float(stored_alpha) if isinstance(stored_alpha, (int, float)) and not isinstance(stored_alpha, bool) else None
    )
    why = "no tensor tells the alpha that LoRA's scale alpha / r needs"
    alpha = reader.need("lora_alpha", _finite, "16", why, found, where)
    stored_rslora = ("yes" if config["use_rslora"] else "no") if "use_rslora" in config else None
    rslora = reader.take("lora_rslora", one_of("yes", "no"), "no", stored_rslora, where)
    return {rank: alpha / (math.sqrt(rank) if rslora == "yes" else rank) for rank in ranks}


def _require_uniform(config: Mapping[str, Any], where: str, ranks: set[int]) -> None:
    """Refuse a configuration whose scale is not one alpha / r, or whose rank is not the adapters'."""
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


def _lora_config(checkpoint: Checkpoint) -> tuple[Mapping[str, Any], str]:
    record = checkpoint.record
    for name in ("peft_config", "lora_config", "config", "args", "meta"):
        place = record.get(name)
        inner = next(iter(place.values()), None) if isinstance(place, Mapping) and "default" in place else place
        if isinstance(inner, Mapping) and "lora_alpha" in inner:
            return inner, name
    if "lora_alpha" in record:
        return record, "the file"
    config_path = checkpoint.path.parent / "adapter_config.json"
    try:
        found = json.loads(config_path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}, ""
    return (found, config_path.name) if isinstance(found, dict) else ({}, "")


# The adapters in a checkpoint, and the checkpoint without them.

_FACTORS = (
    re.compile(r"^(?P<at>.+)\.LoRA_(?P<factor>[ab])\.weight$"),  # official: the layer is `at`.qkv
    re.compile(r"^(?P<at>.+)\.lora_(?P<factor>[AB])(?:\.(?P<name>\w+))??(?:\.weight)?$"),
)
_UNKNOWN = re.compile(r"lora_(?:magnitude_vector|embedding_[AB])")
_SAVED = re.compile(r"^(?P<at>.+)\.modules_to_save\.\w+\.(?P<what>\w+)$")
_PREFIX = "base_model.model."


def require_base(checkpoint: Checkpoint) -> None:
    """Require base weights: refuse a file that contains adapters only, as PEFT saves them.

    Raises:
        Refused: If it does; the hint says how to save the whole model.
    """
    adapters = adapter_names(checkpoint)
    if adapters and len(adapters) == len(checkpoint.tensors):
        raise Refused(
            f"{checkpoint.path} contains LoRA adapters only, without the base weights.",
            hint="Save the state_dict() of the whole model: base weights and adapters.",
            code="lora.alone",
        )


def adapter_names(checkpoint: Checkpoint) -> dict[str, re.Match[str]]:
    """The keys of adapters, with the match that has their parts."""
    found = {}
    for name in checkpoint.tensors:
        if match := next((match for pattern in _FACTORS if (match := pattern.match(name))), None):
            found[name] = match
    return found


def _weight_name(match: re.Match[str]) -> str:
    """The name of the adapted weight in `without_adapters`."""
    at = match["at"].removeprefix(_PREFIX)
    return f"{at}.qkv.weight" if match["factor"] in "ab" else f"{at}.weight"


def without_adapters(checkpoint: Checkpoint) -> Checkpoint:
    """The base checkpoint without adapters; the number of adapted layers is ``record["lora_layers"]``."""
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


def with_merged_weights(base: Checkpoint, adapters: list[Adapter]) -> Checkpoint:
    """The base checkpoint with every adapted weight replaced by W + s B A, in float64."""
    weights = {adapter.weight: adapter.merged(base.tensors[adapter.weight]) for adapter in adapters}
    return replace(base, tensors={**base.tensors, **weights})


def read_adapters(checkpoint: Checkpoint, reader: SettingsReader) -> list[Adapter]:
    """Read the adapters that are not merged into the file's weights yet.

    Raises:
        Refused: If an adapter is not plain LoRA, is ambiguous, lacks a factor or has a wrong shape, or if a setting
            that no tensor shows is missing.
    """
    _require_plain(checkpoint)
    base, pairs = without_adapters(checkpoint), _factor_pairs(checkpoint)
    official = {_weight_name(match) for match in adapter_names(checkpoint).values() if match["factor"] in "ab"}
    others = {weight: pair for weight, pair in pairs.items() if weight not in official}
    ranks = {len(pair["a"]) for pair in others.values() if "a" in pair and pair["a"].ndim == 2}
    merged = read_merged(checkpoint, reader, others)
    scales = read_scales(checkpoint, reader, ranks, merged=merged)
    if official:
        source = "LoRA_a, LoRA_b: the official code has no other"
        reader.facts.append(Fact(name="lora_scale", value=1.0, source=source))
    if official and not ranks:
        source = "LoRA_a, LoRA_b: the official code never merges them"
        reader.facts.append(Fact(name="lora_merged", value="no", source=source))
    adapters = [_adapter(weight, pair, base, None if weight in official else scales) for weight, pair in pairs.items()]
    return [adapter for adapter in adapters if adapter.weight in official or not merged]


def adapters_fact(adapters: list[Adapter]) -> Fact:
    """A fact with the number of adapters and their ranks."""
    ranks = sorted({len(adapter.a) for adapter in adapters})
    return Fact(
        name="lora", value=f"rank {', '.join(map(str, ranks))} on {len(adapters)} layers", source="keys and shapes"
    )


def _require_plain(checkpoint: Checkpoint) -> None:
    """Refuse adapters that are not plain LoRA, invalid weights, and several adapters for the same layers."""
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


def _factor_pairs(checkpoint: Checkpoint) -> dict[str, dict[str, Tensor]]:
    """The factors ``a`` and ``b``, or only one of them, by the name of the adapted weight."""
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
    """Build one adapter from its two factors.

    Args:
        weight: Name of the adapted weight.
        pair: The factors ``a`` and ``b``.
        base: The checkpoint without adapters.
        scales: The scale by rank; None for the official code's adapters, whose scale is 1.

    Raises:
        Refused: If a factor or the adapted weight is missing, or their shapes or types do not fit.
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


# A wrapper around any method, which then also reads checkpoints with LoRA adapters.


@dataclass(frozen=True, kw_only=True)
class AdaptedReading(Reading):
    """A reading with LoRA adapters: a method's reading of the merged weights, and the adapters by layer path."""

    inner: Reading
    adapters: Mapping[str, Adapter]

    def module(self) -> nn.Module:
        """The network as trained, with unmerged adapters."""
        module = self.inner.module()
        for path, adapter in self.adapters.items():
            attach_adapter(module, path, adapter)
        return module.eval()

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> AdaptedReading | None:
        """The same network with other weights; see `Reading`. Only changed adapters are merged again."""
        adapters = {
            path: replace(adapter, a=tensors[f"{path}.lora_a"], b=tensors[f"{path}.lora_b"])
            for path, adapter in self.adapters.items()
        }
        unchanged = {path for path in adapters if all(tensors[n] is self.tensors[n] for n in _names_of(path))}
        merged = {
            f"{path}.weight": self.inner.tensors[f"{path}.weight"]
            if path in unchanged
            else adapter.merged(tensors[f"{path}.weight"])
            for path, adapter in adapters.items()
        }
        inner = self.inner.with_tensors({name: merged.get(name, tensors[name]) for name in self.inner.tensors})
        return None if inner is None else replace(self, tensors=tensors, inner=inner, adapters=adapters)

    def parts(self) -> Iterator[FoldedPart]:
        """Yield the adapters' rows of the certificate, then the method's parts, which have the merged weights."""
        for path, adapter in self.adapters.items():
            yield adapter_fold_part(path, adapter, self.tensors[f"{path}.weight"], self.inner.tensors[f"{path}.weight"])
        yield from self.inner.parts()


def _names_of(path: str) -> tuple[str, str, str]:
    """The tensors of the adapted layer at ``path`` in an `AdaptedReading`, without the bias."""
    return f"{path}.weight", f"{path}.lora_a", f"{path}.lora_b"


def with_adapters(method: Method) -> Method:
    """Wrap a method so that it also reads checkpoints with LoRA on their linear layers."""
    return replace(
        method,
        detect=lambda checkpoint: method.detect(without_adapters(checkpoint)),
        read=partial(_read, method),
        identify=partial(_identify, method.identify) if method.identify else None,
    )


def _read(method: Method, checkpoint: Checkpoint, settings: Mapping[str, str]) -> Reading:
    """Read a checkpoint by the method, with its adapters if there are any.

    Raises:
        Refused: If the method refuses the checkpoint, or an adapter lacks a factor, does not fit its layer, is not
            plain LoRA, or its scale is unknown.
    """
    if not adapter_names(checkpoint):
        return method.read(checkpoint, settings)
    lora_settings, method_settings = _split_settings(settings)
    reader = SettingsReader(lora_settings)
    base, adapters = without_adapters(checkpoint), read_adapters(checkpoint, reader)
    inner = method.read(with_merged_weights(base, adapters), method_settings)
    reader.done()
    if not adapters:
        return replace(inner, facts=(*inner.facts, *reader.facts))
    placed = {_layer_path(adapter, base, inner): adapter for adapter in adapters}
    unmerged: dict[str, Tensor] = {}
    for path, adapter in placed.items():
        weights = {"weight": base.tensors[adapter.weight], "lora_a": adapter.a, "lora_b": adapter.b}
        unmerged |= {f"{path}.{name}": tensor for name, tensor in weights.items()}
    return AdaptedReading(
        **{name: getattr(inner, name) for name in ("backbone", "config", "names", "preprocessing", "deployed")},
        tensors={**inner.tensors, **unmerged},
        facts=(*inner.facts, *reader.facts, adapters_fact(adapters)),
        applied=(*inner.applied, "lora"),
        tolerances=inner.tolerances,
        tolerance_reasons=inner.tolerance_reasons,
        inner=inner,
        adapters=placed,
    )


def _split_settings(settings: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Split the settings into those that are read here and the method's."""
    lora_settings = {name: value for name, value in settings.items() if name in SETTINGS}
    return lora_settings, {name: value for name, value in settings.items() if name not in SETTINGS}


def _layer_path(adapter: Adapter, base: Checkpoint, inner: Reading) -> str:
    """The path of the adapted layer in the method's network.

    Raises:
        Refused: If the network has no such layer.
    """
    saved = base.names[adapter.weight]
    name = next((name for name, file_name in inner.names.items() if file_name == saved), "")
    if name not in inner.tensors:
        raise Refused(
            f"{saved} has an adapter, but this network has no such weight.",
            hint="The file mixes two networks.",
            code="lora.unused",
        )
    return name.removesuffix(".weight")


def _identify(
    identify: Identify, checkpoint: Checkpoint, settings: Mapping[str, str], images: Tensor, recorded: Tensor
) -> dict[str, str]:
    """Identify the method's missing settings on the merged weights, and ``lora_merged`` if it is unknown."""
    if not adapter_names(checkpoint):
        return identify(checkpoint, settings, images, recorded)
    lora_settings, method_settings = _split_settings(settings)
    found: list[dict[str, str]] = []
    for assumed in _settings_to_try(checkpoint, lora_settings):
        reader = SettingsReader({**lora_settings, **assumed})
        merged = with_merged_weights(without_adapters(checkpoint), read_adapters(checkpoint, reader))
        reader.done()
        try:
            found.append({**assumed, **identify(merged, method_settings, images, recorded)})
        except Refused as refused:
            why = refused
    if not found:
        raise why
    if len(found) > 1:
        raise Refused(
            "the recorded output does not determine lora_merged: the network's output is the same with and without "
            "another s B A.",
            hint="Give it with --set lora_merged=yes or no.",
            code="lora.identify",
        )
    return found[0]


def _settings_to_try(checkpoint: Checkpoint, given: Mapping[str, str]) -> list[dict[str, str]]:
    """The settings to try: both values of ``lora_merged`` if it is unknown, else no additional setting."""
    try:
        read_adapters(checkpoint, SettingsReader(given))
    except Refused as refused:
        if refused.code != "lora.merged":
            raise
        return [{"lora_merged": answer} for answer in ("no", "yes")]
    return [{}]
