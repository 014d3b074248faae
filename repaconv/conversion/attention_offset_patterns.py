"""What an attention matrix over a grid of patches has of a convolution: by how far a key is from its query."""

from __future__ import annotations

import torch
from torch import Tensor


def by_offset(matrix: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Sums [..., 2h - 1, 2w - 1] over queries of the entries [..., n, n] at each offset of key from query, and counts.

    Offset (0, 0) is in the middle.
    """
    height, width = grid
    row, column = torch.arange(height * width) // width, torch.arange(height * width) % width
    down, right = row[None] - row[:, None] + height - 1, column[None] - column[:, None] + width - 1
    place, shape = (down * (2 * width - 1) + right).flatten(), (2 * height - 1, 2 * width - 1)
    sums = matrix.new_zeros(*matrix.shape[:-2], shape[0] * shape[1])
    counts = torch.bincount(place, minlength=shape[0] * shape[1]).to(matrix)
    return sums.index_add(-1, place, matrix.flatten(-2)).view(*sums.shape[:-1], *shape), counts.view(shape)


def window(pattern: Tensor, side: int) -> Tensor:
    """The middle [..., side, side] of a pattern [..., 2h - 1, 2w - 1]; what lies outside it is zero."""
    needed = [side - size for size in pattern.shape[-2:]]
    down, right = (max(0, -(-missing // 2)) for missing in needed)
    pattern = torch.nn.functional.pad(pattern, (right, right, down, down))
    top, left = ((size - side) // 2 for size in pattern.shape[-2:])
    return pattern[..., top : top + side, left : left + side]


def locality(matrix: Tensor, grid: tuple[int, int], side: int) -> Tensor:
    """The share [...] of all mass that lies within ``side`` x ``side`` of its query (eq. 14a)."""
    sums, _ = by_offset(matrix, grid)
    return window(sums, side).sum((-2, -1)) / sums.sum((-2, -1))


def invariance(matrix: Tensor, grid: tuple[int, int]) -> Tensor:
    """The share [...] of all squares that a matrix of offsets alone has, 1 for a convolution (eq. 14b)."""
    sums, counts = by_offset(matrix, grid)
    return (sums**2 / counts).sum((-2, -1)) / (matrix**2).sum((-2, -1))


def mean_kernel(matrix: Tensor, grid: tuple[int, int], side: int) -> Tensor:
    """The mean entry [..., side, side] at each offset: the papers' kernel of a mean attention matrix."""
    sums, counts = by_offset(matrix, grid)
    return window(sums / counts, side)
