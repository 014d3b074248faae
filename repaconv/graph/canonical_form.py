"""Bring a graph into one canonical form, in which linear layers are MatMul and Add on tokens [B, N, C].

Exporters and simplifiers write the same function in many ways. For example, onnxsim turns a linear layer on [B, N, C]
into a Gemm on [B N, C], which hides the token axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from repaconv.graph.index_selections import MIN_ELEMENTS, is_fast_transpose, perm_of, swaps_last
from repaconv.graph.models_in_onnx_ir import clean
from repaconv.graph.nodes_and_constants import (
    Writer,
    attribute,
    constant,
    input_at,
    is_constant,
    is_read_once,
    made_by,
    nodes_of,
    shape_of_constant,
)
from repaconv.graph.operator_facts import ARITHMETIC, UNARY, VIEWS
from repaconv.graph.shape_folding import fold_shapes
from repaconv.graph.symbolic_shapes import Size, as_numbers, known_product, rank_of, reshape_target, set_shape, sizes
from repaconv.graph.tensor_views import View
from repaconv.graph.view_chains import view_of

if TYPE_CHECKING:
    import onnx_ir as ir


NORMALIZED_KEY = "repaconv.normal"
"""Metadata key: the nodes after the last `normalize`, to skip a graph that has not changed."""
NODES_KEY = "repaconv.nodes"
"""Metadata key: the number of nodes before the first `normalize`."""
LAST_AXES_KEY = "repaconv.last"
"""Metadata key: whether the original graph has a Transpose of the last two axes only."""


def normalize(model: ir.Model) -> None:
    """Bring the graph into canonical form, in place. Its function stays the same."""
    if model.meta.get(NORMALIZED_KEY) == _node_names(model):
        return  # unchanged since the last call
    model.meta.setdefault(NODES_KEY, len(model.graph))
    model.meta.setdefault(LAST_AXES_KEY, any(map(_is_last, nodes_of(model, "Transpose"))))
    fold_shapes(model)
    for node in nodes_of(model, *_WINDOWS):
        _write_padding(node)
    for node in tuple(model.graph):
        _gemm_as_matmul(model, node)
    for node in tuple(model.graph):
        _unflatten_tokens(model, node)
        _unflatten_heads(model, node)
    shorten_views(model)
    clean(model)
    model.meta[NORMALIZED_KEY] = _node_names(model)


def _is_last(node: ir.Node) -> bool:
    return rank_of(node.outputs[0]) > 2 and swaps_last(node)


def _node_names(model: ir.Model) -> list[tuple[str | None, ...]]:
    """Return operators and value names, to detect whether a graph has changed."""
    return [(node.op_type, *(value and value.name for value in (*node.inputs, *node.outputs))) for node in model.graph]


def shorten_views(model: ir.Model) -> None:
    """Replace every chain of views by the shortest equivalent one, in place."""
    for node in tuple(model.graph):
        _shorten_view(model, node)
        _read_past_reshapes(node)


_WINDOWS = ("Conv", "AveragePool", "MaxPool")


def _write_padding(node: ir.Node) -> None:
    """Replace auto_pad SAME_UPPER or SAME_LOWER by the pads that it means, unless a dynamic size decides; in place."""
    import onnx_ir as ir

    auto = attribute(node, "auto_pad", "NOTSET")
    if not auto.startswith("SAME"):
        return
    window = attribute(node, "kernel_shape", None) or as_numbers((sizes(node.inputs[1]) or ())[2:])
    image = (sizes(node.inputs[0]) or ())[2:]
    if not window or len(image) != len(window):
        return
    strides, dilations = (attribute(node, name, (1,) * len(window)) for name in ("strides", "dilations"))
    lengths = (step * (size - 1) + 1 for step, size in zip(dilations, window, strict=True))
    totals = [_same_padding(*axis) for axis in zip(image, lengths, strides, strict=True)]
    known = [total for total in totals if total is not None]
    if len(known) < len(totals):
        return
    skips = any(stride > length for stride, length in zip(strides, window, strict=True))
    if node.op_type != "Conv" and (skips or set(dilations) != {1}):
        return  # ONNX Runtime's pools do not follow the specification there
    less, more = [total // 2 for total in known], [-(-total // 2) for total in known]
    node.attributes.pop("auto_pad")
    node.attributes["pads"] = ir.AttrInt64s("pads", less + more if auto == "SAME_UPPER" else more + less)


def _same_padding(image: Size, window: int, stride: int) -> int | None:
    """Return the padding on both sides by which there are image / stride windows, rounded up; None if it is dynamic."""
    if window == 1 or stride == 1:
        return window - 1
    return max((-(-image // stride) - 1) * stride + window - image, 0) if isinstance(image, int) else None


def _gemm_as_matmul(model: ir.Model, node: ir.Node) -> None:
    weight = constant(node.inputs[1]) if node.op_type == "Gemm" and not node.domain else None
    if weight is None or attribute(node, "transA", 0):
        return
    bias = constant(input_at(node, 2))
    if input_at(node, 2) is not None and (bias is None or bias.ndim > 1):
        return
    write, shape, x = Writer(model, node), sizes(node.outputs[0]), node.inputs[0]
    alpha, beta = float(attribute(node, "alpha", 1.0)), float(attribute(node, "beta", 1.0))
    same = alpha == 1 and not attribute(node, "transB", 0)
    weight = (weight.T if attribute(node, "transB", 0) else weight) * alpha
    assert x is not None
    new = write("MatMul", x, node.inputs[1] if same else write.constant(weight))
    set_shape(new, shape, x)
    if bias is not None:
        new = write("Add", new, node.inputs[2] if beta == 1 else write.constant(bias * beta))
        set_shape(new, shape, x)
    write.replace(node.outputs[0], new)


def _unflatten_tokens(model: ir.Model, node: ir.Node) -> None:
    """Apply a row-wise operator to [B, N, C] instead of [B N, C], and flatten its output."""
    place = _row_by_row(node)
    if place is None:
        return
    x, shape = node.inputs[place], sizes(node.outputs[0])
    view = view_of(x) if x is not None else None
    if view is None or shape is None or len(view.axes) != 2 or len(view.axes[0]) < 2:
        return
    rows, columns = view.axes
    same = view.in_order and view.of[-1] == columns  # the source itself, also where its batch of 1 is no factor
    apart = replace(view, axes=(*(view.of[:-1] if same else ((factor,) for factor in rows)), columns))
    write = Writer(model, node)
    new = apart.write(write)
    if new is None:
        return
    inputs = [new if i == place else value for i, value in enumerate(node.inputs)]
    attributes = {name: entry.value for name, entry in node.attributes.items()}
    done = write(node.op_type, *inputs, **(attributes | {"axis": -1} if "axis" in attributes else attributes))
    set_shape(done, (*apart.shape[:-1], shape[-1]), new)
    target = reshape_target((), shape)
    if target is None:
        return
    flat = write("Reshape", done, write.constant(target))
    set_shape(flat, shape, new)
    write.replace(node.outputs[0], flat)


def _unflatten_heads(model: ir.Model, node: ir.Node) -> None:
    """Multiply matrices of [B, H, N, M] instead of [B H, N, M], and flatten the product. Keras flattens heads so."""
    shape = sizes(node.outputs[0]) if node.op_type == "MatMul" and not node.domain else None
    if shape is None or len(shape) != 3:
        return
    views = [view_of(x) if x is not None and len(x.uses()) == 1 else None for x in node.inputs]
    heads = [tuple(view.size[factor] for factor in view.axes[0]) for view in views if view and len(view.axes) == 3]
    if len(heads) < 2 or len(heads[0]) < 2 or heads[0] != heads[1]:
        return
    write = Writer(model, node)
    apart = [replace(view, axes=(*((f,) for f in view.axes[0]), *view.axes[1:])).write(write) for view in views if view]
    target = reshape_target((), shape)
    if target is None or any(value is None for value in apart):
        return
    product = write("MatMul", *apart)
    set_shape(product, (*heads[0], *shape[1:]), apart[0])
    flat = write("Reshape", product, write.constant(target))
    set_shape(flat, shape, product)
    write.replace(node.outputs[0], flat)


def _row_by_row(node: ir.Node) -> int | None:
    """Return which input a node processes row by row, its other inputs being constant; None if there is none."""
    if node.domain or len(node.outputs) > 1:
        return None
    if node.op_type not in (*UNARY, *ARITHMETIC, "LayerNormalization", "MatMul", "Pow"):
        return None
    shapes = [shape_of_constant(value) for value in node.inputs]
    vectors = all(other is not None and len(other) < 2 for other in shapes[1:])
    if node.op_type in UNARY:
        return 0
    if node.op_type == "LayerNormalization" and vectors and attribute(node, "axis", -1) in (-1, 1):
        return 0
    if node.op_type == "MatMul":
        return 0 if shapes[0] is None and shapes[1] is not None and len(shapes[1]) == 2 else None
    if node.op_type not in (*ARITHMETIC, "Pow") or sum(shape is None for shape in shapes) != 1:
        return None
    place = 0 if shapes[0] is None else 1
    other = shapes[1 - place]
    return place if other is not None and (len(other) < 2 or other == (1, 1)) else None


def _shorten_view(model: ir.Model, node: ir.Node) -> None:
    """Replace a chain of views that another operator reads by the shortest equivalent one."""
    value = node.outputs[0]
    if node.op_type not in VIEWS or node.domain or is_constant(value):
        return
    if value.is_graph_output() or any(user.op_type not in VIEWS for user, _ in value.uses()):
        _shorten_chain(model, node)


def _read_past_reshapes(node: ir.Node) -> None:
    """Let a Reshape read what others before it, which nothing else reads, have reshaped; sizes need not be known."""
    while node.op_type == "Reshape" and not node.domain and (x := node.inputs[0]) is not None and is_read_once(x):
        before = made_by(x, "Reshape", "Flatten", "Squeeze", "Unsqueeze")
        source = before.inputs[0] if before is not None else None
        if before is None or source is None or is_constant(source) or not _copies_alike(node, before):
            break
        node.replace_input_with(0, source)


def _copies_alike(reshape: ir.Node, before: ir.Node) -> bool:
    """Whether the sizes that a Reshape copies from its input are also those of what the node before it reads.

    It copies a size where its target is 0. A computed size may be 0, for instance the number of detections, but not
    next to a -1, which is then undetermined.
    """
    target = _target(reshape)
    if target is None:
        return False
    if attribute(reshape, "allowzero", 0):
        return True
    copied = [axis for axis, size in enumerate(target) if size == 0 or not (isinstance(size, int) or -1 in target)]
    inner = None if before.op_type != "Reshape" or attribute(before, "allowzero", 0) else _target(before)
    pairs = ((sizes(before.outputs[0]), sizes(before.inputs[0])), (target, inner))
    return all(any(_are_equal_at(axis, *pair) for pair in pairs) for axis in copied)


def _are_equal_at(axis: int, one: Sequence[object] | None, other: Sequence[object] | None) -> bool:
    """Whether two shapes have the same size at an axis, and both are known there."""
    if one is None or other is None or axis >= min(len(one), len(other)):
        return False
    return one[axis] == other[axis]


def _target(reshape: ir.Node) -> list[int | ir.Value] | None:
    """The sizes to which a Reshape reshapes: numbers, and values [1] that are computed; None if others are computed."""
    parts = made_by(reshape.inputs[1], "Concat")
    target: list[int | ir.Value] = []
    for part in reshape.inputs[1:] if parts is None else parts.inputs:
        numbers = constant(part)
        if part is None or (numbers is None and sizes(part) != (1,)):
            return None
        target += [part] if numbers is None else numbers.tolist()
    return target


def _shorten_chain(model: ir.Model, node: ir.Node) -> None:
    """Replace the chain of views that ends in a node, or its beginning if the whole takes too many axes or is slow."""
    value = node.outputs[0]
    view = view_of(value)
    if view is None or view.source is value:
        return
    if not view.writable or _is_slower(view, node):
        before = made_by(node.inputs[0], *VIEWS)
        if before is not None:
            _shorten_chain(model, before)
        return
    length = _removable_nodes(value, view.source)
    if _nodes_to_write(view, length) >= length or view.shape != sizes(value):
        return
    write = Writer(model, node)
    new = view.write(write)
    if new is not None and (new is not view.source or not value.is_graph_output()):
        write.replace(value, new)


def _is_slower(view: View, last: ir.Node) -> bool:
    """Whether ONNX Runtime is slow at the Transpose of a view, and fast at all in the chain that ends in a node.

    It joins Transposes of which one reads another, so they count as one.
    """
    before, _, perm = view.turned
    if is_fast_transpose(perm) or known_product(before) < MIN_ELEMENTS:
        return False
    perm = []
    node: ir.Node | None = last
    while node is not None and node.outputs[0] is not view.source:
        if node.op_type == "Transpose":
            order = perm_of(node, rank_of(node.outputs[0]))
            perm = [order[axis] for axis in perm or range(len(order))]
        elif not is_fast_transpose(perm):
            return False
        else:
            perm = []
        node = made_by(node.inputs[0], *VIEWS)
    return is_fast_transpose(perm)


def _removable_nodes(value: ir.Value, source: ir.Value) -> int:
    """Count the nodes between a source and a value that would be removed; nodes with other readers stay."""
    length = 0
    while value is not source and (length == 0 or len(list(value.uses())) == 1):
        node = value.producer()
        assert node is not None
        assert node.inputs[0] is not None
        value, length = node.inputs[0], length + 1
    return length


def _nodes_to_write(view: View, most: int) -> int:
    """Return how many nodes it takes to write a view; ``most`` if it takes that many or more."""
    order = [factor for axis in view.of for factor in axis]
    wanted = [factor for axis in view.axes for factor in axis]
    if order == wanted:
        return int(view.shape != sizes(view.source))
    if most <= 1:
        return most
    return len(view.operators)
