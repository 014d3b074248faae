"""batch-norm: write a scale and a shift of an image's channels as one operator, if no layer absorbed them.

Keras writes BatchNorm as Mul and Add. If an activation follows (DenseNet, ResNet V2, NASNet), no layer absorbs them.
ONNX Runtime runs convolutions in a blocked layout. It converts the image before and after a Mul or Add of a constant,
but runs BatchNormalization in the blocked layout, fused with the activation. A Mul and an Add of one number each are
written as BatchNormalization if a convolution or a pool reads the image (PP-OCRv4, before convolutions with padding).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from repaconv.graph.channel_axes import IMAGE, scale_and_shift, write_batchnorm
from repaconv.graph.models_in_onnx_ir import clean
from repaconv.graph.nodes_and_constants import Writer, nodes_of, only_reader
from repaconv.graph.operator_facts import POOLS
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir

TYPES = ("FLOAT", "DOUBLE", "FLOAT16")
"""Element types for which ONNX Runtime has BatchNormalization."""

IMAGE_READERS = ("Conv", "ConvTranspose", *POOLS)


def apply(model: ir.Model) -> Iterator[Change]:
    """Write BatchNormalization for every scale of channels that only a shift reads; in place."""
    for node in nodes_of(model, "Mul", "Div"):
        added = only_reader(node.outputs[0], "Add", "Sub")
        first = scale_and_shift(node, IMAGE)
        second = scale_and_shift(added, IMAGE) if added is not None else None
        if first is None or second is None or added is None or second.x is not node.outputs[0] or second.shift is None:
            continue
        if first.x.dtype is None or first.x.dtype.name not in TYPES:
            continue
        scale, shift = first.scale * second.scale, second.shift
        if not scale.size:
            continue
        with np.errstate(over="ignore"):
            if not np.isfinite(scale.astype(first.x.dtype.numpy())).all():
                continue  # BatchNormalization multiplies its mean, 0, by the scale
        if (scale == scale[0]).all() and (shift == shift[0]).all() and not _is_image(added.outputs[0]):
            continue  # two numbers: the axis of channels is not known
        write = Writer(model, added)
        write.replace(added.outputs[0], write_batchnorm(write, first.x, scale, shift))
        description = f"{node.op_type}, {added.op_type} -> BatchNormalization"
        yield Change(rewrite=BATCH_NORM.name, place=node.name or "", description=description)
    clean(model)


def _is_image(value: ir.Value) -> bool:
    """Whether a convolution or a pool reads a value, so that its channels are along axis 1."""
    return any(place == 0 and user.domain == "" and user.op_type in IMAGE_READERS for user, place in value.uses())


BATCH_NORM = Rewrite("batch-norm", "a scale of an image's channels that only a shift reads", apply)
