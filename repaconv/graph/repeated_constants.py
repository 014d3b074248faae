"""Compute values that depend on the inputs only through dynamic sizes, and repeat the same numbers along these.

Exporters write position embeddings, masks and queries of a dynamic batch so: of ones, of which there are as many as
images. Numbers are held as an array of the value's rank that broadcasts to it. Its length is 1 along every dynamic
axis, and may be 1 along others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from repaconv.graph.index_selections import axes_of, perm_of, slice_positions, slices, split_sizes
from repaconv.graph.nodes_and_constants import Array, attribute, constant, stored
from repaconv.graph.operator_facts import POINTWISE, ROW_NORMS
from repaconv.graph.shape_folding import LARGEST_COMPUTED, is_computed_otherwise, reference_output
from repaconv.graph.symbolic_shapes import Sizes, as_numbers, reshape_groups, sizes

if TYPE_CHECKING:
    import onnx_ir as ir


class Repeated(NamedTuple):
    """The numbers of a value that repeats them along its dynamic axes.

    Attributes:
        numbers: An array of the value's rank that broadcasts to it.
        sources: The number of entries of every constant that it is computed from.
    """

    numbers: Array
    sources: dict[ir.Value, int]


def repeated_constants(model: ir.Model) -> dict[ir.Value, Repeated]:
    """Return what is computed of constants and dynamic sizes alone, and repeats the same numbers along each such size.

    Indices of a Gather are taken to be in range.

    Args:
        model: A graph with inferred shapes.
    """
    found: dict[ir.Value, Repeated] = {}
    opset = model.graph.opset_imports.get("", 18)
    for node in model.graph:
        shapes = [sizes(value) for value in node.outputs]
        if node.domain or node.op_type not in _RULES or None in shapes or is_computed_otherwise(node, opset):
            continue
        if node.op_type not in _FIRST and not any(value in found for value in node.inputs):  # weights stay unread
            continue
        given = [_given(value, found) for value in node.inputs]
        numbers = _RULES[node.op_type](node, [one.numbers if one else None for one in given], opset)
        if numbers is None or any(array.size > LARGEST_COMPUTED for array in numbers):
            continue
        sources = {source: size for one in given if one is not None for source, size in one.sources.items()}
        for value, array, shape in zip(node.outputs, numbers, shapes, strict=True):
            if shape is not None and _broadcasts(array, shape):
                found[value] = Repeated(array, sources)
    return found


def _given(value: ir.Value | None, found: dict[ir.Value, Repeated]) -> Repeated | None:
    """What an input is known to be: a constant, or what was found; None if it is something else or left out."""
    if value is None or value in found:
        return None if value is None else found[value]
    if value.const_value is None or value.is_graph_input() or value.const_value.size > LARGEST_COMPUTED:
        return None
    return Repeated(stored(value), {value: value.const_value.size})


def _broadcasts(array: Array, shape: Sizes) -> bool:
    return array.ndim == len(shape) and all(a in (1, b) for a, b in zip(array.shape, shape, strict=True))


def _full(array: Array, shape: Sizes | None, axes: Sequence[int]) -> Array | None:
    """The array with its whole length along some axes; None if one of these is dynamic, or if it is too large."""
    if shape is None or array.ndim != len(shape):
        return None
    lengths = as_numbers(shape[axis] for axis in axes)
    if lengths is None:
        return None
    whole = [*array.shape]
    for axis, length in zip(axes, lengths, strict=True):
        whole[axis] = length
    return np.broadcast_to(array, whole) if math.prod(whole) <= LARGEST_COMPUTED else None


Given = Sequence["Array | None"]
Rule = Callable[["ir.Node", Given, int], "list[Array] | None"]
"""Returns the numbers of every output of a node from those of its inputs, which are None where they are not known."""


def _evaluated(node: ir.Node, given: Given, opset: int) -> list[Array] | None:
    """Evaluate a node of one output, whose inputs are all known or left out."""
    pairs = list(zip(node.inputs, given, strict=True))
    if len(node.outputs) > 1 or any(value is not None and array is None for value, array in pairs):
        return None
    arrays = {value.name: array for value, array in pairs if value is not None and array is not None}
    found = reference_output(node, arrays, opset) if arrays else None
    return None if found is None else [np.asarray(found)]


def _evaluated_along(axes: Sequence[int] | None, node: ir.Node, given: Given, opset: int) -> list[Array] | None:
    """Evaluate a node that mixes the entries of its first input along some axes."""
    first = given[0]
    if axes is None or first is None or not axes:
        return None
    whole = _full(first, sizes(node.inputs[0]), [axis % first.ndim for axis in axes])
    return None if whole is None else _evaluated(node, [whole, *given[1:]], opset)


def _of_shape(node: ir.Node, given: Given, _opset: int) -> list[Array] | None:
    filler, kind = attribute(node, "value", None), node.outputs[0].dtype
    if filler is None and kind is None:
        return None
    number = np.asarray(filler.numpy()) if filler is not None else np.zeros(1, kind.numpy() if kind else None)
    return [number.reshape((1,) * len(sizes(node.outputs[0]) or ()))]


def _expand(node: ir.Node, given: Given, _opset: int) -> list[Array] | None:
    rank, x = len(sizes(node.outputs[0]) or ()), given[0]
    return None if x is None else [x.reshape((1,) * (rank - x.ndim) + x.shape)]


def _tile(node: ir.Node, given: Given, _opset: int) -> list[Array] | None:
    x, after = given[0], sizes(node.outputs[0]) or ()
    if x is None or x.ndim != len(after):
        return None
    if any(not isinstance(b, int) or b % a for a, b in zip(x.shape, after, strict=True) if a > 1):
        return None
    counts = [b // a if isinstance(b, int) and a > 1 else 1 for a, b in zip(x.shape, after, strict=True)]
    return [np.tile(x, counts)]


def _reshape(node: ir.Node, given: Given, _opset: int) -> list[Array] | None:
    """Each group of axes that a Reshape joins or splits has equal numbers everywhere, or known sizes."""
    x, before, after = given[0], sizes(node.inputs[0]), sizes(node.outputs[0]) or ()
    if x is None or before is None or x.ndim != len(before):
        return None
    if x.size == 1:
        return [x.reshape((1,) * len(after))]
    whole, shape = [1] * x.ndim, [1] * len(after)
    groups = reshape_groups(before, after)
    for ours, theirs in groups or ():
        if all(x.shape[axis] == 1 for axis in ours):
            continue
        lengths, others = (as_numbers(each) for each in ((before[i] for i in ours), (after[i] for i in theirs)))
        if lengths is None or others is None:
            return None
        for axis, length in zip((*ours,), lengths, strict=True):
            whole[axis] = length
        for axis, length in zip((*theirs,), others, strict=True):
            shape[axis] = length
    return None if groups is None else [np.broadcast_to(x, whole).reshape(shape)]


def _transpose(node: ir.Node, given: Given, _opset: int) -> list[Array] | None:
    x = given[0]
    return None if x is None else [x.transpose(perm_of(node, x.ndim))]


def _gather(node: ir.Node, given: Given, _opset: int) -> list[Array] | None:
    """A Gather along an axis of equal numbers gives these numbers, whatever its indices are."""
    x, indices, shape = given[0], given[1], sizes(node.inputs[1])
    if x is None or shape is None or not x.ndim:
        return None
    axis = int(attribute(node, "axis", 0)) % x.ndim
    if x.shape[axis] == 1:
        return [x.reshape((*x.shape[:axis], *[1] * len(shape), *x.shape[axis + 1 :]))]
    whole = _full(x, sizes(node.inputs[0]), [axis])
    if indices is None or whole is None:
        return None
    try:
        return [np.take(whole, indices, axis)]
    except IndexError:  # it would also fail in a runtime
        return None


def _gather_nd(node: ir.Node, given: Given, _opset: int) -> list[Array] | None:
    """A GatherND of one number everywhere gives this number, whatever its indices are."""
    x, shape = given[0], sizes(node.outputs[0]) or ()
    return None if x is None or x.size > 1 else [x.reshape((1,) * len(shape))]


def _slice(node: ir.Node, given: Given, _opset: int) -> list[Array] | None:
    x, before = given[0], sizes(node.inputs[0])
    read = [constant(value) for value in node.inputs[1:]]
    computed = [array is None and value is not None for array, value in zip(read, node.inputs[1:], strict=True)]
    if x is None or before is None or any(computed):
        return None
    found = x
    for axis, part in slices([None if each is None else each.reshape(-1).tolist() for each in read], x.ndim):
        if x.shape[axis] > 1:
            positions = slice_positions(part, x.shape[axis])
            if positions is None:
                return None
            found = np.take(found, positions, axis)
    return [found]


def _concat(node: ir.Node, given: Given, _opset: int) -> list[Array] | None:
    known = [x for x in given if x is not None]
    if len(known) < len(given) or len({x.ndim for x in known}) != 1:
        return None
    axis = int(attribute(node, "axis", 0)) % known[0].ndim
    parts = [_full(x, sizes(value), [axis]) for x, value in zip(known, node.inputs, strict=True)]
    whole = [part for part in parts if part is not None]
    if len(whole) < len(parts):
        return None
    others = np.broadcast_shapes(*(tuple(n for i, n in enumerate(part.shape) if i != axis) for part in whole))
    shaped = [np.broadcast_to(part, (*others[:axis], part.shape[axis], *others[axis:])) for part in whole]
    return [np.concatenate(shaped, axis)]


def _split(node: ir.Node, given: Given, _opset: int) -> list[Array] | None:
    x = given[0]
    if x is None:
        return None
    axis = int(attribute(node, "axis", 0)) % x.ndim
    whole = _full(x, sizes(node.inputs[0]), [axis])
    lengths = split_sizes(node, whole.shape[axis]) if whole is not None else None
    return None if whole is None or lengths is None else np.split(whole, np.cumsum(lengths)[:-1], axis)


def _cumsum(node: ir.Node, given: Given, opset: int) -> list[Array] | None:
    axis = constant(node.inputs[1])
    return None if axis is None else _evaluated_along([int(axis.reshape(()))], node, given, opset)


def _reduce(node: ir.Node, given: Given, opset: int) -> list[Array] | None:
    axes = axes_of(node, len(sizes(node.inputs[0]) or ()))
    return _evaluated_along(axes, node, given, opset)


def _softmax(node: ir.Node, given: Given, opset: int) -> list[Array] | None:
    return _evaluated_along([int(attribute(node, "axis", -1))], node, given, opset)


def _norm(node: ir.Node, given: Given, opset: int) -> list[Array] | None:
    rank = len(sizes(node.inputs[0]) or ())
    first = int(attribute(node, "axis", -1)) % max(rank, 1)
    return _evaluated_along(range(first, rank), node, given, opset)


def _matmul(node: ir.Node, given: Given, opset: int) -> list[Array] | None:
    left, right = given
    if left is None or right is None or min(left.ndim, right.ndim) < 2:
        return None
    rows, columns = _full(left, sizes(node.inputs[0]), [-1]), _full(right, sizes(node.inputs[1]), [-2])
    return None if rows is None or columns is None else [np.matmul(rows, columns)]


def _resize(node: ir.Node, given: Given, _opset: int) -> list[Array] | None:
    """An image of equal numbers has the same ones in any size, if none are taken from outside it."""
    x, crops = given[0], attribute(node, "coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize"
    same_rank = x is not None and x.ndim == len(sizes(node.outputs[0]) or ())
    kind = attribute(node, "mode", "nearest")
    if x is None or not same_rank or crops or x.size > 1 or kind not in ("nearest", "linear"):
        return None
    return [x]


_FIRST = ("ConstantOfShape", "Expand", "Tile")
"""Operators that repeat constants by a size."""
_RULES: dict[str, Rule] = {
    **dict.fromkeys((*POINTWISE, "IsNaN"), _evaluated),
    "ConstantOfShape": _of_shape,
    "Expand": _expand,
    "Tile": _tile,
    **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze"), _reshape),
    "Transpose": _transpose,
    "Gather": _gather,
    "GatherND": _gather_nd,
    "Slice": _slice,
    "Concat": _concat,
    "Split": _split,
    "CumSum": _cumsum,
    **dict.fromkeys(("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin"), _reduce),
    "Softmax": _softmax,
    **dict.fromkeys(ROW_NORMS, _norm),
    "MatMul": _matmul,
    "Resize": _resize,
}
