"""Find which layers of a block are folded into which: change a layer slightly, and see which folded tensors change."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repaconv.core import plugins
from repaconv.core.errors import RepaconvError
from repaconv.results import FoldedLayer, FoldStep, ImageSize
from repaconv.sources.method_detection import understood

if TYPE_CHECKING:
    from torch import Tensor

    from repaconv.checkpoints import Checkpoint
    from repaconv.method_api.contract import Method, Reading

MOST_FOLDED_NUMBERS = 300_000_000
"""Most numbers that are folded again to find the correspondence; later kinds of blocks show no layers."""

Layers = dict[str, FoldedLayer]


def with_layers(
    found: Checkpoint,
    method: Method,
    settings: Mapping[str, str],
    trained: Reading,
    size: ImageSize,
    certificate: Sequence[FoldStep],
    weights: Path | None = None,
) -> tuple[FoldStep, ...]:
    """The certificate with the layers before and after the fold, in the first row of each kind of block.

    Args:
        found: The checkpoint.
        method: Its method.
        settings: The settings that it was read with.
        trained: The network as the method reads it.
        size: Image size for which MACs are counted.
        certificate: The rows of its fold.
        weights: The folded weights as a safetensors file; the first blocks are folded once more if there is none.
    """
    from repaconv.backbones.parameter_and_mac_counts import layers_of

    backbone: Any = plugins.load(plugins.BACKBONES, trained.backbone)
    shape = (trained.config.in_channels, *size)
    try:
        before = layers_of(trained.module, shape)
        after = layers_of(lambda: backbone.deploy(trained.config), shape)
        chosen = _first_of_kinds(certificate, before, after)
        chosen = _affordable(chosen, before, trained)
        layers = {name: _layers_in(name, before) for name in chosen}
        right = _folded(trained, layers) if weights is None else _written(weights, layers)
        into = _dependencies(found, method, settings, trained, layers, right)
    except RepaconvError:  # the changed values may make the checkpoint unreadable; then no layers are shown
        return tuple(certificate)
    return tuple(
        step.model_copy(update=_before_and_after(step.module, before, after, into)) if step.module in chosen else step
        for step in certificate
    )


def _layers_in(module: str, layers: Layers) -> list[str]:
    return [name for name in layers if _inside(name, module)]


def _before_and_after(module: str, before: Layers, after: Layers, into: Mapping[str, set[str]]) -> dict[str, Any]:
    """The layers of a module before and after its fold, with names relative to the module."""

    def inside(name: str) -> str:
        return name.removeprefix(f"{module}.")

    new = _layers_in(module, after)
    old = [
        before[name].model_copy(
            update={
                "name": inside(name),
                "into": tuple(inside(to) for to in new if any(_layer_of(key, (to,)) for key in into[name])),
            }
        )
        for name in _layers_in(module, before)
    ]
    return {
        "before": tuple(old),
        "after": tuple(after[name].model_copy(update={"name": inside(name)}) for name in new),
    }


def _first_of_kinds(certificate: Sequence[FoldStep], before: Layers, after: Layers) -> list[str]:
    """The first module of each kind of block, whatever its width, if it has more than one layer."""
    modules = [step.module for step in certificate]
    kinds: dict[tuple[Any, ...], str] = {}
    for step in certificate:
        if any(step.module.startswith(f"{other}.") for other in modules):
            continue
        sides = [
            tuple(name.removeprefix(step.module) for name in _layers_in(step.module, side)) for side in (before, after)
        ]
        if len(sides[0]) > 1 or len(sides[1]) > 1:
            kinds.setdefault((re.sub(r"\d+", "#", step.module), *sides, step.folded), step.module)
    return list(kinds.values())


def _affordable(chosen: Sequence[str], before: Layers, trained: Reading) -> list[str]:
    """Return as many of the modules, in their order, as `MOST_FOLDED_NUMBERS` allows."""
    kept: list[str] = []
    numbers = [(name, tensor.numel()) for name, tensor in trained.tensors.items()]
    for name in chosen:
        last = max((at for at, (key, _) in enumerate(numbers) if key.startswith(f"{name}.")), default=len(numbers) - 1)
        runs = 1 + max(len(_layers_in(each, before)) for each in (*kept, name))
        if runs * sum(count for _, count in numbers[: last + 1]) > MOST_FOLDED_NUMBERS:
            break
        kept.append(name)
    return kept


def _dependencies(
    found: Checkpoint,
    method: Method,
    settings: Mapping[str, str],
    trained: Reading,
    layers: Mapping[str, Sequence[str]],
    right: Mapping[str, Tensor],
) -> dict[str, set[str]]:
    """For every layer of the modules, the folded tensors that change when the layer's own weights change.

    ``right`` has the folded tensors before the change, in any floating-point type.
    """
    into: dict[str, set[str]] = {}
    for turn in range(max(map(len, layers.values()), default=0)):
        changed = {module: names[turn] for module, names in layers.items() if turn < len(names)}
        of_layers = [key for key in trained.tensors if _layer_of(key, changed.values())]
        now = _folded(_changed(found, method, settings, trained, of_layers), changed)
        for module, name in changed.items():
            into[name] = {key for key in now if _inside(key, module) and not _same(right.get(key), now[key])}
    return into


def _changed(
    found: Checkpoint, method: Method, settings: Mapping[str, str], trained: Reading, names: Sequence[str]
) -> Reading:
    """The network with other values in these tensors; read from the checkpoint again if the method requires it."""
    changed = trained.with_tensors({**trained.tensors, **{name: _perturbed(trained.tensors[name]) for name in names}})
    if changed is not None:
        return changed
    stored = {each for name in names for each in (name, trained.names.get(name, name))}  # composed tensors have neither
    tensors = {
        name: tensor if stored.isdisjoint((name, found.names.get(name, name))) else _perturbed(tensor)
        for name, tensor in found.tensors.items()
    }
    return understood(method, replace(found, tensors=tensors), settings)


def _layer_of(key: str, layers: Collection[str]) -> bool:
    """Whether a tensor is a parameter of one of these layers, or has the name of one."""
    return any(key == name or key.rpartition(".")[0] == name for name in layers)


def _perturbed(tensor: Tensor) -> Tensor:
    """The tensor with slightly larger values, each changed by a different amount."""
    import torch

    if not tensor.is_floating_point():
        return tensor
    share = torch.rand(tensor.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return (tensor.double() * (1 + 0.01 * share) + 0.001 * share).to(tensor.dtype)


def _same(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and one.shape == other.shape and bool((one == other.to(one.dtype)).all())


def _folded(reading: Reading, modules: Collection[str]) -> dict[str, Tensor]:
    """The folded tensors of some modules; folding stops after the last of them."""
    waiting, tensors = set(modules), {}
    for part in reading.parts() if waiting else ():
        tensors.update(
            {key: value.double() for key, value in part.tensors.items() if any(_inside(key, name) for name in modules)}
        )
        waiting -= {part.step.module} if part.step else set()
        if not waiting:
            break
    return tensors


def _written(weights: Path, modules: Collection[str]) -> dict[str, Tensor]:
    """The tensors of some modules in a safetensors file."""
    from safetensors import safe_open

    with safe_open(weights, framework="pt") as file:
        names = [name for name in file.keys() if any(_inside(name, module) for module in modules)]  # noqa: SIM118
        return {name: file.get_tensor(name) for name in names}


def _inside(name: str, module: str) -> bool:
    return name.startswith(f"{module}.")
