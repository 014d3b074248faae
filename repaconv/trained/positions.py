"""Position embeddings for another image size, resampled the way that the model's own code does."""

from __future__ import annotations

import torch
from torch import Tensor

WAYS = ("offset", "antialias", "plain")
"""DINOv2: bicubic by the factor (g + 0.1) / M. Its register models and timm: bicubic to the size, antialiased.
``plain``: bicubic to the size."""


def resample(positions: Tensor, prefix: int, trained: tuple[int, int], asked: tuple[int, int], way: str) -> Tensor:
    """Positions [1, prefix + n, d] of a grid for another one; those of the tokens before the patches stay.

    Args:
        positions: Any float type; the result is float64, and baked into the folded model.
        prefix: Rows before the patches.
        trained, asked: Grids, (height, width) in patches.
        way: One of `WAYS`. They differ by 8% to 19%, so it must be that of the model's code.
    """
    kept, patches = positions[:, :prefix].double(), positions[:, prefix:].double()
    grid = patches.unflatten(1, trained).permute(0, 3, 1, 2)  # type: ignore[no-untyped-call]
    if way == "offset":
        factors = [(new + 0.1) / old for new, old in zip(asked, trained, strict=True)]
        grid = torch.nn.functional.interpolate(grid, scale_factor=factors, mode="bicubic", antialias=False)
    else:
        grid = torch.nn.functional.interpolate(grid, size=asked, mode="bicubic", antialias=way == "antialias")
    assert tuple(grid.shape[2:]) == asked
    return torch.cat([kept, grid.flatten(2).transpose(1, 2)], 1)
