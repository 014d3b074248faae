"""unread-channels: drop channels of images that are zero, or that nothing reads, from the layers that compute them.

    relu(W_1 * x) read by W_2:  W_1 keeps the rows whose columns in W_2 are not zero, and which are not zero themselves

Pruned networks have such channels, whose weights a tool has set to zero, and so has a convolution of whose output only
a slice is read. A channel goes on through activations, norms, pools, sums and depthwise convolutions. It is dropped
from all of them together, or from none if an operator that mixes channels in another way reads or computes one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from repaconv.graph.channel_axes import batchnorm
from repaconv.graph.index_selections import are_consecutive, axes_of, selection_of
from repaconv.graph.models_in_onnx_ir import clean
from repaconv.graph.nodes_and_constants import (
    Array,
    Writer,
    attribute,
    constant,
    input_at,
    is_constant,
    is_read,
    nodes_of,
    shape_of_constant,
)
from repaconv.graph.operator_facts import POOLS, REDUCTIONS, SELECTIONS, UNARY
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import rank_of, set_shape, sizes
from repaconv.results import Change
from repaconv.rewrites.fold.kernels_from_onnx import resizes_pixels_only, spatial_padding

if TYPE_CHECKING:
    import onnx_ir as ir

Mask = NDArray[np.bool_]

CHANNELS = 1
LAYERS = ("Conv", "ConvTranspose")
BROADCASTING = ("Add", "Sub", "Mul", "Div", "Sum", "Max", "Min")
"""Operators of several images, and of constants."""
ONE_IMAGE = (*POOLS, *REDUCTIONS, *SELECTIONS, "BatchNormalization", "Clip", "Identity", "Pad", "PRelu", "Resize")
"""Further operators that act channel by channel on their first input, under conditions."""
NOT_ZERO_AT_ZERO = ("Cos", "Exp", "HardSigmoid", "Log", "Reciprocal", "Sigmoid", "Softplus")


def apply(model: ir.Model) -> Iterator[Change]:
    """Drop channels until none is left that could be; in place."""
    while (changes := list(_Channels(model).dropped())) != []:
        yield from changes
        clean(model)


class _Channels:
    """All channels of the images of a graph: which are dropped together, which are read, and which are zero.

    Channels of different values that are dropped together have the same number in ``together``.
    """

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self.start: dict[ir.Value, int] = {}
        self.count = 0
        self.zero: dict[ir.Value, Mask] = {}
        self.pairs: list[tuple[Array, Array]] = []
        self.read: list[Array] = []
        """Channels that stay."""
        if nodes_of(model, *LAYERS):
            for node in model.graph:
                self._enter(node)

    def _enter(self, node: ir.Node) -> None:
        """Record what a node reads, which channels it keeps together, and which of its outputs' are zero."""
        known = self._enter_layer(node) or self._enter_concat(node) or self._enter_selection(node)
        if not known and not self._enter_channelwise(node):
            for value in (*node.inputs, *node.outputs):
                self._read(value)
        for value in node.outputs:
            if value.is_graph_output() or any(user.graph is not self.model.graph for user, _ in value.uses()):
                self._read(value)

    def of(self, value: ir.Value) -> Array:
        """The numbers of the channels of a value."""
        if value not in self.start:
            self.start[value] = self.count
            self.count += width_of(value) or 0
        return self.start[value] + np.arange(width_of(value) or 0)

    def _zero(self, value: ir.Value) -> Mask:
        """Which channels of a value are known to be zero."""
        return self.zero.get(value, np.zeros(width_of(value) or 0, bool))

    def _read(self, value: ir.Value | None, places: Array | None = None) -> None:
        if value is not None and width_of(value) is not None:
            self.read.append(self.of(value) if places is None else self.of(value)[places])

    def _enter_layer(self, node: ir.Node) -> bool:
        """A Conv or ConvTranspose without groups: it reads the channels of weights that are not zero."""
        found = _weight_and_bias(node) if attribute(node, "group", 1) == 1 else None
        x, out = node.inputs[0], node.outputs[0]
        if found is None or x is None or width_of(x) is None or width_of(out) is None:
            return False
        weight, bias = found  # [M, C, ...]
        used: Mask = (weight != 0).reshape(*weight.shape[:2], -1).any(2)
        used[:, self._zero(x)] = False
        self._read(x, np.flatnonzero(used.any(0)))
        self.of(out)
        self.zero[out] = ~used.any(1) & (True if bias is None else bias == 0)
        return True

    def _enter_concat(self, node: ir.Node) -> bool:
        out = node.outputs[0]
        is_along = node.op_type == "Concat" and not node.domain and width_of(out) is not None
        if not is_along or attribute(node, "axis", 0) % rank_of(out) != CHANNELS:
            return False
        parts = [value for value in node.inputs if value is not None and width_of(value) is not None]
        if len(parts) < len(node.inputs):
            return False
        self.pairs.append((self.of(out), np.concatenate([self.of(part) for part in parts])))
        self.zero[out] = np.concatenate([self._zero(part) for part in parts])
        return True

    def _enter_selection(self, node: ir.Node) -> bool:
        """A Slice, Gather or Split of channels."""
        if node.op_type not in SELECTIONS or node.domain:
            return False
        found = [selection_of(value) for value in node.outputs]
        if any(one is None or one.axis != CHANNELS or width_of(one.value) is None for one in found):
            return False
        for one, out in zip(found, node.outputs, strict=True):
            assert one is not None
            if not one.keeps:
                self._read(one.value, one.places)
            elif width_of(out) is None or len(set(one.places.tolist())) < one.places.size:
                return False
            else:
                self.pairs.append((self.of(out), self.of(one.value)[one.places]))
                self.zero[out] = self._zero(one.value)[one.places]
        return True

    def _enter_channelwise(self, node: ir.Node) -> bool:
        images = _images(node)
        if not images:
            return False
        out = node.outputs[0]
        for value in node.inputs:
            if value in images:
                self.pairs.append((self.of(out), self.of(value)))
            else:
                self._read(value)
        self.zero[out] = self._zeros_after(node, images[0])
        return True

    def _zeros_after(self, node: ir.Node, x: ir.Value) -> Mask:
        """Which channels of an output are zero."""
        zero, kind = self._zero(x), node.op_type
        none = np.zeros_like(zero)
        if kind in BROADCASTING:
            parts = [self._zeros_of_operand(node, value) for value in node.inputs if value is not None]
            if kind == "Div":
                return parts[0] & ~parts[1]
            every = np.logical_or if kind == "Mul" else np.logical_and
            return reduce(every, parts)
        if kind == "BatchNormalization":
            both = batchnorm(node)
            return none if both is None else (zero | (both[0] == 0)) & (both[1] == 0)
        if kind == "Conv":
            found = _weight_and_bias(node)
            assert found is not None
            empty: Mask = ~(found[0] != 0).reshape(len(zero), -1).any(1)
            return (zero | empty) & (np.ones_like(zero) if found[1] is None else found[1] == 0)
        if kind == "Clip":
            low, high = (constant(input_at(node, place)) for place in (1, 2))
            given = [input_at(node, place) is None or end is not None for place, end in ((1, low), (2, high))]
            holds = all(given) and (low is None or (low <= 0).all()) and (high is None or (high >= 0).all())
            return zero if holds else none
        if kind == "Pad":
            fill = constant(input_at(node, 2))
            return zero if input_at(node, 2) is None or (fill is not None and not fill.any()) else none
        return none if kind in NOT_ZERO_AT_ZERO else zero

    def _zeros_of_operand(self, node: ir.Node, value: ir.Value) -> Mask:
        """Which channels of an output read zeros of one operand."""
        count, rank = width_of(node.outputs[0]) or 0, rank_of(node.outputs[0])
        numbers = constant(value)
        if numbers is None:
            return self._zero(value) if width_of(value) == count else np.zeros(count, bool)
        others = tuple(axis for axis in range(rank) if axis != CHANNELS)
        zeros: Mask = np.broadcast_to((np.array(numbers, ndmin=rank) == 0).all(others), count)
        return zeros

    def dropped(self) -> Iterator[Change]:
        """Drop the channels that nothing keeps."""
        kept = self._kept()
        if kept is None:
            return
        nodes = [node for node in self.model.graph if _has_less(node, kept)]
        shapes = {value: list(sizes(value) or ()) for value, stay in kept.items() if not stay.all()}
        made: dict[tuple[ir.Value, bytes, bytes], ir.Value] = {}
        for node in nodes:
            before = shape_of_constant(node.inputs[1]) if node.op_type in LAYERS else None
            for value in node.outputs:
                if value in shapes:
                    value.name = Writer(self.model, node).name(value.name)  # what has its name has all channels
            if not _selects_channels(node):
                _narrow(self.model, node, kept, made)
            if before is not None:
                description = f"{node.op_type} {list(before)} -> {list(shape_of_constant(node.inputs[1]) or ())}"
                yield Change(rewrite=UNREAD_CHANNELS.name, place=node.name or "", description=description)
        for node in nodes:
            if _selects_channels(node):
                _narrow_selection(self.model, node, kept)  # last, since it replaces values of which `kept` tells
        for value, shape in shapes.items():
            set_shape(value, [*shape[:CHANNELS], int(kept[value].sum()), *shape[CHANNELS + 1 :]], value)

    def _kept(self) -> dict[ir.Value, Mask] | None:
        """Which channels of each value stay; None if all do."""
        if not self.count:
            return None
        together = _components(self.count, self.pairs)
        stay = np.zeros(self.count, bool)
        for value in self.start:
            if value.producer() is None:
                self._read(value)  # an input of the graph
        stay[together[np.concatenate(self.read)] if self.read else []] = True
        while True:
            kept = {value: stay[together[self.of(value)]] for value in self.start}
            empty = [value for value, one in kept.items() if one.size and not one.any() and is_read(value)]
            if not empty:
                break
            stay[together[self.of(empty[0])[:1]]] = True  # no image is without channels
        return None if all(one.all() for one in kept.values()) else kept


