"""Least squares from normal equations that are summed up batch by batch, in float64."""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
from torch import Tensor

RIDGE = 1e-3
RIDGES = (RIDGE, 1e-5)
"""Of the features' mean square: the usual one, and that of many images. Which is better, the images say that choose."""
MANY = 100
"""Rows an unknown, from which on the other is tried."""
LARGEST = sys.float_info.max
"""The condition of what is singular."""


class Solved(NamedTuple):
    """Weights [..., f, o], and the system's condition number as solved, in the 1-norm; the largest of several."""

    weights: Tensor
    condition: float


class Normal:
    """Systems of f features and o targets, one or a batch [...] of them; the last feature is the constant 1."""

    def __init__(self) -> None:
        self.gram: Tensor | None = None
        self.cross: Tensor | None = None

    def add(self, features: Tensor, targets: Tensor) -> None:
        """Rows of features [..., r, f - 1], to which the constant is added, and targets [..., r, o]."""
        features = torch.cat([features.double(), torch.ones_like(features[..., :1], dtype=torch.float64)], -1)
        self.include(features.mT @ features, features.mT @ targets.double())

    def include(self, gram: Tensor, cross: Tensor) -> None:
        """Sums [..., f, f] and [..., f, o] over rows, made elsewhere."""
        self.gram = gram if self.gram is None else self.gram + gram
        self.cross = cross if self.cross is None else self.cross + cross

    def solve(self, prior: Tensor | None = None, ridge: float = RIDGE) -> Solved:
        """min |F W - T|^2 + lambda |W - prior|^2, the constant's weight free; lambda is ``ridge`` of mean squares.

        Args:
            prior: [..., f, o]; zero when None.
            ridge: The relative one.
        """
        assert self.gram is not None
        assert self.cross is not None
        squares = self.gram.diagonal(dim1=-2, dim2=-1)
        lam = (ridge * squares[..., :-1].mean(-1, keepdim=True)).clamp_min(torch.finfo(torch.float64).tiny)
        penalty = torch.cat([lam.expand_as(squares[..., :-1]), torch.zeros_like(squares[..., :1])], -1)
        system = self.gram + torch.diag_embed(penalty)
        right = self.cross if prior is None else self.cross + penalty.unsqueeze(-1) * prior.double()
        factor, failed = torch.linalg.cholesky_ex(system)
        if failed.any():  # singular but for rounding
            return Solved(torch.linalg.solve(system, right), LARGEST)
        columns = [matrix.abs().sum(-2).amax(-1) for matrix in (system, torch.cholesky_inverse(factor))]
        return Solved(torch.cholesky_solve(right, factor), min(float((columns[0] * columns[1]).max()), LARGEST))

    def centred(self) -> Tensor:
        """The features' Gram matrix [..., f - 1, f - 1] around their means."""
        assert self.gram is not None
        sums, count = self.gram[..., :-1, -1:], self.gram[..., -1:, -1:]
        return self.gram[..., :-1, :-1] - sums @ sums.mT / count
