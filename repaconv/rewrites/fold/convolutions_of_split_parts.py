"""grouped-convolution: write convolutions of the parts of a Split, concatenated again, as one convolution with groups.

    concat(W_1 * x_1, W_2 * x_2, ...) = W * x,    x_1, x_2, ... = split(x),    W = W_1, W_2, ... in groups

MixNet splits its 1x1 convolutions this way. One convolution with groups copies neither the parts nor their outputs, and
a runtime can compute the activation after it in the same kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from repaconv.graph.models_in_onnx_ir import clean
from repaconv.graph.nodes_and_constants import (
    Writer,
    attribute,
    attributes_key,
    made_by,
    nodes_of,
    only_reader,
    shape_of_constant,
)
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import rank_of, shaped_like
from repaconv.results import Change
from repaconv.rewrites.fold.kernels_from_onnx import weight_and_bias

if TYPE_CHECKING:
    import onnx_ir as ir

CHANNELS = 1


def apply(model: ir.Model) -> Iterator[Change]:
    """Write one convolution with groups for every Concat of equal convolutions of all parts of a Split; in place."""
    for concat in nodes_of(model, "Concat"):
        layers = _layers(concat)
        constants = [found for conv in layers if (found := weight_and_bias(conv)) is not None]
        if not layers or len(constants) < len(layers):
            continue
        split, weights = layers[0].inputs[0].producer(), [weight for weight, _ in constants]
        groups = len(layers) * attribute(layers[0], "group", 1)
        attributes = {name: entry.value for name, entry in layers[0].attributes.items()}
        write = Writer(model, concat)
        whole = [np.zeros(len(weight)) if bias is None else bias for weight, bias in constants]
        given = (write.constant(np.concatenate(whole)),) if any(map(np.any, whole)) else ()
        weight = write.constant(np.concatenate(weights).astype(np.float64))
        new = write("Conv", split.inputs[0], weight, *given, **{**attributes, "group": groups})
        write.replace(concat.outputs[0], shaped_like(new, concat.outputs[0]))
        yield Change(
            rewrite=GROUPED_CONVOLUTION.name,
            place=concat.name or "",
            description=f"{len(layers)} convolutions of {list(weights[0].shape)} -> one with {groups} groups",
        )
    clean(model)


def _layers(concat: ir.Node) -> list[ir.Node]:
    """The equal convolutions that a Concat joins, one of each part of a Split, in order; empty if it joins others."""
    layers = [conv for value in concat.inputs if (conv := _layer(value)) is not None]
    if len(layers) < max(2, len(concat.inputs)) or not _is_along_channels(concat):
        return []
    split = made_by(layers[0].inputs[0], "Split")
    if split is None or not _is_along_channels(split) or list(split.outputs) != [conv.inputs[0] for conv in layers]:
        return []
    return layers if len({(attributes_key(conv), shape_of_constant(conv.inputs[1])) for conv in layers}) == 1 else []


def _layer(value: ir.Value | None) -> ir.Node | None:
    """The convolution that computes a value which only one node reads, of a part that only the convolution reads."""
    conv = made_by(value, "Conv")
    if conv is None or value is None or only_reader(value) is None:
        return None
    part = conv.inputs[0]
    return conv if part is not None and only_reader(part) is conv else None


def _is_along_channels(node: ir.Node) -> bool:
    """Whether a Split or Concat of images is along their channels."""
    rank = rank_of(node.outputs[0])
    return rank > 2 and attribute(node, "axis", 0) % rank == CHANNELS


GROUPED_CONVOLUTION = Rewrite(
    "grouped-convolution",
    "a Concat of the outputs of equal convolutions, one of each part of a Split, in the same order",
    apply,
    keeps=True,
)
