"""Write a patch embedding as one matrix product, and add constant positions to constant tokens and biases in advance.

conv_{p, stride p}(x)[n] = patch_n(x) W + b                                            patch-gemm
[cls; x W + b] + [pos_0; pos] = [cls + pos_0; x W + (pos + b)]                          constant-tokens
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from repaconv.graph.linear_layers import linear_of, write_linear
from repaconv.graph.nodes_and_constants import (
    Array,
    Writer,
    attribute,
    constant,
    input_at,
    is_constant,
    made_by,
    nodes_of,
    only_reader,
)
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import as_numbers, sizes
from repaconv.graph.token_grids import is_plain, static_grid, static_tokens, tokens_after
from repaconv.graph.view_chains import chain_up_from, reads
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir


def _patches_as_product(model: ir.Model) -> Iterator[Change]:
    for conv in nodes_of(model, "Conv"):
        pixels, weight = static_grid(conv.inputs[0]), constant(conv.inputs[1])
        tokens = tokens_after(conv.outputs[0])
        if pixels is None or weight is None or weight.ndim != 4 or not tokens or not is_plain(conv):
            continue
        if not all(set(read.chain) & set(tokens) for read in reads(conv.outputs[0])):
            continue
        side = weight.shape[2:]
        if (
            max(side) < 2
            or tuple(attribute(conv, "strides", (1, 1))) != side
            or pixels[1] % side[0]
            or pixels[2] % side[1]
        ):
            continue
        write = Writer(model, conv)
        x = _patches(write, conv.inputs[0], pixels, side)
        bias = constant(input_at(conv, 2))
        product = write_linear(write, x, weight.reshape(len(weight), -1).T, bias)
        for value in tokens:
            write.replace(value, product)
        yield Change(
            rewrite="patch-gemm",
            place=conv.name or "",
            description=f"patches of {side[0]} x {side[1]} as the rows of one matrix product",
        )


def _patches(write: Writer, image: ir.Value | None, pixels: tuple[int, int, int], side: tuple[int, ...]) -> ir.Value:
    """[B, C, h p, w q] -> [B, h w, C p q]."""
    channels, rows, columns = pixels[0], pixels[1] // side[0], pixels[2] // side[1]
    apart = write("Reshape", image, write.constant([-1, channels, rows, side[0], columns, side[1]]))
    turned = write("Transpose", apart, perm=[0, 2, 4, 1, 3, 5])
    return write("Reshape", turned, write.constant([-1, rows * columns, channels * side[0] * side[1]]))


def _constants_once(model: ir.Model) -> Iterator[Change]:
    for node in nodes_of(model, "Add"):
        first, second = node.inputs
        tokens, positions = (first, constant(second)) if is_constant(second) else (second, constant(first))
        if tokens is None or positions is None or positions.ndim not in (2, 3):
            continue
        if (
            positions.shape[-2:] != static_tokens(tokens)
            or positions.size != positions[..., :, :].shape[-2] * positions.shape[-1]
        ):
            continue
        positions = positions.reshape(positions.shape[-2:])
        write = Writer(model, node)
        found = _added_to_parts(write, tokens, positions) or _added_with_bias(write, tokens, positions)
        if found is None:
            continue
        write.replace(node.outputs[0], found)
        yield Change(
            rewrite="constant-tokens",
            place=node.name or "",
            description=f"{len(positions)} position embeddings added to constants in advance",
        )


def _added_to_parts(write: Writer, tokens: ir.Value, positions: Array) -> ir.Value | None:
    """Add positions to constant tokens in advance, and to the other tokens before they are concatenated."""
    joined = made_by(tokens, "Concat")
    if joined is None or only_reader(tokens) is None or attribute(joined, "axis", 0) not in (1, -2):
        return None
    lengths = as_numbers((sizes(part) or (0, 0))[1] for part in joined.inputs)
    if lengths is None or not any(_repeated(part) is not None for part in joined.inputs):
        return None
    ends = np.cumsum(lengths)[:-1]
    parts = []
    for part, rows in zip(joined.inputs, np.split(positions, ends), strict=True):
        repeated = _repeated(part)
        assert part is not None
        if repeated is not None:
            sums = constant(repeated.inputs[0]) + rows
            parts.append(write("Expand", write.constant(sums), repeated.inputs[1]))
        else:
            parts.append(_added_with_bias(write, part, rows) or write("Add", part, write.constant(rows[None])))
    return write("Concat", *parts, axis=1)


def _repeated(value: ir.Value | None) -> ir.Node | None:
    """The Expand that repeats constant tokens [1, n, d] over the batch; None if there is none."""
    node, shape = made_by(value, "Expand"), static_tokens(value)
    numbers = constant(node.inputs[0]) if node is not None else None
    return node if numbers is not None and shape is not None and numbers.shape == (1, *shape) else None


def _added_with_bias(write: Writer, tokens: ir.Value, rows: Array) -> ir.Value | None:
    """x W + (rows + b) for tokens x W + b, or for those of a convolution with a bias."""
    if only_reader(tokens) is None:
        return None
    linear = linear_of(tokens)
    if linear is not None and linear.bias is not None:
        return write(
            "Add", write_linear(write, linear.x, linear.weight, None), write.constant((rows + linear.bias)[None])
        )
    chain = chain_up_from(tokens)
    conv = made_by(chain[-1], "Conv")
    bias = constant(input_at(conv, 2)) if conv is not None else None
    if conv is None or bias is None or tokens not in tokens_after(chain[-1]) or len(reads(chain[-1])) != 1:
        return None
    conv.resize_inputs(2)
    return write("Add", tokens, write.constant((rows + bias)[None]))


PATCH_GEMM = Rewrite(
    "patch-gemm",
    "a convolution whose stride equals its kernel, without padding, on an image of known size, if only tokens are read",
    _patches_as_product,
    order=31,
)
CONSTANT_TOKENS = Rewrite(
    "constant-tokens",
    "constant position embeddings that are added to learned tokens and patches, or to patches with a bias",
    _constants_once,
    order=30,
)
