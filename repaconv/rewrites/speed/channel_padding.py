"""Pad channels with zeros to whole blocks, for runtimes that store and compute channels in blocks.

W are the weights of the convolutions that compute c channels, V those of the convolutions that read them. Every
operator f in between acts on each channel separately and is finite at zero:

    V f(W x + b) = [V 0] f([W; 0] x + [b; 0])

Grouped convolutions with groups narrower than a block: several groups become one block, with zero weights between them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from repaconv.graph.channel_axes import IMAGE
from repaconv.graph.index_selections import axes_of
from repaconv.graph.nodes_and_constants import Writer, attribute, constant, is_constant, nodes_of, scalar
from repaconv.graph.operator_facts import POOLS
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import set_shape, sizes
from repaconv.graph.token_grids import static_grid
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir

BLOCK, WIDE, READ = 8, 16, 4
"""Channels per block with AVX2 (8) and with AVX-512 (16), and the multiple of input channels (4) for which convolutions
run in blocks there without padding.

Channels of 1x1 images cost nothing, so they are padded to 16, which every block size divides.
"""
MOST_PADDING, MOST_DEPTHWISE_PADDING = 1.34, 1.8
"""The largest ratio of channels after to channels before padding; the second if there are depthwise convolutions.

Measured on six layers of 9 to 90 channels: up to these ratios blocks give a speedup of 1.04x to 3.2x, above they may be
slower (`benchmarks/channel_padding.py`).
"""
BY_ITSELF = frozenset(
    ("Relu", "LeakyRelu", "Sigmoid", "HardSigmoid", "HardSwish", "Tanh", "Gelu", "Mish", "Swish", "Softplus", "Clip")
)
"""Elementwise functions that are finite for finite inputs."""
TOGETHER = ("Add", "Sub", "Mul", "Sum")
OUTPUT, INPUT = 0, 1
"""Axes of a convolution's weight."""


class ChannelGroup(NamedTuple):
    """Values [B, c, h, w] that have the same channels and are padded together.

    Attributes:
        values: The values.
        width: The number of channels.
        places: The largest number of pixels h w.
        makers: The convolutions that compute them from other channels.
        keepers: The depthwise convolutions among them.
        readers: The convolutions that read them into other channels.
    """

    values: list[ir.Value]
    width: int
    places: int
    makers: list[ir.Node]
    keepers: list[ir.Node]
    readers: list[ir.Node]


def _whole_blocks(model: ir.Model, name: str, block: int) -> Iterator[Change]:
    for channels in _channels(model):
        width = _padded_width(channels, block)
        if width == channels.width:
            continue
        more = width - channels.width
        for conv in (*channels.makers, *channels.keepers):
            _widen(model, conv, 1, OUTPUT, more)
            _widen(model, conv, 2, OUTPUT, more)
        for conv in channels.readers:
            _widen(model, conv, 1, INPUT, more)
        for conv in channels.keepers:
            _in_groups(conv, width)
        for value in channels.values:
            shape = sizes(value) or ()
            set_shape(value, (*shape[:IMAGE], width, *shape[IMAGE + 1 :]))
        convolutions = len({*channels.makers, *channels.keepers, *channels.readers})
        description = f"{channels.width} channels as {width} in {convolutions} convolutions"
        yield Change(rewrite=name, place=channels.makers[0].name or "", description=description)


