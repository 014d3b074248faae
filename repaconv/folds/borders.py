"""Borders that are assigned: what a 1x1 convolution would give there is its own padding.

    (W x + b, with b written around it) = W (x, with zeros around it) + b

Diverse Branch Block (Ding et al. 2021, fig. 3) stands so: a border of zeros behind BatchNorm's shift would be no border
of zeros before it, so its training form writes into the border what BatchNorm makes of zeros. With the padding in the
convolution there is none behind it, and the two are a row that composes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from repaconv.artefacts import Change
from repaconv.folds.kernels import kernel_of
from repaconv.graphs.nodes import Array, Writer, attribute, constant, made_by
from repaconv.graphs.selections import perm_of
from repaconv.graphs.shapes import set_shape, sizes
from repaconv.graphs.uniform import assigned, uniform

if TYPE_CHECKING:
    import onnx_ir as ir


def bordered(model: ir.Model, rewrite: str) -> Iterator[Change]:
    """Put such borders into the convolutions before them, in place."""
    for pad in tuple(model.graph):
        conv = made_by(pad.inputs[0], "Conv") if pad.op_type == "Pad" and not pad.domain else None
        kernel = kernel_of(conv) if conv is not None else None
        if conv is None or kernel is None or not kernel.acts_by_place or not _only(conv.outputs[0]):
            continue
        pads, found = _pads(pad), _around(pad)
        if pads is None or found is None:
            continue
        last, border = found
        bias = np.zeros(len(kernel.weight)) if kernel.bias is None else kernel.bias
        if border.shape != bias.shape or not np.allclose(border, bias, rtol=_rounding(last), atol=0):
            continue
        write = Writer(model, pad)
        new = write("Conv", *conv.inputs, **kernel.around(pads).attributes)
        set_shape(new, sizes(pad.outputs[0]), pad.outputs[0])
        write.replace(last, new)
        yield Change(rewrite=rewrite, place=conv.name or "", description="a border of its bias -> its padding")


def _only(value: ir.Value) -> bool:
    return len(value.uses()) == 1 and not value.is_graph_output()


def _rounding(value: ir.Value) -> float:
    """Of a bias that was computed twice, relative."""
    import onnx_ir as ir

    return {ir.DataType.DOUBLE: 1e-12, ir.DataType.FLOAT: 1e-6}.get(value.dtype or ir.DataType.UNDEFINED, 0.0)


def _pads(pad: ir.Node) -> list[int] | None:
    """Of places, before and behind every axis; None where others are padded, or places are cut off."""
    given = constant(pad.inputs[1])
    if given is None or given.size % 2 or given.size < 6 or any(value is not None for value in pad.inputs[3:]):
        return None
    before, behind = given.reshape(2, -1).astype(int).tolist()
    whole = not any((*before[:2], *behind[:2])) and min(*before, *behind) >= 0 and any((*before, *behind))
    return (
        [*before[2:], *behind[2:]]
        if whole and attribute(pad, "mode", "constant") in ("constant", b"constant")
        else None
    )


def _around(pad: ir.Node) -> tuple[ir.Value, Array] | None:
    """What stands behind all that is assigned to what a Pad gives, and the border's number a channel."""
    value, pads = pad.outputs[0], _pads(pad)
    fill = constant(pad.inputs[2]) if len(pad.inputs) > 2 and pad.inputs[2] is not None else np.zeros(1)
    size = [one for one in (sizes(value) or ())[1:] if isinstance(one, int)]
    if pads is None or fill is None or len(pads) != 2 * (len(size) - 1):
        return None
    image, axes = np.full((1, *size), float(fill.reshape(-1)[0])), len(size) - 1
    inner: Any = (..., *(slice(pads[axis], size[axis + 1] - pads[axis + axes]) for axis in range(axes)))
    image[inner] = np.nan
    perm = list(range(image.ndim))
    while _only(value) and (node := next(iter(value.uses())).node).inputs[0] is value and not node.domain:
        if node.op_type == "Transpose":
            perm = [perm[axis] for axis in perm_of(node, image.ndim)]
        elif node.op_type == "ScatterND":
            written, numbers = assigned(node), uniform(node.inputs[2])
            if written is None or numbers is None or perm[written[0]] == 0:
                return None
            numbers = numbers.transpose(np.argsort(perm))
            if len(numbers) > 1:
                return None
            np.moveaxis(image, perm[written[0]], 0)[written[1]] = np.moveaxis(numbers, perm[written[0]], 0)
        else:
            break
        value = node.outputs[0]
    outside = np.ones(size[1:], dtype=bool)
    outside[inner] = False
    border = image[0][:, outside]
    done = perm == sorted(perm) and np.isnan(image[inner]).all() and (border == border[:, :1]).all()
    return (value, border[:, 0]) if done else None
