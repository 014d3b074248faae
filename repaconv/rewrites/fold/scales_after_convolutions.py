"""Absorb a scale and shift into the convolutions before it, also past operators with which they commute.

    s (w * x + b) + t = (s w) * x + (s b + t)
    s (x + y) + t     = (s x + t) + s y
    s max(x) + t      = max(s x + t), if s > 0

Between the convolutions and a BatchNorm may lie sums, concatenations, crops, means, maxima, upsampling, and views such
as a shuffle of channels, if nothing else reads what is between. The shift goes into one term of a sum. Only a scale
passes a border of zeros, or a mean that counts one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from repaconv.algebra.convolution_kernels import per_output_channel
from repaconv.graph.channel_axes import ScaleAndShift, affine_of
from repaconv.graph.index_selections import axes_of, selection_of
from repaconv.graph.nodes_and_constants import (
    Array,
    Writer,
    attribute,
    constant,
    input_at,
    is_constant,
    is_read,
    is_read_once,
    made_by,
)
from repaconv.graph.operator_facts import POOLS, SELECTIONS, VIEWS
from repaconv.graph.symbolic_shapes import as_numbers, rank_of, shaped_like, sizes
from repaconv.graph.view_chains import view_of_chain
from repaconv.results import Change
from repaconv.rewrites.fold.kernels_from_onnx import counts_padding, resizes_pixels_only

if TYPE_CHECKING:
    import onnx_ir as ir


class _Layer(NamedTuple):
    """A convolution with its weight and bias, and the scale and shift, both [C], of the channels that it computes."""

    node: ir.Node
    weight: Array
    bias: Array | None
    scale: Array
    shift: Array | None

    def followed_by(self, other: _Layer) -> _Layer:
        """Return the layer with both maps, where parts of its channels come to the same value in two ways."""
        shift = self.shift if self.shift is None else self.shift * other.scale
        if other.shift is not None:
            shift = other.shift if shift is None else shift + other.shift
        return self._replace(scale=self.scale * other.scale, shift=shift)


_Sources = list[tuple["ir.Value | None", "ScaleAndShift | None"]]
"""Inputs of a node, each with the map that acts on it as another does on the node's output; None if there is none."""


def absorb_scales_and_shifts(model: ir.Model, rewrite: str) -> Iterator[Change]:
    """Absorb each scale and shift that comes after nothing but convolutions with constant weights; in place."""
    for node in tuple(model.graph):
        if not any(made_by(value, *_LAYERS, *_RULES, *SELECTIONS) for value in node.inputs):
            continue
        found = affine_of(node)
        layers = _layers_before(*found) if found is not None else []
        if found is None or not layers or any(map(is_read, node.outputs[1:])):
            continue
        for layer in layers:
            x = _scaled(model, layer, found[0])
            description = f"{node.op_type} -> {layer.node.op_type} {list(layer.weight.shape)}"
            yield Change(rewrite=rewrite, place=layer.node.name or "", description=description)
        Writer(model, node).replace(node.outputs[0], x)
        model.graph.remove(node, safe=True)


def readers_after(node: ir.Node) -> tuple[list[ir.Node], bool] | None:
    """The convolutions after a scale and shift, and whether other operators are between.

    The operators between commute with the scale and shift: pools, crops and the like, and products with other values if
    there is no shift. None if anything else reads one of the values.
    """
    found = affine_of(node)
    todo, between = [node.outputs[0]], set()
    convolutions: dict[ir.Node, None] = {}
    while todo and found is not None:
        value = todo.pop()
        if value.is_graph_output() or not value.uses():
            return None
        for reader, place in value.uses():
            if reader.graph is not node.graph or reader.domain:
                return None
            if reader.op_type == "Conv" and place == 0:
                convolutions[reader] = None
            elif reader in between or not _commutes(reader, place, found[1]):
                return None  # a product of two scaled values is scaled twice
            else:
                between.add(reader)
                todo.append(reader.outputs[0])
    return None if found is None else (list(convolutions), bool(between))


def _commutes(reader: ir.Node, place: int, affine: ScaleAndShift) -> bool:
    """Whether a scale and shift of one input of a node could be applied to its output."""
    shapes = [sizes(reader.inputs[place]), sizes(reader.outputs[0])]
    if any(shape is None for shape in shapes) or len(reader.outputs) > 1:
        return False
    before, after = (shape for shape in shapes if shape is not None)
    if len(before) != len(after) or before[1:2] != after[1:2]:
        return False
    if reader.op_type == "Mul":
        return affine.shift is None
    return reader.op_type in _COMMUTING and place == 0 and bool(_RULES[reader.op_type](reader, affine))


