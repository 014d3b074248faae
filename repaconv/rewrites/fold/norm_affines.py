"""Split the affine from a norm, LN(x) g + b = norm without affine, scale, shift; and merge it back.

While they are split, linear layers that read the norm can absorb scale and shift. What remains is merged back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from repaconv.graph.channel_axes import batchnorm
from repaconv.graph.nodes_and_constants import (
    Array,
    Writer,
    attribute,
    constant,
    input_at,
    is_constant,
    made_by,
    only_reader,
)
from repaconv.graph.operator_facts import IMAGE_NORMS, ROW_NORMS
from repaconv.graph.symbolic_shapes import rank_of, set_shape, sizes

if TYPE_CHECKING:
    import onnx_ir as ir


def split(model: ir.Model) -> None:
    """Split the scale and shift from every norm that has them; in place."""
    for node in tuple(model.graph):
        if node.domain or node.op_type not in (*ROW_NORMS, *IMAGE_NORMS) or any(v.uses() for v in node.outputs[1:]):
            continue
        shape, scale = sizes(node.inputs[0]), constant(node.inputs[1])
        given = input_at(node, 2)
        shift = constant(given)
        if shape is None or scale is None or scale.ndim != 1 or (given is not None and shift is None):
            continue
        if not (scale != 1).any() and (shift is None or not shift.any()):
            continue
        channels = shape[-1] if node.op_type in ROW_NORMS else shape[1]
        last = node.op_type in ROW_NORMS and int(attribute(node, "axis", -1)) not in (-1, len(shape) - 1)
        if last or len(scale) != channels or (node.op_type == "InstanceNormalization" and channels == 1):
            continue
        _split(model, node, scale, shift)


def _split(model: ir.Model, node: ir.Node, scale: Array, shift: Array | None) -> None:
    write, shape, x = Writer(model, node), sizes(node.outputs[0]), node.inputs[0]
    assert shape is not None
    assert x is not None
    vector = (-1,) if node.op_type in ROW_NORMS else (-1, *[1] * (len(shape) - 2))
    ones = [write.constant(np.ones(len(scale)))]
    if node.op_type in IMAGE_NORMS:
        ones.append(write.constant(np.zeros(len(scale))))
    new = write.copy(node, x, *ones)
    set_shape(new, shape, x)
    new = write("Mul", new, write.constant(scale.reshape(vector)))
    set_shape(new, shape, x)
    if shift is not None:
        new = write("Add", new, write.constant(shift.reshape(vector)))
        set_shape(new, shape, x)
    write.replace(node.outputs[0], new)


def of_norm(value: ir.Value | None) -> bool:
    """Whether a value is the result of a norm, possibly followed by a constant scale and shift."""
    while (node := made_by(value, "Mul", "Add")) is not None:
        value = next((v for v in node.inputs if not is_constant(v)), None)
    return made_by(value, *ROW_NORMS) is not None


def merge(model: ir.Model) -> None:
    """Merge a scale and a shift that directly follow a norm back into it, also as BatchNormalization; in place."""
    for node in tuple(model.graph):
        if node.op_type in (*ROW_NORMS, *IMAGE_NORMS) and not node.domain and node.graph is model.graph:
            _merge(model, node)


def _merge(model: ir.Model, node: ir.Node) -> None:
    scale, of_images = constant(node.inputs[1]), node.op_type in IMAGE_NORMS
    given = input_at(node, 2)
    shift = constant(given)
    shifted = shift is None or shift.any() if of_images else given is not None
    if shifted or scale is None or scale.ndim != 1 or (scale != 1).any():
        return
    found: dict[str, Array] = {}
    value = node.outputs[0]
    operators: tuple[str, ...] = ("Mul",) if node.op_type == "RMSNormalization" else ("Mul", "Add")
    batch_norm = only_reader(value, "BatchNormalization") if of_images else None
    both = batchnorm(batch_norm) if batch_norm is not None else None
    if batch_norm is not None and both is not None and len(both[0]) == len(scale):
        found, value, operators = dict(zip(operators, both, strict=True)), batch_norm.outputs[0], ()
    for operator in operators:
        following = _only(value, operator)
        if following is None:
            continue
        user, numbers = following
        rank = rank_of(value)
        axis = 1 if of_images else rank - 1
        whole = np.array(numbers, ndmin=rank)
        same = sizes(user.outputs[0]) == sizes(value) and whole.ndim == rank
        if same and whole.size == whole.shape[axis] and whole.size in (1, len(scale)):
            found[operator], value = np.broadcast_to(numbers.reshape(-1), len(scale)), user.outputs[0]
    if not found:
        return
    write = Writer(model, node)
    parts = [write.constant(found.get("Mul", scale))]
    if of_images or "Add" in found:  # norms of images always have a shift
        parts.append(write.constant(found.get("Add", np.zeros(len(scale)))))
    new = write.copy(node, node.inputs[0], *parts)
    set_shape(new, sizes(value), node.outputs[0])
    write.replace(value, new)


def _only(value: ir.Value, operator: str) -> tuple[ir.Node, Array] | None:
    """The only reader of a value and its constant, if it is this operator with a constant."""
    node = only_reader(value, operator)
    numbers = constant(node.inputs[1 if node.inputs[0] is value else 0]) if node is not None else None
    return None if node is None or numbers is None else (node, numbers)
