"""The method that a method becomes, to take checkpoints with LoRA too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn

from repaconv.checkpoint import Checkpoint
from repaconv.errors import Refused
from repaconv.trained.contract import FoldedPart, Identify, Method, Reading
from repaconv.trained.knobs import Knobs
from repaconv.trained.lora.adapters import adapter_names, adapters_fact, read_adapters, with_merged, without_adapters
from repaconv.trained.lora.layer import Adapter, proved, put_beside
from repaconv.trained.lora.untold import KNOBS


@dataclass(frozen=True, kw_only=True)
class AdaptedReading(Reading):
    """Another method's reading of the merged weights, and the adapters by the paths of their layers."""

    inner: Reading
    adapters: Mapping[str, Adapter]

    def module(self) -> nn.Module:
        """The network as trained, its adapted layers with their adapters apart."""
        module = self.inner.module()
        for path, adapter in self.adapters.items():
            put_beside(module, path, adapter)
        return module.eval()

    def parts(self) -> Iterator[FoldedPart]:
        """The adapters' rows of the certificate, then the method's parts, which hold the merged weights."""
        for path, adapter in self.adapters.items():
            yield proved(path, adapter, self.tensors[f"{path}.weight"], self.inner.tensors[f"{path}.weight"])
        yield from self.inner.parts()


def with_adapters(method: Method) -> Method:
    """The method, which then also takes checkpoints with LoRA on their linear layers."""
    return replace(
        method,
        detect=lambda checkpoint: method.detect(without_adapters(checkpoint)),
        read=partial(_read, method),
        identify=partial(_identify, method.identify) if method.identify else None,
    )


def _read(method: Method, checkpoint: Checkpoint, settings: Mapping[str, str]) -> Reading:
    """The method's reading, with the adapters where there are any.

    Raises:
        Refused: Also if an adapter is half, does not fit its layer, is of another kind than LoRA, or its scale is not
            known.
    """
    if not adapter_names(checkpoint):
        return method.read(checkpoint, settings)
    ours, others = _sorted(settings)
    knobs = Knobs(ours)
    base, adapters = without_adapters(checkpoint), read_adapters(checkpoint, knobs)
    inner = method.read(with_merged(base, adapters), others)
    knobs.done()
    if not adapters:
        return replace(inner, facts=(*inner.facts, *knobs.facts))
    placed = {_path(adapter, base, inner): adapter for adapter in adapters}
    apart: dict[str, Tensor] = {}
    for path, adapter in placed.items():
        weights = {"weight": base.tensors[adapter.weight], "lora_a": adapter.a, "lora_b": adapter.b}
        apart |= {f"{path}.{name}": tensor for name, tensor in weights.items()}
    return AdaptedReading(
        **{name: getattr(inner, name) for name in ("backbone", "config", "names", "preprocessing", "deployed")},
        tensors={**inner.tensors, **apart},
        facts=(*inner.facts, *knobs.facts, adapters_fact(adapters)),
        applied=(*inner.applied, "lora"),
        tolerances=inner.tolerances,
        inner=inner,
        adapters=placed,
    )


def _sorted(settings: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Settings that are read here, and the method's."""
    ours = {name: value for name, value in settings.items() if name in KNOBS}
    return ours, {name: value for name, value in settings.items() if name not in KNOBS}


def _path(adapter: Adapter, base: Checkpoint, inner: Reading) -> str:
    """The adapted layer as the method's reading names it.

    Raises:
        Refused: If it has no such layer.
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
    beneath: Identify, checkpoint: Checkpoint, settings: Mapping[str, str], images: Tensor, recorded: Tensor
) -> dict[str, str]:
    """What the method settles on the merged weights."""
    if not adapter_names(checkpoint):
        return beneath(checkpoint, settings, images, recorded)
    ours, others = _sorted(settings)
    found: list[dict[str, str]] = []
    for ways in _open_ways(checkpoint, ours):
        knobs = Knobs({**ours, **ways})
        merged = with_merged(without_adapters(checkpoint), read_adapters(checkpoint, knobs))
        knobs.done()
        try:
            found.append({**ways, **beneath(merged, others, images, recorded)})
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


def _open_ways(checkpoint: Checkpoint, given: Mapping[str, str]) -> list[dict[str, str]]:
    """What to try for ``lora_merged``: both where nothing tells, else nothing more than is known."""
    try:
        read_adapters(checkpoint, Knobs(given))
    except Refused as refused:
        if refused.code != "lora.merged":
            raise
        return [{"lora_merged": way} for way in ("no", "yes")]
    return [{}]
