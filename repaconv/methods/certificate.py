"""The float64 difference that a fold makes, block by block, for the fold certificate."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def loaded(module: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """The module in float64 and eval mode with these weights, strictly."""
    module = module.double().eval()
    module.load_state_dict(dict(tensors), strict=True)
    return module


def max_rel_error(candidate: Tensor, reference: Tensor) -> float:
    """max|candidate - reference| / max|reference|; the plain difference where the reference is zero."""
    difference = float((candidate - reference).abs().max()) if reference.numel() else 0.0
    return difference / (float(reference.abs().max()) or 1.0) if reference.numel() else 0.0


@torch.no_grad()
def relative_difference(training: nn.Module, folded: nn.Module, shape: tuple[int, ...]) -> float:
    """`max_rel_error` of two float64 modules on one seeded standard normal input of this shape."""
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return max_rel_error(folded(x), training(x))
