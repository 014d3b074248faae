"""Products of two matrices that are replaced by smaller ones of the same rank, in float64.

The scores and values of attention heads are such products, one per head; their rank determines the cost.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Product = tuple[Array, Array]
"""left [m, r] and right [r, n]."""


def rank(left: Array, right: Array) -> int:
    """Return the rank of left [m, r] right [r, n]: at least 1, at most r.

    Singular values below float64's rounding error do not count.
    """
    (_, r1), (_, r2) = np.linalg.qr(left), np.linalg.qr(right.T)
    s = np.linalg.svd(r1 @ r2.T, compute_uv=False)
    exact = max(left.shape[0], right.shape[1]) * np.finfo(np.float64).eps
    return max(int((s > s.max() * exact).sum()), 1)


def thin(left: Array, right: Array) -> Product:
    """Return left [m, r] and right [r, n] with the same product and r reduced to its `rank`."""
    kept = rank(left, right)
    if kept >= left.shape[1]:
        return left, right
    (q1, r1), (q2, r2) = np.linalg.qr(left), np.linalg.qr(right.T)
    u, s, vt = np.linalg.svd(r1 @ r2.T)
    root = np.sqrt(s[:kept])
    return q1 @ u[:, :kept] * root, root[:, None] * (vt[:kept] @ q2.T)


def cheaper_than_matrices(rank: int, width: int, tokens: int) -> bool:
    """Return whether products over ``rank`` channels are cheaper than a d x d matrix.

    2 N d r + N^2 r < N d^2 + N^2 d
    """
    return rank * (2 * width + tokens) < width * (width + tokens)


def common_rank(heads: Sequence[Product], tokens: int) -> int | None:
    """Return the common rank of all heads; None if a full matrix per head is cheaper."""
    most = max(rank(left, right) for left, right in heads)
    return most if cheaper_than_matrices(most, heads[0][1].shape[1], tokens) else None


def side_by_side(heads: Sequence[Product], tokens: int) -> tuple[list[Array], list[Array] | None]:
    """Return the left [m, r] and right [r, n] factors of all heads, zero-padded to their common rank r.

    If full matrices are cheaper for this number of tokens, return every product as a matrix [m, n], and None.
    """
    width = common_rank(heads, tokens)
    if width is None:
        return [left @ right for left, right in heads], None
    thinned = [thin(left, right) for left, right in heads]
    return (
        [np.pad(left, ((0, 0), (0, width - left.shape[1]))) for left, _ in thinned],
        [np.pad(right, ((0, width - right.shape[0]), (0, 0))) for _, right in thinned],
    )
