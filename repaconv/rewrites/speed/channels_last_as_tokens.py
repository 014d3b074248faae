"""channels-last-as-tokens: move the channels of an image last as those of its tokens.

    transpose(x [n, c, h, w], 0 2 3 1) = transpose(x [n, c, h w], 0 2 1) [n, h, w, c]

OpenVINO's convolutions keep channels last in memory, so that the Transpose need not move anything. It sees that for the
three axes. The four axes it moves, and the next layers read the result in an order that costs more than the Transpose.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from repaconv.graph.index_selections import perm_of
from repaconv.graph.nodes_and_constants import Writer, nodes_of
from repaconv.graph.operator_facts import MOVES
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import product, rank_of, reshape_target, sizes
from repaconv.graph.tensor_views import reshaped, transposed
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir


def channels_last(write: Writer, image: ir.Value) -> ir.Value | None:
    """Write an image [n, c, *pixels] with its channels last, [n, *pixels, c]; None if that cannot be written."""
    shape = sizes(image)
    if shape is None or len(shape) < 4:
        return None
    batch, channels, *pixels = shape
    found = (batch, *pixels, channels)
    if reshape_target((batch, product(pixels), channels), found) is None:
        return None
    tokens = reshaped(write, image, (batch, channels, product(pixels)))
    return None if tokens is None else reshaped(write, transposed(write, tokens, [0, 2, 1]), found)


def _channels_last_as_tokens(model: ir.Model) -> Iterator[Change]:
    for node in nodes_of(model, "Transpose"):
        image = node.inputs[0]
        rank = rank_of(image) or 0
        if image is None or perm_of(node, rank) != [0, *range(2, rank), 1] or _is_view(image):
            continue
        write = Writer(model, node)
        found = channels_last(write, image)
        if found is None:
            continue
        write.replace(node.outputs[0], found)
        yield Change(
            rewrite="channels-last-as-tokens", place=node.name or "", description="Transpose of the image's tokens"
        )


def _is_view(value: ir.Value) -> bool:
    """Whether a value is a view or a selection, as keys by heads are: these lie in memory as they are written."""
    node = value.producer()
    return node is not None and node.op_type in MOVES


CHANNELS_LAST_AS_TOKENS = Rewrite(
    "channels-last-as-tokens",
    "a Transpose that moves the channels of an image to the end, unless it is a view of another tensor; at most one "
    "size other than the batch is dynamic",
    _channels_last_as_tokens,
    order=101,
    keeps=True,
)
