"""unread-channels: drop channels of images that are zero, or that nothing reads, from the layers that compute them.

    relu(W_1 * x) read by W_2:  W_1 keeps the rows whose columns in W_2 are not zero, and which are not zero themselves

Pruned networks have such channels, whose weights a tool has set to zero, and so has a convolution of whose output only
a slice is read. Activations, norms, pools, sums and depthwise convolutions keep channels apart. A channel is dropped
from all of them together, or from none if an operator that mixes channels in another way reads or computes one of them.
A linear layer may read them too, of the image as a row.

A channel that has one number everywhere, such as the shift of a BatchNorm whose scale a tool has set to zero, goes into
the bias of a convolution that does not pad.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    only_reader,
    shape_of_constant,
    stored,
)
from repaconv.graph.operator_facts import POOLS, REDUCTIONS, SELECTIONS, UNARY
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import rank_of, set_shape, shaped_like, sizes
from repaconv.results import Change
from repaconv.rewrites.fold.kernels_from_onnx import (
    LAYERS,
    counts_padding,
    is_padded,
    resizes_pixels_only,
    spatial_padding,
    weight_and_bias,
)

if TYPE_CHECKING:
    import onnx_ir as ir

Mask = NDArray[np.bool_]
Narrowed = tuple["ir.Value", tuple[str, bool, int, int], bytes, bytes]
"""A constant, what it is of the node that reads it, and the channels that stay."""

CHANNELS = 1
BROADCASTING = ("Add", "Sub", "Mul", "Div", "Sum", "Max", "Min")
"""Operators of several images, and of constants."""
ONE_IMAGE = (*POOLS, *REDUCTIONS, *SELECTIONS, "BatchNormalization", "Clip", "Identity", "Pad", "PRelu", "Resize")
"""Further operators that act channel by channel on their first input, under conditions."""
ROWS = ("Flatten", "Reshape", "Squeeze", "ReduceMean")
"""Operators that make a row of an image, each channel after the one before."""
BLOCKS = (16, 8, 4)
"""Channels that runtimes compute together on CPUs: a layer of fewer channels that fill no blocks may take longer."""
NOT_ZERO_AT_ZERO = ("Cos", "Exp", "HardSigmoid", "Log", "Reciprocal", "Sigmoid", "Softplus")
FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "Relu": lambda numbers: np.maximum(numbers, 0),
    "Sigmoid": lambda numbers: 1 / (1 + np.exp(-numbers)),
    "Tanh": np.tanh,
    "Neg": np.negative,
    "Abs": np.abs,
    "HardSwish": lambda numbers: numbers * np.clip(numbers / 6 + 0.5, 0, 1),
}
"""Activations of which numbers other than zero are computed as well."""


def apply(model: ir.Model) -> Iterator[Change]:
    """Drop channels until none is left that could be; in place."""
    while (changes := list(_Channels(model).dropped())) != []:
        yield from changes
        clean(model)


class _Channels:
    """All channels of the images of a graph: which are dropped together, which are read, and which are one number.

    Channels of different values that are dropped together have the same number in ``together``.
    """

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self.start: dict[ir.Value, int] = {}
        self.count = 0
        self.numbers: dict[ir.Value, Array] = {}
        """The number that each channel of a value is everywhere; NaN if it is not known to be one number."""
        self.pairs: list[tuple[Array, Array]] = []
        self.read: list[Array] = []
        """Channels that stay."""
        if nodes_of(model, *LAYERS):
            for node in model.graph:
                self._enter(node)

    def _enter(self, node: ir.Node) -> None:
        """Record what a node reads, which channels it keeps together, and the numbers of its outputs."""
        known = self._enter_layer(node) or self._enter_concat(node) or self._enter_selection(node)
        known = known or self._enter_row(node)
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

    def _numbers(self, value: ir.Value) -> Array:
        return self.numbers.get(value, np.full(width_of(value) or 0, np.nan))

    def _read(self, value: ir.Value | None, places: Array | None = None) -> None:
        if value is not None and width_of(value) is not None:
            self.read.append(self.of(value) if places is None else self.of(value)[places])

    def _enter_layer(self, node: ir.Node) -> bool:
        """A Conv or ConvTranspose without groups: it reads the channels of weights that are not zero."""
        found = weight_and_bias(node) if attribute(node, "group", 1) == 1 else None
        if found is None:
            return False
        x, out = node.inputs[0], node.outputs[0]
        if x is None or width_of(x) is None or width_of(out) is None:
            return False
        weight, bias = found  # [M, C, ...]
        used: Mask = (weight != 0).reshape(*weight.shape[:2], -1).any(2)
        used &= ~self._are_absorbed(node, x)
        self._read(x, np.flatnonzero(used.any(0)))
        self.of(out)
        whole = self._bias_of(node, weight, np.ones(weight.shape[1], bool)) + (0 if bias is None else bias)
        self.numbers[out] = np.where(used.any(1), np.nan, whole)
        return True

    def _are_absorbed(self, node: ir.Node, x: ir.Value) -> Mask:
        """Which channels of an image a layer needs not read: zeros, and other numbers if it does not pad."""
        numbers = self._numbers(x)
        result: Mask = (numbers == 0) | (~np.isnan(numbers) & (node.op_type == "Conv" and not is_padded(node)))
        return result

    def _bias_of(self, node: ir.Node, weight: Array, places: Mask) -> Array:
        """What those of some channels that are one number add to each output of a layer."""
        x = node.inputs[0]
        assert x is not None
        places = places & self._are_absorbed(node, x) & (self._numbers(x) != 0)
        kernels = weight[:, places].astype(np.float64).sum(tuple(range(2, weight.ndim)))
        summed: Array = kernels @ self._numbers(x)[places]
        return summed

    def _enter_concat(self, node: ir.Node) -> bool:
        out = node.outputs[0]
        is_along = node.op_type == "Concat" and not node.domain and width_of(out) is not None
        if not is_along or attribute(node, "axis", 0) % rank_of(out) != CHANNELS:
            return False
        parts = [value for value in node.inputs if value is not None and width_of(value) is not None]
        if len(parts) < len(node.inputs):
            return False
        self.pairs.append((self.of(out), np.concatenate([self.of(part) for part in parts])))
        self.numbers[out] = np.concatenate([self._numbers(part) for part in parts])
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
                self._read(out)
            elif width_of(out) is None or len(set(one.places.tolist())) < one.places.size:
                return False
            else:
                self.pairs.append((self.of(out), self.of(one.value)[one.places]))
                self.numbers[out] = self._numbers(one.value)[one.places]
        return True

    def _enter_row(self, node: ir.Node) -> bool:
        """A row of an image that a linear layer reads: it reads the channels of weights that are not zero."""
        layer, x = _layer_of_rows(node), node.inputs[0] if node.inputs else None
        if layer is None or x is None or layer.inputs[1] is None:
            return False
        numbers = self._numbers(x)
        weight = stored(layer.inputs[1])
        pixels = len(weight) // len(numbers)
        used = (weight[::pixels] != 0).any(1)  # the first pixel tells nearly always, and no large weight is copied
        for place in np.flatnonzero(~used):
            used[place] = weight[place * pixels : (place + 1) * pixels].any()
        self._read(x, np.flatnonzero(used & np.isnan(numbers)))
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
        self.numbers[out] = self._numbers_after(node, images[0])
        return True

    def _numbers_after(self, node: ir.Node, x: ir.Value) -> Array:
        """The number that each channel of the output of a channelwise node is."""
        numbers, kind = self._numbers(x), node.op_type
        zeros: Array = np.where(numbers == 0, 0.0, np.nan)
        if kind in BROADCASTING:
            return _combined(kind, [self._operand(node, value) for value in node.inputs if value is not None])
        if kind == "BatchNormalization":
            both = batchnorm(node)
            assert both is not None
            return np.where(both[0] == 0, both[1], numbers * both[0] + both[1])
        if kind == "Conv":
            found = weight_and_bias(node)
            assert found is not None
            weight = found[0].reshape(len(numbers), -1).astype(np.float64)
            known = zeros if is_padded(node) else numbers
            summed = np.where(weight.any(1), known * weight.sum(1), 0.0)
            return summed if found[1] is None else summed + found[1]
        if kind == "Clip":
            ends = [(input_at(node, place), constant(input_at(node, place))) for place in (1, 2)]
            if any(value is not None and end is None for value, end in ends):
                return np.full_like(numbers, np.nan)
            low, high = (
                end if end is not None else limit for (_, end), limit in zip(ends, (-np.inf, np.inf), strict=True)
            )
            return np.minimum(np.maximum(numbers, low), high).reshape(-1)
        if kind == "Pad":
            fill = constant(input_at(node, 2))
            filled = input_at(node, 2) is None or (fill is not None and not fill.any())
            return zeros if filled else np.full_like(numbers, np.nan)
        if kind in FUNCTIONS:
            with np.errstate(over="ignore"):  # of a sigmoid that is 0
                return FUNCTIONS[kind](numbers)
        if kind in UNARY:
            return np.full_like(numbers, np.nan) if kind in NOT_ZERO_AT_ZERO else zeros
        return zeros if kind in ("PRelu", "ReduceSum") or counts_padding(node) else numbers

    def _operand(self, node: ir.Node, value: ir.Value) -> Array:
        """The number that each channel of an output reads of one operand."""
        count, rank = width_of(node.outputs[0]) or 0, rank_of(node.outputs[0])
        given = constant(value)
        if given is None:
            return self._numbers(value) if width_of(value) == count else np.full(count, np.nan)
        whole = np.array(given, float, ndmin=rank)
        others = tuple(axis for axis in range(rank) if axis != CHANNELS)
        least, most = whole.min(others), whole.max(others)
        return np.broadcast_to(np.where(least == most, least, np.nan), count)

    def dropped(self) -> Iterator[Change]:
        """Drop the channels that nothing keeps."""
        kept = self._kept()
        if kept is None:
            return
        nodes = [node for node in self.model.graph if _has_less(node, kept)]
        shapes = {value: list(sizes(value) or ()) for value, stay in kept.items() if not stay.all()}
        made: dict[Narrowed, ir.Value] = {}
        for node in nodes:
            before = shape_of_constant(node.inputs[1]) if node.op_type in LAYERS else None
            for value in node.outputs:
                if value in shapes:
                    value.name = Writer(self.model, node).name(value.name)  # what has its name has all channels
            if not _selects_channels(node):
                added = self._dropped_bias(node, kept)
                _narrow(self.model, node, kept, made)
                _add_bias(self.model, node, added)
            yield from self._dropped_from_row(node, kept)
            if before is not None:
                description = f"{node.op_type} {list(before)} -> {list(shape_of_constant(node.inputs[1]) or ())}"
                yield Change(rewrite=UNREAD_CHANNELS.name, place=node.name or "", description=description)
        for node in reversed(nodes):  # a selection replaces its output, of which `kept` tells its readers
            if _selects_channels(node):
                _narrow_selection(self.model, node, kept)
        for value, shape in shapes.items():
            set_shape(value, [*shape[:CHANNELS], int(kept[value].sum()), *shape[CHANNELS + 1 :]], value)

    def _dropped_from_row(self, node: ir.Node, kept: dict[ir.Value, Mask]) -> Iterator[Change]:
        """Drop channels from the weight of the layer that reads a row, and add to the layer what they did."""
        layer, x, row = _layer_of_rows(node), node.inputs[0] if node.inputs else None, node.outputs[0]
        weight = constant(layer.inputs[1]) if layer is not None else None
        if layer is None or x is None or weight is None:
            return
        stay, numbers = kept[x], np.nan_to_num(self._numbers(x))  # channels of no known number have weights of zero
        parts = weight.reshape(len(stay), -1, weight.shape[-1])
        less = parts[stay].reshape(-1, weight.shape[-1])
        write = Writer(self.model, node)
        if node.op_type == "Reshape":
            node.replace_input_with(1, write.constant([-1, len(less)]))
        row.name = write.name(row.name)
        set_shape(row, ((sizes(row) or ())[0], len(less)), row)
        write = Writer(self.model, layer)
        new = shaped_like(write("MatMul", row, write.constant(less, like=layer.inputs[1])), layer.outputs[0])
        added = numbers[~stay] @ parts[~stay].sum(1)
        if added.any():
            new = shaped_like(write("Add", new, write.constant(added, like=layer.inputs[1])), new)
        write.replace(layer.outputs[0], new)
        self.model.graph.remove(layer, safe=True)
        description = f"MatMul {list(weight.shape)} -> {list(less.shape)}"
        yield Change(rewrite=UNREAD_CHANNELS.name, place=layer.name or "", description=description)

    def _dropped_bias(self, node: ir.Node, kept: dict[ir.Value, Mask]) -> Array | None:
        """What the channels that are dropped add to the outputs of a layer that stay; None for other nodes."""
        x, out = node.inputs[0], node.outputs[0]
        found = weight_and_bias(node) if attribute(node, "group", 1) == 1 else None
        if found is None or x not in kept or kept[x].all():
            return None
        return self._bias_of(node, found[0], ~kept[x])[kept[out]]

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
        todo = True
        while todo:
            todo = False
            for value in self.start:
                own = together[self.of(value)]
                gone = own[~stay[own]]
                stay[gone[: _count_to_keep(value, len(gone))]] = True
                todo = todo or _count_to_keep(value, len(gone)) > 0
        kept = {value: stay[together[self.of(value)]] for value in self.start}
        return None if all(one.all() for one in kept.values()) else kept


def width_of(value: ir.Value) -> int | None:
    """The number of channels of a computed image [N, C, ...]; None if it is unknown or the value is no image."""
    shape = sizes(value)
    if shape is None or len(shape) < 3 or is_constant(value) or value.dtype is None:
        return None
    width = shape[CHANNELS]
    return width if isinstance(width, int) and width > 0 and value.dtype.is_floating_point() else None


def _count_to_keep(value: ir.Value, gone: int) -> int:
    """How many of the channels that nothing keeps stay nevertheless, so that those of a layer fill whole blocks."""
    width, maker = width_of(value) or 0, value.producer()
    if not gone or not is_read(value):
        return 0
    block = next((one for one in BLOCKS if width % one == 0 and (width > one or one == BLOCKS[-1])), 1)
    is_layer = maker is not None and maker.op_type in LAYERS
    return -(width - gone) % block if is_layer and width > gone else block * (width == gone)


def _combined(kind: str, operands: list[Array]) -> Array:
    """What an operator makes of numbers of channels; NaN is an unknown one, and zero times that is zero."""
    result = operands[0]
    for one in operands[1:]:
        if kind == "Mul":
            result = np.where((result == 0) | (one == 0), 0.0, result * one)
        elif kind == "Div":
            result = np.where(one == 0, np.nan, result / np.where(one == 0, 1.0, one))
        else:
            result = _OPERATORS[kind](result, one)
    return result


_OPERATORS: dict[str, Callable[[Array, Array], Array]] = {
    **{"Add": np.add, "Sum": np.add, "Sub": np.subtract, "Max": np.maximum, "Min": np.minimum},
}


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


def _layer_of_rows(node: ir.Node) -> ir.Node | None:
    """The linear layer that alone reads rows [B, c k] that a node makes of images [B, c, ...]; None for other nodes."""
    x, out = node.inputs[0] if node.inputs else None, node.outputs[0]
    layer = only_reader(out, "MatMul") if node.op_type in ROWS and not node.domain else None
    weight = shape_of_constant(layer.inputs[1]) if layer is not None else None
    before, after = sizes(x), sizes(out)
    if x is None or width_of(x) is None or weight is None or before is None or after is None:
        return None
    axes = axes_of(node, len(before)) if node.op_type == "ReduceMean" else [CHANNELS + 1]
    if not axes or min(axes) <= CHANNELS:
        return None
    return layer if len(weight) == len(after) == 2 and after[0] == before[0] else None


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
        return _is_depthwise(node) and weight_and_bias(node) is not None
    if kind in SELECTIONS:
        found = selection_of(node.outputs[0])
        return found is not None and found.keeps and found.axis != CHANNELS and kind != "Split"
    if kind in REDUCTIONS:
        axes = axes_of(node, rank)
        return axes is not None and CHANNELS not in axes and bool(attribute(node, "keepdims", 1))
    if kind == "BatchNormalization":
        return batchnorm(node) is not None
    if kind == "Resize":
        return resizes_pixels_only(node)
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
    made: dict[Narrowed, ir.Value],
) -> None:
    """Drop channels from the constants of a node; those that nodes read alike, as in ``made``, stay shared."""
    import onnx_ir as ir

    x, out = node.inputs[0], node.outputs[0]
    columns, rows = (kept.get(value) if value is not None else None for value in (x, out))
    if rows is None:
        return
    for place, value in enumerate(node.inputs):
        if value is None or not is_constant(value):
            continue
        role = (node.op_type, _is_depthwise(node), place, rank_of(out))
        key = (value, role, b"" if columns is None else columns.tobytes(), rows.tobytes())
        if key not in made:
            numbers = constant(value)
            assert numbers is not None
            less = _rows_and_columns(node, place, numbers, rows, columns)
            made[key] = value if np.array_equal(less, numbers) else Writer(model, node).constant(less, like=value)
        if made[key] is not value:
            node.replace_input_with(place, made[key])
    if node.op_type == "Conv" and attribute(node, "group", 1) > 1:
        node.attributes["group"] = ir.AttrInt64("group", int(rows.sum()))


def _add_bias(model: ir.Model, node: ir.Node, added: Array | None) -> None:
    """Add numbers to the bias of a layer."""
    if added is None or not added.any():
        return
    bias = constant(input_at(node, 2))
    new = Writer(model, node).constant(added + (0 if bias is None else bias), like=node.inputs[1])
    node.resize_inputs(3)
    node.replace_input_with(2, new)


def _rows_and_columns(node: ir.Node, place: int, numbers: Array, rows: Mask, columns: Mask | None) -> Array:
    """The numbers of an input of a node for the channels of the output, and of the first input, that stay."""
    if node.op_type in LAYERS and place == 1 and not _is_depthwise(node) and columns is not None:
        first, second = (rows, columns) if node.op_type == "Conv" else (columns, rows)
        return numbers.compress(first, 0).compress(second, 1)
    if node.op_type in (*LAYERS, "BatchNormalization"):
        return numbers.compress(rows, 0)
    rank = rank_of(node.outputs[0])
    if node.op_type == "Resize" and place == 3:
        axes = np.array(attribute(node, "axes", range(rank))) % rank
        return np.where(axes == CHANNELS, rows.sum(), numbers)
    axis = numbers.ndim - rank + CHANNELS
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
    out = next((value for value, count in zip(node.outputs, counts, strict=True) if count), None)
    found = selection_of(out)
    if out is None or found is None:
        return  # nothing reads it
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
