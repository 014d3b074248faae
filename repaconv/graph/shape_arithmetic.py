"""Follow shape arithmetic in a graph: the entries of small integer tensors, as numbers or symbolic sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from repaconv.graph.index_selections import axes_of, slice_positions, slices
from repaconv.graph.nodes_and_constants import attribute, constant
from repaconv.graph.symbolic_shapes import (
    Size,
    SymbolicSize,
    floor_divided,
    is_of_difference,
    may_be_negative,
    product,
    size_plus,
    sizes,
)

if TYPE_CHECKING:
    import onnx_ir as ir

INT64 = np.iinfo(np.int64)
MOST_SHAPE_ENTRIES = 64
"""Maximum number of entries of an integer tensor that may be a shape."""


class Integers(dict["ir.Value", "list[Size] | Size"]):
    """The known integer values: a list of entries, or a single size for a scalar."""

    def int_of(self, value: ir.Value | None) -> list[Size] | Size | None:
        """Return the entries of a small integer tensor (one size for a scalar), or None if unknown."""
        if value is None:
            return None
        if value in self:
            return self[value]
        stored = value.const_value
        # Before it is converted: weights are large.
        if stored is None or stored.size > MOST_SHAPE_ENTRIES or len(stored.shape) > 1:
            return None
        found = constant(value)
        if found is None or found.dtype.kind not in "iub":
            return None
        return [int(entry) for entry in found] if found.ndim else int(found)


def entries_of(found: list[Size] | Size) -> list[Size]:
    """Return known integers as a list; a single one is a list of one."""
    return found if isinstance(found, list) else [found]


IntRule = Callable[[Integers, "ir.Node"], "list[Size] | Size | None"]


def _shape_of(known: Integers, node: ir.Node) -> list[Size] | None:
    found = sizes(node.inputs[0])
    if found is None:
        return None
    return list(found[slice(attribute(node, "start", 0), attribute(node, "end", None))])


def _gathered(known: Integers, node: ir.Node) -> list[Size] | Size | None:
    data, indices = known.int_of(node.inputs[0]), known.int_of(node.inputs[1])
    if not isinstance(data, list) or indices is None or attribute(node, "axis", 0) not in (0, -1):
        return None
    found = [data[i] for i in entries_of(indices) if isinstance(i, int) and -len(data) <= i < len(data)]
    if len(found) < len(entries_of(indices)):
        return None
    return found if isinstance(indices, list) else found[0]


def _sliced(known: Integers, node: ir.Node) -> list[Size] | None:
    data = known.int_of(node.inputs[0])
    if not isinstance(data, list):
        return None
    parts: list[list[int] | None] = []
    for value in node.inputs[1:]:
        found = known.int_of(value)
        numbers = [n for n in found if isinstance(n, int)] if isinstance(found, list) else []
        if value is not None and (not isinstance(found, list) or len(numbers) != len(found)):
            return None
        parts.append(None if value is None else numbers)
    if len(parts) < 2:
        return None
    ((_, part),) = slices(parts, 1)
    places = slice_positions(part, len(data))
    return None if places is None else [data[i] for i in places]


def _joined(known: Integers, node: ir.Node) -> list[Size] | None:
    parts = [known.int_of(value) for value in node.inputs]
    if any(not isinstance(part, list) for part in parts):
        return None
    return [size for part in parts if isinstance(part, list) for size in part]


def _as_list(known: Integers, node: ir.Node) -> list[Size] | None:
    found = known.int_of(node.inputs[0])
    axes = known.int_of(node.inputs[1]) if len(node.inputs) > 1 else attribute(node, "axes", [0])
    return [found] if isinstance(found, (int, SymbolicSize)) and isinstance(axes, list) and len(axes) == 1 else None


def _as_scalar(known: Integers, node: ir.Node) -> Size | None:
    found = known.int_of(node.inputs[0])
    return found[0] if isinstance(found, list) and len(found) == 1 else None


def _same(known: Integers, node: ir.Node) -> list[Size] | Size | None:
    integral = node.op_type == "Identity" or attribute(node, "to", 0) in (6, 7)
    return known.int_of(node.inputs[0]) if integral else None


def _entrywise(operation: Callable[[Any, Any], Size | None]) -> IntRule:
    def within(a: Size, b: Size) -> Size | None:
        found = operation(a, b)
        return None if isinstance(found, int) and not INT64.min <= found <= INT64.max else found

    def rule(known: Integers, node: ir.Node) -> list[Size] | Size | None:
        a, b = known.int_of(node.inputs[0]), known.int_of(node.inputs[1])
        if a is None or b is None:
            return None
        if not isinstance(a, list) and not isinstance(b, list):
            return within(a, b)
        left, right = entries_of(a), entries_of(b)
        lengths = {len(left), len(right)} - {1} or {1}
        if len(lengths) > 1:
            return None
        length = lengths.pop()
        left, right = (side * (length if len(side) == 1 else 1) for side in (left, right))
        found = [entry for pair in zip(left, right, strict=True) if (entry := within(*pair)) is not None]
        return found if len(found) == length else None

    return rule


def _added(a: Size, b: Size) -> Size:
    if isinstance(a, int):
        return size_plus(b, a)
    return size_plus(a, b) if isinstance(b, int) else SymbolicSize((f"({a}+{b})",))


def _subtracted(a: Size, b: Size) -> Size:
    return size_plus(a, -b) if isinstance(b, int) else SymbolicSize((f"({a}-{b})",))


def _divided(a: Size, b: Size) -> Size | None:
    """Divide sizes. Rounding towards zero equals rounding down where no window is larger than its image."""
    if isinstance(a, int) and isinstance(b, int):
        return (abs(a) // abs(b) if (a < 0) == (b < 0) else -(abs(a) // abs(b))) if b else None
    down = not is_of_difference(a)
    return floor_divided(a, b) if isinstance(b, int) and b > 0 and down else SymbolicSize((f"({a}/{b})",))


def _calculated(symbol: str, exact: Callable[[int, int], int | None]) -> IntRule:
    def operation(a: Size, b: Size) -> Size | None:
        if isinstance(a, int) and isinstance(b, int):
            return exact(a, b)
        if symbol == "*":
            return product((a, b))
        return SymbolicSize((f"({a}{symbol}{b})",))

    return _entrywise(operation)


def _modulo(known: Integers, node: ir.Node) -> list[Size] | Size | None:
    rule = _calculated("%", lambda a, b: a % b if b else None)
    return None if attribute(node, "fmod", 0) else rule(known, node)


def _multiplied(known: Integers, node: ir.Node) -> list[Size] | Size | None:
    """The product of all entries, such as the rows of a matrix that tokens become (Keras)."""
    data, axes = known.int_of(node.inputs[0]), axes_of(node, 1)
    if not isinstance(data, list) or axes != [0]:
        return None
    found = product(data)
    if isinstance(found, int) and not INT64.min <= found <= INT64.max:
        return None
    return [found] if attribute(node, "keepdims", 1) else found


def _extreme(choose: Callable[[int, int], int]) -> IntRule:
    """The rule of a Max or Min of two, if they are numbers or the same size."""

    def operation(a: Size, b: Size) -> Size | None:
        if a == b:
            return a
        return choose(a, b) if isinstance(a, int) and isinstance(b, int) else None

    rule = _entrywise(operation)
    return lambda known, node: rule(known, node) if len(node.inputs) == 2 else None


def _equal(a: Size, b: Size) -> int | None:
    if isinstance(a, int) and isinstance(b, int):
        return int(a == b)
    if a == b:
        return 1
    number, size = (a, b) if isinstance(a, int) else (b, a)
    return 0 if isinstance(number, int) and number < 0 and not may_be_negative(size) else None


def _chosen(known: Integers, node: ir.Node) -> list[Size] | Size | None:
    test, a, b = (known.int_of(value) for value in node.inputs)
    if isinstance(test, list) and isinstance(a, list) and isinstance(b, list) and len(test) == len(a) == len(b):
        return [x if t else y for t, x, y in zip(test, a, b, strict=True)]
    return None


def _filled(known: Integers, node: ir.Node) -> list[Size] | None:
    shape = known.int_of(node.inputs[0])
    value = attribute(node, "value", None)
    number = np.asarray(value.numpy()).reshape(-1)[0] if value is not None else np.float32(0)
    if not isinstance(shape, list) or len(shape) != 1 or not isinstance(shape[0], int) or number.dtype.kind not in "iu":
        return None
    return [int(number)] * shape[0] if shape[0] <= MOST_SHAPE_ENTRIES else None


def _reshaped_ints(known: Integers, node: ir.Node) -> list[Size] | None:
    data, shape = known.int_of(node.inputs[0]), known.int_of(node.inputs[1])
    if data is None or not isinstance(shape, list) or len(shape) != 1:
        return None
    return entries_of(data)


INTS: dict[str, IntRule] = {
    "Shape": _shape_of,
    "Gather": _gathered,
    "Slice": _sliced,
    "Concat": _joined,
    "Unsqueeze": _as_list,
    "Squeeze": _as_scalar,
    "Cast": _same,
    "Identity": _same,
    "Mul": _calculated("*", lambda a, b: a * b),
    "Add": _entrywise(_added),
    "Sub": _entrywise(_subtracted),
    "Div": _entrywise(_divided),
    "Mod": _modulo,
    "ReduceProd": _multiplied,
    "Max": _extreme(max),
    "Min": _extreme(min),
    "Equal": _entrywise(_equal),
    "Where": _chosen,
    "ConstantOfShape": _filled,
    "Reshape": _reshaped_ints,
}
"""Rules by operator that compute an output from known sizes."""
