"""transpose-in-steps: split a Transpose that ONNX Runtime is slow at into two that it is fast at.

    transpose(x, p) = transpose(transpose(x, q), r)

A DepthToSpace is the Transpose of an image [B, c, b, b, h, w], or [B, b, b, c, h, w], to [B, c, h, b, w, b].

One of q and r moves rows: the last axis stays. The other transposes matrices: [.., a, b] to [.., b, a].

ONNX Runtime copies rows as blocks, and transposes matrices in tiles. Everything else it copies element by element, at a
fifth to a tenth of that speed. It joins transposes that follow each other, also through a Reshape, but not through a
Flatten.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from repaconv.graph.index_selections import MIN_ELEMENTS, is_fast_transpose, joined_axes, perm_of
from repaconv.graph.nodes_and_constants import Writer, attribute, nodes_of
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import Size, Sizes, is_dynamic, known_product, product, sizes
from repaconv.graph.tensor_views import reshaped
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir

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


class _PartialTranspose(NamedTuple):
    """A Transpose of a tensor that is read as one of another shape.

    Attributes:
        shape: The shape.
        perm: The axes, as they are afterwards.
    """

    shape: Sizes
    perm: list[int]

    def kept_row(self) -> int:
        """Elements of a row that is moved as a whole."""
        axes = range(len(self.shape))
        return known_product(size for axis, size in enumerate(self.shape) if self.perm[axis:] == list(axes[axis:]))


def _transpose_in_steps(model: ir.Model) -> Iterator[Change]:
    if model.opset_imports.get("", 0) < MIN_OPSET:
        return
    for node in nodes_of(model, "Transpose", "DepthToSpace"):
        shape, write = sizes(node.inputs[0]), Writer(model, node)
        typed = write.dtype is not None and write.dtype.name in TYPES
        if shape is None or sum(map(is_dynamic, shape)) > 1 or not typed:
            continue
        if node.op_type == "DepthToSpace" and is_dynamic(shape[1]):
            continue
        shape, perm, out = _moved(node, shape)
        if (
            is_fast_transpose(perm)
            or known_product(shape) < MIN_ELEMENTS
            or not (steps := _steps(*_simplified(shape, perm)))
        ):
            continue
        value = node.inputs[0]
        for number, step in enumerate(steps):
            given = write("Flatten", value, axis=1) if number else value
            value = write("Transpose", _read_as(write, given, step.shape), perm=step.perm)
        write.replace(node.outputs[0], _read_as(write, value, out))
        yield Change(
            rewrite="transpose-in-steps", place=node.name or "", description="two Transposes: of rows, and of matrices"
        )


def _moved(node: ir.Node, shape: Sizes) -> tuple[Sizes, list[int], Sizes]:
    """The shape as which a node reads its input, the order of its axes afterwards, and the shape of its output."""
    if node.op_type == "Transpose":
        perm = perm_of(node, len(shape))
        return shape, perm, tuple(shape[axis] for axis in perm)
    batch, channels, *image = shape
    assert isinstance(channels, int)
    side = int(attribute(node, "blocksize", 1))
    left = channels // side**2
    out = (batch, left, *(product((side, size)) for size in image))
    if attribute(node, "mode", "DCR") == "CRD":
        return (batch, left, side, side, *image), [0, 1, 4, 2, 5, 3], out
    return (batch, side, side, left, *image), [0, 3, 4, 1, 5, 2], out


def _simplified(shape: Sizes, perm: Sequence[int]) -> tuple[Sizes, list[int]]:
    """The same Transpose without axes of size 1, and with axes joined that stay neighbors."""
    groups, order = joined_axes([axis for axis in perm if shape[axis] != 1])
    return tuple(product(shape[axis] for axis in group) for group in groups), order


def _steps(shape: Sizes, perm: list[int]) -> list[_PartialTranspose]:
    """The steps of a simplified Transpose. Of the two orders of the steps, the one that moves longer rows.

    [] if the rows are too short in both.
    """
    last = len(shape) - 1
    if last < 1:
        return []
    if perm[-1] == last:
        return [_PartialTranspose(shape, perm)]
    # rows first: the last axis goes to its place afterwards
    rows = [*(axis for axis in perm if axis != last), last]
    rows_first = [_PartialTranspose(shape, rows), _turn([shape[axis] for axis in rows], perm.index(last), last)]
    # matrices first: the axis that will be the last one goes there
    turned = [*(axis for axis in range(last + 1) if axis != perm[-1]), perm[-1]]
    rows = [turned.index(axis) for axis in perm]
    turned_first = [
        _turn(shape, perm[-1], perm[-1] + 1),
        _PartialTranspose(tuple(shape[axis] for axis in turned), rows),
    ]
    kept, of_rows = rows_first[0].kept_row(), turned_first[1].kept_row()
    steps = rows_first if kept > of_rows else turned_first
    return [step for step in steps if step.perm != sorted(step.perm)] if max(kept, of_rows) >= MIN_ROW else []


def _turn(shape: Sequence[Size], start: int, middle: int) -> _PartialTranspose:
    """The step that exchanges the axes from ``start`` to ``middle`` with all after them."""
    return _PartialTranspose((product(shape[:start]), product(shape[start:middle]), product(shape[middle:])), [0, 2, 1])


def _read_as(write: Writer, value: ir.Value | None, shape: Sizes) -> ir.Value:
    read = None if value is None else reshaped(write, value, shape)
    assert read is not None  # one size at most is dynamic
    return read


TRANSPOSE_IN_STEPS = Rewrite(
    "transpose-in-steps",
    "a Transpose that moves the last axis and another one, or a DepthToSpace, with at most one dynamic size",
    _transpose_in_steps,
    order=101,
    keeps=True,
)
