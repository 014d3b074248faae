"""Tokens [B, h w, c] and grids [B, c, h, w]: the one found behind or before the other, and written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from repaconv.forms.graph import Array, Writer, attribute, constant, dims
from repaconv.forms.layout import chain_of, layout, reads

if TYPE_CHECKING:
    import onnx_ir as ir


def static_grid(value: ir.Value | None) -> tuple[int, int, int] | None:
    """(c, h, w) of [B, c, h, w]; None where one of them is free."""
    shape = dims(value)
    if shape is None or len(shape) != 4 or None in shape[1:]:
        return None
    channels, height, width = (size or 0 for size in shape[1:])
    return channels, height, width


def to_tokens(write: Writer, grid: ir.Value, sizes: tuple[int, int, int]) -> ir.Value:
    """[B, c, h, w] -> [B, h w, c]."""
    channels, height, width = sizes
    flat = write("Reshape", grid, write.constant([-1, channels, height * width]))
    return write("Transpose", flat, perm=[0, 2, 1])


def to_grid(write: Writer, tokens: ir.Value, sizes: tuple[int, int, int]) -> ir.Value:
    """[B, h w, c] -> [B, c, h, w]."""
    turned = write("Transpose", tokens, perm=[0, 2, 1])
    return write("Reshape", turned, write.constant([-1, *sizes]))


def tokens_behind(grid: ir.Value) -> list[ir.Value]:
    """All that is this grid as tokens."""
    sizes = static_grid(grid)
    if sizes is None:
        return []
    found = {value: None for read in reads(grid) for value in _as_tokens(read.chain, sizes)}
    return list(found)


def _as_tokens(chain: list[ir.Value], sizes: tuple[int, int, int]) -> list[ir.Value]:
    wanted = _turned(sizes[0], sizes[1] * sizes[2])
    return [value for index, value in enumerate(chain[:-1]) if _is(chain[index:], wanted[None])]


def tokens_before(grid: ir.Value) -> ir.Value | None:
    """The tokens that are this grid."""
    sizes = static_grid(grid)
    if sizes is None:
        return None
    chain, count = chain_of(grid), sizes[1] * sizes[2]
    wanted = _turned(count, sizes[0]).reshape(1, *sizes)
    for index, value in enumerate(chain[1:], 2):
        if (dims(value) or ())[1:] == (count, sizes[0]) and _is(chain[:index], wanted):
            return value
    return None


def _turned(rows: int, columns: int) -> Array:
    turned: Array = np.arange(rows * columns).reshape(rows, columns).T
    return turned


def _is(chain: list[ir.Value], wanted: Array) -> bool:
    read = layout(chain)
    return read is not None and read.factor == 1 and np.array_equal(read.positions, wanted)


def is_plain(conv: ir.Node) -> bool:
    """Whether a convolution has one group, no padding, no dilation, and constant weights."""
    numbers = [constant(entry) for entry in conv.inputs[1:] if entry is not None]
    return (
        attribute(conv, "auto_pad", "NOTSET") in ("NOTSET", "VALID")
        and not any(attribute(conv, "pads", ()))
        and all(step == 1 for step in attribute(conv, "dilations", ()))
        and attribute(conv, "group", 1) == 1
        and all(entry is not None for entry in numbers)
    )
