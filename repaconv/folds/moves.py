"""Operators that change places: selections and per-channel constants come before views, affine maps behind means.

A view only moves numbers, so a selection on one of its factors, or a constant that varies along one axis of its source,
may act on the source. A mean over tokens, or a choice of them, of x g + b is that of x, times g, plus b: on fewer.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from repaconv.folds.edges import LINEAR, batchnorm
from repaconv.graphs.graph import Array, Writer, attribute, constant, made_by
from repaconv.graphs.operators import ARITHMETIC, SELECTIONS, VIEWS
from repaconv.graphs.selections import axes_of, one_run, perm_of, selection_of
from repaconv.graphs.shapes import sizes
from repaconv.graphs.uniform import assigned, uniform
from repaconv.graphs.views import View, set_shape, view_of

if TYPE_CHECKING:
    import onnx_ir as ir


def before_views(model: ir.Model) -> None:
    """Selections and constants act on what a view shows, not on the view; in place."""
    for node in tuple(model.graph):
        if node.graph is not model.graph or node.domain:
            continue
        if node.op_type in SELECTIONS:
            for value in node.outputs:
                _select(model, node, value)
        elif node.op_type in ARITHMETIC:
            _constant(model, node)
            _sum(model, node)
        elif node.op_type == "BatchNormalization":
            _batchnorm(model, node)
        elif node.op_type == "ScatterND":
            _assign(model, node)


def _select(model: ir.Model, node: ir.Node, value: ir.Value) -> None:
    selected = selection_of(value)
    view = view_of(selected.value) if selected is not None else None
    if (
        selected is None
        or view is None
        or view.source is selected.value
        or not (value.uses() or value.is_graph_output())
    ):
        return
    merged = view.merged(selected.axis)
    if merged is None or len(merged.axes[selected.axis]) != 1:
        return
    factor = merged.axes[selected.axis][0]
    chosen = merged.channels(factor, selected.places)
    if chosen is None:
        return
    write, axis, shape = Writer(model, node), merged.axis_of(factor), sizes(merged.source)
    assert shape is not None
    if one_run(chosen):
        ends = ([int(chosen[0])], [int(chosen[-1]) + 1], [axis])
        new = write("Slice", merged.source, *(write.constant(end) for end in ends))
    else:
        new = write("Gather", merged.source, write.constant(chosen), axis=axis)
    set_shape(new, (*shape[:axis], len(chosen), *shape[axis + 1 :]), merged.source)
    seen = merged.narrowed(new, factor, len(selected.places) if selected.keeps else None).write(write)
    if seen is not None:
        write.replace(value, seen)


def _spread(numbers: Array, view: View) -> tuple[Array, int] | None:
    """A constant that is broadcast to a view, as one along an axis of its source; -1 for a single number."""
    rank = len(view.axes)
    if numbers.size == 1:
        return numbers.reshape(()), -1
    if numbers.ndim > rank:
        return None
    whole = numbers.reshape((1,) * (rank - numbers.ndim) + numbers.shape)
    varying = [axis for axis in range(rank) if whole.shape[axis] != 1]
    homes = {view.axis_of(factor) for axis in varying for factor in view.axes[axis]}
    if len(homes) != 1:
        return None
    home = homes.pop()
    factors = [factor for axis in varying for factor in view.axes[axis]]
    lengths = [view.size[factor] for factor in factors]
    every = [view.size[factor] for factor in view.of[home]]
    if any(isinstance(length, str) for length in (*lengths, *every)):
        return None
    grid = whole.reshape([int(length) for length in lengths])
    order = sorted(range(len(factors)), key=lambda i: view.of[home].index(factors[i]))
    grid = grid.transpose(order)
    if set(factors) != set(view.of[home]) and made_by(view.source, *LINEAR) is None:
        return None  # it would grow to the size of what is normalised there, and nothing could take it in
    inside = [int(view.size[f]) if f in factors else 1 for f in view.of[home]]
    full = np.broadcast_to(grid.reshape(inside), [int(length) for length in every])
    return full.reshape(math.prod(int(length) for length in every)), home


def _constant(model: ir.Model, node: ir.Node) -> None:
    numbers = [constant(value) for value in node.inputs]
    if sum(n is None for n in numbers) != 1:
        return
    place = 0 if numbers[0] is None else 1
    x, given = node.inputs[place], numbers[1 - place]
    view = view_of(x) if x is not None else None
    if x is None or given is None or view is None or view.source is x or sizes(x) != sizes(node.outputs[0]):
        return
    spread = _spread(given, view)
    shape = sizes(view.source)
    if spread is None or shape is None or made_by(view.source, *LINEAR) is None:
        return
    vector, axis = spread
    write = Writer(model, node)
    other = write.constant(vector if axis < 0 else vector.reshape(-1, *[1] * (len(shape) - 1 - axis)))
    new = write(node.op_type, *((view.source, other) if place == 0 else (other, view.source)))
    set_shape(new, shape, view.source)
    seen = View(new, view.of, view.axes, view.size).write(write)
    if seen is not None:
        write.replace(node.outputs[0], seen)


def _assign(model: ir.Model, node: ir.Node) -> None:
    """Assignment along the first axis of two values turned alike is one along their own axis: a choice of both's."""
    found, data, updates = assigned(node), node.inputs[0], node.inputs[2]
    views = [view_of(value) if value is not None else None for value in (data, updates)]
    masks = uniform(node.outputs[0]) is not None
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
    write = Writer(model, node)
    both = write("Concat", first.source, second.source, axis=home)
    set_shape(both, (*shapes[0][:home], length + added, *shapes[0][home + 1 :]), first.source)
    order = np.arange(length)
    order[found[1]] = length + np.arange(added)
    new = write("Gather", both, write.constant(order), axis=home)
    set_shape(new, shapes[0], first.source)
    seen = View(new, first.of, first.axes, first.size).write(write)
    if seen is not None:
        write.replace(node.outputs[0], seen)


