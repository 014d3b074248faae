"""Low-rank products: what `thin` keeps, and when one matrix per head is cheaper."""

from __future__ import annotations

import numpy as np

from repaconv.algebra.low_rank_products import cheaper_than_matrices, rank, side_by_side, thin

RANDOM = np.random.default_rng(0)
LEFT, RIGHT = RANDOM.standard_normal((25, 6)), RANDOM.standard_normal((6, 24))


def test_thin_keeps_the_product():
    assert thin(LEFT, RIGHT) == (LEFT, RIGHT)
    left, right = thin(np.concatenate([LEFT, LEFT], 1), np.concatenate([RIGHT, -0.5 * RIGHT]))
    assert left.shape == (25, 6)
    np.testing.assert_allclose(left @ right, 0.5 * LEFT @ RIGHT, rtol=1e-12, atol=1e-13)
    assert thin(0 * LEFT, RIGHT)[0].shape == (25, 1)


def test_float64_rounding_is_no_rank():
    assert rank(np.eye(12), np.concatenate([RIGHT, RIGHT])) == 6
    assert rank(np.eye(12), np.concatenate([RIGHT, RIGHT.astype(np.float32)])) == 12


def test_heads_stand_side_by_side_over_their_common_rank_where_that_is_cheaper():
    # 128.6 = d (d + N) / (2 d + N) at d = 192, N = 197
    assert cheaper_than_matrices(128, 192, 197)
    assert not cheaper_than_matrices(129, 192, 197)
    heads = [(LEFT, RIGHT), (np.concatenate([LEFT[:, :2]] * 2, 1), np.concatenate([RIGHT[:2]] * 2))]
    lefts, rights = side_by_side(heads, tokens=9)
    assert rights is not None
    assert [(left.shape, right.shape) for left, right in zip(lefts, rights, strict=True)] == [((25, 6), (6, 24))] * 2
    for (left, right), one, other in zip(heads, lefts, rights, strict=True):
        np.testing.assert_allclose(one @ other, left @ right, rtol=1e-12, atol=1e-13)
    square = [(RANDOM.standard_normal((24, 20)), RANDOM.standard_normal((20, 24)))]
    whole, none = side_by_side(square, tokens=9)
    assert none is None
    assert (whole[0] == square[0][0] @ square[0][1]).all()
