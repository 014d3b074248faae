"""Numbers that are moved for nothing: moves that undo each other, a transpose before a mean.

mean_h(transpose(x)) = mean over the axis where h lies in x
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from repaconv.artefact import Change
from repaconv.forms.contract import Rewrite
from repaconv.forms.graph import Writer, attribute, constant, dims, made_by
from repaconv.forms.layout import MOVES, chain_of, example, layout

if TYPE_CHECKING:
    import onnx_ir as ir

REDUCTIONS = ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin")


def _no_moves(model: ir.Model) -> Iterator[Change]:
    for node in [node for node in model.graph if node.op_type in MOVES and node.domain == ""]:
        for value in node.outputs:
            found = None if value.is_graph_output() else _unmoved(value)
            if found is None:
                continue
            source, told = found
            write, shape = Writer(model, node), dims(value) or ()
            same = dims(source) == shape
            write.replace(
                value,
                source if same else write("Reshape", source, write.constant([-1 if d is None else d for d in shape])),
            )
            yield Change(rewrite="no-moves", place=node.name or "", told=told)


def _unmoved(value: ir.Value) -> tuple[ir.Value, str] | None:
    """The tensor, the farther the better, that a moved one is, in its own shape or but for the shape."""
    chain = chain_of(value)
    for length in range(len(chain), 1, -1):
        source = chain[length - 1]
        read, numbers = layout(chain[:length]), example(source)
        if read is None or numbers is None or read.factor != 1 or constant(source) is not None:
            continue
        if read.positions.size != numbers.size or not np.array_equal(read.positions.ravel(), numbers.ravel()):
            continue
        if dims(source) == dims(value):
            return source, f"{length - 1} moves that undo each other"
        if length > 2 and (dims(value) or ()).count(None) < 2:
            return source, f"{length - 1} moves as one Reshape"
    return None


def _reduced_in_place(model: ir.Model) -> Iterator[Change]:
    for node in [node for node in model.graph if node.op_type in REDUCTIONS]:
        turned, axes = made_by(node.inputs[0], "Transpose"), _axes(node)
        if turned is None or axes is None:
            continue
        rank = len(dims(turned.outputs[0]) or ())
        perm = list(attribute(turned, "perm", list(reversed(range(rank)))))
        if not rank or not perm:
            continue
        gone = sorted(perm[axis % rank] for axis in axes)
        kept = [axis for axis in perm if axis not in gone]
        if kept != sorted(kept) or attribute(node, "keepdims", 1):
            continue
        write = Writer(model, node)
        write.replace(node.outputs[0], write(node.op_type, turned.inputs[0], write.constant(gone), keepdims=0))
        yield Change(
            rewrite="reduce-in-place", place=node.name or "", told=f"over the axes {gone}, not transposed before"
        )


def _axes(node: ir.Node) -> list[int] | None:
    axes = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    return None if axes is None or not axes.size else [int(axis) for axis in axes]


NO_MOVES = Rewrite(
    "no-moves",
    "reshapes, transposes, slices and the like that leave all numbers in order",
    _no_moves,
    order=99,
    keeps=True,
)
REDUCE_IN_PLACE = Rewrite(
    "reduce-in-place",
    "a reduction without kept axes behind a transpose that leaves the other axes in order",
    _reduced_in_place,
    opset=18,
    order=55,
    keeps=True,
)
