"""Linear maps over channels, as a selection of channels with factors or as a matrix; composed and added in float64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]
Mask = NDArray[np.bool_]


def channel_vector(numbers: NDArray[np.float64], axis: int, width: int) -> Vector | None:
    """Return an array as one number per channel, [width], or None if it differs along another axis.

    Args:
        numbers: An array with as many axes as the value that it is broadcast to.
        axis: The axis of channels.
        width: The number of channels; the array may have one for all.
    """
    whole = np.moveaxis(numbers, axis, 0).reshape(numbers.shape[axis], -1)
    if not whole.size or (whole.shape[1] > 1 and not (whole == whole[:, :1]).all()):
        return None
    return np.broadcast_to(whole[:, 0], (width,)).astype(np.float64)


def _is_zero(a: Costed) -> bool:
    """Whether all outputs are always 0."""
    return not a.rows.any()


def _cost_of_matrix(a: Dense | UncomputedMatrix) -> int:
    """Multiply-accumulates per token."""
    return int(a.rows.sum()) * int(a.cols.sum())


@dataclass(frozen=True)
class Pick:
    """The map out[i] = scale[i] * in[index[i]], or 0 where index[i] is -1: identity, diagonal, split, concat, pad.

    Attributes:
        index: [out], int64.
        scale: [out], float64; 0 where index is -1.
        width: Number of input channels.
    """

    index: NDArray[np.int64]
    scale: Vector
    width: int

    @cached_property
    def rows(self) -> Mask:
        """Mask of the outputs that are not always 0, [out]."""
        return self.index >= 0

    @cached_property
    def cols(self) -> Mask:
        """Mask of the inputs that are read, [in]."""
        read = np.zeros(self.width, bool)
        read[self.index[self.rows]] = True
        return read

    @cached_property
    def is_identity(self) -> bool:
        """Whether it is the identity."""
        same = len(self.index) == self.width and bool((self.index == np.arange(self.width)).all())
        return same and bool((self.scale == 1).all())

    @cached_property
    def is_free(self) -> bool:
        """Whether it costs nothing: an unscaled slice, or a negation that becomes a subtraction."""
        return self.is_range or (self.is_diagonal and bool((self.scale == -1).all()))

    @cached_property
    def is_diagonal(self) -> bool:
        """Whether every channel keeps its index."""
        return len(self.index) == self.width and bool((self.index == np.arange(self.width)).all())

    @cached_property
    def keeps_places(self) -> bool:
        """Whether every channel that is not always 0 keeps its index."""
        places = np.flatnonzero(self.rows)
        return len(self.index) == self.width and bool((self.index[places] == places).all())

    @cached_property
    def is_range(self) -> bool:
        """Whether it is an unscaled slice of consecutive channels."""
        return bool((self.scale == 1).all()) and bool((np.diff(self.index) == 1).all()) and bool(self.rows.all())

    is_zero = cached_property(_is_zero)

    @cached_property
    def cost(self) -> int:
        """Multiply-accumulates per token; a slice is free."""
        return 0 if self.is_free else int(self.rows.sum())

    def dense(self) -> Matrix:
        """Return the matrix, [out, in]."""
        matrix = np.zeros((len(self.index), self.width))
        places = np.flatnonzero(self.rows)
        matrix[places, self.index[places]] = self.scale[places]
        return matrix


@dataclass(frozen=True)
class Dense:
    """The map out = matrix in; matrix is [out, in]."""

    matrix: Matrix

    @property
    def width(self) -> int:
        """Number of input channels."""
        return int(self.matrix.shape[1])

    @cached_property
    def rows(self) -> Mask:
        """Mask of the outputs that are not always 0, [out]."""
        return np.asarray(self.matrix.any(1))

    @cached_property
    def cols(self) -> Mask:
        """Mask of the inputs that are read, [in]."""
        return np.asarray(self.matrix.any(0))

    is_zero = cached_property(_is_zero)
    cost = cached_property(_cost_of_matrix)

    def dense(self) -> Matrix:
        """Return the matrix, [out, in]."""
        return self.matrix


Map = Pick | Dense


def identity(width: int) -> Pick:
    """Return the identity over ``width`` channels."""
    return diagonal(np.ones(width))


def diagonal(scale: Vector) -> Pick:
    """Return the map with one factor per channel."""
    index = np.arange(len(scale))
    return Pick(np.where(scale != 0, index, -1), np.asarray(scale, np.float64), len(scale))


def selection(places: NDArray[np.int64], width: int) -> Pick:
    """Return the map from [width] channels that selects these, in this order: [len(places)]."""
    return Pick(np.asarray(places, np.int64), np.ones(len(places)), width)


def embedding(places: NDArray[np.int64], out: int) -> Pick:
    """Return the map of channel i to index places[i]; other outputs are 0."""
    index = np.full(out, -1)
    index[places] = np.arange(len(places))
    return Pick(index, (index >= 0).astype(np.float64), len(places))


def composition(second: Map, first: Map) -> Map:
    """Return the composition second(first(x))."""
    if isinstance(second, Pick):
        kept = second.rows
        if second.is_diagonal and isinstance(first, Dense):  # of large matrices, gathering takes most of the time
            return first if second.is_identity else Dense(first.matrix * second.scale[:, None])
        if isinstance(first, Pick):
            index = np.where(kept, first.index[second.index], -1)
            return Pick(index, np.where(index >= 0, second.scale * first.scale[second.index], 0.0), first.width)
        return Dense(np.where(kept[:, None], first.matrix[second.index] * second.scale[:, None], 0.0))
    if isinstance(first, Dense):
        return Dense(second.matrix @ first.matrix)
    if first.is_diagonal:
        return second if first.is_identity else Dense(second.matrix * first.scale)
    matrix = np.zeros((len(second.matrix), first.width))
    places = np.flatnonzero(first.rows)
    index, columns = first.index[places], second.matrix[:, places] * first.scale[places]
    if len(np.unique(index)) == len(index):
        matrix[:, index] = columns
    else:
        np.add.at(matrix.T, index, columns.T)  # slow but rare
    return Dense(matrix)


def map_sum(a: Map, b: Map) -> Map:
    """Return the sum a(x) + b(x)."""
    if isinstance(a, Pick) and isinstance(b, Pick):
        fits = (a.index == b.index) | ~a.rows | ~b.rows
        if fits.all():
            scale = a.scale + b.scale
            index = np.where(a.rows, a.index, b.index)
            return Pick(np.where(scale != 0, index, -1), scale, a.width)
    return Dense(a.dense() + b.dense())


def product_with_vector(a: Map, vector: Vector) -> Vector:
    """Return the map of a vector [in]: [out], float64."""
    if isinstance(a, Pick):
        return np.where(a.rows, a.scale * vector[a.index], 0.0)
    return a.matrix @ vector


def are_equal(a: Map, b: Map) -> bool:
    """Return whether two maps are equal up to float64 rounding."""
    if isinstance(a, Pick) and isinstance(b, Pick):
        return bool((a.index == b.index).all()) and bool(np.allclose(a.scale, b.scale, rtol=1e-14, atol=0))
    if type(a) is not type(b) or a.dense().shape != b.dense().shape:
        return False
    if (np.abs(a.dense()[:1] - b.dense()[:1]) > 1e-14 * np.abs(a.dense()[:1]).max(initial=0.0)).any():
        return False  # the first row alone tells most apart, and takes no time
    size = np.abs(a.dense())
    magnitude = np.minimum(size.max(0, keepdims=True, initial=0.0), size.max(1, keepdims=True, initial=0.0))
    return bool((np.abs(a.dense() - b.dense()) <= 1e-14 * magnitude).all())  # relative to row and column


@dataclass(frozen=True)
class UncomputedMatrix:
    """A matrix that was not computed, of which only the cost is known.

    Attributes:
        rows: Mask of the outputs that are not always 0.
        cols: Mask of the inputs that are read.
    """

    rows: Mask
    cols: Mask

    is_zero = cached_property(_is_zero)
    cost = cached_property(_cost_of_matrix)


Costed = Map | UncomputedMatrix
"""Anything whose cost is known."""


def composition_to_cost(second: Map, first: Map) -> Costed:
    """Return second(first(x)), computed only where that is cheap."""
    if isinstance(second, Pick) and isinstance(first, Pick):
        return composition(second, first)
    if isinstance(second, Pick):
        return UncomputedMatrix(second.rows & first.rows[second.index], first.cols)
    if isinstance(first, Pick):
        cols = np.zeros(first.width, bool)
        places = np.flatnonzero(first.rows & second.cols)
        cols[first.index[places]] = True
        return UncomputedMatrix(second.rows, cols)
    return UncomputedMatrix(second.rows, first.cols)


def sum_to_cost(a: Costed, b: Costed) -> Costed:
    """Return a(x) + b(x), computed only where that is cheap."""
    if isinstance(a, Pick) and isinstance(b, Pick):
        return map_sum(a, b)
    return UncomputedMatrix(a.rows | b.rows, a.cols | b.cols)
