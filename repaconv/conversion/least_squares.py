"""Least squares in float64 from normal equations that are accumulated batch by batch."""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
from torch import Tensor

RIDGE = 1e-3
RIDGES = (RIDGE, 1e-5)
"""Relative to the mean square of the features: the usual parameter, and one for many images. The validation images
decide."""
MANY_ROWS = 100
"""Number of rows per unknown from which the second ridge parameter is tried."""
SINGULAR_CONDITION = sys.float_info.max
"""Condition number reported for singular systems."""


class Solution(NamedTuple):
    """Weights [..., f, o] and the condition number of the solved system in the 1-norm (the largest, if there are
    several)."""

    weights: Tensor
    condition: float


class NormalEquations:
    """Normal equations with f features and o targets, for one system or a batch [...]. The last feature is the constant
    1."""

    def __init__(self) -> None:
        self.gram: Tensor | None = None
        self.cross: Tensor | None = None

    def add(self, features: Tensor, targets: Tensor) -> None:
        """Add rows of features [..., r, f - 1], to which the constant is appended, and of targets [..., r, o]."""
        features = torch.cat([features.double(), torch.ones_like(features[..., :1], dtype=torch.float64)], -1)
        self.include(features.mT @ features, features.mT @ targets.double())

    def include(self, gram: Tensor, cross: Tensor) -> None:
        """Add sums over rows that were computed elsewhere: [..., f, f] and [..., f, o]."""
        self.gram = gram if self.gram is None else self.gram + gram
        self.cross = cross if self.cross is None else self.cross + cross

    def solve(self, prior: Tensor | None = None, ridge: float = RIDGE) -> Solution:
        """Minimize |F W - T|^2 + lambda |W - prior|^2. The constant's weight is not penalized; lambda is ``ridge``
        times the
        mean square of the features.

        Args:
            prior: [..., f, o]; zero if None.
            ridge: The relative ridge parameter.
        """
        assert self.gram is not None
        assert self.cross is not None
        squares = self.gram.diagonal(dim1=-2, dim2=-1)
        lam = (ridge * squares[..., :-1].mean(-1, keepdim=True)).clamp_min(torch.finfo(torch.float64).tiny)
        penalty = torch.cat([lam.expand_as(squares[..., :-1]), torch.zeros_like(squares[..., :1])], -1)
        system = self.gram + torch.diag_embed(penalty)
        right = self.cross if prior is None else self.cross + penalty.unsqueeze(-1) * prior.double()
        factor, failed = torch.linalg.cholesky_ex(system)
        if failed.any():  # numerically singular
            return Solution(torch.linalg.solve(system, right), SINGULAR_CONDITION)
        columns = [matrix.abs().sum(-2).amax(-1) for matrix in (system, torch.cholesky_inverse(factor))]
        return Solution(
            torch.cholesky_solve(right, factor), min(float((columns[0] * columns[1]).max()), SINGULAR_CONDITION)
        )

    def centred(self) -> Tensor:
        """Return the Gram matrix [..., f - 1, f - 1] of the centered features."""
        assert self.gram is not None
        sums, count = self.gram[..., :-1, -1:], self.gram[..., -1:, -1:]
        return self.gram[..., :-1, :-1] - sums @ sums.mT / count
