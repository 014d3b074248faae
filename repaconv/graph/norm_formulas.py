"""Norms that a graph writes as means, differences, products and a root.

    m = mean(x),  r = 1 / sqrt(mean((x - m)^2) + eps)
    (x - m) r g + b  =  x (r g) + (b - m (r g))

PyTorch writes the first formula, Keras and tf2onnx the second one, flax a variance mean(x^2) - m^2.

A value is read as a sum of terms c u r^n, where u is x, m or 1, and c is a constant that is broadcast to x. It is a
norm if the terms are g x r, -g m r and b.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from repaconv.graph.index_selections import axes_of
from repaconv.graph.nodes_and_constants import Array, attribute, constant, is_constant, made_by, only_reader, scalar
from repaconv.graph.operator_facts import ARITHMETIC
from repaconv.graph.symbolic_shapes import rank_of, sizes

if TYPE_CHECKING:
    import onnx_ir as ir

DEPTH = 8
"""The longest chain of operators that is followed; Keras has five after the root."""
ROOTS = ("Sqrt", "Pow")
"""Operators that may be the root of a variance."""
_Terms = dict[tuple[str, int], Array]
"""The numbers of every term by u and the power of r, with as many axes as x."""


# --- The root of the variance.


class Spread(NamedTuple):
    """A root sqrt(mean((x - m)^2) + epsilon) over axes of x, or a power of it."""

    root: ir.Value
    power: int
    x: ir.Value
    axes: tuple[int, ...]
    epsilon: float

    @property
    def kept(self) -> list[int]:
        """The axes that the mean is not over."""
        return [axis for axis in range(rank_of(self.x)) if axis not in self.axes]


class _Mean(NamedTuple):
    """The mean of x along axes, or its variance."""

    x: ir.Value
    axes: tuple[int, ...]


def spread_of(node: ir.Node) -> Spread | None:
    """Return the root of a variance; None for another root, or if epsilon does not fit an attribute (float32)."""
    power = {"Sqrt": 0.5, "Pow": scalar(node.inputs[-1])}[node.op_type]
    added = made_by(node.inputs[0], "Add")
    if added is None or power not in (0.5, -0.5):
        return None
    for variance, given in zip(added.inputs, added.inputs[::-1], strict=True):
        epsilon, found = scalar(given), _of_variance(variance)
        if epsilon is None or found is None or node.outputs[0].dtype != found.x.dtype:
            continue
        kind = found.x.dtype
        if kind is not None and kind.is_floating_point() and float(np.float32(epsilon)) == epsilon:
            return Spread(node.outputs[0], int(-2 * power), *found, epsilon)
    return None


def _of_variance(value: ir.Value | None) -> _Mean | None:
    """Read a variance, mean((x - m)^2) or mean(x^2) - m^2, or the larger of that and 0; None for other values."""
    larger = made_by(value, "Max")
    if larger is not None and len(larger.inputs) == 2 and 0 in map(scalar, larger.inputs):
        value = larger.inputs[1 if scalar(larger.inputs[0]) == 0 else 0]
    mean = _averaged(value)
    if mean is not None:
        centered = _centered(_squared(mean.x))
        return centered if centered is not None and centered.axes == mean.axes else None
    less = made_by(value, "Sub")
    mean = _averaged(less.inputs[0]) if less is not None else None
    x = _squared(mean.x) if mean is not None else None
    if less is None or mean is None or x is None:
        return None
    found = _Mean(x, mean.axes)
    return found if _averaged(_squared(less.inputs[1])) == found else None


def _squared(value: ir.Value | None) -> ir.Value | None:
    node = made_by(value, "Mul", "Pow")
    if node is None:
        return None
    twice = node.inputs[0] is node.inputs[1] if node.op_type == "Mul" else scalar(node.inputs[1]) == 2
    return node.inputs[0] if twice and sizes(node.inputs[0]) == sizes(value) else None


def _centered(value: ir.Value | None) -> _Mean | None:
    """Return the mean of x - mean(x), or of mean(x) - x, which has the same square."""
    node = made_by(value, "Sub")
    for x, average in (node.inputs, node.inputs[::-1]) if node is not None else ():
        mean = _averaged(average)
        if mean is not None and mean.x is x:
            return mean
    return None


def _averaged(value: ir.Value | None) -> _Mean | None:
    """Read a mean that keeps its axes. tf2onnx writes a GlobalAveragePool for a mean over the last ones."""
    while (view := _same(value)) is not None:
        value = view
    node = made_by(value, "ReduceMean", "GlobalAveragePool")
    rank = rank_of(node.inputs[0]) if node is not None else 0
    if node is None or rank < 2 or not attribute(node, "keepdims", 1):
        return None
    axes = (axes_of(node, rank) or ()) if node.op_type == "ReduceMean" else range(2, rank)
    x = node.inputs[0]
    return _Mean(x, tuple(sorted(axes))) if x is not None and axes and 0 not in axes else None


def _same(value: ir.Value | None) -> ir.Value | None:
    """Return the input of a Reshape to the same shape; tf2onnx makes one of a Transpose of a mean."""
    node = made_by(value, "Reshape", "Identity")
    return node.inputs[0] if node is not None and sizes(node.inputs[0]) == sizes(value) is not None else None


# --- The values that are a norm.


class NormFormulas:
    """The values that are a norm by a root of a variance.

    Args:
        spread: The root.
        fits: Whether an operator can have a scale or a shift, which has as many axes as x.
    """

    def __init__(self, spread: Spread, fits: Callable[[Array], bool]) -> None:
        self.spread, self.fits = spread, fits
        self.ones = np.ones((1,) * rank_of(spread.x))
        self.known: dict[ir.Value, _Terms | None] = {spread.root: {("", spread.power): self.ones}}

    def found(self) -> list[tuple[ir.Value, Array, Array | None]]:
        """Return the norms, each with its scale and shift; none if anything else depends on the root."""
        todo, seen = [self.spread.root], {self.spread.root}
        found: dict[ir.Value, tuple[Array, Array | None]] = {}
        while todo:
            value = todo.pop()
            if value.is_graph_output():
                return []
            for node in value.consumers():
                out = node.outputs[0]
                if node.graph is not value.graph or self._terms(out) is None:
                    return []
                norm = self._norm(out)
                if norm is not None:
                    found[out] = norm
                elif out not in seen:
                    seen.add(out)
                    todo.append(out)
        return [self._with_affine(value, *norm) for value, norm in found.items()]

    def _norm(self, value: ir.Value) -> tuple[Array, Array | None] | None:
        """Return the scale and shift of a value; None if it is no norm."""
        terms = dict(self._terms(value) or {})
        scale, less, shift = terms.pop(("x", 1), None), terms.pop(("m", 1), None), terms.pop(("", 0), None)
        if scale is None or less is None or terms or sizes(value) != sizes(self.spread.x):
            return None
        if not all(part is None or self.fits(part) for part in (scale, shift)):
            return None
        return (scale, shift) if bool((scale == -less).all()) else None

    def _with_affine(self, value: ir.Value, scale: Array, shift: Array | None) -> tuple[ir.Value, Array, Array | None]:
        """Return a norm together with the constant scale and shift after it, if nothing else reads it."""
        while (reader := only_reader(value)) is not None and (norm := self._norm(reader.outputs[0])) is not None:
            value, (scale, shift) = reader.outputs[0], norm
        return value, scale, shift

    def _terms(self, value: ir.Value | None, depth: int = DEPTH) -> _Terms | None:
        """Return the terms of a value; None if it is no sum of terms."""
        if value is None or not depth:
            return None
        if value not in self.known:
            self.known[value] = self._computed(value, depth - 1)
        return self.known[value]

    def _computed(self, value: ir.Value, depth: int) -> _Terms | None:
        mean = _Mean(self.spread.x, self.spread.axes)
        if value is mean.x or _averaged(value) == mean:
            return {("x" if value is mean.x else "m", 0): self.ones}
        if (view := _same(value)) is not None:
            return self._terms(view, depth)
        if is_constant(value):
            return self._constant(value)
        node = made_by(value, *ARITHMETIC, "Neg", "Reciprocal")
        parts = [self._terms(each, depth) for each in node.inputs] if node is not None else []
        known = [part for part in parts if part is not None]
        if node is None or len(known) < len(parts):
            return None
        return _OPERATORS[node.op_type](*known)

    def _constant(self, value: ir.Value) -> _Terms | None:
        numbers, shape = constant(value), sizes(self.spread.x) or ()
        if numbers is None or numbers.dtype.kind != "f" or numbers.ndim > len(shape):
            return None
        whole = np.array(numbers, ndmin=len(shape))
        known = all(size in (1, there) for size, there in zip(whole.shape, shape, strict=True))
        return {("", 0): whole} if known else None


def _sum(first: _Terms, second: _Terms) -> _Terms:
    keys = [*first, *(key for key in second if key not in first)]
    return {key: first.get(key, np.zeros(())) + second.get(key, np.zeros(())) for key in keys}


def _negative(terms: _Terms) -> _Terms:
    return {key: -numbers for key, numbers in terms.items()}


def _product(first: _Terms, second: _Terms | None) -> _Terms | None:
    """Return the product of terms; None if x or m is multiplied by x or m."""
    found: _Terms = {}
    for (one, power), numbers in first.items():
        for (other, more), factors in (second or {}).items():
            if one and other:
                return None
            found = _sum(found, {(one or other, power + more): numbers * factors})
    return found or None


def _inverse(terms: _Terms) -> _Terms | None:
    """Return 1 divided by a multiple of a power of r; None for other terms."""
    (factor, power), numbers = next(iter(terms.items()))
    return {("", -power): 1 / numbers} if len(terms) == 1 and not factor and numbers.all() else None


_OPERATORS: dict[str, Callable[..., _Terms | None]] = {
    "Add": _sum,
    "Sub": lambda first, second: _sum(first, _negative(second)),
    "Mul": _product,
    "Div": lambda first, second: _product(first, _inverse(second)),
    "Neg": _negative,
    "Reciprocal": _inverse,
}
