"""Write the index of published networks, ``repaconv/checkpoints/index.zip``.

Builds every architecture of timm, torchvision and transformers' vision models on the meta device, where weights take no
memory. timm names its classifiers; elsewhere the classifier is what changes with the number of classes. Networks of the
same shapes are distinguished by their module classes and by all plain values that these modules hold. The three
packages must be installed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import ZIP_LZMA, ZipFile, ZipInfo
from zlib import crc32

import torch

from repaconv.checkpoints.architecture_index import member

INDEX = Path(__file__).parents[1] / "repaconv" / "checkpoints" / "index.zip"
CLASSES = 7
MAPPINGS = ("IMAGE_CLASSIFICATION", "SEMANTIC_SEGMENTATION", "OBJECT_DETECTION", "DEPTH_ESTIMATION")
TOWERS = ("CLIPVisionModel", "CLIPVisionModelWithProjection", "SiglipVisionModel", "ViTModel", "Dinov2Model")
OF_TRAINING = {"training", "p", "drop_prob", "inplace", "momentum", "grad_checkpointing", "gradient_checkpointing"}
OF_THE_SHAPES = {"num_classes", "num_labels", "out_features"}

Build = Callable[[int | None], torch.nn.Module]


def of_timm() -> Iterator[tuple[str, Build]]:
    import timm

    def build(name: str, classes: int | None) -> torch.nn.Module:
        return timm.create_model(name, pretrained=False, **({"num_classes": classes} if classes else {}))

    for name in timm.list_models():
        yield f"timm:{name}", partial(build, name)


def of_torchvision() -> Iterator[tuple[str, Build]]:
    from torchvision import models

    def build(name: str, classes: int | None) -> torch.nn.Module:
        given: dict[str, Any] = {"weights": None, **({"num_classes": classes} if classes else {})}
        try:
            return models.get_model(name, **given, weights_backbone=None)
        except TypeError:
            return models.get_model(name, **given)

    for name in models.list_models(exclude="quantized_*"):
        yield f"torchvision:{name}", partial(build, name)


def of_transformers() -> Iterator[tuple[str, Build]]:
    import transformers
    from transformers.models.auto import modeling_auto

    def build(name: str, classes: int | None) -> torch.nn.Module:
        kind = getattr(transformers, name)
        config = kind.config_class()
        if classes:
            config.num_labels = classes
        return kind(config)

    mapped = [getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES") for name in MAPPINGS]
    names = [
        name for mapping in mapped for kind in mapping.values() for name in ([kind] if isinstance(kind, str) else kind)
    ]
    for name in dict.fromkeys([*names, *TOWERS]):
        yield f"transformers:{name}", partial(build, name)


def shapes(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(tensor.shape)
        for name, tensor in module.state_dict().items()
        if not name.endswith("num_batches_tracked")
    }


def made_of(module: torch.nn.Module) -> str:
    """Its classes and their plain values, in order: what equal tensors are computed with."""
    parts = []
    for name, part in module.named_modules():
        values = {
            key: _plain(value)
            for key, value in vars(part).items()
            if key[0] != "_" and key not in OF_TRAINING | OF_THE_SHAPES
        }
        parts.append(f"{name} {type(part).__module__}.{type(part).__qualname__} {sorted(values.items())}")
    return "\n".join(parts)


def _plain(value: object) -> str:
    if isinstance(value, int | float | str | None):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_plain, value))})"
    if isinstance(value, partial):
        return f"{_plain(value.func)}{_plain(value.args)}{sorted((k, _plain(v)) for k, v in value.keywords.items())}"
    return getattr(value, "__qualname__", type(value).__qualname__)


def described(build: Build) -> tuple[dict[str, tuple[int, ...]], list[str], str]:
    """Names and shapes, which of them are the classifier's, and what the network is made of."""
    try:
        with torch.device("meta"):
            return _described(build)
    except NotImplementedError:  # its initialization looks at values
        return _described(build)


def _described(build: Build) -> tuple[dict[str, tuple[int, ...]], list[str], str]:
    usual = build(None)
    found = shapes(usual)
    return found, _classifier(usual, found, build), made_of(usual)


def _classifier(module: torch.nn.Module, found: dict[str, tuple[int, ...]], build: Build) -> list[str]:
    classifier = getattr(module, "default_cfg", {}).get("classifier")
    if classifier is not None:
        layers = (classifier,) if isinstance(classifier, str) else classifier
        return [name for name in found if name.rpartition(".")[0] in layers]
    try:
        other = shapes(build(CLASSES))
    except Exception:  # it has no classifier
        return []
    return [name for name in found if found[name] != other.get(name)]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("-o", type=Path, default=INDEX)
    out = options.parse_args().o
    groups: dict[tuple[str, ...], dict[Any, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, build in (*of_timm(), *of_torchvision(), *of_transformers()):
        try:
            found, head, made = described(build)
        except Exception as error:  # an extra that it needs, or an operator that the meta device lacks
            sys.stderr.write(f"{name}: {type(error).__name__}: {error}"[:200].replace("\n", " ") + "\n")
            continue
        names = tuple(found)
        text = ",".join("x".join(map(str, shape)) for shape in found.values())
        groups[names][tuple(names.index(each) for each in head), text, made].append(name)
    members: dict[str, list[Any]] = defaultdict(list)
    for names, networks in sorted(groups.items()):
        lines = [[known, head, text, f"{crc32(made.encode()):08x}"] for (head, text, made), known in networks.items()]
        members[member(len(names))].append([names, lines])
    with ZipFile(out, "w", ZIP_LZMA) as index:
        for name, written in sorted(members.items()):
            index.writestr(ZipInfo(name), json.dumps(written, separators=(",", ":")), ZIP_LZMA)
    count = sum(len(known) for networks in groups.values() for known in networks.values())
    sys.stdout.write(f"{count} architectures, {out.stat().st_size:,} bytes\n")


if __name__ == "__main__":
    main()