def _padded_width(channels: ChannelGroup, block: int) -> int:
    """The number of channels after padding; unchanged if they are computed in blocks already or padding costs more."""
    if channels.places == 1:
        return -(-channels.width // WIDE) * WIDE
    width = -(-channels.width // block) * block
    lies = channels.width % READ == 0 or (not channels.keepers and channels.width < block)
    return channels.width if lies or width > _largest_width(channels) else width


def _largest_width(channels: ChannelGroup) -> float:
    return channels.width * (MOST_DEPTHWISE_PADDING if channels.keepers else MOST_PADDING)


def _widen(model: ir.Model, conv: ir.Node, place: int, axis: int, more: int) -> None:
    numbers = constant(conv.inputs[place]) if place < len(conv.inputs) else None
    if numbers is not None:
        around = [(0, more if axis == other else 0) for other in range(numbers.ndim)]
        conv.replace_input_with(place, Writer(model, conv).constant(np.pad(numbers, around)))


def _in_groups(conv: ir.Node, count: int) -> None:
    import onnx_ir as ir

    conv.attributes.add(ir.AttrInt64("group", count))


def _channels(model: ir.Model) -> Iterator[ChannelGroup]:
    """Sets of channels that only convolutions compute and read, with only channelwise operators in between."""
    heads: dict[ir.Value, ir.Value] = {}

    def head(value: ir.Value) -> ir.Value:
        while heads.setdefault(value, value) is not value:
            value = heads[value]
        return value

    shown = {*model.graph.inputs, *model.graph.outputs}
    for node in model.graph:
        given = [value for value in node.inputs if value is not None and not is_constant(value)]
        if _is_dense_convolution(node):
            continue
        if _is_channelwise(node) and len({(static_grid(value) or ())[:1] for value in (*given, node.outputs[0])}) == 1:
            for value in given:
                heads[head(value)] = head(node.outputs[0])
        else:
            shown.update(given, node.outputs)
    alike: dict[ir.Value, list[ir.Value]] = defaultdict(list)
    for node in model.graph:
        for value in node.outputs:
            alike[head(value)].append(value)
            if any(user.graph is not model.graph for user in value.consumers()):
                shown.add(value)
    closed = {head(value) for value in shown}
    yield from (found for first, values in alike.items() if first not in closed and (found := _channels_of(values)))


def _channels_of(values: list[ir.Value]) -> ChannelGroup | None:
    grids = [static_grid(value) for value in values]
    known = [grid for grid in grids if grid is not None]
    convolutions = [node for value in values if (node := value.producer()) is not None and node.op_type == "Conv"]
    makers = [node for node in convolutions if _is_dense_convolution(node)]
    users = dict.fromkeys(user for value in values for user in value.consumers())
    readers = [user for user in users if _is_dense_convolution(user)]
    if not makers or not readers or len(known) < len(grids):
        return None
    keepers = [node for node in convolutions if node not in makers]
    return ChannelGroup(values, known[0][0], max(prod(grid[1:]) for grid in known), makers, keepers, readers)


def _groups_of(node: ir.Node) -> int:
    """The groups of a 2-D convolution with constant weights; 0 for any other node."""
    if node.op_type != "Conv" or node.domain or any(v is not None and not is_constant(v) for v in node.inputs[1:]):
        return 0
    return int(attribute(node, "group", 1)) if len(sizes(node.inputs[1]) or ()) == 4 else 0


def _is_dense_convolution(node: ir.Node) -> bool:
    return _groups_of(node) == 1 and static_grid(node.outputs[0]) is not None


def _is_channelwise(node: ir.Node) -> bool:
    """Whether every output channel depends only on the same channel of the inputs, and is finite if that is zero."""
    if groups := _groups_of(node):
        return (sizes(node.inputs[1]) or ())[:2] == (groups, 1)
    if node.domain or len(node.outputs) > 1:
        return False
    numbers = [value for value in node.inputs if value is not None and is_constant(value)]
    if node.op_type in BY_ITSELF or node.op_type in TOGETHER:
        return all(scalar(value) is not None for value in numbers)
    if node.op_type == "Resize":
        scales = constant(node.inputs[2]) if len(node.inputs) == 3 else None
        return scales is not None and len(scales) == 4 and (scales[:2] == 1).all() and "axes" not in node.attributes
    over_places = node.op_type == "ReduceMean" and sorted(axes_of(node, 4) or ()) == [2, 3]
    return node.op_type in POOLS or (over_places and bool(attribute(node, "keepdims", 1)))


def _whole_groups(model: ir.Model, name: str, block: int) -> Iterator[Change]:
    for conv in nodes_of(model, "Conv"):
        groups, weight = _groups_of(conv), constant(conv.inputs[1])
        if weight is None or groups < 2 or weight.shape[0] != groups * weight.shape[1]:
            continue
        width = weight.shape[1]
        joined = block // width
        if width in (1, block) or block % width or groups % joined:
            continue
        blocks = np.zeros((groups // joined, joined, width, joined, *weight.shape[1:]))
        parts = weight.reshape(groups // joined, joined, width, *weight.shape[1:])
        for place in range(joined):
            blocks[:, place, :, place] = parts[:, place]
        wide = blocks.reshape(weight.shape[0], block, *weight.shape[2:])
        conv.replace_input_with(1, Writer(model, conv).constant(wide))
        _in_groups(conv, groups // joined)
        description = f"{groups} groups of {width} channels as {groups // joined} of {block}"
        yield Change(rewrite=name, place=conv.name or "", description=description)


VALID = (
    "channels between convolutions, not a multiple of {}, with per-channel operators between; at most 1.8 times as many"
)
ALIKE = "a grouped convolution with as many output as input channels, if several groups fill a block of {}"
WHOLE_BLOCKS, WHOLE_BLOCKS_16 = (
    Rewrite(name, VALID.format(block), partial(_whole_blocks, name=name, block=block), order=95)
    for name, block in (("whole-blocks", BLOCK), ("whole-blocks-16", WIDE))
)
WHOLE_GROUPS, WHOLE_GROUPS_16 = (
    Rewrite(name, ALIKE.format(block), partial(_whole_groups, name=name, block=block), order=94, keeps=True)
    for name, block in (("whole-groups", BLOCK), ("whole-groups-16", WIDE))
)
