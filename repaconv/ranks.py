"""The algebra of products of two matrices that their rank makes smaller, in float64."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def thin(left: Array, right: Array, rounding: float = 0.0) -> tuple[Array, Array]:
    """left [m, r] right [r, n] as a product of the same value over its rank, where that is below r.

    Singular values that are zero to float64's rounding go, or to twice that of the numbers which they came from.
    """
    (q1, r1), (q2, r2) = np.linalg.qr(left), np.linalg.qr(right.T)
    u, s, vt = np.linalg.svd(r1 @ r2.T)
    exact = max(left.shape[0], right.shape[1]) * np.finfo(np.float64).eps
    rank = max(int((s > s.max() * max(exact, 2 * rounding)).sum()), 1)
    if rank >= left.shape[1]:
        return left, right
    root = np.sqrt(s[:rank])
    return q1 @ u[:, :rank] * root, root[:, None] * (vt[:rank] @ q2.T)
