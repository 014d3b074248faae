"""convolution: a scale and a shift a channel behind a convolution of any kernel go into it, and so do those beside it.

    s (w * x + b) + t = (s w) * x + (s b + t)

What is summed is in `parallel`, what stands in a row in `sequences`, what is assigned to a border in `borders`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from repaconv.artefacts import Change
from repaconv.folds.borders import bordered
from repaconv.folds.parallel import joined
from repaconv.folds.sequences import composed_in_row
from repaconv.graphs.channels import IMAGE, batchnorm, per_channel
from repaconv.graphs.contract import Rewrite
from repaconv.graphs.graph import clean
from repaconv.graphs.nodes import Array, Writer, attribute, constant, made_by
from repaconv.graphs.normal import normalise
from repaconv.graphs.shapes import set_shape, sizes

if TYPE_CHECKING:
    import onnx_ir as ir


def apply(model: ir.Model) -> Iterator[Change]:
    """See `repaconv.graphs.contract.Apply`."""
    normalise(model)
    again = True
    while again:
        made = [
            change for step in (_behind, bordered, composed_in_row, joined) for change in step(model, CONVOLUTION.name)
        ]
        clean(model)
        yield from made
        again = bool(made)


def _behind(model: ir.Model, rewrite: str) -> Iterator[Change]:
    for node in tuple(model.graph):
        if not node.domain and node.op_type in ("BatchNormalization", "Mul", "Div", "Add", "Sub"):
            yield from _absorb(model, node, rewrite)


def _absorb(model: ir.Model, node: ir.Node, rewrite: str) -> Iterator[Change]:
    found = _scale_and_shift(node)
    conv = made_by(found[0], "Conv", "ConvTranspose") if found is not None else None
    weight = constant(conv.inputs[1]) if conv is not None else None
    given = conv.inputs[2] if conv is not None and len(conv.inputs) > 2 else None
    bias = constant(given)
    if found is None or conv is None or weight is None or (given is not None and bias is None):
        return
    value, scale, shift = found
    if len(list(value.uses())) != 1 or value.is_graph_output() or any(v.uses() for v in node.outputs[1:]):
        return
    write = Writer(model, node)
    parts = [write.constant(weight * _outwards(conv, weight, scale))]
    if bias is not None or shift is not None:
        total = (0 if bias is None else bias * scale) + (0 if shift is None else shift)
        parts.append(write.constant(np.asarray(total)))
    attributes = {name: entry.value for name, entry in conv.attributes.items()}
    new = write(conv.op_type, conv.inputs[0], *parts, **attributes)
    set_shape(new, sizes(value), value)
    write.replace(node.outputs[0], new)
    model.graph.remove([node, conv], safe=True)
    yield Change(
        rewrite=rewrite, place=conv.name or "", description=f"{node.op_type} -> {conv.op_type} {list(weight.shape)}"
    )


def _outwards(conv: ir.Node, weight: Array, scale: Array) -> Array:
    """A factor a channel of the output, in the shape of the weight."""
    if conv.op_type == "Conv":
        return scale.reshape(-1, *[1] * (weight.ndim - 1))
    groups = int(attribute(conv, "group", 1))  # [in, out / groups, ...]
    each: Array = np.repeat(scale.reshape(groups, -1), len(weight) // groups, axis=0)
    return each.reshape(*each.shape, *[1] * (weight.ndim - 2))


def _scale_and_shift(node: ir.Node) -> tuple[ir.Value, Array, Array | None] | None:
    """What a node multiplies the channels of an image with, and adds to them."""
    x = node.inputs[0]
    if node.op_type == "BatchNormalization":
        both = batchnorm(node)
        return None if both is None or x is None else (x, *both)
    for place in (0, 1):
        x, other = node.inputs[place], node.inputs[1 - place]
        vector = per_channel(constant(other), node.outputs[0], IMAGE, 3)
        if x is None or vector is None or sizes(x) != sizes(node.outputs[0]):
            continue
        if node.op_type == "Mul":
            return x, vector, None
        if node.op_type == "Div":
            return (x, 1 / vector, None) if place == 0 and vector.all() else None
        sign = -1.0 if node.op_type == "Sub" else 1.0
        return x, np.full(len(vector), sign if place else 1.0), vector if place or sign > 0 else -vector
    return None


CONVOLUTION = Rewrite("convolution", "behind a convolution with constant weights that nothing else reads", apply)