def width_of(value: ir.Value) -> int | None:
    """The number of channels of a computed image [N, C, ...]; None if it is unknown or the value is no image."""
    shape = sizes(value)
    if shape is None or len(shape) < 3 or is_constant(value) or value.dtype is None:
        return None
    width = shape[CHANNELS]
    return width if isinstance(width, int) and width > 0 and value.dtype.is_floating_point() else None


def _components(count: int, pairs: list[tuple[Array, Array]]) -> Array:
    """For each of ``count`` elements the least element that pairs connect it with."""
    least = np.arange(count)
    if not pairs:
        return least
    first, second = (np.concatenate(side) for side in zip(*pairs, strict=True))
    while True:
        before = least.copy()
        np.minimum.at(least, first, least[second])
        np.minimum.at(least, second, least[first])
        least = least[least]
        if (before == least).all():
            return least


def _weight_and_bias(node: ir.Node) -> tuple[Array, Array | None] | None:
    """The weight, outputs first, and the bias of a layer that alone reads them; None for other nodes."""
    if node.op_type not in LAYERS or node.domain:
        return None
    given = input_at(node, 2)
    weight, bias = constant(node.inputs[1]), constant(given)
    if weight is None or (given is not None and bias is None):
        return None
    return weight if node.op_type == "Conv" else weight.swapaxes(0, 1), bias