def _sum(model: ir.Model, node: ir.Node) -> None:
    """A sum of two values that are seen the same way is their sum, seen that way."""
    a, b = node.inputs
    if (
        node.op_type not in ("Add", "Sub")
        or a is None
        or b is None
        or constant(a) is not None
        or constant(b) is not None
    ):
        return
    views = [view_of(value) for value in (a, b)]
    if any(view is None for view in views) or not views[0].alike(views[1]) or views[0].source is a:  # type: ignore[union-attr, arg-type]
        return
    first, second = (view for view in views if view is not None)
    write = Writer(model, node)
    new = write(node.op_type, first.source, second.source)
    set_shape(new, sizes(first.source), first.source)
    seen = View(new, first.of, first.axes, first.size).write(write)
    if seen is not None:
        write.replace(node.outputs[0], seen)


def _batchnorm(model: ir.Model, node: ir.Node) -> None:
    """A BatchNormalization of transposed tokens is a scale and a shift of the tokens."""
    found, x = batchnorm(node), node.inputs[0]
    view = view_of(x) if x is not None else None
    shape = sizes(x)
    if found is None or x is None or view is None or shape is None or any(v.uses() for v in node.outputs[1:]):
        return
    column = (-1, *[1] * (len(shape) - 2))
    spread = [_spread(part.reshape(column), view) for part in found]
    inner = sizes(view.source)
    if view.source is x or inner is None or any(part is None or part[1] < 0 for part in spread):
        return
    write = Writer(model, node)
    new = view.source
    for operator, part in zip(("Mul", "Add"), spread, strict=True):
        assert part is not None
        vector, axis = part
        new = write(operator, new, write.constant(vector.reshape(-1, *[1] * (len(inner) - 1 - axis))))
        set_shape(new, inner, view.source)
    seen = View(new, view.of, view.axes, view.size).write(write)
    if seen is not None:
        write.replace(node.outputs[0], seen)