def _layers_before(value: ir.Value, affine: ScaleAndShift) -> list[_Layer]:
    """The convolutions that can absorb a map of a value between them; empty if something else computes the value."""
    found: dict[ir.Node, _Layer] = {}
    todo: _Sources = [(value, affine)]
    while todo:
        x, moved = todo.pop()
        if x is None or moved is None or not is_read_once(x):
            return []
        x, moved = _before_selection(x, moved)
        node = x.producer()
        if node is None or node.domain:
            return []
        if any(is_read(other) for other in node.outputs if other is not x):
            return []
        layer = _layer(node, moved)
        if layer is not None:
            found[node] = layer.followed_by(found[node]) if node in found else layer
            continue
        known = all(sizes(each) is not None for each in (x, *node.inputs) if each is not None)
        rule = _RULES.get(node.op_type) if known else None
        sources = rule(node, moved) if rule is not None else []
        if not sources:
            return []
        todo += sources
    return list(found.values())[::-1]


def _before_selection(x: ir.Value, affine: ScaleAndShift) -> tuple[ir.Value, ScaleAndShift]:
    """The value of which ``x`` is some channels, if no other reader has these, and the map that keeps its others.

    If ``x`` is anything else, it is returned with its own map.
    """
    chosen = selection_of(x)
    shape = sizes(chosen.value) if chosen is not None else None
    if chosen is None or shape is None or chosen.axis != 1 or not chosen.keeps or not isinstance(shape[1], int):
        return x, affine
    if chosen.value.is_graph_output() or not _are_apart(chosen.value):
        return x, affine

    def spread(numbers: Array, fill: float) -> Array:
        whole = np.full((len(numbers), shape[1], *numbers.shape[2:]), fill, numbers.dtype)
        whole[:, chosen.places] = numbers
        return whole

    shift = None if affine.shift is None else spread(affine.shift, 0)
    return chosen.value, ScaleAndShift(spread(affine.scale, 1), shift)


def _are_apart(value: ir.Value) -> bool:
    """Whether all that reads a value are selections of different channels."""
    readers = dict.fromkeys(reader for reader, _ in value.uses())
    if len(readers) == 1 and next(iter(readers)).op_type == "Split":
        return True
    found = [selection_of(out) for reader in readers for out in reader.outputs if is_read(out)]
    parts = [part.places for part in found if part is not None and (part.value, part.axis) == (value, 1)]
    taken = np.concatenate(parts)
    return len(parts) == len(found) and len(np.unique(taken)) == len(taken)


def _layer(node: ir.Node, affine: ScaleAndShift) -> _Layer | None:
    """A convolution with constants that can absorb the map; None for other nodes."""
    weight = constant(node.inputs[1]) if node.op_type in _LAYERS else None
    given = input_at(node, 2)
    bias = constant(given)
    if weight is None or (given is not None and bias is None):
        return None
    width = len(weight) if node.op_type == "Conv" else weight.shape[1] * int(attribute(node, "group", 1))
    if any(part.size != part.shape[1] for part in affine if part is not None):
        return None  # another constant for every pixel
    scale, shift = (None if part is None else np.broadcast_to(part.reshape(-1), width) for part in affine)
    assert scale is not None
    return _Layer(node, weight, bias, scale, shift)


def _scaled(model: ir.Model, layer: _Layer, last: ir.Value) -> ir.Value:
    """Write the convolution with its scale and shift; the last value of all, which may be the convolution's own."""
    node, weight, bias, scale, shift = layer
    old = node.outputs[0]
    write = Writer(model, node)
    groups = int(attribute(node, "group", 1)) if node.op_type == "ConvTranspose" else 0
    parts = [write.constant(weight * per_output_channel(weight, scale, groups))]
    if bias is not None or shift is not None:
        total = (0 if bias is None else bias * scale) + (0 if shift is None else shift)
        parts.append(write.constant(np.asarray(total)))
    new = shaped_like(write.copy(node, node.inputs[0], *parts), old)
    write.replace(old, new)
    model.graph.remove(node, safe=True)
    return new if last is old else last


# --- What lies between: for each operator, the maps of its inputs that do what a map of its output does.


def _sum(node: ir.Node, affine: ScaleAndShift) -> _Sources:
    shape = sizes(node.outputs[0])
    if any(value is None or is_constant(value) or sizes(value) != shape for value in node.inputs):
        return []
    return [(x, affine if place == 0 else ScaleAndShift(affine.scale, None)) for place, x in enumerate(node.inputs)]