def _is_depthwise(node: ir.Node) -> bool:
    shape = shape_of_constant(node.inputs[1]) if node.op_type == "Conv" else None
    return shape is not None and shape[1] == 1 and shape[0] == attribute(node, "group", 1) > 1


def _images(node: ir.Node) -> list[ir.Value]:
    """The images on whose channels a node acts one by one; empty if it does not, or reads what is no constant."""
    x, out = node.inputs[0] if node.inputs else None, node.outputs[0]
    count, rank = width_of(out), rank_of(out)
    if node.domain or count is None or any(map(is_read, node.outputs[1:])):
        return []
    if node.op_type in BROADCASTING:
        found = [value for value in node.inputs if value is not None and width_of(value) == count]
        others = [value for value in node.inputs if value not in found]
        ranks = {rank_of(value) for value in found} | {rank}
        fits = all(_broadcasts(value, rank) for value in others)
        return found if len(ranks) == 1 and fits else []
    if x is None or width_of(x) != count or rank_of(x) != rank:
        return []
    if any(value is not None and not is_constant(value) for value in node.inputs[1:]):
        return []
    return [x] if _acts_on_channels(node, rank) else []


def _broadcasts(value: ir.Value | None, rank: int) -> bool:
    """Whether an operand is a constant, or has one channel or none."""
    shape = shape_of_constant(value) if is_constant(value) else sizes(value)
    if shape is None or len(shape) > rank:
        return False
    return is_constant(value) or len(shape) < rank - CHANNELS or shape[len(shape) - rank + CHANNELS] == 1


def _acts_on_channels(node: ir.Node, rank: int) -> bool:
    """Whether a node of one image acts channel by channel."""
    kind = node.op_type
    if kind == "Conv":
        return _is_depthwise(node) and _weight_and_bias(node) is not None
    if kind in SELECTIONS:
        found = selection_of(node.outputs[0])
        return found is not None and found.keeps and found.axis != CHANNELS and kind != "Split"
    if kind in REDUCTIONS:
        axes = axes_of(node, rank)
        return axes is not None and CHANNELS not in axes and bool(attribute(node, "keepdims", 1))
    if kind == "BatchNormalization":
        return batchnorm(node) is not None
    if kind == "Resize":
        return resizes_pixels_only(node) and input_at(node, 3) is None
    if kind == "Pad":
        return len(node.inputs) < 4 and spatial_padding(node) is not None
    if kind == "PRelu":
        return constant(node.inputs[1]) is not None
    return kind in UNARY or kind in ONE_IMAGE


