"""Move operators past means: a mean, or a selection of tokens, of x g + b equals that of x, times g, plus b.

After the move, the scale and shift act on fewer numbers, and the layer that reads the mean may absorb them. A linear
layer before the mean of its tokens, or a 1x1 convolution before the mean of its pixels, moves as well: mean(x W) =
mean(x) W. Before a linear layer, a scale and shift also move past maxima, if g > 0, and past a view of an image as a
row; a 1x1 convolution moves past the mean of all pixels as a row, and past a view of one pixel as a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from repaconv.graph.channel_axes import batchnorm
from repaconv.graph.index_selections import axes_of, perm_of, selection_of
from repaconv.graph.nodes_and_constants import (
    Array,
    Writer,
    attribute,
    constant,
    is_constant,
    is_read,
    is_read_once,
    made_by,
    only_reader,
    shape_of_constant,
)
from repaconv.graph.operator_facts import ARITHMETIC, POOLS, VIEWS
from repaconv.graph.symbolic_shapes import rank_of, set_shape, shaped_like, sizes
from repaconv.graph.view_chains import view_of_chain
from repaconv.rewrites.fold.kernels_from_onnx import LEAST_RANK, counts_padding, kernel_of
from repaconv.rewrites.fold.linear_graph_from_onnx import LINEAR
from repaconv.rewrites.fold.norm_affines import of_norm

if TYPE_CHECKING:
    import onnx_ir as ir

    from repaconv.algebra.convolution_kernels import Kernel


AVERAGES = ("ReduceMean", "GlobalAveragePool", "AveragePool")
MAXIMA = ("ReduceMax", "GlobalMaxPool", "MaxPool")


def move_past_means(model: ir.Model) -> list[str]:
    """Move scales and shifts past means and selections, and before a linear layer past maxima and views; and linear
    layers past means; in place.

    Returns:
        The names of the moved layers. The scales are reported by the rewrite that absorbs them.
    """
    moved: list[str] = []
    again = True
    while again:
        again = False
        for node in tuple(model.graph):
            if node.graph is not model.graph or node.domain:
                continue
            layer = _move_linear_layer(model, node)
            if layer is None:  # a layer may have an empty name
                layer = _move_past_row(model, node)
            moved += [layer] if layer is not None else []
            again = again or layer is not None or _move_scale_and_shift(model, node)
    return moved


def _move_scale_and_shift(model: ir.Model, node: ir.Node) -> bool:
    if node.op_type not in (*AVERAGES, *MAXIMA, "Slice", "Gather", *VIEWS):
        return False
    x = node.inputs[0] if node.inputs else None
    inner = made_by(x, *ARITHMETIC, "BatchNormalization")
    if x is None or inner is None or not _may_read_past(x, node) or x.is_graph_output():
        return False
    terms = _source_and_steps(inner)
    if terms is None:
        return False
    source, steps = terms
    if source.dtype is not None and not source.dtype.is_floating_point():  # a mean of integers is rounded
        return False
    if node.op_type in MAXIMA and not (all(map(_is_increasing, steps)) and _is_for_layer_after(node)):
        return False
    rank = rank_of(x)
    if sizes(source) != sizes(x) or any(n.ndim > rank for _, n, _ in steps):
        return False
    whole = [np.array(n, ndmin=rank) for _, n, _ in steps]
    moved = [_constant_after(node, n) for n in whole]
    if any(m is None for m in moved):
        return False
    write = Writer(model, node)
    new = write.copy(node, source, *node.inputs[1:])
    set_shape(new, sizes(node.outputs[0]), source)
    for (operator, _, place), numbers in zip(steps, moved, strict=True):
        assert numbers is not None
        other = write.constant(numbers)
        new = write(operator, *((new, other) if place == 0 else (other, new)))
        set_shape(new, sizes(node.outputs[0]), source)
    write.replace(node.outputs[0], new)
    model.graph.remove(node, safe=True)
    if not x.uses():
        model.graph.remove(inner, safe=True)
    return True


def _may_read_past(x: ir.Value, node: ir.Node) -> bool:
    """Whether the scale before a value may move past one of its readers.

    It may if nothing else reads the value. Past an AveragePool it also may if sums read the value, which take the scale
    then: PoolFormer subtracts a value from its average.
    """
    if is_read_once(x):
        return True
    readers = {reader.op_type for reader in x.consumers()}
    return node.op_type == "AveragePool" and readers <= {"AveragePool", "Add", "Sub"}


def _move_linear_layer(model: ir.Model, node: ir.Node) -> str | None:
    """Move a linear layer that only a mean reads to after the mean; the layer's name, or None if nothing moved."""
    if node.op_type not in AVERAGES:
        return None
    x = node.inputs[0] if node.inputs else None
    inner = made_by(x, "MatMul", "Conv")
    if x is None or inner is None or not is_read_once(x) or len(inner.inputs) < 2:
        return None
    source = inner.inputs[0]
    shape, out = sizes(source), sizes(node.outputs[0])
    takes = _averages_places if inner.op_type == "Conv" else _averages_tokens
    if source is None or shape is None or out is None or len(out) < 2 or not takes(node, inner):
        return None
    write, axis = Writer(model, node), 1 if inner.op_type == "Conv" else len(out) - 1
    width = shape[1] if inner.op_type == "Conv" else shape[-1]
    mean = write.copy(node, source, *node.inputs[1:])
    set_shape(mean, (*out[:axis], width, *out[axis + 1 :]), source)
    new = write.copy(inner, mean, *inner.inputs[1:])
    set_shape(new, out, node.outputs[0])
    write.replace(node.outputs[0], new)
    model.graph.remove([node, inner], safe=True)
    return inner.name or ""


