"""transpose-in-steps: write a Transpose that moves the last axis among others as two that are fast.

    transpose(x, p) = transpose(transpose(x, q), r)

One of q and r moves rows: the last axis stays. The other transposes matrices: [.., a, b] to [.., b, a].

ONNX Runtime copies rows as blocks, and transposes matrices in tiles. Everything else it copies element by element, at a
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

MIN_ELEMENTS = 4096
"""Elements from which a tensor is moved in steps; for fewer, running more nodes takes as long as it saves."""
MIN_ROW = 4
"""Elements of a row from which moving rows is faster than moving elements."""
MIN_OPSET = 9
"""Before it, Flatten takes floating-point numbers only."""
TYPES = (
    "FLOAT",
    "FLOAT16",
    "BFLOAT16",
    "DOUBLE",
    "BOOL",
    *(f"{s}INT{bits}" for s in ("", "U") for bits in (8, 16, 32, 64)),
)
"""Element types for which ONNX Runtime has all kernels: not 4 bits, and not float8."""

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
        """Elements of a row that is moved as a whole."""
        kept = [size for axis, size in enumerate(self.dims) if self.perm[axis:] == list(range(axis, len(self.dims)))]
        return abs(prod(kept))


def _transpose_in_steps(model: ir.Model) -> Iterator[Change]:
    if model.opset_imports.get("", 0) < MIN_OPSET:
        return
    for node in nodes_of(model, "Transpose"):
        shape, write = sizes(node.inputs[0]), Writer(model, node)
        typed = write.dtype is not None and write.dtype.name in TYPES
        if shape is None or sum(map(is_dynamic, shape)) > 1 or not typed:
            continue
        dims = [size if isinstance(size, int) else -1 for size in shape]
        perm = list(attribute(node, "perm", range(len(dims))[::-1]))
        if _is_fast(perm) or abs(prod(dims)) < MIN_ELEMENTS or not (steps := _steps(*_simplified(dims, perm))):
            continue
        value = node.inputs[0]
        for step in steps:
            if value is not node.inputs[0]:
                value = write("Flatten", value, axis=1)
            value = write("Transpose", _read_as(write, value, step.dims), perm=step.perm)
        value = write("Reshape", value, write.constant([dims[axis] for axis in perm]))
        set_shape(value, [shape[axis] for axis in perm])
        write.replace(node.outputs[0], value)
        yield Change(
            rewrite="transpose-in-steps", place=node.name or "", description="two Transposes: of rows, and of matrices"
        )


def _is_fast(perm: Sequence[int]) -> bool:
    """Whether ONNX Runtime has a fast kernel: rows are moved, or of all axes, with neighbors joined, one is moved."""
    runs = _runs(perm)
    order = [sorted(runs).index(run) for run in runs]
    others = ([axis for axis in order if axis != moved] for moved in order)
    return perm[-1:] == [len(perm) - 1] or any(rest == sorted(rest) for rest in others)


def _runs(axes: Sequence[int]) -> list[list[int]]:
    """Groups of axes that were neighbors before and stay neighbors."""
    places = {axis: place for place, axis in enumerate(sorted(axes))}
    runs: list[list[int]] = []
    for axis in axes:
        if runs and places[axis] == places[runs[-1][-1]] + 1:
            runs[-1].append(axis)
        else:
            runs.append([axis])
    return runs


def _simplified(dims: Dims, perm: Sequence[int]) -> tuple[Dims, list[int]]:
    """The same Transpose without axes of size 1, and with axes joined that stay neighbors."""
    runs = _runs([axis for axis in perm if dims[axis] != 1])
    before = sorted(runs)
    return [_joined([dims[axis] for axis in run]) for run in before], [before.index(run) for run in runs]


def _steps(dims: Dims, perm: list[int]) -> list[_Step]:
    """The steps of a simplified Transpose. Of the two orders of the steps, the one that moves longer rows.

    [] if the rows are too short in both.
    """
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
    return [step for step in steps if step.perm != sorted(step.perm)] if kept >= MIN_ROW else []


def _turn(dims: Dims, start: int, middle: int) -> _Step:
    """The step that exchanges the axes from ``start`` to ``middle`` with all after them."""
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
