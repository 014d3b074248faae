"""space-to-depth: let a convolution read the image directly, without the rearrangement of its pixels into channels.

    z[c, p](i) = x[c](r i + p),  0 <= p < r along each axis:    W * z = V * x of stride r,    V[c](r t + p) = W[c, p](t)

Blocks of r x r pixels become channels in Focus (YOLOv5, YOLOX), which slices every second row and column, and in
`nn.PixelUnshuffle`. A convolution of these channels equals a convolution of the image, with r times the kernel size,
stride and padding, and the same number of products. Zero padding around the blocks is zero padding around the image.

If Reshape and Transpose, or SpaceToDepth, rearrange the pixels, only 1x1 convolutions are rewritten: OpenVINO runs its
own SpaceToDepth faster than the larger kernels. Before other convolutions, Reshape, Transpose and Reshape become one
SpaceToDepth, which orders the channels differently, so the weights are reordered: with ONNX Runtime, rearranging and a
3x3 convolution then take 0.7 to 0.86 of the time.

Source: Ultralytics' YOLOv5 v6.0, whose Focus became a convolution with a kernel of 6x6.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from repaconv.algebra.channel_maps import Vector
from repaconv.algebra.convolution_kernels import Kernel
from repaconv.graph.nodes_and_constants import Writer, attribute, is_read_once, made_by, nodes_of
from repaconv.graph.operator_facts import VIEWS
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.strided_slices import pixels_of_blocks
from repaconv.graph.symbolic_shapes import as_numbers, shaped_like, sizes
from repaconv.graph.view_chains import view_of_chain
from repaconv.results import Change
from repaconv.rewrites.fold.convolution_composition import scaled_channels
from repaconv.rewrites.fold.kernels_from_onnx import kernel_of

if TYPE_CHECKING:
    import onnx_ir as ir

    from repaconv.graph.tensor_views import View


class _Blocks(NamedTuple):
    """An image whose pixels became channels, block by block.

    Attributes:
        image: The image.
        lengths: The length of a block along each axis.
        channels: For each channel: the channel of the image, and the place of the pixel in its block.
    """

    image: ir.Value
    lengths: tuple[int, ...]
    channels: list[tuple[int, ...]]


def apply(model: ir.Model) -> Iterator[Change]:
    """Let every convolution of rearranged pixels read the image, if it is their only reader; in place."""
    for node in nodes_of(model, "Conv"):
        x, kernel = node.inputs[0], kernel_of(node)
        if x is None or kernel is None or kernel.groups > 1 or min(kernel.pads) < 0 or not is_read_once(x):
            continue
        if any(taps.step != 1 for taps in kernel.taps):
            continue
        sliced = _sliced(x)
        blocks = sliced or _rearranged(x)
        if blocks is None:
            continue
        if sliced is None and not kernel.is_pointwise:
            yield from _of_operator(model, node, kernel, blocks)
            continue
        new = _of_image(kernel, blocks)
        write = Writer(model, node)
        parts = [write.constant(part) for part in (new.weight, new.bias) if part is not None]
        out = shaped_like(write("Conv", blocks.image, *parts, **new.attributes), node.outputs[0])
        write.replace(node.outputs[0], out)
        sides = ["x".join(map(str, each.weight.shape[2:])) for each in (kernel, new)]
        description = f"{sides[0]} on blocks of pixels -> {sides[1]} with stride {'x'.join(map(str, new.strides))}"
        yield Change(rewrite=SPACE_TO_DEPTH.name, place=node.name or "", description=description)


def _of_image(kernel: Kernel, blocks: _Blocks) -> Kernel:
    """The kernel on the image that computes the same as this kernel on the image's blocks."""
    out, _, *taps = kernel.weight.shape
    width = 1 + max(channel for channel, *_ in blocks.channels)
    weight = np.zeros((out, width, *(tap * length for tap, length in zip(taps, blocks.lengths, strict=True))))
    for number, (channel, *places) in enumerate(blocks.channels):
        every = [slice(place, None, length) for place, length in zip(places, blocks.lengths, strict=True)]
        index: tuple[Any, ...] = (slice(None), channel, *every)
        weight[index] = kernel.weight[:, number]
    pads = [pad * length for pad, length in zip(kernel.pads, blocks.lengths * 2, strict=True)]
    strides = [stride * length for stride, length in zip(kernel.strides, blocks.lengths, strict=True)]
    return Kernel.convolution(weight, kernel.bias, strides=strides, pads=pads)


