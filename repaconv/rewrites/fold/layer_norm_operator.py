"""layer-norm: write a LayerNorm that an exporter wrote as means, differences, products and a root as one operator.

    m = mean(x),  r = 1 / sqrt(mean((x - m)^2) + eps)
    (x - m) r g + b  =  x (r g) + (b - m (r g))

PyTorch writes the first formula before opset 17, Keras and tf2onnx the second one, flax a variance mean(x^2) - m^2. In
the second one g is in the way of the linear layer after it, and every operator acts on all tokens. ONNX Runtime fuses
the first one only.

A value is read as a sum of terms c u r^n, where u is x, m or 1, and c has a number per channel. It is a norm if the
terms are g x r, -g m r and b.

The operator acts on the last axis. For the channels of an image (ConvNeXt of Keras by tf2onnx), a Transpose before and
one after it take less time than the formula, and fold with others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from repaconv.graph.index_selections import axes_of
from repaconv.graph.model_rewriting import clean
from repaconv.graph.nodes_and_constants import (
    Array,
    Writer,
    attribute,
    constant,
    is_constant,
    made_by,
    nodes_of,
    only_reader,
    scalar,
)
from repaconv.graph.operator_facts import ARITHMETIC
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import rank_of, shaped_like, sizes
from repaconv.graph.tensor_views import transposed
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir

DEPTH = 8
"""Operators of which one reads another that are looked through at most; Keras has five after the root."""
_Terms = dict[tuple[str, int], Array]
"""The numbers of every term by u and the power of r; [C], or [1] if they are the same for all channels."""


def apply(model: ir.Model) -> Iterator[Change]:
    """Write LayerNormalization wherever other operators compute it; in place."""
    for node in nodes_of(model, "Sqrt"):
        spread = _spread(node)
        if spread is None:
            continue
        for value, scale, shift in _Norms(spread).found():
            last = value.producer()
            assert last is not None
            write = Writer(model, last)
            parts = [np.broadcast_to(part, spread.width) for part in (scale, shift) if part is not None]
            x, order = spread.x, [axis for axis in range(rank_of(spread.x)) if axis != spread.axis] + [spread.axis]
            x = transposed(write, x, order)
            new = write("LayerNormalization", x, *map(write.constant, parts), axis=-1, epsilon=spread.epsilon)
            new = transposed(write, shaped_like(new, x), [int(axis) for axis in np.argsort(order)])
            write.replace(value, new)
            yield Change(
                rewrite=LAYER_NORM.name, place=last.name or "", description="means, a root -> LayerNormalization"
            )
    clean(model)


# --- The root of the variance.


class _Spread(NamedTuple):
    """A root sqrt(mean((x - m)^2) + epsilon) over an axis of x, which is so wide."""

    root: ir.Value
    x: ir.Value
    axis: int
    epsilon: float
    width: int


class _Mean(NamedTuple):
    """The mean of x along an axis, or its variance."""

    x: ir.Value
    axis: int


def _spread(root: ir.Node) -> _Spread | None:
    added = made_by(root.inputs[0], "Add")
    for variance, given in zip(added.inputs, added.inputs[::-1], strict=True) if added is not None else ():
        epsilon, found = scalar(given), _of_variance(variance)
        if epsilon is None or found is None or root.outputs[0].dtype != found.x.dtype:
            continue
        width, kind = (sizes(found.x) or ())[found.axis], found.x.dtype
        if not isinstance(width, int) or kind is None or not kind.is_floating_point():
            continue
        if float(np.float32(epsilon)) == epsilon:  # an attribute is in float32
            return _Spread(root.outputs[0], *found, epsilon, width)
    return None


def _of_variance(value: ir.Value | None) -> _Mean | None:
    """What mean((x - m)^2) or mean(x^2) - m^2 is the variance of, also the larger of that and 0."""
    larger = made_by(value, "Max")
    if larger is not None and len(larger.inputs) == 2 and 0 in map(scalar, larger.inputs):
        value = larger.inputs[1 if scalar(larger.inputs[0]) == 0 else 0]
    mean = _averaged(value)
    if mean is not None:
        centered = _centered(_squared(mean.x))
        return centered if centered is not None and centered.axis == mean.axis else None
    less = made_by(value, "Sub")
    mean = _averaged(less.inputs[0]) if less is not None else None
    x = _squared(mean.x) if mean is not None else None
    if less is None or mean is None or x is None:
        return None
    found = _Mean(x, mean.axis)
    return found if _averaged(_squared(less.inputs[1])) == found else None


def _squared(value: ir.Value | None) -> ir.Value | None:
    node = made_by(value, "Mul", "Pow")
    if node is None:
        return None
    twice = node.inputs[0] is node.inputs[1] if node.op_type == "Mul" else scalar(node.inputs[1]) == 2
    return node.inputs[0] if twice and sizes(node.inputs[0]) == sizes(value) else None


def _centered(value: ir.Value | None) -> _Mean | None:
    """The mean that x - mean(x) subtracts."""
    node = made_by(value, "Sub")
    mean = _averaged(node.inputs[1]) if node is not None else None
    return mean if node is not None and mean is not None and mean.x is node.inputs[0] else None


def _averaged(value: ir.Value | None) -> _Mean | None:
    """What a value is the mean of along an axis, which is kept. tf2onnx writes a GlobalAveragePool for the last one."""
    while (view := _same(value)) is not None:
        value = view
    node = made_by(value, "ReduceMean", "GlobalAveragePool")
    rank = rank_of(node.inputs[0]) if node is not None else 0
    if node is None or rank < 2 or not attribute(node, "keepdims", 1):
        return None
    axes = [*(axes_of(node, rank) or ())] if node.op_type == "ReduceMean" else [*range(2, rank)]
    x = node.inputs[0]
    return _Mean(x, axes[0]) if x is not None and len(axes) == 1 and axes[0] else None


def _same(value: ir.Value | None) -> ir.Value | None:
    """What a Reshape to the same shape is of; tf2onnx makes one of a Transpose of a mean."""
    node = made_by(value, "Reshape", "Identity")
    return node.inputs[0] if node is not None and sizes(node.inputs[0]) == sizes(value) is not None else None


# --- The values that are a norm.


class _Norms:
    """The values that are a norm by a root of a variance."""

    def __init__(self, spread: _Spread) -> None:
        self.spread = spread
        self.known: dict[ir.Value, _Terms | None] = {spread.root: {("", -1): np.ones(1)}}

    def found(self) -> list[tuple[ir.Value, Array, Array | None]]:
        """The norms with scale and shift; empty if anything else depends on the root."""
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
        """Scale and shift of a value, if it is a norm."""
        terms = dict(self._terms(value) or {})
        scale, less, shift = terms.pop(("x", 1), None), terms.pop(("m", 1), None), terms.pop(("", 0), None)
        if scale is None or less is None or terms or sizes(value) != sizes(self.spread.x):
            return None
        return (scale, shift) if bool((scale == -less).all()) else None

    def _with_affine(self, value: ir.Value, scale: Array, shift: Array | None) -> tuple[ir.Value, Array, Array | None]:
        """A norm with the constant scale and shift that alone read it."""
        while (reader := only_reader(value)) is not None and (norm := self._norm(reader.outputs[0])) is not None:
            value, (scale, shift) = reader.outputs[0], norm
        return value, scale, shift

    def _terms(self, value: ir.Value | None, depth: int = DEPTH) -> _Terms | None:
        """The terms of a value; None if it is anything else."""
        if value is None or not depth:
            return None
        if value not in self.known:
            self.known[value] = self._computed(value, depth - 1)
        return self.known[value]

    def _computed(self, value: ir.Value, depth: int) -> _Terms | None:
        mean = _Mean(self.spread.x, self.spread.axis)
        if value is mean.x or _averaged(value) == mean:
            return {("x" if value is mean.x else "m", 0): np.ones(1)}
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
        numbers, rank = constant(value), rank_of(self.spread.x)
        if numbers is None or numbers.dtype.kind != "f" or numbers.ndim > rank:
            return None
        along = numbers.size in (1, np.array(numbers, ndmin=rank).shape[self.spread.axis])
        return {("", 0): numbers.reshape(-1)} if along and numbers.size in (1, self.spread.width) else None


def _sum(first: _Terms, second: _Terms) -> _Terms:
    keys = [*first, *(key for key in second if key not in first)]
    return {key: first.get(key, np.zeros(1)) + second.get(key, np.zeros(1)) for key in keys}


def _negative(terms: _Terms) -> _Terms:
    return {key: -numbers for key, numbers in terms.items()}


def _product(first: _Terms, second: _Terms | None) -> _Terms | None:
    """The product of terms; None if it has a product of x and m."""
    found: _Terms = {}
    for (one, power), numbers in first.items():
        for (other, more), factors in (second or {}).items():
            if one and other:
                return None
            found = _sum(found, {(one or other, power + more): numbers * factors})
    return found or None


def _inverse(terms: _Terms) -> _Terms | None:
    """1 divided by a multiple of a power of r; None for anything else."""
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

LAYER_NORM = Rewrite(
    "layer-norm",
    "a LayerNorm over one axis, if nothing else reads its root",
    apply,
    opset=17,
)
