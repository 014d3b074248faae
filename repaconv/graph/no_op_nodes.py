"""Remove nodes whose output is their input: Casts to the same type, Dropouts, Slices of everything, Resizes by 1."""

from __future__ import annotations

from typing import TYPE_CHECKING

from repaconv.graph.nodes_and_constants import Writer, attribute, constant, is_read
from repaconv.graph.symbolic_shapes import sizes

if TYPE_CHECKING:
    import onnx_ir as ir

_OF_SEVERAL = ("Concat", "Max", "Mean", "Min", "Sum")
"""Operators that return their input if they have one only."""
_SHIFTED = ("tf_crop_and_resize", "tf_half_pixel_for_nn")
"""Coordinate transformations of Resize that may move positions even if the size stays."""


def remove_no_ops(model: ir.Model) -> bool:
    """Remove every node whose output is its input, in place; return whether there was one.

    One between an input and an output of the graph stays, since both keep their names.
    """
    removed = False
    for node in tuple(model.graph):
        if node.domain or not _is_no_op(node):
            continue
        value, source = node.outputs[0], node.inputs[0]
        if source is None or not is_read(value):
            continue
        if value.is_graph_output() and (source.producer() is None or source.is_graph_output()):
            continue
        Writer(model, node).replace(value, source)
        removed = True
    return removed


def _is_no_op(node: ir.Node) -> bool:
    if not node.inputs or node.inputs[0] is None or any(map(is_read, node.outputs[1:])):
        return False
    if node.op_type == "Cast":
        return node.inputs[0].dtype is not None and int(node.inputs[0].dtype) == attribute(node, "to", None)
    if node.op_type == "Dropout":
        return len(node.inputs) < 3 or node.inputs[2] is None or _all_equal(node.inputs[2], 0)  # no training mode
    if node.op_type == "Tile":
        return _all_equal(node.inputs[1], 1)
    if node.op_type == "Slice":
        return _keeps_size(node) and (len(node.inputs) < 5 or node.inputs[4] is None or _all_equal(node.inputs[4], 1))
    if node.op_type == "Resize":
        return _resizes_by_one(node)
    return node.op_type in _OF_SEVERAL and len(node.inputs) == 1


def _resizes_by_one(node: ir.Node) -> bool:
    """Whether a Resize takes every position for itself."""
    if len(node.inputs) < 3 or attribute(node, "coordinate_transformation_mode", "half_pixel") in _SHIFTED:
        return False
    if len(node.inputs) > 3 and node.inputs[3] is not None:
        return _keeps_size(node)
    return _all_equal(node.inputs[2], 1)


def _keeps_size(node: ir.Node) -> bool:
    shape = sizes(node.inputs[0])
    return shape is not None and shape == sizes(node.outputs[0])


def _all_equal(value: ir.Value | None, number: int) -> bool:
    numbers = constant(value)
    return numbers is not None and bool((numbers == number).all())
