"""Remove nodes whose output is their input: Casts to the same type and back, selections of everything, sums with zeros,
products with ones, masks that hide nothing, assignments to everything, pools and reductions of single numbers.

So is the guard that PyTorch's exporter writes after the softmax of attention, Where(IsNaN(p), 0, p), unless a mask may
hide all keys of a query. A product counts as finite; if it overflows, p is NaN, as it is if the guard is not exported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from repaconv.graph.constants_of_dynamic_shape import assigns_all, broadcast_constant
from repaconv.graph.index_selections import EVERYTHING, Selection, selection_of
from repaconv.graph.nodes_and_constants import (
    Writer,
    attribute,
    both_keep_names,
    constant,
    input_at,
    is_constant,
    is_read,
    made_by,
)
from repaconv.graph.operator_facts import PRODUCTS, REDUCTIONS, VIEWS
from repaconv.graph.shape_inference import MICROSOFT
from repaconv.graph.symbolic_shapes import sizes

if TYPE_CHECKING:
    import onnx_ir as ir

_OF_SEVERAL = ("Concat", "Max", "Mean", "Min", "Sum")
"""Operators that return their input if they have one only."""
_NEUTRAL = {"Add": 0, "Sub": 0, "Mul": 1, "Div": 1, "Pow": 1}
"""The number with which as the second operand an operator returns the first."""
_SHIFTED = ("tf_crop_and_resize", "tf_half_pixel_for_nn")
"""Coordinate transformations of Resize that may move positions even if the size stays."""


def remove_no_ops(model: ir.Model) -> bool:
    """Remove every node whose output is its input, in place; return whether there was one.

    One between an input and an output of the graph stays, since both keep their names.
    """
    removed = False
    for node in tuple(model.graph):
        value, source = node.outputs[0], None if node.domain else _unchanged_input(node)
        if source is None or not is_read(value):
            continue
        if both_keep_names(value, source):
            continue
        Writer(model, node).replace(value, source)
        removed = True
    return removed


def _unchanged_input(node: ir.Node) -> ir.Value | None:
    """The input that a node returns; None if it returns none."""
    if not node.inputs or any(map(is_read, node.outputs[1:])):
        return None
    if node.op_type in _NEUTRAL:
        commutes = node.op_type in ("Add", "Mul")
        others = zip(node.inputs, node.inputs[::-1] if commutes else node.inputs[1:], strict=False)
        number = _NEUTRAL[node.op_type]
        return next((x for x, other in others if _has_shape_of_output(x, node) and _all_equal(other, number)), None)
    if (
        node.op_type == "Cast"
        and (before := made_by(node.inputs[0], "Cast")) is not None
        and _is_cast_back(before, node)
    ):
        return before.inputs[0]
    if node.op_type == "ScatterND":
        return node.inputs[2] if _has_shape_of_output(node.inputs[2], node) and assigns_all(node) else None
    if node.op_type == "Where" and (chosen := constant(node.inputs[0])) is not None:
        found = None if not chosen.size else node.inputs[1] if chosen.all() else node.inputs[2]
        return found if (chosen.all() or not chosen.any()) and _has_shape_of_output(found, node) else None
    if node.op_type == "Where":
        x, test = node.inputs[2], made_by(node.inputs[0], "IsNaN")
        guards = test is not None and test.inputs[0] is x and _has_shape_of_output(x, node)
        return x if guards and _is_softmax_of_finite_scores(x) else None
    return node.inputs[0] if _is_no_op(node) else None


_HELD_BY = {
    "BOOL": ("INT32", "INT64", "FLOAT16", "FLOAT", "DOUBLE"),
    "INT32": ("INT64", "DOUBLE"),
    **dict.fromkeys(("FLOAT16", "BFLOAT16"), ("FLOAT", "DOUBLE")),
    "FLOAT": ("DOUBLE",),
}
"""Types that have every number of a type."""


def _is_cast_back(first: ir.Node, second: ir.Node) -> bool:
    """Whether the second of two Casts gives what the first one reads: converters to FP16 write such pairs."""
    given, between = (value.dtype if value is not None else None for value in (first.inputs[0], first.outputs[0]))
    if given is None or between is None or int(given) != attribute(second, "to", None):
        return False
    return between.name in _HELD_BY.get(given.name, ())


def _is_no_op(node: ir.Node) -> bool:
    """Whether a node of one input returns that."""
    if node.inputs[0] is None:
        return False
    if node.op_type == "Cast":
        return node.inputs[0].dtype is not None and int(node.inputs[0].dtype) == attribute(node, "to", None)
    if node.op_type == "Dropout":
        return input_at(node, 2) is None or _all_equal(node.inputs[2], 0)  # no training mode
    if node.op_type == "Tile":
        return _all_equal(node.inputs[1], 1)
    if node.op_type == "Pad":
        return _all_equal(input_at(node, 1), 0)
    if node.op_type == "Slice":
        forwards = input_at(node, 4) is None or _all_equal(node.inputs[4], 1)
        return forwards and (_keeps_size(node) or _selects_from_start_to_end(node))
    if node.op_type == "Split":
        return len(node.outputs) == 1
    if node.op_type == "Gather":
        found = selection_of(node.outputs[0])
        return found is not None and found.keeps and np.array_equal(found.places, np.arange(_length(found)))
    if node.op_type == "Resize":
        return _resizes_by_one(node)
    if node.op_type == "Clip":
        return input_at(node, 1) is None and input_at(node, 2) is None
    if node.op_type in ("AveragePool", "MaxPool"):
        return _is_of_single_pixels(node)
    if node.op_type in (*REDUCTIONS, "GlobalAveragePool", "GlobalMaxPool"):
        return all(map(is_constant, node.inputs[1:])) and _keeps_size(node)
    return node.op_type in _OF_SEVERAL and len(node.inputs) == 1


def _selects_from_start_to_end(node: ir.Node) -> bool:
    """Whether a Slice is ``x[0:]`` along all its axes, which may be dynamic."""
    end = constant(input_at(node, 2))
    return _all_equal(input_at(node, 1), 0) and end is not None and bool((end >= EVERYTHING).all())


def _length(selection: Selection) -> int:
    """The length of the axis that a selection is along, which is known."""
    length = (sizes(selection.value) or ())[selection.axis]
    assert isinstance(length, int)
    return length


def _resizes_by_one(node: ir.Node) -> bool:
    """Whether a Resize takes every position for itself."""
    if len(node.inputs) < 3 or attribute(node, "coordinate_transformation_mode", "half_pixel") in _SHIFTED:
        return False
    if input_at(node, 3) is not None:
        return _keeps_size(node)
    return _all_equal(node.inputs[2], 1)


def _is_of_single_pixels(pool: ir.Node) -> bool:
    """Whether each window of a pool is one pixel, and each pixel is a window."""
    ones = all(set(attribute(pool, name, (1,))) == {1} for name in ("kernel_shape", "strides"))
    return ones and not any(attribute(pool, "pads", ()))


def _keeps_size(node: ir.Node) -> bool:
    return _has_shape_of_output(node.inputs[0], node)


def _has_shape_of_output(value: ir.Value | None, node: ir.Node) -> bool:
    shape = sizes(value)
    return shape is not None and shape == sizes(node.outputs[0])


def _all_equal(value: ir.Value | None, number: int) -> bool:
    numbers = constant(value) if is_constant(value) else broadcast_constant(value)
    return numbers is not None and bool((numbers == number).all())


LARGEST_UNMASKED = 256.0
"""Largest number that a constant may add to scores, or multiply them by, and not be a mask: scores stay far from the
largest number even of float16."""


def _is_softmax_of_finite_scores(value: ir.Value | None) -> bool:
    """Whether a value is the softmax of sums and multiples of products, to which no mask is added."""
    softmax = made_by(value, "Softmax")
    todo = [softmax.inputs[0] if softmax is not None else None]
    seen: set[ir.Value | None] = set()
    while todo:
        x = todo.pop()
        numbers, node = constant(x), x.producer() if x is not None else None
        if x in seen or (numbers is not None and bool((np.abs(numbers) <= LARGEST_UNMASKED).all())):
            continue
        fused = node is not None and node.domain == MICROSOFT and node.op_type == "FusedMatMul"
        if x is None or node is None or not (fused or _may_be_of_scores(node)):
            return False
        seen.add(x)
        # what products multiply is taken as finite, unless it is a constant that is not
        if fused or node.op_type in PRODUCTS:
            if not all(np.isfinite(factor).all() for factor in map(constant, node.inputs[:2]) if factor is not None):
                return False
            todo += [term for term in node.inputs[2:] if term is not None]
        else:
            todo += node.inputs[:1] if node.op_type in VIEWS else node.inputs
    return True


def _may_be_of_scores(node: ir.Node) -> bool:
    return not node.domain and node.op_type in (*PRODUCTS, *VIEWS, "Add", "Sub", "Mul")
