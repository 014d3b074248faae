"""selections: read the part of a Concat that a Slice, Gather or Split selects, without the Concat.

    (a, b)[len(a):] = b

TimeSformer puts the class token before all others and takes both apart again, in every layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from repaconv.graph.canonical_form import shorten_views
from repaconv.graph.index_selections import Selection, are_consecutive, selection_of
from repaconv.graph.models_in_onnx_ir import clean
from repaconv.graph.nodes_and_constants import Writer, attribute, is_read, made_by, nodes_of
from repaconv.graph.operator_facts import SELECTIONS
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import as_numbers, set_shape, sizes
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir


def apply(model: ir.Model) -> Iterator[Change]:
    """Let each selection along the axis of a Concat read the input of it that has all that is selected; in place."""
    changes: list[Change] = []
    ends: Ends = {}
    for node in nodes_of(model, *SELECTIONS):
        read = [value for value in node.outputs if is_read(value)]
        found = [
            (value, chosen, part) for value in read if (chosen := selection_of(value)) and (part := _part(chosen, ends))
        ]
        if len(found) < len(read):
            continue  # the Split stays for one output, and its others cost nothing there
        for value, chosen, (source, places) in found:
            write = Writer(model, node)
            write.replace(value, _selected(write, source, places, chosen, value))
            description = f"{node.op_type} of a Concat -> of one of its inputs"
            changes.append(Change(rewrite=SELECTIONS_OF_CONCATS.name, place=node.name or "", description=description))
    clean(model)
    if changes:
        shorten_views(model)
        clean(model)
    yield from changes


Ends = dict["ir.Node", "NDArray[np.int64] | None"]
"""Where the inputs of each Concat end along its axis; None if that is not known."""


def _part(chosen: Selection, ends: Ends) -> tuple[ir.Value, np.ndarray] | None:
    """The input of a Concat that has all that is selected, and its places there; None if there is none."""
    concat, rank = made_by(chosen.value, "Concat"), len(sizes(chosen.value) or ())
    if concat is None or int(attribute(concat, "axis", 0)) % rank != chosen.axis:
        return None
    if concat not in ends:
        ends[concat] = _ends(concat, chosen.axis)
    known = ends[concat]
    if known is None:
        return None
    first = int(chosen.places.min())
    at = int(np.searchsorted(known, first, side="right"))
    start, source = int(known[at - 1]) if at else 0, concat.inputs[at]
    return None if source is None or int(chosen.places.max()) >= known[at] else (source, chosen.places - start)


def _ends(concat: ir.Node, axis: int) -> NDArray[np.int64] | None:
    shapes = [shape for value in concat.inputs if (shape := sizes(value)) is not None]
    lengths = as_numbers(shape[axis] for shape in shapes)
    return None if lengths is None or len(shapes) < len(concat.inputs) else np.cumsum(lengths)


def _selected(write: Writer, source: ir.Value, places: np.ndarray, chosen: Selection, value: ir.Value) -> ir.Value:
    """Write a selection of a value, as that which it replaces selects of a Concat."""
    length, axis = (sizes(source) or ())[chosen.axis], chosen.axis
    if not chosen.keeps:
        new = write("Gather", source, write.constant(np.array(int(places[0]))), axis=axis)
    elif len(places) == length and are_consecutive(places):
        return source
    elif are_consecutive(places):
        ends = ([int(places[0])], [int(places[-1]) + 1], [axis])
        new = write("Slice", source, *(write.constant(end) for end in ends))
    else:
        new = write("Gather", source, write.constant(places), axis=axis)
    set_shape(new, sizes(value), source)
    return new


SELECTIONS_OF_CONCATS = Rewrite("selections", "along the axis of a Concat, within one of its inputs", apply)
