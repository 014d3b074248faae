"""Run a torch network on one image to find its outputs: their names, their widths, the number of classes."""

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
"""Hint of refusals: other ways to fold a network that does not take images or return tensors."""


def called(module: nn.Module, shape: tuple[int, int, int]) -> Any:
    """Run the module on one image of zeros and return its output.

    Args:
        module: The network.
        shape: [C, H, W] of the image.

    Raises:
        Refused: The module raises an exception, which the message repeats.
    """
    import torch

    try:
        return _run_on_zeros(module, shape, next((p.dtype for p in module.parameters()), torch.float32))
    except Exception as error:  # of any network
        raise Refused(
            f"this network does not take one image of {'x'.join(map(str, shape))}: {describe_exception(error)}.",
            hint=f"If its images are of another size: --set image_size=224x224. If it takes something else: {ELSE}",
            code="network.call",
        ) from error


@contextmanager
def norms_run(module: nn.Module) -> Iterator[list[str]]:
    """Record the names of the BatchNorms that run within the context, one entry per call."""
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
    """Convert the module to float64, in place, and check that it runs.

    Args:
        module: The network.
        shape: [C, H, W] of its images.

    Raises:
        Refused: The module does not run in float64, e.g. since its code creates float32 tensors.
    """
    import torch

    module = module.double()
    try:
        _run_on_zeros(module, shape, torch.float64)
    except Exception as error:  # of any network that took an image before
        raise Refused(
            f"this network computes in float32 only, so it cannot be verified in float64: {describe_exception(error)}.",
            hint="Export it yourself and fold the ONNX model, which is evaluated in float64: repaconv fold model.onnx.",
            code="network.float64",
        ) from error
    return module


def _run_on_zeros(module: nn.Module, shape: tuple[int, int, int], dtype: torch.dtype) -> Any:
    """Run the module on one image of zeros of this dtype."""
    import torch

    with torch.inference_mode():
        return module(torch.zeros(1, *shape, dtype=dtype))


def outputs_of(built: Built, found: Any) -> tuple[str, ...]:
    """Name the outputs of a network.

    A dict of outputs keeps its own names. A single output is called ``logits`` for a classifier, ``output`` where that
    is unknown and its shape is [images, numbers], else ``features``. Several are called ``output_0``, ``output_1``, ...

    Args:
        built: The network.
        found: What it returned.

    Raises:
        Refused: The network returns something that is no tensor.
    """
    from torch import Tensor
    from torch.utils._pytree import tree_leaves

    named = _outputs_by_name(found)
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
    """The number of columns of each floating-point output of shape [images, numbers], by name."""
    from torch import Tensor
    from torch.utils._pytree import tree_leaves

    leaves = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
    pairs = zip(names, leaves, strict=False)
    return {name: int(leaf.shape[1]) for name, leaf in pairs if leaf.ndim == 2 and leaf.is_floating_point()}


def _outputs_by_name(found: Any) -> dict[str, Any]:
    """The values of a returned dict by name, nested ones with a number appended; empty if it is no dict."""
    from torch.utils._pytree import tree_leaves

    several = {str(name): tree_leaves(value) for name, value in found.items()} if isinstance(found, Mapping) else {}
    return {
        f"{name}_{number}" if len(leaves) > 1 else name: leaf
        for name, leaves in several.items()
        for number, leaf in enumerate(leaves)
    }


def head_of(built: Built, found: Any) -> int | None:
    """The number of classes; 0 for none, None where unknown.

    An output counts as class scores if it is called ``logits`` or is the only output of a timm or torchvision network.
    """
    logits = found.get("logits") if isinstance(found, Mapping) else found
    by_name = (built.versions and built.input_name == "input") or isinstance(found, Mapping)
    if not by_name or getattr(logits, "ndim", 0) != 2 or built.classes == 0:
        return built.classes
    return int(logits.shape[1])  # type: ignore[union-attr]


def differs(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two runs on the same inputs gave different outputs."""
    return any(not np.array_equal(one[name], other[name], equal_nan=True) for name in one)