def behind_means(model: ir.Model) -> None:
    """Scales and shifts act on the mean, or on the tokens that are read; in place."""
    again = True
    while again:
        again = False
        for node in tuple(model.graph):
            if node.graph is model.graph and not node.domain and _lower(model, node):
                again = True


def _lower(model: ir.Model, node: ir.Node) -> bool:
    x = node.inputs[0] if node.inputs else None
    inner = made_by(x, *ARITHMETIC, "BatchNormalization")
    shared = node.op_type != "AveragePool" and len(list(x.uses())) != 1 if x is not None else True
    if x is None or inner is None or shared or x.is_graph_output():
        return False
    terms = _terms(inner)
    if terms is None:
        return False
    source, steps = terms
    rank = len(sizes(x) or ())
    if sizes(source) != sizes(x) or any(n.ndim > rank for _, n, _ in steps):
        return False
    whole = [n.reshape((1,) * (rank - n.ndim) + n.shape) for _, n, _ in steps]
    moved = [_through(node, n) for n in whole]
    if any(m is None for m in moved):
        return False
    write = Writer(model, node)
    inputs = [source, *node.inputs[1:]]
    new = write(node.op_type, *inputs, **{name: entry.value for name, entry in node.attributes.items()})
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


def _terms(inner: ir.Node) -> tuple[ir.Value, list[tuple[str, Array, int]]] | None:
    """What a node does with constants: operator, numbers, place of the variable."""
    if inner.op_type == "BatchNormalization":
        found, x = batchnorm(inner), inner.inputs[0]
        rank = len(sizes(x) or ())
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


def _through(node: ir.Node, numbers: Array) -> Array | None:
    """The constant behind a node that averages, chooses or drops axes along which it does not vary."""
    rank = numbers.ndim
    if node.op_type == "GlobalAveragePool":
        return numbers if all(size == 1 for size in numbers.shape[2:]) else None
    if node.op_type == "AveragePool":
        return numbers if not _counts_padding(node) and all(size == 1 for size in numbers.shape[2:]) else None
    if node.op_type == "ReduceMean":
        axes = axes_of(node, rank)
        if axes is None or any(numbers.shape[axis] != 1 for axis in axes):
            return None
        return numbers if attribute(node, "keepdims", 1) else numbers.squeeze(tuple(axes))
    if node.op_type in ("Slice", "Gather"):
        found = selection_of(node.outputs[0])
        if found is None or numbers.shape[found.axis] != 1:
            return None
        return numbers if found.keeps else numbers.squeeze(found.axis)
    if node.op_type == "Transpose" and rank == 4 and _of_norm(node.inputs[0]):
        turned: Array = numbers.transpose(perm_of(node, rank))
        return turned
    if node.op_type in VIEWS and node.op_type != "Transpose":
        return _dropped(node, numbers)
    return None


def _counts_padding(node: ir.Node) -> bool:
    """Whether an AveragePool may divide by more than what lies in the image: then a constant is less at the border."""
    inside = attribute(node, "auto_pad", "NOTSET") in ("NOTSET", "VALID") and not any(attribute(node, "pads", (0,)))
    return bool(attribute(node, "count_include_pad", 0)) and (not inside or bool(attribute(node, "ceil_mode", 0)))


def _of_norm(value: ir.Value | None) -> bool:
    """Whether it is a norm with scale and shift: no linear layer before it could take those."""
    while (node := made_by(value, "Mul", "Add")) is not None:
        value = next((v for v in node.inputs if constant(v) is None), None)
    return made_by(value, "LayerNormalization", "RMSNormalization") is not None


def _dropped(node: ir.Node, numbers: Array) -> Array | None:
    """Behind a view that only takes axes of length 1 away."""
    before, after = sizes(node.inputs[0]), sizes(node.outputs[0])
    if before is None or after is None or [s for s in before if s != 1] != list(after) or len(after) >= len(before):
        return None
    if len([s for s in before if s != 1]) != len(after):
        return None
    gone = tuple(axis for axis, size in enumerate(before) if size == 1)
    return numbers.squeeze(gone)
