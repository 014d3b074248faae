"""Move operators from after views (Reshape, Transpose, ...) to before them, where linear layers can absorb them.

A view only moves numbers, so an operator that acts on its result can act on its source instead. This is done for
selections along one axis of the source, constants that vary along one such axis, sums of two equal views, and linear
layers and 1x1 convolutions after the layer or scale that they can be composed with.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

from repaconv.graph.channel_axes import LAST, batchnorm, scale_and_shift
from repaconv.graph.constants_of_dynamic_shape import broadcast_constant, slice_assignment
from repaconv.graph.index_selections import (
    Places,
    are_consecutive,
    axes_of,
    perm_of,
    selected_positions,
    selection_of,
)
from repaconv.graph.nodes_and_constants import (
    Array,
    Writer,
    attribute,
    constant,
    is_constant,
    is_read,
    is_read_once,
    made_by,
    nodes_of,
    only_reader,
    shape_of_constant,
)
from repaconv.graph.operator_facts import ARITHMETIC, ROW_NORMS, SELECTIONS, VIEWS
from repaconv.graph.symbolic_shapes import Sizes, as_numbers, is_dynamic, rank_of, set_shape, shaped_like, sizes
from repaconv.graph.tensor_views import View, reshaped
from repaconv.graph.view_chains import view_of
from repaconv.rewrites.fold.kernels_from_onnx import kernel_of
from repaconv.rewrites.fold.linear_graph_from_onnx import LINEAR
from repaconv.rewrites.fold.norm_affines import of_norm

if TYPE_CHECKING:
    import onnx_ir as ir


def move_before_views(model: ir.Model, embeddings: Collection[ir.Node] = ()) -> None:
    """Move selections, constants, BatchNormalizations, sums and layers to before the views that they act on; in place.

    Args:
        model: In the form that `repaconv.graph.canonical_form` makes.
        embeddings: The nodes of rotary embeddings, which stay: they mix the halves of every head.
    """
    for node in tuple(model.graph):
        if node.graph is not model.graph or node.domain or node in embeddings:
            continue
        if node.op_type in SELECTIONS:
            for value in node.outputs:
                _move_selection(model, node, value)
        elif node.op_type in ARITHMETIC:
            _move_constant(model, node)
            _move_sum(model, node)
        elif node.op_type == "BatchNormalization":
            _move_batchnorm(model, node)
        elif node.op_type == "ScatterND":
            _move_assignment(model, node)
        elif node.op_type in ("MatMul", "Conv"):
            _move_linear(model, node)


def back_to_norms(model: ir.Model) -> None:
    """Move scales and shifts that nothing absorbed from after a view, selection or mean of a norm to directly after the
    norm; in place."""
    for node in nodes_of(model, "Mul", "Add"):
        if _move_before_selection(model, node):
            continue
        view = next((seen for value in node.inputs if (seen := view_of(value)) and seen.source is not value), None)
        one = view is not None and len(list(view.source.uses())) == 1 and made_by(view.source, *ROW_NORMS, "Mul")
        if one and view is not None and of_norm(view.source):
            _move_constant(model, node, (*ROW_NORMS, "Mul"))


def _move_before_selection(model: ir.Model, node: ir.Node) -> bool:
    """Scale or shift a norm before its tokens are selected or averaged; in place. Whether it was done."""
    place = next((place for place in (0, 1) if is_constant(node.inputs[place])), None)
    x = node.inputs[1 - place] if place is not None else None
    chosen, numbers = made_by(x, "Slice", "Gather", "ReduceMean"), constant(node.inputs[place or 0])
    source = chosen.inputs[0] if chosen is not None else None
    if x is None or chosen is None or numbers is None or source is None or not of_norm(source):
        return False
    if not is_read_once(x) or not is_read_once(source) or not numbers.ndim or numbers.size != numbers.shape[-1]:
        return False
    found = _positions(chosen, x, rank_of(source))
    shape = sizes(source)
    if found is None or shape is None or sizes(x) != sizes(node.outputs[0]):
        return False
    numbers, last = numbers.reshape(-1), found.get(len(shape) - 1)
    if last is not None:  # the numbers of other channels are not read
        width = shape[-1]
        if last.ndim != 1 or len(set(last.tolist())) < len(last) or not isinstance(width, int) or len(numbers) == 1:
            return False
        whole = np.full(width, float(node.op_type == "Mul"))
        whole[last] = numbers
        numbers = whole
    write = Writer(model, node)
    moved = shaped_like(write(node.op_type, source, write.constant(numbers, like=source)), source)
    new = write.copy(chosen, moved, *chosen.inputs[1:])
    set_shape(new, sizes(x), x)
    write.replace(node.outputs[0], new)
    return True


def _positions(chosen: ir.Node, value: ir.Value, rank: int) -> dict[int, Places] | None:
    """The positions by axis that a selection holds; none for a mean, which may not be over the last axis."""
    if chosen.op_type != "ReduceMean":
        return selected_positions(chosen, value)
    axes = axes_of(chosen, rank)
    return None if axes is None or rank - 1 in axes else {}


def _move_selection(model: ir.Model, node: ir.Node, value: ir.Value) -> None:
    selected = selection_of(value)
    view = view_of(selected.value) if selected is not None else None
    if selected is None or view is None or view.source is selected.value or not is_read(value):
        return
    merged = view.merged(selected.axis)
    if merged is None or len(merged.axes[selected.axis]) != 1:
        return
    factor = merged.axes[selected.axis][0]
    chosen = merged.channels(factor, selected.places)
    if chosen is None:
        return
    alone = selected.keeps or _is_seen_once(selected.value, view.source)
    if not alone and not _follows_linear_layer(view.source):
        return  # each of the selections would have a view of its own, and no layer could absorb it
    write, axis, shape = Writer(model, node), merged.axis_of(factor), sizes(merged.source)
    assert shape is not None
    if are_consecutive(chosen):
        ends = ([int(chosen[0])], [int(chosen[-1]) + 1], [axis])
        new = write("Slice", merged.source, *(write.constant(end) for end in ends))
    elif node.op_type != "Gather" and not _could_be_reordered(merged.source, axis):
        return  # a slice would become a gather of scattered channels, which no linear layer absorbs
    else:
        new = write("Gather", merged.source, write.constant(chosen), axis=axis)
    set_shape(new, (*shape[:axis], len(chosen), *shape[axis + 1 :]), merged.source)
    seen = merged.narrowed(new, factor, len(selected.places) if selected.keeps else None).write(write)
    if seen is not None:
        write.replace(value, seen)


def _could_be_reordered(value: ir.Value, axis: int) -> bool:
    """Whether a linear layer comes before a value, and could compute it in another order along an axis.

    Along the last one, where gathered numbers are not adjacent, only if selections alone read the value or its views.
    """
    if not _follows_linear_layer(value, scattered=True):
        return False
    todo = [value] if axis == rank_of(value) - 1 else []
    while todo:
        value = todo.pop()
        for reader, _ in value.uses():
            if reader.domain or reader.op_type not in (*VIEWS, *SELECTIONS):
                return False
            todo += reader.outputs if reader.op_type in VIEWS else ()
        if value.is_graph_output():
            return False
    return True


def _follows_linear_layer(
    value: ir.Value, layers: Collection[str] = ("MatMul", "Conv"), *, scattered: bool = False
) -> bool:
    """Whether such a layer comes before a value, with only operators in between that a selection can move past.

    A scattered selection moves past none if one of the layers is a convolution of groups, whose channels keep their
    order.
    """
    seen: set[ir.Node] = set()
    todo, found = [value], False
    while todo:
        node = todo.pop().producer()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.op_type in layers:
            if scattered and attribute(node, "group", 1) > 1:
                return False
            found = True
        elif node.op_type in LINEAR:
            todo += [before for before in node.inputs if before is not None]
    return found


def _along_source_axis(given: Array, view: View) -> tuple[Array, int] | None:
    """A constant that is broadcast to a view, as a vector along one axis of the view's source.

    Returns:
        The vector and the axis; a scalar and -1 for a single number; None if it varies along several source axes.
    """
    rank = len(view.axes)
    if given.size == 1:
        return given.reshape(()), -1
    if given.ndim > rank:
        return None
    whole = np.array(given, ndmin=rank)
    moved = view.constant_before(whole)
    homes = [axis for axis, length in enumerate(moved.shape) if length != 1] if moved is not None else []
    if moved is None or len(homes) != 1:
        return None
    if moved.size > whole.size and made_by(view.source, *LINEAR) is None:
        return None  # it would grow to the size of what is normalized there, and nothing could absorb it
    return moved.reshape(-1), homes[0]


def _move_constant(model: ir.Model, node: ir.Node, sources: tuple[str, ...] = LINEAR) -> None:
    numbers = [constant(value) for value in node.inputs]
    if sum(n is None for n in numbers) != 1:
        return
    place = 0 if numbers[0] is None else 1
    x, given = node.inputs[place], numbers[1 - place]
    view = view_of(x) if x is not None else None
    if x is None or given is None or view is None or view.source is x or sizes(x) != sizes(node.outputs[0]):
        return
    if not _is_seen_once(x, view.source):  # the others would read a view of their own
        return
    spread = _along_source_axis(given, view)
    shape = sizes(view.source)
    if spread is None or shape is None or made_by(view.source, *sources) is None:
        return
    vector, axis = spread
    write = Writer(model, node)
    column = vector if axis < 0 else vector.reshape(-1, *[1] * (len(shape) - 1 - axis))
    other = write.constant(column, like=view.source)
    new = write(node.op_type, *((view.source, other) if place == 0 else (other, view.source)))
    set_shape(new, shape, view.source)
    _replace_by_view(write, new, view)


def _move_linear(model: ir.Model, node: ir.Node) -> None:
    """Apply a layer before the view of tokens that it reads, if the layer or scale before the view absorbs it.

        W view(s x + t) + b = view(W (s x + t) + b),    if the view keeps the channels of every token together

    The layer is linear, or a 1x1 convolution. A decoder maps the tokens of a Vision Transformer as images (DPT), and
    TimeSformer regroups tokens between two layers.
    """
    x = node.inputs[0]
    view = view_of(x) if x is not None and made_by(x, *VIEWS) else None
    if x is None or view is None or view.source is x or view.places or view.scale != 1:
        return
    found = _matrix(node)
    if found is None or not is_read_once(view.source) or not _is_seen_once(x, view.source):
        return
    axis, weight, bias = found
    merged = view.merged(axis)
    if merged is None or len(merged.axes[axis]) != 1 or merged.axes[axis] != merged.of[-1]:
        return
    if not _can_absorb(view.source, weight):
        return
    shape = sizes(view.source)
    assert shape is not None
    write = Writer(model, node)
    new = write("MatMul", view.source, write.constant(weight, like=node.inputs[1]))
    set_shape(new, (*shape[:-1], weight.shape[1]), view.source)
    if bias is not None:
        new = shaped_like(write("Add", new, write.constant(bias, like=node.inputs[1])), new)
    seen = merged.narrowed(new, merged.axes[axis][0], weight.shape[1]).write(write)
    if seen is not None:
        write.replace(node.outputs[0], seen)


def _matrix(node: ir.Node) -> tuple[int, Array, Array | None] | None:
    """The channel axis of a MatMul or 1x1 convolution, its matrix [c, d] and its bias [d]; None for other nodes."""
    rank = rank_of(node.outputs[0])
    if node.op_type == "MatMul":
        weight = constant(node.inputs[1])
        return None if weight is None or weight.ndim != 2 or is_constant(node.inputs[0]) else (rank - 1, weight, None)
    kernel = kernel_of(node)
    if kernel is None or not kernel.acts_by_place or kernel.groups > 1:
        return None
    return 1, kernel.weight.reshape(kernel.weight.shape[:2]).T, kernel.bias


def _is_seen_once(value: ir.Value, source: ir.Value) -> bool:
    """Whether a value and all values in its chain of views, up to the source, are read once."""
    while value is not source:
        node = value.producer() if is_read_once(value) else None
        if node is None:
            return False
        assert node.inputs[0] is not None
        value = node.inputs[0]
    return True


def _can_absorb(source: ir.Value, weight: Array) -> bool:
    """Whether the operator that computes ``source`` can absorb a layer; the layer must not add channels.

    A scale and a shift of a norm cost nothing there.
    """
    node = source.producer()
    if node is None or weight.shape[1] > weight.shape[0] or of_norm(source):
        return False
    first = shape_of_constant(node.inputs[1]) if node.op_type == "MatMul" and not node.domain else None
    return len(first) == 2 if first is not None else scale_and_shift(node, LAST) is not None


def _replace_by_view(write: Writer, new: ir.Value, view: View) -> None:
    """Replace the output of the node ``write.before`` by a view of a new value."""
    seen = View(new, view.of, view.axes, view.size).write(write)
    if seen is not None:
        write.replace(write.before.outputs[0], seen)


def _move_assignment(model: ir.Model, node: ir.Node) -> None:
    """Replace a ScatterND along the first axis of two equally transposed values by a Concat of their sources.

    What is written to the beginning or the end stands next to a slice of the rest: MViT adds ``x[:, 1:] += y``. Of what
    is written elsewhere, a Gather takes the order.
    """
    found, data, updates = slice_assignment(node), node.inputs[0], node.inputs[2]
    views = [view_of(value) if value is not None else None for value in (data, updates)]
    masks = broadcast_constant(node.outputs[0]) is not None
    if found is None or masks or found[0] != 0 or any(view is None for view in views):
        return
    first, second = (view for view in views if view is not None)
    if first.axes != second.axes or first.of != second.of or first.source is data or len(first.axes[0]) != 1:
        return
    home, shapes = first.axis_of(first.axes[0][0]), (sizes(first.source), sizes(second.source))
    if len(first.of[home]) != 1 or shapes[0] is None or shapes[1] is None:
        return
    length, added = shapes[0][home], shapes[1][home]
    if not isinstance(length, int) or not isinstance(added, int):
        return
    if shapes[1] != (*shapes[0][:home], added, *shapes[0][home + 1 :]):  # 2 x 3 and 3 x 2 seen as 6
        return
    write, places = Writer(model, node), found[1]
    rest = np.setdiff1d(np.arange(length), places)
    if len(rest) and len(places) == added == length - len(rest) and are_consecutive(places) and are_consecutive(rest):
        ends = ([int(rest[0])], [int(rest[-1]) + 1], [home])
        kept = write("Slice", first.source, *(write.constant(end) for end in ends))
        set_shape(kept, (*shapes[0][:home], len(rest), *shapes[0][home + 1 :]), first.source)
        parts = (kept, second.source) if rest[0] < places[0] else (second.source, kept)
        new = write("Concat", *parts, axis=home)
        set_shape(new, shapes[0], first.source)
        _replace_by_view(write, new, first)
        return
    both = write("Concat", first.source, second.source, axis=home)
    set_shape(both, (*shapes[0][:home], length + added, *shapes[0][home + 1 :]), first.source)
    order = np.arange(length)
    order[places] = length + np.arange(added)
    new = write("Gather", both, write.constant(order), axis=home)
    set_shape(new, shapes[0], first.source)
    _replace_by_view(write, new, first)


def _move_sum(model: ir.Model, node: ir.Node) -> None:
    """Replace a sum of two equal views by the same view of the sum of their sources."""
    a, b = node.inputs
    if node.op_type not in ("Add", "Sub") or a is None or b is None or is_constant(a) or is_constant(b):
        return
    views = [view_of(value) for value in (a, b)]
    if any(view is None for view in views) or not views[0].alike(views[1]) or views[0].source is a:  # type: ignore[union-attr, arg-type]
        return
    first, second = (view for view in views if view is not None)
    write = Writer(model, node)
    new = shaped_like(write(node.op_type, first.source, second.source), first.source)
    _replace_by_view(write, new, first)


def _move_batchnorm(model: ir.Model, node: ir.Node) -> None:
    """Replace a BatchNormalization of transposed tokens by a scale and a shift of what can absorb them."""
    found, x = batchnorm(node), node.inputs[0]
    view = view_of(x) if x is not None else None
    shape = sizes(x)
    if found is None or x is None or view is None or shape is None or any(v.uses() for v in node.outputs[1:]):
        return
    column = (-1, *[1] * (len(shape) - 2))
    spread = [_along_source_axis(part.reshape(column), view) for part in found]
    inner = sizes(view.source)
    if view.source is x or inner is None or any(part is None or part[1] < 0 for part in spread):
        return
    reader = only_reader(node.outputs[0], "Conv")
    kernel = kernel_of(reader) if reader is not None else None
    before = _follows_linear_layer(view.source, ("MatMul", "Conv", *ROW_NORMS))
    if not before or (kernel is not None and not kernel.is_padded):  # the convolution absorbs it without this move
        return
    write = Writer(model, node)
    new = view.source
    for operator, part in zip(("Mul", "Add"), spread, strict=True):
        assert part is not None
        vector, axis = part
        new = write(operator, new, write.constant(vector.reshape(-1, *[1] * (len(inner) - 1 - axis))))
        set_shape(new, inner, view.source)
    _replace_by_view(write, new, view)


# --- The other direction: views that are the same for all pieces of a Split are applied once, before the Split.
#
# For example, pieces of tokens that are each viewed as an image become pieces of one image. Heads that a product takes
# stay as they are.


def move_views_before_splits(model: ir.Model) -> None:
    """Apply views that are the same for all pieces of a Split once, before the Split; in place."""
    while any(_move_before_split(model, node) for node in nodes_of(model, "Split")):
        pass


def _move_before_split(model: ir.Model, node: ir.Node) -> bool:
    readers = [(value, only_reader(value, "Transpose", "Reshape")) for value in node.outputs]
    views = [view for value, view in readers if view is not None and view.inputs[0] is value]
    shape, ends = sizes(node.inputs[0]), [sizes(view.outputs[0]) for view in views]
    if len(views) < len(node.outputs) or shape is None or any(map(_is_read_by_product, views)):
        return False
    axis, write = int(attribute(node, "axis", 0)) % len(shape), Writer(model, node)
    if any(part is None or is_dynamic(part[axis]) for part in map(sizes, node.outputs)):
        return False
    seen = _transposed_before_split(write, node, views, axis) or _reshaped_before_split(
        write, node, ends, axis, {view.op_type for view in views}
    )
    if seen is None:
        return False
    whole, axis = seen
    widths = as_numbers(end[axis] for end in ends if end is not None)
    assert widths is not None
    for view, piece, end in zip(views, write.split(whole, widths, axis), ends, strict=True):
        set_shape(piece, end, whole)
        Writer(model, view).replace(view.outputs[0], piece)
    model.graph.remove([*views, node], safe=True)
    return True


def _is_read_by_product(view: ir.Node) -> bool:
    """Whether a MatMul reads the view, possibly through other views."""
    users = [user for user, _ in view.outputs[0].uses()]
    return any(user.op_type == "MatMul" or (user.op_type in VIEWS and _is_read_by_product(user)) for user in users)


def _transposed_before_split(
    write: Writer, node: ir.Node, views: list[ir.Node], axis: int
) -> tuple[ir.Value, int] | None:
    """The transposed input of the Split and the axis to split it along; None if the transposes of the pieces differ."""
    x, shape = node.inputs[0], sizes(node.inputs[0]) or ()
    perms = [perm_of(view, len(shape)) for view in views if view.op_type == "Transpose"]
    if x is None or len(perms) < len(views) or any(perm != perms[0] for perm in perms):
        return None
    new = write("Transpose", x, perm=perms[0])
    set_shape(new, tuple(shape[place] for place in perms[0]), x)
    return new, perms[0].index(axis)


def _reshaped_before_split(
    write: Writer, node: ir.Node, ends: list[Sizes | None], axis: int, operators: set[str]
) -> tuple[ir.Value, int] | None:
    """The reshaped input of the Split, and the axis to split it along; None if the reshapes differ in other axes."""
    x, shape = node.inputs[0], sizes(node.inputs[0]) or ()
    known = [end for end in ends if end is not None and len(end) == len(ends[0] or ())]
    if x is None or operators != {"Reshape"} or len(known) < len(ends):
        return None
    given = [(sizes(value) or ())[axis] for value in node.outputs]
    for place in range(len(known[0])):
        before, after = known[0][:place], known[0][place + 1 :]
        outer = before == shape[:axis] or (after == shape[axis + 1 :] and [end[place] for end in known] == given)
        widths = as_numbers(end[place] for end in known)
        if outer and widths is not None and all((end[:place], end[place + 1 :]) == (before, after) for end in known):
            new = reshaped(write, x, (*before, sum(widths), *after))
            return None if new is None else (new, place)
    return None
