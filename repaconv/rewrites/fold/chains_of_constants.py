"""constants: merge constants of any shape that are added or multiplied by one after the other.

    (x + c) + d = x + (c + d)        (x c) d = x (c d)        s (C x) = (s C) x

The linear graph merges constants along one axis of channels. Others are masks and positions: Swin V2 of transformers
adds the mask of its shifted windows twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from repaconv.graph.linear_layers import linear_of
from repaconv.graph.models_in_onnx_ir import clean
from repaconv.graph.nodes_and_constants import (
    Array,
    Writer,
    constant,
    is_constant,
    made_by,
    nodes_of,
    shape_of_constant,
)
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import rank_of, shaped_like
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir

SUMS, FACTORS = ("Add", "Sub"), ("Mul", "Div")
RANGES = {"FLOAT16": np.finfo(np.float16)}
"""Range of a data type. All other types have float32's range, because float64 graphs may be written as float32."""


class _Pair(NamedTuple):
    """Two nodes in series, each with the place of its constant, and the constant of both."""

    first: ir.Node
    second: ir.Node
    places: tuple[int, int]
    merged: Array

    @property
    def constants(self) -> tuple[ir.Value | None, ir.Value | None]:
        """The constants of the two nodes."""
        return self.first.inputs[self.places[0]], self.second.inputs[self.places[1]]

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for pairs that are merged to the same constant."""
        nodes = zip((self.first, self.second), self.places, strict=True)
        kinds = [(node.op_type, 0 if node.op_type in ("Add", "Mul") else place) for node, place in nodes]
        return *kinds, *map(id, self.constants)


def apply(model: ir.Model) -> Iterator[Change]:
    """Merge the constants of sums and products in series, where the graph then holds no more numbers; in place."""
    while pairs := _no_larger([pair for node in nodes_of(model, *SUMS, *FACTORS) if (pair := _pair(node))]):
        for pair in pairs:
            place, description = pair.second.name or "", f"{pair.first.op_type}, {pair.second.op_type}"
            new = _written(Writer(model, pair.second), pair)
            Writer(model, pair.second).replace(pair.second.outputs[0], new)
            yield Change(rewrite=CONSTANTS.name, place=place, description=f"{description} -> one constant")
        clean(model)


def _pair(second: ir.Node) -> _Pair | None:
    """The pair of a node and the one before, if both have a constant and nothing reads what is between."""
    place = next((place for place in (0, 1) if is_constant(second.inputs[place])), None)
    value = None if place is None else second.inputs[1 - place]
    sums = second.op_type in SUMS
    first = made_by(value, *(SUMS if sums else (*FACTORS, "MatMul")))
    if first is None or value is None or place is None or len(value.uses()) > 1 or value.is_graph_output():
        return None
    at = next((at for at in (0, 1) if is_constant(first.inputs[at])), None)
    if at is None or not _fits(first, _shape(first.inputs[at]), _shape(second.inputs[place])):
        return None
    given, own = constant(first.inputs[at]), constant(second.inputs[place])
    if given is None or own is None or {given.dtype.kind, own.dtype.kind} != {"f"}:
        return None
    with np.errstate(all="ignore"):  # overflow is checked by _is_in_range
        if not sums:
            merged = _factor(first, at, second, place)
        else:
            merged = None if linear_of(value) else _shift(second, place, _shift(first, at, 0.0))
    if merged is None or not _is_in_range(merged, given, own, value):
        return None
    return _Pair(first, second, (at, place), merged)


def _fits(first: ir.Node, given: tuple[int, ...], own: tuple[int, ...]) -> bool:
    """Whether the merged constant has the shape of one of the two constants."""
    if first.op_type == "MatMul":  # more axes than the product's would be lost
        return prod(own) == 1 and len(own) <= rank_of(first.outputs[0])
    return np.broadcast_shapes(given, own) in (given, own)


def _shift(node: ir.Node, place: int, before: Array | float) -> Array:
    """What a sum adds in total, if ``before`` was added already."""
    numbers = constant(node.inputs[place])
    assert numbers is not None
    if node.op_type == "Add":
        return before + numbers
    return before - numbers if place == 1 else numbers - before


def _factor(first: ir.Node, at: int, second: ir.Node, place: int) -> Array | None:
    """The product of both nodes' constants; None if the second node divides by zero or divides its constant by x."""
    given, own = constant(first.inputs[at]), constant(second.inputs[place])
    assert given is not None
    assert own is not None
    if second.op_type == "Div" and (place == 0 or not own.all()):
        return None
    if first.op_type == "Div" and at == 1:
        if not given.all():
            return None
        given = 1 / given
    own = own.reshape(()) if first.op_type == "MatMul" else own
    return given / own if second.op_type == "Div" else given * own


def _is_in_range(merged: Array, given: Array, own: Array, value: ir.Value) -> bool:
    """Whether the value's type can hold all merged numbers. A number may be infinite only if it was infinite before."""
    limits = RANGES.get(value.dtype.name if value.dtype is not None else "", np.finfo(np.float32))
    infinite, absolute = ~np.isfinite(given) | ~np.isfinite(own), np.abs(merged)
    if np.isnan(merged).any() or 0 < absolute.max(initial=0) < limits.tiny:
        return False
    return bool((infinite | (absolute <= limits.max)).all())


def _no_larger(pairs: list[_Pair]) -> list[_Pair]:
    """Pairs without a common node whose merged constants take no more memory than the constants that they replace.

    A constant of the merged constant's size then has no reader but pairs with the same merged constant.
    """
    merged: dict[object, set[ir.Node]] = defaultdict(set)
    for pair in pairs:
        merged[pair.key] |= {pair.first, pair.second}
    found: list[_Pair] = []
    taken: set[ir.Node] = set()
    for pair in pairs:
        large = [value for value in pair.constants if value is not None and _shape(value) == pair.merged.shape]
        gone = any({*value.consumers()} <= merged[pair.key] for value in large)
        if gone and not {pair.first, pair.second} & taken:
            found.append(pair)
            taken |= {pair.first, pair.second}
    return found


def _shape(value: ir.Value | None) -> tuple[int, ...]:
    return shape_of_constant(value) or ()


def _written(write: Writer, pair: _Pair) -> ir.Value:
    """Write one operator that computes the same as both nodes."""
    at, like = pair.places[0], pair.first.outputs[0]
    x, merged = pair.first.inputs[1 - at], write.constant(pair.merged, like=like)
    if pair.first.op_type in SUMS:
        nodes = zip((pair.first, pair.second), pair.places, strict=True)
        signs = [node.op_type == "Sub" and place == 0 for node, place in nodes]
        inputs, operator = ((x, merged), "Add") if signs[0] == signs[1] else ((merged, x), "Sub")
    elif pair.first.op_type == "Div" and at == 1:
        inputs, operator = (x, merged), "Mul"
    else:
        inputs, operator = ((x, merged) if at else (merged, x)), pair.first.op_type
    return shaped_like(write(operator, *inputs), pair.second.outputs[0])


CONSTANTS = Rewrite("constants", "constants in series, one of which has the shape of the result", apply)
