"""transpose-in-steps: write a Transpose that moves the last axis among others as two that are fast.

    transpose(x, p) = transpose(transpose(x, q), r)

One of q and r moves whole rows: the last axis stays. The other turns matrices: [.., a, b] to [.., b, a].

ONNX Runtime copies rows as blocks, and turns matrices in tiles. All other transposes it copies number by number, at a
fifth to a tenth of that speed. It joins transposes that follow each other, also through a Reshape, but not through a
Flatten.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from repaconv.graph.nodes_and_constants import Writer, attribute, nodes_of
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import is_dynamic, set_shape, sizes
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir

LEAST_NUMBERS = 4096
"""Numbers from which a tensor is moved in steps; for fewer, running more nodes takes as long as it saves."""
LEAST_ROW = 4
"""Numbers of a row from which moving rows is faster than moving numbers."""

Dims = list[int]
"""A shape; -1 is the dynamic size, of which there is one at most."""


class _Step(NamedTuple):
    """A Transpose of a tensor that is read as one of another shape.

    Attributes:
        dims: The shape.
        perm: The axes, as they are afterwards.
    """

    dims: Dims
    perm: list[int]

    def kept_row(self) -> float:
        """Numbers of a row that is moved as a whole."""
        kept = [size for axis, size in enumerate(self.dims) if self.perm[axis:] == list(range(axis, len(self.dims)))]
        return abs(prod(kept))


def _transpose_in_steps(model: ir.Model) -> Iterator[Change]:
    for node in nodes_of(model, "Transpose"):
        shape = sizes(node.inputs[0])
        if shape is None or sum(map(is_dynamic, shape)) > 1:
            continue
        dims = [size if isinstance(size, int) else -1 for size in shape]
        perm = list(attribute(node, "perm", range(len(dims))[::-1]))
        if perm[-1:] == [len(dims) - 1] or _moves_one_axis(perm) or abs(prod(dims)) < LEAST_NUMBERS:
            continue
        if not (steps := _steps(*_simplified(dims, perm))):
            continue
        write, value = Writer(model, node), node.inputs[0]
        for step in steps:
            if value is not node.inputs[0]:
                value = write("Flatten", value, axis=1)
            value = write("Transpose", _read_as(write, value, step.dims), perm=step.perm)
        value = write("Reshape", value, write.constant([dims[axis] for axis in perm]))
        set_shape(value, [shape[axis] for axis in perm])
        write.replace(node.outputs[0], value)
        yield Change(rewrite="transpose-in-steps", place=node.name or "", description="rows and matrices apart")


def _moves_one_axis(perm: Sequence[int]) -> bool:
    """Whether all axes but one keep their order."""
    rests = ([axis for axis in perm if axis != moved] for moved in perm)
    return any(rest == sorted(rest) for rest in rests)


def _simplified(dims: Dims, perm: Sequence[int]) -> tuple[Dims, list[int]]:
    """The same Transpose without axes of size 1, and with axes joined that stay neighbors."""
    moved = [axis for axis in perm if dims[axis] != 1]
    places = {axis: place for place, axis in enumerate(sorted(moved))}
    runs: list[list[int]] = []
    for axis in moved:
        if runs and places[axis] == places[runs[-1][-1]] + 1:
            runs[-1].append(axis)
        else:
            runs.append([axis])
    before = sorted(runs)
    return [_joined([dims[axis] for axis in run]) for run in before], [before.index(run) for run in runs]


def _steps(dims: Dims, perm: list[int]) -> list[_Step]:
    """The steps of a simplified Transpose, with longer rows of the two ways; [] if the rows are too short in both."""
    last = len(dims) - 1
    if last < 1:
        return []
    if perm[-1] == last:
        return [_Step(dims, perm)]
    # rows first: the last axis goes to its place afterwards
    rows = [*(axis for axis in perm if axis != last), last]
    rows_first = [_Step(dims, rows), _turn([dims[axis] for axis in rows], perm.index(last), last)]
    # matrices first: the axis that will be the last one goes there
    turned = [*(axis for axis in range(last + 1) if axis != perm[-1]), perm[-1]]
    rows = [turned.index(axis) for axis in perm]
    turned_first = [_turn(dims, perm[-1], perm[-1] + 1), _Step([dims[axis] for axis in turned], rows)]
    kept, steps = max((rows_first[0].kept_row(), rows_first), (turned_first[1].kept_row(), turned_first))
    return [step for step in steps if step.perm != sorted(step.perm)] if kept >= LEAST_ROW else []


def _turn(dims: Dims, start: int, middle: int) -> _Step:
    """The step that exchanges the axes from ``start`` to ``middle`` with all behind them."""
    return _Step([_joined(dims[:start]), _joined(dims[start:middle]), _joined(dims[middle:])], [0, 2, 1])


def _joined(dims: Sequence[int]) -> int:
    """The size of axes that are joined."""
    return -1 if -1 in dims else prod(dims)


def _read_as(write: Writer, value: ir.Value, dims: Dims) -> ir.Value:
    return value if sizes(value) == tuple(dims) else write("Reshape", value, write.constant(dims))


TRANSPOSE_IN_STEPS = Rewrite(
    "transpose-in-steps",
    "a Transpose that moves the last axis and another one, of a tensor with at most one dynamic size",
    _transpose_in_steps,
    order=101,
    keeps=True,
)
