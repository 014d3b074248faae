"""conv-each: replace a convolution whose output is split by channels by one convolution per part.

split(f(W x + b)) = f(W_1 x + b_1), f(W_2 x + b_2), ...
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from repaconv.graph.activation_patterns import group, is_activation, ungroup
from repaconv.graph.channel_axes import IMAGE
from repaconv.graph.index_selections import split_sizes
from repaconv.graph.nodes_and_constants import Writer, attribute, constant, made_by, nodes_of, only_reader
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import shaped_like
from repaconv.graph.token_grids import static_grid
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir


def _a_convolution_for_each_part(model: ir.Model) -> Iterator[Change]:
    splits = [node for node in nodes_of(model, "Split") if static_grid(node.inputs[0]) is not None]
    splits = [node for node in splits if attribute(node, "axis", 0) in (IMAGE, IMAGE - 4)]
    if splits:
        group(model)
        for split in splits:
            yield from split_convolution(model, split, "conv-each")
        ungroup(model)


def split_convolution(model: ir.Model, split: ir.Node, rewrite: str) -> Iterator[Change]:
    """Replace the convolution of a Split along channels by one for each part, if nothing else reads it."""
    value = split.inputs[0]
    between: list[ir.Node] = []
    while value is not None and only_reader(value) and (node := value.producer()) is not None and is_activation(node):
        value, between = node.inputs[0], [node, *between]
    conv = made_by(value, "Conv")
    if value is None or conv is None or only_reader(value) is None or attribute(conv, "group", 1) != 1:
        return
    weight, bias = constant(conv.inputs[1]), constant(conv.inputs[2]) if len(conv.inputs) > 2 else np.zeros(0)
    parts = split_sizes(split, weight.shape[0]) if weight is not None else None
    if weight is None or bias is None or parts is None:
        return
    write, bounds = Writer(model, split), np.cumsum(parts)[:-1]
    biases = np.split(bias, bounds) if bias.size else [None] * len(parts)
    for old, rows, shift in zip(list(split.outputs), np.split(weight, bounds), biases, strict=True):
        given = () if shift is None else (write.constant(shift),)
        part = shaped_like(write.copy(conv, conv.inputs[0], write.constant(rows), *given), old)
        for node in between:
            part = shaped_like(write.copy(node, part), old)
        write.replace(old, part)
    description = f"{weight.shape[0]} channels as {' + '.join(map(str, parts))}"
    yield Change(rewrite=rewrite, place=conv.name or "", description=description)


CONV_EACH = Rewrite(
    "conv-each",
    "a convolution of an image of known size, if its output after the activation is only split by channels",
    _a_convolution_for_each_part,
    order=93,
    keeps=True,
)
