"""resize-as-matmul: a cubic Resize of images as a product with a constant matrix for each axis.

resized = H x W^T,   for images x [.., h, w]   with H [h', h] and W [w', w]

Resizing an axis is a linear map of its pixels: each new one is a weighted sum of four old ones. ONNX Runtime looks up
sums in a hash table, on one thread, so that products are faster although most entries of the matrices are zero. The
axis comes first with which they take fewer multiplications. Pixels are taken to be finite.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from repaconv.algebra.image_resizing import resized_by_axis
from repaconv.graph.nodes_and_constants import Array, Writer, attribute, constant, input_at, nodes_of
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import set_shape, sizes
from repaconv.graph.token_grids import static_grid
from repaconv.results import Change
from repaconv.rewrites.fold.kernels_from_onnx import resizes_pixels_only

if TYPE_CHECKING:
    import onnx_ir as ir

TYPES = ("FLOAT", "DOUBLE")
"""Types of images; ONNX Runtime has no cubic Resize of others, and a product in float16 would round once more."""
MOST_PRODUCTS, MOST_PER_NEW_PIXEL = 1024, 8192
"""Multiplications per pixel of the larger image, and per pixel of the new one, up to which products are faster. The
former take 25 to 70 ns per pixel with AVX2, and ONNX Runtime's Resize 95 to 300 ns; of an image that is made much
smaller it reads few pixels, and products all."""


def _resize_as_matmul(model: ir.Model) -> Iterator[Change]:
    for node in nodes_of(model, "Resize"):
        x, before, after = node.inputs[0], static_grid(node.inputs[0]), static_grid(node.outputs[0])
        if x is None or x.dtype is None or x.dtype.name not in TYPES or not _is_cubic(node):
            continue
        if before is None or after is None or before == after or not all((*before, *after)):
            continue
        order, products = _cheapest_order(before[1:], after[1:])
        old, new = prod(before[1:]), prod(after[1:])
        if products > min(MOST_PRODUCTS * max(old, new), MOST_PER_NEW_PIXEL * new):
            continue
        matrices = _matrices(node, before, after)
        if matrices is None:
            continue
        write, image = Writer(model, node), x
        for axis in order:
            image = _multiplied(write, image, matrices[axis], axis)
        write.replace(node.outputs[0], image)
        yield Change(
            rewrite=RESIZE_AS_MATMUL.name,
            place=node.name or "",
            description=f"{before[1]} x {before[2]} to {after[1]} x {after[2]} pixels",
        )


def _is_cubic(node: ir.Node) -> bool:
    """Whether a Resize is cubic, and none with antialiasing: ONNX Runtime has another kernel for it, which is fast."""
    return (
        attribute(node, "mode", "nearest") == "cubic"
        and not attribute(node, "antialias", 0)
        and resizes_pixels_only(node)
    )


def _cheapest_order(before: Sequence[int], after: Sequence[int]) -> tuple[Sequence[int], int]:
    """The order of the axes that takes fewer multiplications, and how many for each channel."""
    (h, w), (new_h, new_w) = before, after
    down, across = h * (h != new_h), w * (w != new_w)  # for each number that a product computes
    across_first = across * h * new_w + down * new_h * new_w
    down_first = down * new_h * w + across * new_h * new_w
    return ((3, 2), across_first) if across_first <= down_first else ((2, 3), down_first)


def _matrices(node: ir.Node, before: Sequence[int], after: Sequence[int]) -> dict[int, Array] | None:
    """The matrices [new, old] of height and width, by axis; None for attributes or scales that are not supported."""
    attributes = {name: entry.value for name, entry in node.attributes.items() if name != "axes"}
    scales: dict[int, float] | None = None
    if input_at(node, 3) is None:
        given = constant(input_at(node, 2))
        axes = [int(axis) % 4 for axis in attribute(node, "axes", range(4))]
        if given is None or len(given) != len(axes):
            return None
        scales = dict(zip(axes, given.tolist(), strict=True))
    found = {}
    for axis in (2, 3):
        old, new = before[axis - 1], after[axis - 1]
        by = None if scales is None else [scales.get(axis, 1.0), 1.0]
        matrix = resized_by_axis(np.eye(old), by, [new, old], attributes)
        if matrix is None:
            return None
        found[axis] = matrix
    return found


def _multiplied(write: Writer, x: ir.Value, matrix: Array, axis: int) -> ir.Value:
    """The product of images with the matrix of an axis; the images themselves if the matrix has no effect."""
    if np.array_equal(matrix, np.eye(len(matrix))):
        return x
    new = write("MatMul", *((x, write.constant(matrix.T, x)) if axis == 3 else (write.constant(matrix, x), x)))
    shape = list(sizes(x) or ())
    shape[axis] = len(matrix)
    set_shape(new, shape, x)
    return new


RESIZE_AS_MATMUL = Rewrite(
    "resize-as-matmul",
    "a cubic Resize of images of constant size, without antialiasing",
    _resize_as_matmul,
    order=93,
    keeps=True,
    fp32_only=True,
)