def _of_operator(model: ir.Model, node: ir.Node, kernel: Kernel, blocks: _Blocks) -> Iterator[Change]:
    """Let a convolution read a SpaceToDepth in place of a Reshape, Transpose and Reshape; scales before go into it."""
    x, (channels, *places) = node.inputs[0], np.array(blocks.channels).T
    written = bool(made_by(x, "SpaceToDepth"))
    if len({*blocks.lengths}) > 1 or len(blocks.lengths) != 2 or not _has_kernel(x):
        return
    image, scale, shift = _before_scales(blocks.image, padded=kernel.is_padded)
    if written and image is blocks.image:
        return
    new, length = kernel.of_scaled(scale[channels], shift[channels] if shift.any() else None), blocks.lengths[0]
    weight = np.empty_like(new.weight)
    weight[:, (places[0] * length + places[1]) * len(scale) + channels] = new.weight
    write = Writer(model, node)
    rearranged = shaped_like(write("SpaceToDepth", image, blocksize=length), x)
    parts = [write.constant(part) for part in (weight, new.bias) if part is not None]
    out = shaped_like(write("Conv", rearranged, *parts, **new.attributes), node.outputs[0])
    write.replace(node.outputs[0], out)
    description = "a scale of channels before SpaceToDepth" if written else "blocks of pixels -> SpaceToDepth"
    yield Change(rewrite=SPACE_TO_DEPTH.name, place=node.name or "", description=description)


def _before_scales(image: ir.Value, *, padded: bool) -> tuple[ir.Value, Vector, Vector]:
    """The value before all scales of an image that nothing else reads, and the factor and shift of each channel.

    A padded convolution takes no shift: its zeros are not shifted.
    """
    width = (sizes(image) or ())[1]
    assert isinstance(width, int)
    scale, shift = np.ones(width), np.zeros(width)
    while is_read_once(image) and (node := image.producer()) is not None and not node.domain:
        found = scaled_channels(node, 1)
        if found is None or (padded and found[2].any()):
            break
        image, shift, scale = found[0], shift + scale * found[2], scale * found[1]
    return image, scale, shift


def _has_kernel(value: ir.Value | None) -> bool:
    """Whether ONNX Runtime has a SpaceToDepth of the type of a value, or casts it to one."""
    return value is not None and value.dtype is not None and value.dtype.name in ("FLOAT", "DOUBLE", "FLOAT16")


# --- A Concat of slices, each of every r-th pixel.


def _sliced(value: ir.Value) -> _Blocks | None:
    """The blocks whose pixels a Concat joins, one slice per pixel of a block; None for other values."""
    concat = made_by(value, "Concat")
    if concat is None or attribute(concat, "axis", 0) not in (1, 1 - len(sizes(value) or ())):
        return None
    whole = pixels_of_blocks(concat.inputs, range(2, len(sizes(value) or ())))
    width = (sizes(whole.source) or (None, None))[1] if whole is not None else None
    if whole is None or not isinstance(width, int):
        return None
    channels = [(channel, *start) for start in whole.places for channel in range(width)]
    return _Blocks(whole.source, whole.lengths, channels)


# --- Views that move pixels into channels, and the operator for it.


def _rearranged(value: ir.Value) -> _Blocks | None:
    """The blocks whose pixels a view or a SpaceToDepth turns into channels; None for other values."""
    node = made_by(value, "SpaceToDepth")
    if node is not None and (image := node.inputs[0]) is not None:
        length, width = int(attribute(node, "blocksize", 1)), (sizes(image) or (None, None))[1]
        if not isinstance(width, int):
            return None
        places = product(range(length), range(length), range(width))
        return _Blocks(image, (length, length), [(channel, *place) for *place, channel in places])
    chain = [value]
    while (node := made_by(chain[-1], *VIEWS)) is not None and (before := node.inputs[0]) is not None:
        chain.append(before)
        view = view_of_chain(chain)
        blocks = _blocks_of_view(view) if view is not None else None
        if blocks is not None:
            return blocks
    return None


def _blocks_of_view(view: View) -> _Blocks | None:
    """The blocks of a view whose channels are an image's channels times the pixels of a block; None for other views."""
    if len(view.of) != len(view.axes) or len(view.of) < 3 or view.axes[0] != view.of[0]:
        return None
    pairs = list(zip(view.of[2:], view.axes[2:], strict=True))
    inner = [factors[len(blocks) :] for factors, blocks in pairs]
    channels = (*view.of[1], *(factor for factors in inner for factor in factors))
    apart = as_numbers(view.size[factor] for factor in channels)
    if any(factors[: len(blocks)] != blocks for factors, blocks in pairs) or {*channels} != {*view.axes[1]}:
        return None
    lengths = [as_numbers(view.size[factor] for factor in factors) for factors in (view.of[1], *inner)]
    whole = tuple(prod(length) for length in lengths if length is not None)
    if apart is None or len(whole) < len(lengths) or prod(whole[1:]) < 2:
        return None
    order = np.arange(prod(whole)).reshape(apart).transpose([channels.index(factor) for factor in view.axes[1]])
    places = np.stack(np.unravel_index(order.reshape(-1), whole), axis=1)
    return _Blocks(view.source, whole[1:], [tuple(place) for place in places.tolist()])


SPACE_TO_DEPTH = Rewrite(
    "space-to-depth", "convolutions of slices of every r-th pixel, or of rearranged blocks of pixels", apply
)
