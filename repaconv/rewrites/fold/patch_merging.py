"""patch-merging: rearrange tokens by views where a network concatenates every r-th row and column of them.

Swin halves an image of tokens [B, H, W, C] between two stages: it slices every second row and column, four times, and
concatenates the channels. Reshape, Transpose and Reshape move the same numbers, in one pass in place of three.

Source: Liu et al. 2021, "Swin Transformer", section 3.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product
from typing import TYPE_CHECKING

from repaconv.graph.models_in_onnx_ir import clean
from repaconv.graph.nodes_and_constants import Writer, attribute, nodes_of
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.strided_slices import PixelsOfBlocks, pixels_of_blocks
from repaconv.graph.symbolic_shapes import as_numbers, set_shape, sizes
from repaconv.graph.tensor_views import reshaped
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir


def apply(model: ir.Model) -> Iterator[Change]:
    """Write views in place of each Concat, along the last axis, of slices that have every token once; in place."""
    for node in nodes_of(model, "Concat"):
        rank = len(sizes(node.outputs[0]) or ())
        if rank < 3 or int(attribute(node, "axis", 0)) % rank != rank - 1:
            continue
        pixels = pixels_of_blocks(node.inputs, range(1, rank - 1))
        new = _viewed(Writer(model, node), pixels) if pixels is not None else None
        if new is not None:
            Writer(model, node).replace(node.outputs[0], new)
            description = f"Concat of {len(node.inputs)} slices -> Reshape, Transpose, Reshape"
            yield Change(rewrite=PATCH_MERGING.name, place=node.name or "", description=description)
    clean(model)


def _viewed(write: Writer, pixels: PixelsOfBlocks) -> ir.Value | None:
    """The blocks as channels; None if views would order them otherwise, or if the size of the image is dynamic."""
    shape, count = sizes(pixels.source), len(pixels.lengths)
    order = next((order for order in permutations(range(count)) if _ordered(pixels, order) == pixels.places), None)
    image = as_numbers((shape or ())[1:])
    if shape is None or image is None or order is None:
        return None
    if any(size % length for size, length in zip(image, pixels.lengths, strict=False)):
        return None
    blocks = [size // length for size, length in zip(image, pixels.lengths, strict=False)]
    pairs = [size for pair in zip(blocks, pixels.lengths, strict=True) for size in pair]
    apart = reshaped(write, pixels.source, (shape[0], *pairs, image[-1]))
    if apart is None:
        return None
    perm = [0, *(1 + 2 * axis for axis in range(count)), *(2 + 2 * axis for axis in order), 1 + 2 * count]
    moved = write("Transpose", apart, perm=perm)
    set_shape(moved, [(shape[0], *pairs, image[-1])[axis] for axis in perm], apart)
    return reshaped(write, moved, (shape[0], *blocks, len(pixels.places) * image[-1]))


def _ordered(pixels: PixelsOfBlocks, order: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The places of a block's pixels, where the axes are counted in this order, the last one fastest."""
    found = product(*(range(pixels.lengths[axis]) for axis in order))
    return [tuple(place[order.index(axis)] for axis in range(len(order))) for place in found]


PATCH_MERGING = Rewrite(
    "patch-merging", "concatenated slices that take every r-th row and column of tokens of a fixed size", apply
)
