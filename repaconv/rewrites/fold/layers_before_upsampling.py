"""before-upsampling: apply a 1x1 convolution before its input is upsampled, where there are fewer pixels.

Every pixel of an upsampled image is a weighted mean of pixels, with weights that sum to 1. A 1x1 convolution can
therefore be applied before, on fewer pixels: conv(up(x)) = up(conv(x)). A convolution of concatenated images is the sum
of one convolution per image. If the head of a segmentation network concatenates images of several resolutions
(SegFormer), each image is convolved at its own resolution.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from repaconv.algebra.convolution_kernels import Kernel
from repaconv.graph.index_selections import swaps_last
from repaconv.graph.nodes_and_constants import (
    Array,
    Writer,
    attribute,
    constant,
    input_at,
    made_by,
    nodes_of,
    only_reader,
)
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import limit_of_ratio, rank_of, set_shape, shaped_like, sizes
from repaconv.results import Change
from repaconv.rewrites.fold.kernels_from_onnx import kernel_of, resizes_pixels_only

if TYPE_CHECKING:
    import onnx_ir as ir

MACS_PER_NUMBER = 64
"""Multiply-accumulates that take about as long as adding a number of one more image, or interpolating it."""
LEAST_SHARE = 0.5
"""Least share of a convolution's products that must be saved; for less, the graph would grow for little gain."""


class _Part(NamedTuple):
    """An image that a convolution reads, its number of channels, and the Resize that upsamples it, if one does."""

    image: ir.Value
    width: int
    resize: ir.Node | None


def apply(model: ir.Model) -> Iterator[Change]:
    """Move 1x1 convolutions before the upsampling of the images that they read, where that is cheaper; in place."""
    for node in nodes_of(model, "Conv"):
        kernel = kernel_of(node)
        if kernel is None or not kernel.acts_by_place or kernel.groups > 1:
            continue
        parts = _parts(node, kernel)
        if not _is_cheaper(kernel, parts):
            continue
        _write(model, node, kernel, parts)
        count = sum(part.resize is not None for part in parts)
        yield Change(
            rewrite=BEFORE_UPSAMPLING.name,
            place=node.name or "",
            description=f"{node.name} acts on {count} image{'s' * (count > 1)} before upsampling, not after",
        )


def _parts(node: ir.Node, kernel: Kernel) -> list[_Part]:
    """The images that are concatenated for a convolution, or its only one; empty if their widths are unknown."""
    image = node.inputs[0]
    assert image is not None
    concat = made_by(image, "Concat")
    if concat is None or attribute(concat, "axis", 0) != 1 or only_reader(image) is None:
        return [_Part(image, kernel.weight.shape[1], _upsampling(image, len(kernel.weight)))]
    found = []
    for part in concat.inputs:
        shape = sizes(part)
        if part is None or shape is None or not isinstance(width := shape[1], int):
            return []
        found.append(_Part(part, width, _upsampling(part, len(kernel.weight))))
    return found


def _upsampling(image: ir.Value, width: int) -> ir.Node | None:
    """The Resize that makes an image of a smaller one for its only reader, and could make one of so many channels."""
    resize = made_by(image, "Resize")
    if resize is None or only_reader(image) is None:
        return None
    fits = _has_own_width(resize, width) or "axes" not in resize.attributes
    return resize if resizes_pixels_only(resize) and fits and _share_of_pixels(resize) < 1 else None


def _share_of_pixels(resize: ir.Node) -> float:
    """Pixels before an upsampling relative to those after it, in the limit of large images; 1 if unknown."""
    before, after = (sizes(value) or () for value in (resize.inputs[0], resize.outputs[0]))
    shares = [limit_of_ratio(*pair) for pair in zip(before[2:], after[2:], strict=True)]
    known = [share for share in shares if share is not None]
    if len(known) == len(shares):
        return prod(known)
    scales = constant(input_at(resize, 2))
    return float(1 / np.prod(scales)) if scales is not None and scales.size else 1.0


def _is_cheaper(kernel: Kernel, parts: list[_Part]) -> bool:
    """Whether the saved products take longer than the additional sums and interpolations."""
    out = len(kernel.weight)
    moved = [(part.width, _share_of_pixels(part.resize)) for part in parts if part.resize is not None]
    saved = sum(out * width * (1 - share) for width, share in moved)
    added = out * (len(moved) - (len(moved) == len(parts)))
    interpolated = sum(out - width for width, _ in moved)
    return saved > max(MACS_PER_NUMBER * (added + interpolated), LEAST_SHARE * kernel.weight.size)


