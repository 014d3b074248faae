"""What a network gives for images: run once, and what of it is compared and what it is called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from repaconv.core.errors import Refused, describe_exception
from repaconv.sources.class_score_outputs import LOGITS
from repaconv.sources.named_architectures import Built

if TYPE_CHECKING:
    import torch
    from torch import nn

ELSE = "Fold the module in memory, repaconv.fold(module, example=...), or as ONNX: repaconv fold model.onnx."
"""What folds without any of these."""


def called(module: nn.Module, shape: tuple[int, int, int]) -> Any:
    """What it gives for one image of zeros, [C, H, W].

    Raises:
        Refused: If it takes no such image, with what it says.
    """
    import torch

    try:
        return _answer(module, shape, next((p.dtype for p in module.parameters()), torch.float32))
    except Exception as error:  # of any network
        raise Refused(
            f"this network does not take one image of {'x'.join(map(str, shape))}: {describe_exception(error)}.",
            hint=f"If its images are of another size: --set image_size=224x224. If it takes something else: {ELSE}",
            code="network.call",
        ) from error


@contextmanager
def norms_run(module: nn.Module) -> Iterator[list[str]]:
    """Names of the BatchNorms that run inside, one for each call."""
    from torch.nn.modules.batchnorm import _BatchNorm

    found: list[str] = []
    every = [(name, part) for name, part in module.named_modules() if isinstance(part, _BatchNorm)]
    hooks = [part.register_forward_hook(lambda *_, name=name: found.append(name)) for name, part in every]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def doubled(module: nn.Module, shape: tuple[int, int, int]) -> nn.Module:
    """It in float64, in which everything is proved, of images [C, H, W].

    Raises:
        Refused: If it makes numbers of its own in float32, and does not compute otherwise.
    """
    import torch

    module = module.double()
    try:
        _answer(module, shape, torch.float64)
    except Exception as error:  # of any network that took an image before
        raise Refused(
            f"this network computes in float32 only, so it cannot be verified in float64: {describe_exception(error)}.",
            hint="Export it yourself and fold the ONNX model, which is evaluated in float64: repaconv fold model.onnx.",
            code="network.float64",
        ) from error
    return module


def _answer(module: nn.Module, shape: tuple[int, int, int], dtype: torch.dtype) -> Any:
    """What a module gives for one image of zeros of that type."""
    import torch

    with torch.inference_mode():
        return module(torch.zeros(1, *shape, dtype=dtype))


def outputs_of(built: Built, found: Any) -> tuple[str, ...]:
    """Names of what it gives: its own where it has names, ``logits`` where it tells classes apart, ``output`` where it
    may.

    Raises:
        Refused: If something of it is no tensor.
    """
    from torch import Tensor
    from torch.utils._pytree import tree_leaves

    named = _named(found)
    if named and all(isinstance(value, Tensor) for value in named.values()):
        return tuple(named)
    every = tree_leaves(found)
    leaves = [leaf for leaf in every if isinstance(leaf, Tensor)]
    numbers = [leaf for leaf in every if isinstance(leaf, (int, float))]  # which an exporter writes, too
    if numbers or not leaves:
        raise Refused(
            f"this network gives {type((numbers or every or [None])[0]).__name__}, which is no tensor.",
            hint=f"Let it return tensors, or a tuple or dict of them. {ELSE}",
            code="network.outputs",
        )
    if len(leaves) == 1:
        unknown = "output" if built.classes is None and leaves[0].ndim == 2 else "features"
        return (LOGITS,) if built.classes else (unknown,)
    return tuple(f"output_{number}" for number in range(len(leaves)))


def widths_of(names: Sequence[str], found: Any) -> dict[str, int]:
    """Numbers per image of what has the shape [images, numbers], by name."""
    from torch import Tensor
    from torch.utils._pytree import tree_leaves

    leaves = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
    pairs = zip(names, leaves, strict=False)
    return {name: int(leaf.shape[1]) for name, leaf in pairs if leaf.ndim == 2 and leaf.is_floating_point()}


def _named(found: Any) -> dict[str, Any]:
    """What has a name, several under one name with their numbers; nothing where nothing has."""
    from torch.utils._pytree import tree_leaves

    several = {str(name): tree_leaves(value) for name, value in found.items()} if isinstance(found, Mapping) else {}
    return {
        f"{name}_{number}" if len(leaves) > 1 else name: leaf
        for name, leaves in several.items()
        for number, leaf in enumerate(leaves)
    }


def head_of(built: Built, found: Any) -> int | None:
    """How many classes it tells apart: logits are those of an architecture for classes, or called so."""
    logits = found.get("logits") if isinstance(found, Mapping) else found
    by_name = (built.versions and built.input_name == "input") or isinstance(found, Mapping)
    if not by_name or getattr(logits, "ndim", 0) != 2 or built.classes == 0:
        return built.classes
    return int(logits.shape[1])  # type: ignore[union-attr]


def differs(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two calls with the same inputs gave something else."""
    return any(not np.array_equal(one[name], other[name], equal_nan=True) for name in one)