def _concat(node: ir.Node, affine: ScaleAndShift) -> _Sources:
    axis = int(attribute(node, "axis", 0)) % rank_of(node.outputs[0])
    lengths = as_numbers((sizes(value) or ())[axis] for value in node.inputs)
    if any(x is None or is_constant(x) for x in node.inputs):
        return []

    def part(place: int, numbers: Array) -> Array | None:
        if numbers.shape[axis] == 1:
            return numbers
        return None if lengths is None else np.split(numbers, np.cumsum(lengths)[:-1], axis)[place]

    return [(x, affine.moved(partial(part, place))) for place, x in enumerate(node.inputs)]


def _pooled(node: ir.Node, affine: ScaleAndShift) -> _Sources:
    if affine.shift is not None and counts_padding(node):
        return []
    fits = bool((affine.scale > 0).all()) or not node.op_type.endswith("MaxPool")
    return _along_others(node, affine, range(2, affine.scale.ndim)) if fits else []


def _resized(node: ir.Node, affine: ScaleAndShift) -> _Sources:
    return _along_others(node, affine, range(2, affine.scale.ndim)) if resizes_pixels_only(node) else []


def _reduced(node: ir.Node, affine: ScaleAndShift) -> _Sources:
    axes = axes_of(node, rank_of(node.inputs[0]))
    if axes is None or (node.op_type == "ReduceMax" and not (affine.scale > 0).all()):
        return []
    if attribute(node, "keepdims", 1):
        return _along_others(node, affine, axes)
    return [(node.inputs[0], affine.moved(lambda numbers: np.expand_dims(numbers, axes)))]


def _sliced(node: ir.Node, affine: ScaleAndShift) -> _Sources:
    starts, given = sizes(node.inputs[1]) if len(node.inputs) > 1 else None, node.inputs[3:4]
    axes = range(starts[0]) if not given and starts and isinstance(starts[0], int) else constant(*given or [None])
    return [] if axes is None else _along_others(node, affine, axes)


def _padded(node: ir.Node, affine: ScaleAndShift) -> _Sources:
    pads = constant(node.inputs[1]) if len(node.inputs) == 2 else None  # without a number and without axes
    copies = attribute(node, "mode", "constant") in ("edge", "reflect", "wrap")
    if pads is None or not (copies or affine.shift is None):
        return []
    return _along_others(node, affine, np.flatnonzero(pads.reshape(2, -1).any(0)))


def _along_others(node: ir.Node, affine: ScaleAndShift, axes: Iterable[int]) -> _Sources:
    """The same map of the first input, for an operator that acts along axes along which the map is the same."""
    rank = affine.scale.ndim
    alike = all(part.shape[int(axis) % rank] == 1 for part in affine if part is not None for axis in axes)
    return [(node.inputs[0], affine)] if alike else []


def _viewed(node: ir.Node, affine: ScaleAndShift) -> _Sources:
    x = node.inputs[0]
    view = view_of_chain([node.outputs[0], x]) if x is not None and sizes(x) is not None else None
    return [] if view is None else [(x, affine.moved(view.constant_before))]


def _depth_to_space(node: ir.Node, affine: ScaleAndShift) -> _Sources:
    count = int(attribute(node, "blocksize", 1)) ** 2
    is_adjacent = attribute(node, "mode", "DCR") == "CRD"  # the pixels of a channel come from adjacent channels

    def before(numbers: Array) -> Array:
        if numbers.shape[1] == 1:
            return numbers
        return np.repeat(numbers, count, 1) if is_adjacent else np.tile(numbers, (1, count, 1, 1))

    found = _along_others(node, affine, (2, 3))
    return [(x, affine.moved(before)) for x, _ in found]


_RULES: dict[str, Callable[[ir.Node, ScaleAndShift], _Sources]] = {
    **dict.fromkeys(("Add", "Sub", "Sum"), _sum),
    "Concat": _concat,
    **dict.fromkeys(POOLS, _pooled),
    **dict.fromkeys(("ReduceMean", "ReduceMax"), _reduced),
    "Resize": _resized,
    "Slice": _sliced,
    "Pad": _padded,
    "DepthToSpace": _depth_to_space,
    **dict.fromkeys(VIEWS, _viewed),
}
_COMMUTING = (*POOLS, "ReduceMean", "Resize", "Slice", "Pad")
"""Operators with one image as input and one as output, which may have the same channels."""
_LAYERS = ("Conv", "ConvTranspose")
