"""A torch module as something to run: numpy images in, numpy output out, in pieces that fit in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor, nn

IMAGES_AT_ONCE = 8


def run_module(
    module: nn.Module, tensors: Mapping[str, Tensor], images: NDArray[np.float32], *, double: bool
) -> NDArray[np.floating]:
    """Load the weights strictly, run in eval mode in float64 or float32.

    Args:
        module: Built on any device, meta included; its own weights are replaced.
        tensors: Its whole state dict.
        images: [N, C, H, W].

    Returns:
        [N, ...] in the precision asked for.
    """
    import torch

    dtype = torch.float64 if double else torch.float32
    weights = {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors.items()}
    module.load_state_dict(weights, strict=True, assign=True)
    module = module.to(dtype).eval()
    with torch.inference_mode():
        pieces = [module(torch.from_numpy(piece).to(dtype)) for piece in _pieces(images)]
        return torch.cat(pieces).numpy()


def _pieces(images: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    return [images[start : start + IMAGES_AT_ONCE] for start in range(0, len(images), IMAGES_AT_ONCE)]
