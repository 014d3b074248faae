"""slices: select along several axes at once, where a Slice reads another one.

    x[:, :h][:, :, :w] = x[:, :h, :w]

Swin crops the padding of its windows from the rows and then from the columns of every image.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from repaconv.graph.index_selections import slices
from repaconv.graph.models_in_onnx_ir import clean
from repaconv.graph.nodes_and_constants import Writer, constant, made_by, nodes_of, only_reader
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import rank_of, set_shape, sizes
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir


def apply(model: ir.Model) -> Iterator[Change]:
    """Let each Slice select along the axes of the one that it alone reads as well, if these are others; in place."""
    for node in nodes_of(model, "Slice"):  # in the order of the graph, so that three become one
        before = made_by(node.inputs[0], "Slice")
        if before is None or only_reader(before.outputs[0]) is None:
            continue
        first, second = _parts(before), _parts(node)
        if first is None or second is None or {axis for axis, _ in first} & {axis for axis, _ in second}:
            continue
        write = Writer(model, node)
        rows = [(part.start, part.stop, axis, part.step) for axis, part in (*first, *second)]
        axes = len(rows)
        new = write("Slice", before.inputs[0], *(write.constant([*column]) for column in zip(*rows, strict=True)))
        set_shape(new, sizes(node.outputs[0]), node.outputs[0])
        write.replace(node.outputs[0], new)
        yield Change(rewrite=SLICES.name, place=node.name or "", description=f"two -> one along {axes} axes")
    clean(model)


def _parts(node: ir.Node) -> list[tuple[int, slice]] | None:
    """What a Slice selects along each of its axes; None if that is computed."""
    given = [constant(value) for value in node.inputs[1:]]
    rank = rank_of(node.outputs[0])
    if not rank or any(numbers is None for numbers in given):
        return None
    return slices([numbers.tolist() for numbers in given if numbers is not None], rank)


SLICES = Rewrite("slices", "a Slice of which another one alone reads what is left, along other axes", apply)
