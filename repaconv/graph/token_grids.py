"""Convert between tokens [B, h w, c] and grids [B, c, h, w]: find one before or after the other, and write either."""

from __future__ import annotations

from typing import TYPE_CHECKING

from repaconv.graph.nodes_and_constants import attribute, constant
from repaconv.graph.symbolic_shapes import as_numbers, rank_of, sizes
from repaconv.graph.tensor_views import View
from repaconv.graph.view_chains import reads, view_of_chain

if TYPE_CHECKING:
    import onnx_ir as ir


def static_grid(value: ir.Value | None) -> tuple[int, int, int] | None:
    """Return (c, h, w) of a value [B, c, h, w]; None if one is dynamic."""
    known = as_numbers((sizes(value) or ())[1:]) if rank_of(value) == 4 else None
    return None if known is None else (known[0], known[1], known[2])


def static_tokens(value: ir.Value | None) -> tuple[int, int] | None:
    """Return (n, c) of a value [B, n, c]; None if one is dynamic."""
    known = as_numbers((sizes(value) or ())[1:]) if rank_of(value) == 3 else None
    return None if known is None else (known[0], known[1])


def tokens_after(grid: ir.Value) -> list[ir.Value]:
    """Return all values that are this grid as tokens."""
    if static_grid(grid) is None:
        return []
    chains = [read.chain for read in reads(grid)]
    parts = [chain[index:] for chain in chains for index in range(len(chain) - 1)]
    return list(dict.fromkeys(part[0] for part in parts if _as_tokens(view_of_chain(part))))


def _as_tokens(view: View | None) -> bool:
    """Return whether a view is a grid [B, c, h, w] as tokens [B, h w, c]."""
    if view is None or view.places or view.scale != 1 or len(view.of) != 4:
        return False
    batch, channels, height, width = view.of
    return view.axes == (batch, height + width, channels)


def is_plain(conv: ir.Node) -> bool:
    """Return whether a convolution has one group, no padding, no dilation, and constant weights."""
    numbers = [constant(entry) for entry in conv.inputs[1:] if entry is not None]
    return (
        attribute(conv, "auto_pad", "NOTSET") in ("NOTSET", "VALID")
        and not any(attribute(conv, "pads", ()))
        and all(step == 1 for step in attribute(conv, "dilations", ()))
        and attribute(conv, "group", 1) == 1
        and all(entry is not None for entry in numbers)
    )