def _write(model: ir.Model, node: ir.Node, kernel: Kernel, parts: list[_Part]) -> None:
    """Write a convolution of each upsampled image and one of all others, and their sum."""
    write, out = Writer(model, node), node.outputs[0]
    columns = np.split(kernel.weight, np.cumsum([part.width for part in parts])[:-1], axis=1)
    others = [(part.image, own) for part, own in zip(parts, columns, strict=True) if part.resize is None]
    bias, terms = kernel.bias, []

    def convolved(image: ir.Value, weight: Array) -> ir.Value:
        nonlocal bias
        new, bias = _mapped(write, image, weight, bias), None
        return _with_width(new, len(weight), image)

    if others:
        images, weights = zip(*others, strict=True)
        image, weight = images[0], np.concatenate(weights, axis=1)
        if len(images) > 1:
            image = _with_width(write("Concat", *images, axis=1), weight.shape[1], images[0])
        terms.append(convolved(image, weight))
    for part, own in zip(parts, columns, strict=True):
        if part.resize is not None and part.resize.inputs[0] is not None:
            small = convolved(part.resize.inputs[0], own)
            large = write.copy(part.resize, small, *_resize_inputs(write, part.resize, len(own)))
            terms.append(shaped_like(large, out))
    total = terms[0]
    for term in terms[1:]:
        total = shaped_like(write("Add", total, term), out)
    write.replace(out, total)
    concat = made_by(node.inputs[0], "Concat") if len(parts) > 1 else None
    gone = dict.fromkeys([node, concat, *(part.resize for part in parts)])
    model.graph.remove([each for each in gone if each is not None], safe=True)


def _with_width(image: ir.Value, width: int, like: ir.Value) -> ir.Value:
    """Record that the image has the sizes of ``like``, but ``width`` channels; returns the image."""
    shape = sizes(like)
    set_shape(image, None if shape is None else (shape[0], width, *shape[2:]), like)
    return image


def _mapped(write: Writer, image: ir.Value, weight: Array, bias: Array | None) -> ir.Value:
    """Write a 1x1 convolution. If the image is a view of tokens, write a MatMul, which the layer before absorbs."""
    views = _views_of_tokens(image) if weight.shape[0] == weight.shape[1] else None  # else the Reshape is another
    if views is None:
        return write("Conv", image, *(write.constant(numbers) for numbers in (weight, bias) if numbers is not None))
    turn, reshape = views
    tokens = turn.inputs[0]
    assert tokens is not None
    new = shaped_like(write("MatMul", tokens, write.constant(weight.reshape(weight.shape[:2]).T)), tokens)
    if bias is not None:
        new = shaped_like(write("Add", new, write.constant(bias)), tokens)
    turned = shaped_like(write.copy(turn, new), turn.outputs[0])
    return write.copy(reshape, turned, *reshape.inputs[1:])


def _views_of_tokens(image: ir.Value) -> tuple[ir.Node, ir.Node] | None:
    """The Transpose and the Reshape that make an image of tokens [B, N, C], if they do."""
    reshape = made_by(image, "Reshape")
    turn = made_by(reshape.inputs[0], "Transpose") if reshape is not None else None
    if reshape is None or turn is None or not swaps_last(turn):
        return None
    before, after = sizes(turn.outputs[0]), sizes(image)
    same = before is not None and after is not None and len(before) == 3 and before[:2] == after[:2]
    return (turn, reshape) if same else None


def _resize_inputs(write: Writer, resize: ir.Node, width: int) -> list[ir.Value | None]:
    """The inputs of a Resize but for the image, for an image of so many channels."""
    given = list(resize.inputs[1:])
    if _has_own_width(resize, width):
        return given
    wanted, rank = constant(given[2]), rank_of(resize.outputs[0])
    if wanted is not None:
        return [*given[:2], write.constant([*wanted[:1].astype(int), width, *wanted[2:].astype(int)])]
    images = write("Slice", given[2], write.constant([0]), write.constant([1]))
    pixels = write("Slice", given[2], write.constant([2]), write.constant([rank]))
    new = write("Concat", images, write.constant([width]), pixels, axis=0)
    for value, length in ((images, 1), (pixels, rank - 2), (new, rank)):
        set_shape(value, (length,), given[2])
    return [*given[:2], new]


def _has_own_width(resize: ir.Node, width: int) -> bool:
    """Whether the inputs of a Resize fit an image of so many channels."""
    by_scales = input_at(resize, 3) is None
    of_pixels = min(attribute(resize, "axes", (0,))) > 1
    return by_scales or of_pixels or (sizes(resize.outputs[0]) or ())[1:2] == (width,)


BEFORE_UPSAMPLING = Rewrite(
    "before-upsampling",
    "a 1x1 convolution that alone reads upsampled images, if that saves products",
    apply,
)
