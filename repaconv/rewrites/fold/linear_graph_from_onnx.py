"""Build a `LinearGraph` from an ONNX graph: nodes that are linear over channels become edges along one axis."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import numpy as np

from repaconv.algebra.channel_maps import Dense, Map, Vector, diagonal, embedding, map_sum, selection
from repaconv.graph.activation_patterns import is_activation
from repaconv.graph.channel_axes import IMAGE, LAST, channel_axis, per_channel, scale_and_shift
from repaconv.graph.constants_of_dynamic_shape import broadcast_constant, slice_assignment
from repaconv.graph.index_selections import selection_of
from repaconv.graph.nodes_and_constants import attribute, constant, input_at, is_constant, shape_of_constant
from repaconv.graph.operator_facts import PRODUCTS
from repaconv.graph.symbolic_shapes import sizes
from repaconv.rewrites.fold.linear_graph import LinearGraph, Vertex
from repaconv.rewrites.fold.norm_affines import of_norm

if TYPE_CHECKING:
    import onnx_ir as ir

Edges = tuple[list[tuple["ir.Value", Map]], "Vector | None"]
"""The affine map that computes a value: the sources with the map of each, and the constant."""


def linear_graph(model: ir.Model, axis: int, excluded: Collection[ir.Node] = ()) -> LinearGraph:
    """Read the linear part of an ONNX graph.

    Args:
        model: In the form that `repaconv.graph.canonical_form` makes.
        axis: The axis of channels: `LAST`, or `IMAGE` for axis 1 of values with four or more dimensions.
        excluded: Nodes that stay as they are.
    """
    graph = LinearGraph(biased=axis == IMAGE)
    found: dict[ir.Value, Vertex] = {}
    linear: set[tuple[ir.Node, int]] = set()

    def vertex(value: ir.Value) -> Vertex:
        if value not in found:
            width = _width(value, axis)
            assert width is not None
            found[value] = graph.add(Vertex(width, value))
        return found[value]

    for node in model.graph:
        if node in excluded:
            continue
        for value in node.outputs:
            width = _width(value, axis)
            if width is None:
                continue
            edges = _edges(node, value, axis)
            if edges is not None and all(_width(source, axis) is not None for source, _ in edges[0]):
                inputs = _summed([(vertex(s), edge) for s, edge in edges[0]])
                if not inputs:
                    continue  # a sum that cancels completely stays an ONNX node
                one = Vertex(width, value, inputs=inputs, shift=edges[1])
                one.shared, one.of_norm = _is_shared(node), len(inputs) == 1 and of_norm(value)
                found[value] = graph.add(one)
                linear |= {(node, place) for place, s in enumerate(node.inputs) if s is not None}
            elif is_activation(node) and node.inputs[0] is not None and _width(node.inputs[0], axis) == width:
                after = vertex(node.inputs[0])
                found[value] = graph.add(Vertex(width, value, through=(node, after)))
                after.activations.append(found[value])
                linear.add((node, 0))
    for value, one in found.items():
        others = any((user, place) not in linear or user.graph is not model.graph for user, place in value.uses())
        one.sink = value.is_graph_output() or others
    return graph


def _is_shared(node: ir.Node) -> bool:
    """Whether other products use the node's weight matrix as well."""
    weight = node.inputs[1] if node.op_type in PRODUCTS else None
    return weight is not None and is_constant(weight) and len(list(weight.uses())) > 1


def _summed(edges: list[tuple[Vertex, Map]]) -> dict[Vertex, Map]:
    """The edges with one map per source; sources whose maps cancel are left out."""
    found: dict[Vertex, Map] = {}
    for source, edge in edges:
        found[source] = map_sum(found[source], edge) if source in found else edge
    return {source: edge for source, edge in found.items() if edge.rows.any()}


def _width(value: ir.Value, axis: int) -> int | None:
    """The number of channels of a computed floating-point value; None if it has none, or if it is dynamic."""
    place = channel_axis(value, axis)
    shape = sizes(value)
    if place is None or shape is None or value.dtype is None or not value.dtype.is_floating_point():
        return None
    size = shape[place]
    return size if isinstance(size, int) and size > 0 and not is_constant(value) else None


def _edges(node: ir.Node, value: ir.Value, axis: int) -> Edges | None:
    rule = _RULES.get(node.op_type) if node.domain == "" else None
    return rule(node, value, axis) if rule else None


# Each rule gives the edges of one operator's output along the axis of channels, or None if the node is not linear.


def _same(node: ir.Node, value: ir.Value, axis: int) -> Edges | None:
    source, width = node.inputs[0], _width(value, axis)
    if source is None or width is None or is_constant(source) or source.dtype != value.dtype:
        return None
    scale = -1.0 if node.op_type == "Neg" else 1.0
    return [(source, diagonal(np.full(width, scale)))], None


def _scaled(node: ir.Node, value: ir.Value, axis: int) -> Edges | None:
    found = scale_and_shift(node, axis, numbers=broadcast_constant if node.op_type in ("Mul", "Div") else constant)
    apart = node.op_type == "BatchNormalization" and (value.index() or channel_axis(value, axis) != 1)
    return None if found is None or apart else ([(found.x, diagonal(found.scale))], found.shift)


