"""rotary-op: write a rotary position embedding as one RotaryEmbedding operator (opset 23).

y_a = x_a cos t - x_b sin t,   y_b = x_a sin t + x_b cos t

for pairs (a, b) of channels of every head. Written as slices, negations, concatenations, products and sums, it reads
and writes all tokens about seven times. A class token, which is not rotated, has cos t = 1 and sin t = 0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from repaconv.graph.nodes_and_constants import Array, Writer, nodes_of
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.rotary_embedding_patterns import RotaryEmbedding, rotary_embeddings
from repaconv.graph.shape_folding import fold_shapes
from repaconv.graph.symbolic_shapes import Size, as_numbers, set_shape, sizes
from repaconv.graph.tensor_views import View, reshaped
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir


TYPES = ("FLOAT", "FLOAT16", "BFLOAT16")
"""Element types that ONNX's operator takes."""


def write_operators(model: ir.Model, types: Collection[str] = TYPES) -> Iterator[Change]:
    """Write the rotary embeddings of these element types as one operator each; in place."""
    if nodes_of(model, "Neg", "Sub"):
        fold_shapes(model)  # angles may be computed from constants
    shared = _SharedInputs()
    for found in list(rotary_embeddings(model)):
        node = found.y.producer()
        if node is None or found.y.dtype is None or found.y.dtype.name not in types:
            continue
        write = Writer(model, node)
        found = _with_batch(write, found)
        x = _input(write, found)
        view = None if x is None else _embedded(write, x, found, shared)
        seen = None if view is None else view.write(write)
        if seen is None:
            continue
        write.replace(found.y, seen)
        yield Change(
            rewrite="rotary-op",
            place=node.name or "",
            description=f"{found.heads} heads of {found.width} on {len(found.cos)} tokens as one RotaryEmbedding",
        )


def _with_batch(write: Writer, found: RotaryEmbedding) -> RotaryEmbedding:
    """The same embedding, of x with the axis B."""
    shape = as_numbers(sizes(found.x) or ())
    if found.x_axes[0] == "b" or shape is None:
        return found
    x = reshaped(write, found.x, (1, *shape))
    return found if x is None else replace(found, x=x, x_axes="b" + found.x_axes)


def _input(write: Writer, found: RotaryEmbedding) -> ir.Value | None:
    """x as tokens [B, N, H d]. Heads [B, H, N, d] stay as they are; None if they cannot."""
    x, shape, width = found.x, sizes(found.x) or (), found.heads * found.width
    if found.x_axes == "bhnd" and _rows(found) == 1:
        return x if shape[1] == found.heads else None
    if len(shape) == 4:
        axes = tuple((axis,) for axis in range(4))
        batch, tokens, heads, channels = (axes[found.x_axes.index(axis)] for axis in "bnhd")
        x = View(x, axes, (batch, tokens, heads + channels), dict(enumerate(shape))).write(write)
        if x is None:
            return None
        shape = sizes(x) or ()
    if shape[2] != width:
        x = write("Slice", x, *(write.constant([bound]) for bound in (found.offset, found.offset + width, 2)))
        set_shape(x, (*shape[:2], width), found.x)
    return x


def _rows(found: RotaryEmbedding) -> int:
    """How many rows with angles of their own a token has: all heads or blocks of heads if they differ, otherwise 1."""
    return found.heads * found.blocks if found.blocks > 1 or found.cos.shape[1] > 1 else 1


def _embedded(write: Writer, x: ir.Value, found: RotaryEmbedding, shared: _SharedInputs) -> View | None:
    """The embedding of x, as a view with the axes of y."""
    tokens, own, pairs = found.cos.shape
    pairs, width, of_token = pairs // found.blocks, found.width // found.blocks, _rows(found)
    shape, rows = sizes(x) or (), x
    attributes = {"interleaved": int(found.interleaved)}
    if of_token > 1:  # every row of every token is a token by itself
        rows = reshaped(write, x, (shape[0], tokens * of_token, width))
    if rows is None:
        return None
    if len(shape) == 3:
        attributes["num_heads"] = found.heads if of_token == 1 else 1
    if 2 * pairs < width:
        attributes["rotary_embedding_dim"] = 2 * pairs
    # a table has a row for each place: ONNX Runtime refuses one with fewer
    every = (tokens, of_token // found.blocks, found.blocks, pairs)
    tables = [np.broadcast_to(part.reshape(tokens, own, *every[2:]), every) for part in (found.cos, found.sin)]
    angles = [shared.constant(write, table.reshape(-1, pairs)) for table in tables]
    new = write("RotaryEmbedding", rows, *angles, shared.positions(write, x, tokens * of_token), **attributes)
    set_shape(new, sizes(rows), x)
    back = reshaped(write, new, shape)  # attention-op reads tokens
    size = {"bnhd".index(axis): length for axis, length in zip(found.y_axes, sizes(found.y) or (), strict=True)}
    axes = tuple(("bnhd".index(axis),) for axis in found.y_axes)
    of = tuple(("bnhd".index(axis),) for axis in found.x_axes) if len(shape) == 4 else ((0,), (1,), (2, 3))
    return None if back is None else View(back, of, axes, size)


class _SharedInputs:
    """Cosines, sines and positions, written once for all embeddings with the same ones."""

    def __init__(self) -> None:
        self._constants: dict[object, ir.Value] = {}
        self._positions: dict[tuple[Size, int], ir.Value] = {}

    def constant(self, write: Writer, numbers: Array) -> ir.Value:
        """A constant of these numbers in the type of the tokens."""
        key = (write.dtype, numbers.shape, numbers.tobytes())
        if key not in self._constants:
            self._constants[key] = write.constant(numbers)
        return self._constants[key]

    def positions(self, write: Writer, x: ir.Value, tokens: int) -> ir.Value:
        """The numbers of the tokens for every image, [B, N]: ONNX Runtime does not broadcast them over the batch."""
        import onnx_ir as ir

        batch = (sizes(x) or ())[0]
        if (batch, tokens) not in self._positions:
            row = np.arange(tokens)[None]
            if isinstance(batch, int):
                every = write.constant(np.repeat(row, batch, 0))
            else:
                size = write("Shape", x, start=0, end=1)
                shape = write("Concat", size, write.constant([1]), axis=0)
                every = write("Expand", write.constant(row), shape)
                for value in (size, shape, every):
                    value.dtype = ir.DataType.INT64
                set_shape(every, (batch, tokens))
            self._positions[batch, tokens] = every
        return self._positions[batch, tokens]


ROTARY_OP = Rewrite(
    "rotary-op",
    "rotary position embeddings of queries or keys: pairs of channels, rotated by an angle per token and pair",
    write_operators,
    opset=23,
    order=59,
    keeps=True,
)
"""Before attention-op, which then reads the embedded heads side by side."""
