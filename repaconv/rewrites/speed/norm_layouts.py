"""Norms written otherwise: their affine in the layers behind, one group as one long row or where the image lies, an
affine as a BatchNorm.

(n g + b) W + c = n (diag(g) W) + (b W + c)                                norm-affine
n = (x - m) / sqrt(mean((x - m)^2) + eps),  m = mean(x) over a sample      norm-in-place
x g_c + b_c = BN(x) of mean 0, variance 1 - eps, scale g, shift b          affine-as-batchnorm
BN(x) = x g' + b',  g' = g / sqrt(var + eps),  b' = b - mean g'            batchnorm-as-affine
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from repaconv.graph.channel_axes import IMAGE, batchnorm, per_channel
from repaconv.graph.linear_layers import layers_behind, write_linear
from repaconv.graph.nodes_and_constants import Array, Writer, attribute, constant, nodes_of, only_reader
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import rank_of, sizes
from repaconv.graph.token_grids import static_tokens
from repaconv.graph.view_chains import view_of
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir

# A power of two, so that 1 - 2^-17 and 2^-17 are exact in every float type and add up to exactly 1.
BATCHNORM_EPS = 2.0**-17


def _affine_into_layers(model: ir.Model) -> Iterator[Change]:
    for norm in nodes_of(model, "LayerNormalization"):
        out, scale = norm.outputs[0], constant(norm.inputs[1])
        shifted = len(norm.inputs) > 2 and norm.inputs[2] is not None
        shift = constant(norm.inputs[2]) if shifted else np.zeros(1)
        over = (sizes(out) or (None,))[-1]
        if scale is None or shift is None or not isinstance(over, int) or scale.shape != (over,):
            continue
        if not shift.any() and (scale == 1).all():
            continue
        layers = layers_behind(out)
        if layers is None:
            continue
        shift, write = np.broadcast_to(shift, (over,)), Writer(model, norm)
        ones = write.constant(np.ones_like(scale), like=norm.inputs[1])
        kept = {
            name: norm.attributes[name].value for name in ("axis", "epsilon", "stash_type") if name in norm.attributes
        }
        bare = write("LayerNormalization", norm.inputs[0], ones, **kept)
        bare.shape = out.shape
        for layer in layers:
            before = Writer(model, layer.node)
            bias = layer.shift() + shift @ layer.weight
            before.replace(layer.out, write_linear(before, bare, scale[:, None] * layer.weight, bias))
        yield _told("norm-affine", norm, f"scale and shift of {over} channels into {len(layers)} layers")


def _group_as_row(model: ir.Model) -> Iterator[Change]:
    """InstanceNormalization of [B, 1, C H W] is the LayerNormalization of its last axis."""
    for norm in nodes_of(model, "InstanceNormalization"):
        shape = static_tokens(norm.inputs[0])
        scale, shift = constant(norm.inputs[1]), constant(norm.inputs[2])
        if shape is None or shape[0] != 1 or not shape[1] or scale is None or shift is None:
            continue
        write, whole = Writer(model, norm), np.ones(shape[1])
        inputs = [norm.inputs[0], write.constant(scale * whole)]
        inputs += [write.constant(shift * whole)] if shift.any() else []
        settings = {"axis": -1, "epsilon": attribute(norm, "epsilon", 1e-5)}
        write.replace(norm.outputs[0], write("LayerNormalization", *inputs, **settings))
        yield _told("group-norm-flat", norm, f"one row of {shape[1]}")


def _norm_in_place(model: ir.Model) -> Iterator[Change]:
    """All of a sample is one group, whichever way its numbers are put in a row; an image stays as it lies."""
    for norm in nodes_of(model, "InstanceNormalization", "GroupNormalization"):
        ends = _around(norm)
        scale, shift = constant(norm.inputs[1]), constant(norm.inputs[2])
        if ends is None or scale is None or shift is None:
            continue
        (x, out), write = ends, Writer(model, norm)
        rank = rank_of(x)
        axes = write.constant(list(range(1, rank)))
        apart = write("Sub", x, write("ReduceMean", x, axes, keepdims=1))
        spread = write("ReduceMean", write("Mul", apart, apart), axes, keepdims=1)
        epsilon = write.constant(attribute(norm, "epsilon", 1e-5))
        new = write("Div", apart, write("Sqrt", write("Add", spread, epsilon)))
        column = (-1, *(1,) * (rank - 2))
        if (scale != 1).any():
            new = write("Mul", new, write.constant(scale.reshape(column)))
        if shift.any():
            new = write("Add", new, write.constant(shift.reshape(column)))
        new.shape = x.shape
        write.replace(out, new)
        yield _told(
            "norm-in-place", norm, f"a norm over all of {'x'.join(map(str, (sizes(x) or ())[1:]))}, not in a row"
        )


def _around(norm: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """What a norm over all of a sample normalises, and as what of the same shape it is read; None if it is another.

    An InstanceNormalization of one channel has that as a row, a GroupNormalization of one group as it lies.
    """
    out, given = norm.outputs[0], sizes(norm.inputs[0])
    if given is None or len(given) < 3:
        return None
    if norm.op_type == "GroupNormalization":
        per_channel = norm.inputs[1] is not None and sizes(norm.inputs[1]) == given[1:2]
        one = attribute(norm, "num_groups", 0) == 1 and per_channel
        return (norm.inputs[0], out) if one and norm.inputs[0] is not None else None
    view = view_of(norm.inputs[0]) if given[1] == 1 and norm.inputs[0] is not None else None
    if view is None or not view.in_order:
        return None
    image = sizes(view.source)
    if image is None or len(image) < 3 or image[0] != given[0]:
        return None
    while sizes(out) != image:
        after = only_reader(out, "Reshape", "Squeeze", "Unsqueeze", "Flatten")
        if after is None:
            return None
        out = after.outputs[0]
    return view.source, out


def _affine_of(node: ir.Node) -> tuple[ir.Value, Array, Array, ir.Value] | None:
    """x, scale and shift of a Mul by channel, with the Add behind it if nothing else reads what lies between."""
    out = node.outputs[0]
    if rank_of(out) != 4:
        return None
    for x, by in (node.inputs, node.inputs[::-1]):
        scale = per_channel(constant(by), out, IMAGE)
        if x is None or scale is None or sizes(x) != sizes(out):
            continue
        after = only_reader(out, "Add")
        if after is not None:
            first, second = after.inputs
            shift = per_channel(constant(second if first is out else first), out, IMAGE)
            if shift is not None:
                return x, scale, shift, after.outputs[0]
        return x, scale, np.zeros_like(scale), out
    return None


def _affine_as_batchnorm(model: ir.Model) -> Iterator[Change]:
    for node in nodes_of(model, "Mul"):
        found = _affine_of(node)
        if found is None:
            continue
        x, scale, shift, out = found
        write = Writer(model, node)
        moments = (np.zeros_like(scale), np.full_like(scale, 1 - BATCHNORM_EPS))
        parts = [write.constant(part) for part in (scale, shift, *moments)]
        write.replace(out, write("BatchNormalization", x, *parts, epsilon=BATCHNORM_EPS))
        yield _told("affine-as-batchnorm", node, f"scale and shift of {scale.size} channels as one BatchNormalization")


def _batchnorm_as_affine(model: ir.Model) -> Iterator[Change]:
    for node in nodes_of(model, "BatchNormalization"):
        found, rank = batchnorm(node), rank_of(node.inputs[0])
        if len(node.outputs) != 1 or rank < 2 or found is None:
            continue
        (scale, shift), column = found, (-1, *(1,) * (rank - 2))
        write = Writer(model, node)
        scaled = write("Mul", node.inputs[0], write.constant(scale.reshape(column)))
        out = write("Add", scaled, write.constant(shift.reshape(column))) if shift.any() else scaled
        write.replace(node.outputs[0], out)
        yield _told("batchnorm-as-affine", node, f"{scale.size} channels times a number, plus a number")


def _told(name: str, node: ir.Node, told: str) -> Change:
    return Change(rewrite=name, place=node.name or "", description=told)


NORM_AFFINE = Rewrite(
    "norm-affine", "a LayerNorm with a scale or shift that only linear layers read", _affine_into_layers, order=35
)
GROUP_NORM_FLAT = Rewrite(
    "group-norm-flat",
    "a norm over all of a sample, as InstanceNormalization of one channel",
    _group_as_row,
    opset=17,
    order=37,
)
NORM_IN_PLACE = Rewrite(
    "norm-in-place",
    "a norm over all of a sample, which stays an image: the norm's formula, that the runtime knows again",
    _norm_in_place,
    opset=18,
    order=37,
    keeps=True,
)
AFFINE_AS_BATCHNORM = Rewrite(
    "affine-as-batchnorm",
    "[B, C, H, W] times a constant a channel, and plus one if that follows",
    _affine_as_batchnorm,
    order=38,
)
BATCHNORM_AS_AFFINE = Rewrite("batchnorm-as-affine", "a BatchNorm of constants", _batchnorm_as_affine, order=39)