def _added(node: ir.Node, value: ir.Value, axis: int) -> Edges | None:
    width, signs = _width(value, axis), (1.0, -1.0 if node.op_type == "Sub" else 1.0)
    if any(is_constant(source) for source in node.inputs):
        return _scaled(node, value, axis)
    if width is None or any(source is None or sizes(source) != sizes(value) for source in node.inputs):
        return None
    terms = zip(node.inputs, signs, strict=True)
    return [(source, diagonal(np.full(width, sign))) for source, sign in terms if source is not None], None


def _matmul(node: ir.Node, value: ir.Value, axis: int) -> Edges | None:
    source, shape = node.inputs[0], shape_of_constant(node.inputs[1])
    if axis != LAST or source is None or shape is None or len(shape) != 2 or is_constant(source):
        return None
    weight = constant(node.inputs[1])
    assert weight is not None
    return [(source, Dense(weight.T))], None


def _conv(node: ir.Node, value: ir.Value, axis: int) -> Edges | None:
    source, shape = node.inputs[0], shape_of_constant(node.inputs[1])
    if axis != IMAGE or source is None or shape is None or set(shape[2:]) != {1}:
        return None
    plain = set(attribute(node, "strides", (1,))) == {1} and not any(attribute(node, "pads", (0,)))
    if not plain:
        return None
    group = int(attribute(node, "group", 1))
    given = input_at(node, 2)
    bias = constant(given)
    if given is not None and bias is None:
        return None
    weight = constant(node.inputs[1])
    assert weight is not None
    flat = weight.reshape(weight.shape[:2])
    if group == 1:
        return [(source, Dense(flat))], bias
    if group == len(weight) and weight.shape[1] == 1:
        return [(source, diagonal(flat[:, 0]))], bias
    return None


def _concat(node: ir.Node, value: ir.Value, axis: int) -> Edges | None:
    shape, place = sizes(value), channel_axis(value, axis)
    if shape is None or place is None or int(attribute(node, "axis", 0)) % len(shape) != place:
        return None
    width = _width(value, axis)
    edges: list[tuple[ir.Value, Map]] = []
    start = 0
    assert width is not None
    for source in node.inputs:
        own = _width(source, axis) if source is not None else None
        if own is None or source is None:
            return None
        edges.append((source, embedding(np.arange(start, start + own), width)))
        start += own
    return (edges, None) if start == width else None


def _select(node: ir.Node, value: ir.Value, axis: int) -> Edges | None:
    found = selection_of(value)
    if found is None or not found.keeps or found.axis != channel_axis(found.value, axis):
        return None
    width = _width(found.value, axis)
    return ([(found.value, selection(found.places, width))], None) if width is not None else None


def _where(node: ir.Node, value: ir.Value, axis: int) -> Edges | None:
    """The edges of a Where with a constant mask over channels, between two values, or between a value and constants."""
    mask = per_channel(broadcast_constant(node.inputs[0]), value, axis)
    if mask is None:
        return None
    edges: list[tuple[ir.Value, Map]] = []
    shift: Vector | None = None
    for source, chosen in ((node.inputs[1], mask), (node.inputs[2], 1 - mask)):
        numbers = constant(source)
        if numbers is not None:
            vector = per_channel(numbers, value, axis)
            if vector is None:
                return None
            shift = (0 if shift is None else shift) + np.where(chosen > 0, vector, 0.0)
        elif source is None or sizes(source) != sizes(value):
            return None
        elif chosen.any():
            edges.append((source, diagonal(chosen)))
    return (edges, shift if shift is not None and shift.any() else None) if edges else None


def _pad(node: ir.Node, value: ir.Value, axis: int) -> Edges | None:
    """The edge of a Pad that adds channels of zeros."""
    source, pads = node.inputs[0], constant(input_at(node, 1))
    shape, place = sizes(value), channel_axis(value, axis)
    filler = constant(node.inputs[2]) if input_at(node, 2) is not None else np.zeros(1)
    if source is None or pads is None or shape is None or place is None or filler is None or filler.any():
        return None
    if len(node.inputs) > 3 or attribute(node, "mode", "constant") != "constant" or pads.min() < 0:
        return None
    rank = len(shape)
    if any(pads[i] or pads[i + rank] for i in range(rank) if i != place):
        return None
    own, width = _width(source, axis), _width(value, axis)
    if own is None or width is None:
        return None
    return [(source, embedding(np.arange(own) + int(pads[place]), width))], None


def _scatter(node: ir.Node, value: ir.Value, axis: int) -> Edges | None:
    """The edges of a ScatterND that overwrites channels of one value with those of another."""
    found, width = slice_assignment(node), _width(value, axis)
    data, updates = node.inputs[0], node.inputs[2]
    if found is None or width is None or found[0] != channel_axis(value, axis) or data is None or updates is None:
        return None
    places = found[1]
    if is_constant(data) or is_constant(updates) or _width(updates, axis) != len(places):
        return None
    kept = np.ones(width)
    kept[places] = 0
    return [(data, diagonal(kept)), (updates, embedding(places, width))], None


_RULES: dict[str, Callable[[ir.Node, ir.Value, int], Edges | None]] = {
    "Identity": _same,
    "Neg": _same,
    "Add": _added,
    "Sub": _added,
    "Mul": _scaled,
    "Div": _scaled,
    "MatMul": _matmul,
    "Conv": _conv,
    "BatchNormalization": _scaled,
    "Concat": _concat,
    "Slice": _select,
    "Gather": _select,
    "Split": _select,
    "Where": _where,
    "Pad": _pad,
    "ScatterND": _scatter,
}

LINEAR = tuple(_RULES)
"""Operators that can be an edge of the linear graph. Linear operators before or after them may be merged into them."""
