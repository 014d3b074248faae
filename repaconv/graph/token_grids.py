"""Tokens [B, h w, c] and grids [B, c, h, w]: the one found behind or before the other, and written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from repaconv.graph.nodes_and_constants import Writer, attribute, constant
from repaconv.graph.symbolic_shapes import as_numbers, rank_of, sizes
from repaconv.graph.tensor_views import View
from repaconv.graph.view_chains import chain_of, reads, seen

if TYPE_CHECKING:
    import onnx_ir as ir


def static_grid(value: ir.Value | None) -> tuple[int, int, int] | None:
    """(c, h, w) of [B, c, h, w]; None where one of them is free."""
    known = as_numbers((sizes(value) or ())[1:]) if rank_of(value) == 4 else None
    return None if known is None else (known[0], known[1], known[2])


def static_tokens(value: ir.Value | None) -> tuple[int, int] | None:
    """(n, c) of [B, n, c], likewise."""
    known = as_numbers((sizes(value) or ())[1:]) if rank_of(value) == 3 else None
    return None if known is None else (known[0], known[1])


def to_tokens(write: Writer, grid: ir.Value, size: tuple[int, int, int]) -> ir.Value:
    """[B, c, h, w] -> [B, h w, c]."""
    channels, height, width = size
    flat = write("Reshape", grid, write.constant([-1, channels, height * width]))
    return write("Transpose", flat, perm=[0, 2, 1])


def to_grid(write: Writer, tokens: ir.Value, size: tuple[int, int, int]) -> ir.Value:
    """[B, h w, c] -> [B, c, h, w]."""
    turned = write("Transpose", tokens, perm=[0, 2, 1])
    return write("Reshape", turned, write.constant([-1, *size]))


def tokens_behind(grid: ir.Value) -> list[ir.Value]:
    """All that is this grid as tokens."""
    if static_grid(grid) is None:
        return []
    chains = [read.chain for read in reads(grid)]
    parts = [chain[index:] for chain in chains for index in range(len(chain) - 1)]
    return list(dict.fromkeys(part[0] for part in parts if _as_tokens(seen(part))))


def tokens_before(grid: ir.Value) -> ir.Value | None:
    """The tokens that are this grid."""
    if static_grid(grid) is None:
        return None
    chain = chain_of(grid)
    return next((chain[n] for n in range(1, len(chain)) if _as_grid(seen(chain[: n + 1]))), None)


def _as_tokens(view: View | None) -> bool:
    """Whether [B, c, h, w] is seen as [B, h w, c]."""
    if view is None or view.places or view.scale != 1 or len(view.of) != 4:
        return False
    batch, channels, height, width = view.of
    return view.axes == (batch, height + width, channels)


def _as_grid(view: View | None) -> bool:
    """Whether [B, h w, c] is seen as [B, c, h, w]."""
    if view is None or view.places or view.scale != 1 or len(view.axes) != 4:
        return False
    batch, channels, height, width = view.axes
    return view.of == (batch, height + width, channels)


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