def _move_past_row(model: ir.Model, node: ir.Node) -> str | None:
    """Move a 1x1 convolution past the node that makes a row [B, c] of its image, next to the linear layer after that.

    Nothing else may read the image or the row.

    Returns:
        The convolution's name; None if nothing moved, also if the two layers as one would multiply more.
    """
    x, out = node.inputs[0] if node.inputs else None, sizes(node.outputs[0])
    inner, reader = made_by(x, "Conv"), only_reader(node.outputs[0], "MatMul")
    kernel = kernel_of(inner) if inner is not None and reader is not None else None
    weight = shape_of_constant(reader.inputs[1]) if reader is not None else None
    if x is None or inner is None or kernel is None or weight is None or not _is_row(node) or not is_read_once(x):
        return None
    source, (width, own) = inner.inputs[0], kernel.weight.shape[:2]
    if not _is_plain_pointwise(kernel) or kernel.groups > 1 or own * weight[-1] > width * (own + weight[-1]):
        return None
    write = Writer(model, node)
    row = write.copy(node, source, *node.inputs[1:]) if node.op_type == "ReduceMean" else write("Flatten", source)
    assert out is not None
    set_shape(row, (out[0], own), x)
    new = write("MatMul", row, write.constant(kernel.weight.reshape(width, own).T))
    set_shape(new, out, x)
    if kernel.bias is not None:
        new = shaped_like(write("Add", new, write.constant(kernel.bias)), new)
    write.replace(node.outputs[0], new)
    model.graph.remove([node, inner], safe=True)
    return inner.name or ""


def _is_row(node: ir.Node) -> bool:
    """Whether a node makes a row [B, c]: a view of an image [B, c, 1, 1], or the mean of all pixels of an image."""
    before, after = sizes(node.inputs[0]), sizes(node.outputs[0])
    if before is None or after != before[:2] or len(before) < LEAST_RANK:
        return False
    if node.op_type in VIEWS:
        return set(before[2:]) == {1}
    return node.op_type == "ReduceMean" and set(axes_of(node, len(before)) or ()) == {*range(2, len(before))}


def _averages_tokens(node: ir.Node, inner: ir.Node) -> bool:
    """Whether a node averages over axes other than the channels of a MatMul with constant weights."""
    weight, rank = constant(inner.inputs[1]), rank_of(node.inputs[0])
    axes = axes_of(node, rank) if node.op_type == "ReduceMean" else None
    return weight is not None and weight.ndim == 2 and bool(axes) and rank - 1 not in (axes or ())


def _averages_places(node: ir.Node, inner: ir.Node) -> bool:
    """Whether a node averages pixels of a 1x1 convolution and returns fewer pixels."""
    kernel = kernel_of(inner)
    if kernel is None or not _is_plain_pointwise(kernel):
        return False
    if node.op_type == "GlobalAveragePool":
        return True
    if node.op_type == "ReduceMean":
        axes = axes_of(node, rank_of(node.inputs[0]))
        return bool(axes) and min(axes or (0,)) > 1 and bool(attribute(node, "keepdims", 1))
    fewer = any(stride > 1 for stride in attribute(node, "strides", (1,)))
    return node.op_type == "AveragePool" and fewer and not (kernel.bias is not None and counts_padding(node))


