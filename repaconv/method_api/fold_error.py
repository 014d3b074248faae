"""Measure the float64 difference between a module as trained and folded, for the fold certificate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

Loaded = tuple[nn.Module, Mapping[str, Tensor]]
"""A module on any device, and the weights to load into it."""


def loaded(module: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Load these weights into the module, strictly, and return it in float64 and eval mode.

    The module may have been built on the meta device.

    Args:
        module: The module, which is changed.
        tensors: Its whole state dict, of any floating dtype; other dtypes stay.

    Raises:
        RuntimeError: torch's, if a tensor is missing, unexpected or of another shape.
    """
    weights = {name: w.double() if w.is_floating_point() else w for name, w in tensors.items()}
    module.load_state_dict(weights, strict=True, assign=True)
    return module.double().eval()


def max_rel_error(candidate: Tensor, reference: Tensor) -> float:
    """max|candidate - reference| / max|reference| of two tensors of one shape; 0 if they are empty.

    It is the absolute difference if the reference is zero everywhere.
    """
    difference = float((candidate - reference).abs().max()) if reference.numel() else 0.0
    return difference / (float(reference.abs().max()) or 1.0) if reference.numel() else 0.0


def tensors_in(output: Any, place: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in a module's output, with its path in the output (``0.logits``).

    Tuples, lists, mappings and dataclasses are searched; plain numbers become tensors; None is left out.

    Raises:
        TypeError: If the output contains an object of another type, which cannot be compared.
    """
    if isinstance(output, Tensor):
        yield place, output.to_dense() if output.is_sparse else output
        return
    if isinstance(output, (bool, int, float)):
        yield place, torch.tensor(output)
        return
    if is_dataclass(output) and not isinstance(output, (Mapping, type)):
        output = {field.name: getattr(output, field.name) for field in fields(output)}
    if isinstance(output, (tuple, list)):
        output = dict(enumerate(output))
    if output is not None and not isinstance(output, Mapping):
        raise TypeError(f"{place or 'the output'} is a {type(output).__name__}, which cannot be compared")
    for name, value in (output or {}).items():
        yield from tensors_in(value, f"{place}.{name}" if place else str(name))


@torch.no_grad()
def relative_difference(training: Loaded, folded: Loaded, shape: tuple[int, ...]) -> float:
    """`max_rel_error` of the folded module's output, in float64 on one seeded standard normal input of this shape.

    Args:
        training: The module as trained, with its weights.
        folded: The folded module, with its weights.
        shape: Shape of the input, with the batch, e.g. (2, C, H, W).
    """
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return max_rel_error(loaded(*folded)(x), loaded(*training)(x))
