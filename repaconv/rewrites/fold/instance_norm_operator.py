"""instance-norm: write a norm over the pixels of each channel or group of an image as one operator.

Keras, flax and TensorFlow 1 (instance normalization in style transfer) write GroupNormalization as means, products and
a root, on images with channels last. Every one of these nodes passes over the whole image, and tf2onnx does not move
them to channels first. Each group becomes one channel of the operator. Scales and shifts of single channels are written
as Mul and Add after it, and the next convolution may absorb them.

Source: Wu and He 2018, "Group Normalization", section 3.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from repaconv.graph.models_in_onnx_ir import clean
from repaconv.graph.nodes_and_constants import Array, Writer, nodes_of
from repaconv.graph.norm_formulas import ROOTS, NormFormulas, Spread, spread_of
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import Sizes, rank_of, shaped_like, sizes
from repaconv.graph.tensor_views import reshaped, transposed
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir


def apply(model: ir.Model) -> Iterator[Change]:
    """Write InstanceNormalization wherever other operators compute it; in place."""
    for node in nodes_of(model, *ROOTS):
        spread = spread_of(node)
        if spread is None or not _is_possible(spread):
            continue
        for value, scale, shift in NormFormulas(spread, _is_equal_in_batch).found():
            last = value.producer()
            assert last is not None
            if _write(Writer(model, last), spread, value, scale, shift):
                description = "means, a root -> InstanceNormalization"
                yield Change(rewrite=INSTANCE_NORM.name, place=last.name or "", description=description)
    clean(model)


def _is_possible(spread: Spread) -> bool:
    """Whether a norm is over whole samples, or over whole channels or groups whose number is known.

    Without numbers, ONNX Runtime ends the process with a segmentation fault.
    """
    shape, kept = sizes(spread.x) or (), spread.kept
    if 0 in shape:
        return False
    return len(kept) == 1 or (len(kept) == 2 and len(shape) > 2 and isinstance(shape[kept[1]], int))


def _is_equal_in_batch(numbers: Array) -> bool:
    return len(numbers) == 1


def _order(spread: Spread) -> list[int]:
    """Return the axes of x, the averaged ones last; of these, the axis after the group's comes first: its channels."""
    rank, kept = rank_of(spread.x), spread.kept
    return [*kept, *sorted(spread.axes, key=lambda axis: (axis - kept[-1]) % rank)]


def _write(write: Writer, spread: Spread, value: ir.Value, scale: Array, shift: Array | None) -> bool:
    """Write the operator in place of a value; False if a shape cannot be written."""
    order = _order(spread)
    turned = transposed(write, spread.x, order)
    shape = sizes(turned)
    assert shape is not None
    samples = len(spread.kept) == 1  # each sample is one channel
    places = [axis for axis in range(len(spread.kept), len(shape)) if shape[axis] != 1] or [len(shape) - 1]
    image = (shape[0], 1 if samples else shape[1], *(shape[axis] for axis in places))
    x = reshaped(write, turned, image)
    if x is None or reshaped(write, x, shape) is None:
        return False
    zero = np.zeros_like(scale[:1])
    parts = [np.transpose(part, order) for part in (scale, zero if shift is None else shift)]
    parts = [
        part.reshape(1, *part.shape[1 : 2 - samples], *(1,) * samples, *(part.shape[axis] for axis in places))
        for part in parts
    ]
    channels = image[1]
    assert isinstance(channels, int)
    inside = all(part.size == part.shape[1] for part in parts)
    own = parts if inside else [np.ones(1), np.zeros(1)]
    numbers = [write.constant(np.broadcast_to(part.reshape(-1), channels)) for part in own]
    new = shaped_like(write("InstanceNormalization", x, *numbers, epsilon=spread.epsilon), x)
    after = reshaped(write, new if inside else _with_affine(write, new, parts), shape)
    assert after is not None
    write.replace(value, transposed(write, after, [int(place) for place in np.argsort(order)]))
    return True


def _with_affine(write: Writer, value: ir.Value, parts: list[Array]) -> ir.Value:
    """Write a scale and a shift. If possible, the axes along which they differ become the channels of an image."""
    shape = sizes(value) or ()
    last = max(axis for part in parts for axis, length in enumerate(part.shape) if length > 1)
    widths = [size for size in shape[1 : last + 1] if isinstance(size, int)]
    image: Sizes = (shape[0], int(np.prod(widths)), *shape[last + 1 :])
    seen = reshaped(write, value, image) if 3 < len(image) < len(shape) and len(widths) == last else None
    if seen is not None and reshaped(write, seen, shape) is not None:
        column = (1, *widths, *(1,) * (len(shape) - last - 1))
        flat = (1, -1, *(1,) * (len(image) - 2))
        parts = [np.broadcast_to(part, column).reshape(flat) for part in parts]
        value = seen
    for operator, part in zip(("Mul", "Add"), parts, strict=True):
        if (part != (operator == "Mul")).any():
            value = shaped_like(write(operator, value, write.constant(part)), value)
    return value


INSTANCE_NORM = Rewrite(
    "instance-norm",
    "a norm over the places of each channel, group or sample, if nothing else reads its root",
    apply,
)