def _is_plain_pointwise(kernel: Kernel) -> bool:
    """Whether a convolution computes each pixel of its output from one pixel, and as many as it reads."""
    return kernel.is_pointwise and not kernel.is_padded and not any(kernel.reach) and max(kernel.strides) == 1


def _is_increasing(step: tuple[str, Array, int]) -> bool:
    """Whether a step of `_source_and_steps` keeps the order of numbers."""
    operator, numbers, place = step
    return operator == "Add" or (operator == "Sub" and place == 0) or (operator != "Sub" and bool((numbers > 0).all()))


def _is_for_layer_after(node: ir.Node) -> bool:
    """Whether a linear layer alone reads a node, through means, maxima and views at most, and none is before it."""
    value = node.outputs[0]
    if _follows_linear_layers(node.inputs[0]):
        return False
    while not any(map(is_read, node.outputs[1:])):
        reader = only_reader(value, *AVERAGES, *MAXIMA, *VIEWS, "MatMul")
        if reader is None or reader.op_type == "MatMul":
            return reader is not None and reader.inputs[0] is value and is_constant(reader.inputs[1])
        node, value = reader, reader.outputs[0]
    return False


def _follows_linear_layers(value: ir.Value | None) -> bool:
    """Whether linear layers alone compute a value, through scales, shifts and sums that nothing else reads."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        inner = made_by(each, *ARITHMETIC, "BatchNormalization")
        if inner is None and made_by(each, *LINEAR) is None:
            return False
        variable = [x for x in inner.inputs if x is not None and not is_constant(x)] if inner is not None else []
        if len(variable) > 1 and not all(map(is_read_once, variable)):
            return False
        waiting += variable
    return True


def _source_and_steps(inner: ir.Node) -> tuple[ir.Value, list[tuple[str, Array, int]]] | None:
    """The variable input of a node with constants, and its steps: operator, constant, position of the variable."""
    if inner.op_type == "BatchNormalization":
        found, x = batchnorm(inner), inner.inputs[0]
        rank = rank_of(x)
        if found is None or x is None or rank < 2:
            return None
        column = (-1, *[1] * (rank - 2))
        return x, [(op, part.reshape(column), 0) for op, part in zip(("Mul", "Add"), found, strict=True)]
    numbers = [constant(value) for value in inner.inputs]
    if sum(n is None for n in numbers) != 1:
        return None
    place = 0 if numbers[0] is None else 1
    x, given = inner.inputs[place], numbers[1 - place]
    if x is None or given is None or (inner.op_type == "Div" and place == 1):
        return None
    return x, [(inner.op_type, given, place)]


def _constant_after(node: ir.Node, numbers: Array) -> Array | None:
    """The constant to apply after a mean, a maximum, a selection or a view; None if it varies along those axes."""
    rank = numbers.ndim
    if node.op_type in POOLS:
        return numbers if not counts_padding(node) and all(size == 1 for size in numbers.shape[2:]) else None
    if node.op_type in ("ReduceMean", "ReduceMax"):
        axes = axes_of(node, rank)
        if axes is None or any(numbers.shape[axis] != 1 for axis in axes):
            return None
        return numbers if attribute(node, "keepdims", 1) else numbers.squeeze(tuple(axes))
    if node.op_type in ("Slice", "Gather"):
        found = selection_of(node.outputs[0])
        if found is None or numbers.shape[found.axis] != 1:
            return None
        return numbers if found.keeps else numbers.squeeze(found.axis)
    if node.op_type == "Transpose" and rank == 4 and of_norm(node.inputs[0]):  # no layer before a norm absorbs them
        turned: Array = numbers.transpose(perm_of(node, rank))
        return turned
    if node.op_type in VIEWS:
        return _constant_after_view(node, numbers)
    return None


def _constant_after_view(node: ir.Node, numbers: Array) -> Array | None:
    """The constant after a view that only drops axes of length 1, or that a linear layer reads; None for others."""
    before, after = sizes(node.inputs[0]), sizes(node.outputs[0])
    if before is None or after is None:
        return None
    drops = [s for s in before if s != 1] == [s for s in after if s != 1] and len(after) < len(before)
    if not drops and not _is_for_layer_after(node):
        return None
    view = view_of_chain([node.outputs[0], node.inputs[0]]) if node.inputs[0] is not None else None
    return None if view is None else view.constant_after(numbers)
