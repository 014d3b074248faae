"""Read values that are constant up to dynamic dimensions, and ScatterND assignments along one axis.

Exporters write masks this way: ``mask[..., :A] = True`` with a dynamic batch is an Expand and a ScatterND whose output
varies along the channels only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from repaconv.graph.index_selections import EVERYTHING, axes_of, perm_of
from repaconv.graph.nodes_and_constants import Array, attribute, constant, made_by, scalar
from repaconv.graph.symbolic_shapes import Size, Sizes, sizes

if TYPE_CHECKING:
    import onnx_ir as ir

MOST_ENTRIES = 1 << 24
"""Maximum number of entries of a constant that is searched for repetition."""


def broadcast_constant(value: ir.Value | None, depth: int = 12) -> Array | None:
    """Return a value as an array that broadcasts to it, with length 1 along axes where it is constant.

    None if the value is computed from inputs.
    """
    numbers = constant(value)
    if numbers is not None:
        return _collapsed(numbers) if numbers.size <= MOST_ENTRIES else None
    node = value.producer() if value is not None else None
    shape = sizes(value)
    if node is None or node.domain or shape is None or not depth or value is None or not node.inputs:
        return None
    if node.op_type == "ConstantOfShape":
        filler = attribute(node, "value", None)
        number = np.zeros(1) if filler is None else np.asarray(filler.numpy())
        return number.reshape((1,) * len(shape))
    if node.op_type == "ScatterND":
        return _scattered(node, depth)
    if node.op_type not in ("Expand", "Identity", "Cast", "Transpose", "Unsqueeze", "Squeeze"):
        return None
    inner = broadcast_constant(node.inputs[0], depth - 1)
    if inner is None:
        return None
    if node.op_type == "Transpose":
        turned: Array = inner.transpose(perm_of(node, inner.ndim))
        return turned
    if node.op_type in ("Unsqueeze", "Squeeze"):
        axes = axes_of(node, max(inner.ndim, len(shape)))
        if axes is None:
            return None
        return np.expand_dims(inner, tuple(axes)) if node.op_type == "Unsqueeze" else inner.squeeze(tuple(axes))
    if node.op_type == "Cast":
        return _cast(inner, node)
    return inner.reshape((1,) * (len(shape) - inner.ndim) + inner.shape)


def _cast(numbers: Array, node: ir.Node) -> Array | None:
    """Convert numbers to another type; floating results are returned in float64."""
    import onnx_ir as ir

    kind = ir.DataType(int(attribute(node, "to", 1)))
    if kind.name not in _NUMPY:
        return None
    found = numbers.astype(kind.numpy())
    return found.astype(np.float64) if found.dtype.kind == "f" else found


_NUMPY = ("FLOAT", "DOUBLE", "FLOAT16", "INT8", "INT32", "INT64", "UINT8", "BOOL")


def _collapsed(numbers: Array) -> Array:
    for axis, length in enumerate(numbers.shape):
        first = np.take(numbers, [0], axis) if length > 1 else numbers
        if length > 1 and (numbers == first).all():
            numbers = first
    return numbers


def _scattered(node: ir.Node, depth: int) -> Array | None:
    found = slice_assignment(node)
    data, updates = broadcast_constant(node.inputs[0], depth - 1), broadcast_constant(node.inputs[2], depth - 1)
    shape = sizes(node.inputs[0])
    if found is None or data is None or updates is None or shape is None:
        return None
    axis, places = found
    length = shape[axis]
    if not isinstance(length, int):
        return None
    whole = np.repeat(data, length, axis) if data.shape[axis] == 1 else data.copy()
    others = [
        max(a, b) if i != axis else length for i, (a, b) in enumerate(zip(whole.shape, updates.shape, strict=True))
    ]
    spread: Array = np.broadcast_to(whole, others).copy()
    index: list[Any] = [slice(None)] * spread.ndim
    index[axis] = places
    spread[tuple(index)] = updates
    return spread


def slice_assignment(node: ir.Node) -> tuple[int, Array] | None:
    """Return axis and indices of a ScatterND that assigns whole slices along one axis, else None.

    Along an axis of dynamic length, negative indices count from its end; it is taken to have all that are there.
    """
    shape, given = sizes(node.inputs[0]), sizes(node.inputs[1])
    if shape is None or given is None or attribute(node, "reduction", "none") not in ("none", b"none"):
        return None
    indices, rank = constant(node.inputs[1]), len(shape)
    grid: tuple[int, Array] | None = None
    if indices is not None and indices.ndim == 2 and indices.shape[1] == 1:
        grid = 0, indices[:, 0]
    elif indices is None and given[1:] == (1,) and (ends := _ends_of_count(node.inputs[1], shape[0])) is not None:
        return 0, ends
    elif given[-1] == rank and len(given) == rank + 1:
        if indices is not None:
            grid = _places(indices, shape)
        elif given[:-2] == shape[: rank - 1] and (last := _grid(node, rank)) is not None:
            grid = rank - 1, last
    if grid is None:
        return None
    axis, found = grid
    length = shape[axis]
    return (axis, found % length) if isinstance(length, int) and len(set(found.tolist())) == len(found) else None


def assigns_all(node: ir.Node) -> bool:
    """Whether a ScatterND assigns everything, in order along the first axis: ``x[:] = ...``."""
    shape, given = sizes(node.inputs[0]), sizes(node.inputs[1])
    if not shape or given != (shape[0], 1) or attribute(node, "reduction", "none") not in ("none", b"none"):
        return False
    numbers, column = constant(node.inputs[1]), made_by(node.inputs[1], "Unsqueeze", "Reshape")
    if numbers is not None:
        return bool((numbers[:, 0] == np.arange(len(numbers))).all())
    return column is not None and _is_count(made_by(column.inputs[0], "Range"), shape[0])


def _is_count(count: ir.Node | None, length: Size) -> bool:
    """Whether a Range is 0, 1, 2, ..., ``length`` numbers."""
    if count is None or sizes(count.outputs[0]) != (length,):
        return False
    return (scalar(count.inputs[0]), scalar(count.inputs[2])) == (0, 1)


def _ends_of_count(value: ir.Value | None, length: Size) -> Array | None:
    """Return what a Slice leaves of the indices of a dynamic axis, with an axis appended; None if it has a step.

    This is how PyTorch's exporter writes ``x[:1] = ...`` and ``x[-1:] = ...``.
    """
    column = made_by(value, "Unsqueeze", "Reshape")
    part = made_by(column.inputs[0], "Slice") if column is not None else None
    if part is None or isinstance(length, int) or not _is_count(made_by(part.inputs[0], "Range"), length):
        return None
    given = [constant(one) for one in part.inputs[1:]]
    if any(numbers is None or numbers.size != 1 for numbers in given) or (len(given) > 3 and given[3] != 1):
        return None
    start, end = (int(numbers.item()) for numbers in given[:2] if numbers is not None)
    if start < 0 <= end:
        return np.arange(start, 0) if end >= EVERYTHING else None
    return np.arange(start, end) if start < end < EVERYTHING and (end < 0) == (start < 0) else None


def _places(indices: Array, shape: Sizes) -> tuple[int, Array] | None:
    """Return the axis that indices [.., r] select along, and the selected indices; None if other axes are not full."""
    rank = len(shape)

    def along(axis: int, numbers: Array) -> Array:
        return numbers.reshape([-1 if i == axis else 1 for i in range(rank)])

    def counts(axis: int) -> bool:
        length = indices.shape[axis]
        return shape[axis] == length and bool((indices[..., axis] == along(axis, np.arange(length))).all())

    others = [axis for axis in range(rank) if not counts(axis)] or [rank - 1]
    chosen: Array = indices[..., others[0]]
    first: Array = np.moveaxis(chosen, others[0], -1)[(0,) * (rank - 1)]
    same = len(others) == 1 and bool((chosen == along(others[0], first)).all())
    return (others[0], first) if same else None


def _grid(node: ir.Node, rank: int) -> Array | None:
    """Return the last-axis indices of a ScatterND whose indices are a Concat of one index tensor per axis.

    This is the form for dynamic dimensions. Each of the other index tensors must count along its own axis.
    """
    joined = node.inputs[1].producer() if node.inputs[1] is not None else None
    if joined is None or joined.op_type != "Concat" or len(joined.inputs) != rank:
        return None
    shape = sizes(node.inputs[0])
    assert shape is not None
    for axis, value in enumerate(joined.inputs[:-1]):
        if not _counts(value, axis, shape[axis], rank):
            return None
    last = broadcast_constant(joined.inputs[-1])
    if last is None or last.size != max(last.shape) or last.size != last.shape[rank - 1]:
        return None
    return last.reshape(-1)


def _counts(value: ir.Value | None, axis: int, length: Size, rank: int) -> bool:
    """Return whether a value is 0, 1, 2, ... along one axis and constant along all others."""
    numbers = broadcast_constant(value)
    if numbers is not None:
        count = np.arange(numbers.size)
        return numbers.size == length and numbers.shape[axis] == length and bool((numbers.reshape(-1) == count).all())
    spread = False
    while value is not None and (node := value.producer()) is not None and node.inputs:
        if node.op_type == "Range":
            start, step = constant(node.inputs[0]), constant(node.inputs[2])
            return spread and start is not None and not start.any() and step is not None and bool((step == 1).all())
        shape = sizes(node.inputs[0])
        if node.op_type not in ("Expand", "Unsqueeze", "Reshape", "Identity", "Cast") or shape is None:
            return False
        if node.op_type == "Expand":
            spread = all(size == 1 or i + rank - len(shape) == axis for i, size in enumerate(shape))
        if (node.op_type == "Expand" and not spread) or (spread and sum(size != 1 for size in shape) > 1):
            return False
        value = node.inputs[0]
    return False
