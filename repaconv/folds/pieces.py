"""One linear layer for queries, keys and values, taken apart where its parts are read for different tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from repaconv.graphs.chains import view_of
from repaconv.graphs.linears import linear_of
from repaconv.graphs.nodes import Writer
from repaconv.graphs.operators import SELECTIONS, VIEWS
from repaconv.graphs.selections import selection_of
from repaconv.graphs.shapes import set_shape, sizes
from repaconv.graphs.views import View

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True)
class _Piece:
    """A selection of a linear layer's channels: which, and how it is seen."""

    value: ir.Value
    view: View
    factor: int
    channels: np.ndarray
    count: int | None

    @property
    def whole(self) -> View:
        """What a layer of these channels alone is seen as."""
        return self.view.narrowed(self.view.source, self.factor, self.count)


def separate(model: ir.Model, read: set[ir.Value]) -> bool:
    """Take apart one linear layer of which some channels are read for few tokens, in place; whether there was one.

    Args:
        model: In the form that `repaconv.graphs.normal` makes.
        read: The selections that are read for few tokens, of values that are read for all.
    """
    for node in model.graph:
        for value in node.outputs:
            piece = _piece(value) if value in read else None
            if piece is None or linear_of(piece.view.source) is None:
                continue
            pieces = _all_pieces(piece.view.source)
            if pieces is not None and all(one.whole.writable for one in pieces):
                for one in pieces:
                    _write_piece(model, one)
                return True
    return False


def _piece(value: ir.Value) -> _Piece | None:
    selected = selection_of(value)
    seen = view_of(selected.value) if selected is not None else None
    merged = seen.merged(selected.axis) if seen is not None and selected is not None else None
    if selected is None or merged is None or len(merged.axes[selected.axis]) != 1:
        return None
    factor = merged.axes[selected.axis][0]
    channels = merged.channels(factor, selected.places)
    if channels is None or merged.axis_of(factor) != len(merged.of) - 1:
        return None
    return _Piece(value, merged, factor, channels, len(selected.places) if selected.keeps else None)


def _all_pieces(source: ir.Value) -> list[_Piece] | None:
    """Every selection of its channels, if nothing else reads the value."""
    found, seen = [], [source]
    while seen:
        value = seen.pop()
        if value.is_graph_output():
            return None
        for user, place in value.uses():
            if place == 0 and user.domain == "" and user.op_type in SELECTIONS:
                pieces = [_piece(output) for output in user.outputs if output.uses() or output.is_graph_output()]
                if any(piece is None or piece.view.source is not source for piece in pieces):
                    return None
                found += [piece for piece in pieces if piece is not None]
            elif place == 0 and user.op_type in VIEWS:
                seen.append(user.outputs[0])
            else:
                return None
    return found


def _write_piece(model: ir.Model, piece: _Piece) -> None:
    """A linear layer of the piece's channels alone."""
    found, node, shape = linear_of(piece.view.source), piece.value.producer(), sizes(piece.view.source)
    assert found is not None
    assert node is not None
    assert shape is not None
    write = Writer(model, node)
    new = write("MatMul", found.x, write.constant(found.weight[:, piece.channels]))
    set_shape(new, (*shape[:-1], len(piece.channels)), found.x)
    if found.bias is not None:
        new = write("Add", new, write.constant(found.bias[piece.channels]))
        set_shape(new, (*shape[:-1], len(piece.channels)), found.x)
    seen = replace(piece.whole, source=new).write(write)
    assert seen is not None
    write.replace(piece.value, seen)
