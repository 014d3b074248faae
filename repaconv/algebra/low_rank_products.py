"""The algebra of products of two matrices that their rank makes smaller, in float64.

Heads' scores and values are such products, one a head: what they cost follows from their rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Product = tuple[Array, Array]
"""left [m, r], right [r, n]."""


def rank(left: Array, right: Array) -> int:
    """Of left [m, r] right [r, n]: at least 1, at most r. Singular values that are zero to float64's rounding are 0."""
    (_, r1), (_, r2) = np.linalg.qr(left), np.linalg.qr(right.T)
    s = np.linalg.svd(r1 @ r2.T, compute_uv=False)
    exact = max(left.shape[0], right.shape[1]) * np.finfo(np.float64).eps
    return max(int((s > s.max() * exact).sum()), 1)


def thin(left: Array, right: Array) -> Product:
    """left [m, r] right [r, n] as a product of the same value over its `rank`, where that is below r."""
    kept = rank(left, right)
    if kept >= left.shape[1]:
        return left, right
    (q1, r1), (q2, r2) = np.linalg.qr(left), np.linalg.qr(right.T)
    u, s, vt = np.linalg.svd(r1 @ r2.T)
    root = np.sqrt(s[:kept])
    return q1 @ u[:, :kept] * root, root[:, None] * (vt[:kept] @ q2.T)


def cheaper_than_matrices(rank: int, width: int, tokens: int) -> bool:
    """Two products over ``rank`` channels against one d x d matrix: 2 N d r + N^2 r against N d^2 + N^2 d."""
    return rank * (2 * width + tokens) < width * (width + tokens)


def common_rank(heads: Sequence[Product], tokens: int) -> int | None:
    """The rank over which all heads can stand side by side; None where a whole matrix for each is cheaper."""
    most = max(rank(left, right) for left, right in heads)
    return most if cheaper_than_matrices(most, heads[0][1].shape[1], tokens) else None


def side_by_side(heads: Sequence[Product], tokens: int) -> tuple[list[Array], list[Array] | None]:
    """The heads over their common rank, filled up with zeros: every left, every right.

    Or, where that is cheaper for so many tokens, every product whole, and None.
    """
    width = common_rank(heads, tokens)
    if width is None:
        return [left @ right for left, right in heads], None
    thinned = [thin(left, right) for left, right in heads]
    return (
        [np.pad(left, ((0, 0), (0, width - left.shape[1]))) for left, _ in thinned],
        [np.pad(right, ((0, width - right.shape[0]), (0, 0))) for _, right in thinned],
    )