def _has_less(node: ir.Node, kept: dict[ir.Value, Mask]) -> bool:
    """Whether a node reads or computes a channel that does not stay."""
    ends = [value for value in (*node.inputs, *node.outputs) if value is not None and value in kept]
    return any(not kept[value].all() for value in ends)


def _selects_channels(node: ir.Node) -> bool:
    found = selection_of(node.outputs[0])
    return found is not None and found.axis == CHANNELS


def _narrow(
    model: ir.Model,
    node: ir.Node,
    kept: dict[ir.Value, Mask],
    made: dict[tuple[ir.Value, bytes, bytes], ir.Value],
) -> None:
    """Drop channels from the constants of a node; those that several nodes read, as ``made`` has them, stay shared."""
    import onnx_ir as ir

    x, out = node.inputs[0], node.outputs[0]
    columns, rows = (kept.get(value) if value is not None else None for value in (x, out))
    if rows is None:
        return
    for place, value in enumerate(node.inputs):
        if value is None or not is_constant(value):
            continue
        key = (value, b"" if columns is None else columns.tobytes(), rows.tobytes())
        if key not in made:
            numbers = constant(value)
            assert numbers is not None
            less = _rows_and_columns(node, place, numbers, rows, columns)
            made[key] = value if less.shape == numbers.shape else Writer(model, node).constant(less, like=value)
        if made[key] is not value:
            node.replace_input_with(place, made[key])
    if node.op_type == "Conv" and attribute(node, "group", 1) > 1:
        node.attributes["group"] = ir.AttrInt64("group", int(rows.sum()))


def _rows_and_columns(node: ir.Node, place: int, numbers: Array, rows: Mask, columns: Mask | None) -> Array:
    """The numbers of an input of a node for the channels of the output, and of the first input, that stay."""
    if node.op_type in LAYERS and place == 1 and not _is_depthwise(node) and columns is not None:
        first, second = (rows, columns) if node.op_type == "Conv" else (columns, rows)
        return numbers.compress(first, 0).compress(second, 1)
    if node.op_type in (*LAYERS, "BatchNormalization"):
        return numbers.compress(rows, 0)
    axis = numbers.ndim - rank_of(node.outputs[0]) + CHANNELS
    has_channels = node.op_type in (*BROADCASTING, "PRelu") and axis >= 0 and numbers.shape[axis] == len(rows)
    return numbers.compress(rows, axis) if has_channels else numbers


def _narrow_selection(model: ir.Model, node: ir.Node, kept: dict[ir.Value, Mask]) -> None:
    """Select the channels that stay from those that stay."""
    write, x = Writer(model, node), node.inputs[0]
    assert x is not None
    number = np.cumsum(kept[x]) - 1
    counts = [int(kept[value].sum()) if value in kept else 1 for value in node.outputs]
    if sum(count > 0 for count in counts) > 1:
        parts = iter(write.split(x, [count for count in counts if count], CHANNELS))
        for count, out in zip(counts, node.outputs, strict=True):
            if count:
                write.replace(out, _shaped(next(parts), out, count))
        model.graph.remove(node, safe=True)
        return
    out = next(value for value, count in zip(node.outputs, counts, strict=True) if count)
    found = selection_of(out)
    assert found is not None
    if not found.keeps:
        node.replace_input_with(1, write.exactly(number[found.places].reshape(())))
        return
    places = number[found.places[kept[out]]]
    if len(places) == kept[x].sum() and are_consecutive(places):
        write.replace(out, x)
    elif are_consecutive(places):
        ends = (write.constant([int(end)]) for end in (places[0], places[-1] + 1, CHANNELS))
        write.replace(out, _shaped(write("Slice", x, *ends), out, len(places)))
    else:
        write.replace(out, _shaped(write("Gather", x, write.exactly(places), axis=CHANNELS), out, len(places)))
    model.graph.remove(node, safe=True)


def _shaped(new: ir.Value, old: ir.Value, count: int) -> ir.Value:
    """The new value, recorded to be like the old one with so many channels."""
    shape = list(sizes(old) or ())
    shape[CHANNELS] = count
    set_shape(new, shape, old)
    return new


UNREAD_CHANNELS = Rewrite(
    "unread-channels",
    "channels of convolutions that are zero, or that nothing reads, also through operators that act on each channel",
    apply,
)
