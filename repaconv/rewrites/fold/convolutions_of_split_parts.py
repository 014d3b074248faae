"""grouped-convolution: write convolutions of the parts of a Split, concatenated again, as one convolution with groups.

    concat(W_1 * x_1, W_2 * x_2, ...) = W * x,    x_1, x_2, ... = split(x),    W = W_1, W_2, ... in groups

MixNet splits its 1x1 convolutions this way. One convolution with groups copies neither the parts nor their outputs, and
a runtime can compute the activation after it in the same kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from repaconv.graph.model_rewriting import clean
from repaconv.graph.nodes_and_constants import (
    Array,
    Writer,
    attribute,
    attributes_key,
    constant,
    input_at,
    made_by,
    nodes_of,
    only_reader,
)
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import rank_of, shaped_like
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir

CHANNELS = 1


def apply(model: ir.Model) -> Iterator[Change]:
    """Write one convolution with groups for every Concat of equal convolutions of all parts of a Split; in place."""
    for concat in nodes_of(model, "Concat"):
        rank = rank_of(concat.outputs[0])
        layers = [conv for value in concat.inputs if (conv := _layer(value)) is not None]
        if concat.graph is not model.graph or rank < 3 or attribute(concat, "axis", 0) % rank != CHANNELS:
            continue
        if len(layers) < max(2, len(concat.inputs)) or len({attributes_key(conv) for conv in layers}) > 1:
            continue
        split = made_by(layers[0].inputs[0], "Split")
        if split is None or list(split.outputs) != [conv.inputs[0] for conv in layers]:
            continue
        weights = [constant(conv.inputs[1]) for conv in layers]
        known = [weight for weight in weights if weight is not None]
        if attribute(split, "axis", 0) % rank != CHANNELS or len(known) < len(layers):
            continue
        if len({weight.shape for weight in known}) > 1:
            continue
        biases = [_bias(conv, weight) for conv, weight in zip(layers, known, strict=True)]
        shifts = [bias for bias in biases if bias is not None]
        if len(shifts) < len(layers):
            continue
        write = Writer(model, concat)
        given = (write.constant(np.concatenate(shifts)),) if any(map(np.any, shifts)) else ()
        known_attributes = {name: entry.value for name, entry in layers[0].attributes.items()}
        groups = len(layers) * attribute(layers[0], "group", 1)
        weight = write.constant(np.concatenate(known))
        new = write("Conv", split.inputs[0], weight, *given, **{**known_attributes, "group": groups})
        write.replace(concat.outputs[0], shaped_like(new, concat.outputs[0]))
        yield Change(
            rewrite=GROUPED_CONVOLUTION.name,
            place=concat.name or "",
            description=f"{len(layers)} convolutions of {list(known[0].shape)} -> one with {groups} groups",
        )
    clean(model)


def _layer(value: ir.Value | None) -> ir.Node | None:
    """The convolution that computes a value which only one node reads, of a part that only the convolution reads."""
    conv = made_by(value, "Conv")
    if conv is None or value is None or only_reader(value) is None:
        return None
    part = conv.inputs[0]
    return conv if part is not None and only_reader(part) is conv else None


def _bias(conv: ir.Node, weight: Array) -> Array | None:
    """The bias [M] of a convolution, zeros if it has none; None if it is computed."""
    given = input_at(conv, 2)
    return np.zeros(len(weight), weight.dtype) if given is None else constant(given)


GROUPED_CONVOLUTION = Rewrite(
    "grouped-convolution",
    "a Concat of the outputs of equal convolutions, one of each part of a Split, in the same order",
    apply,
    keeps=True,
)
