"""unstack: branches that were put on each other along an axis of their own, to be computed at once, are taken apart.

torch.stack of n branches [n, ...], operators that treat every branch alike, and a sum over the branches or a choice of
one of them, are the same operators on every branch for itself. Apart, equal ones can be found and sums composed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from repaconv.artefacts import Change
from repaconv.folds import activations
from repaconv.folds.tokens import POINTWISE
from repaconv.graphs.contract import Rewrite
from repaconv.graphs.graph import Writer, attribute, clean, constant
from repaconv.graphs.normal import normalise
from repaconv.graphs.selections import axes_of, perm_of, selection_of
from repaconv.graphs.shapes import groups, sizes
from repaconv.graphs.views import set_shape

if TYPE_CHECKING:
    import onnx_ir as ir

MOST = 16
"""Branches; what is stacked higher is rather an axis of the data."""


@dataclass(frozen=True)
class Stacked:
    """A value of branches along an axis, and the stacks that it comes from."""

    axis: int
    roots: frozenset[ir.Node]


ENDS = -1
"""There is no axis of branches any more behind this node."""


def apply(model: ir.Model) -> Iterator[Change]:
    """See `repaconv.graphs.contract.Apply`."""
    normalise(model)
    activations.group(model)
    roots = {node for node in model.graph if _is_stack(node)}
    while roots:
        stacked, bad = _followed(model, roots)
        if not bad:
            break
        roots -= bad
    if roots:
        yield from _take_apart(model, stacked, roots)
    clean(model)
    activations.ungroup(model)


def _is_stack(node: ir.Node) -> bool:
    if node.op_type != "Concat" or node.domain or not 2 <= len(node.inputs) <= MOST:
        return False
    shapes = [sizes(value) for value in node.inputs]
    axis = int(attribute(node, "axis", 0))
    floats = all(v is not None and v.dtype is not None and v.dtype.is_floating_point() for v in node.inputs)
    return floats and all(s is not None and len(s) > 1 and s[axis] == 1 and s == shapes[0] for s in shapes)


def _followed(model: ir.Model, roots: set[ir.Node]) -> tuple[dict[ir.Value, Stacked], set[ir.Node]]:
    """Which values are stacks of branches, and the roots that end in something that is not understood."""
    stacked: dict[ir.Value, Stacked] = {}
    bad: set[ir.Node] = set()
    for node in model.graph:
        if node in roots:
            value = node.outputs[0]
            axis = int(attribute(node, "axis", 0)) % len(sizes(value) or (1,))
            stacked[value] = Stacked(axis, frozenset({node}))
        else:
            met = [stacked[value] for value in node.inputs if value in stacked]
            if not met:
                continue
            origins = frozenset().union(*(one.roots for one in met))
            axis_or_none = _behind(node, stacked)
            if axis_or_none is None or any(sizes(value) is None for value in node.outputs):
                bad |= origins
            elif axis_or_none >= 0:
                stacked |= {value: Stacked(axis_or_none, origins) for value in node.outputs}
    for value, one in stacked.items():
        if value.is_graph_output() or any(user.graph is not model.graph for user, _ in value.uses()):
            bad |= one.roots
    return stacked, bad


def _behind(node: ir.Node, stacked: dict[ir.Value, Stacked]) -> int | None:
    """The branches' axis behind a node, `ENDS`, or None where branches mix."""
    first = next(value for value in node.inputs if value in stacked)
    axis, before, after = stacked[first].axis, sizes(first), sizes(node.outputs[0])
    if before is None or after is None:
        return None
    kind = node.op_type
    if activations.is_activation(node) or (not node.domain and kind in POINTWISE):
        return _aligned(node, stacked, len(after))
    if node.domain:
        return None
    if kind == "MatMul":
        found = _aligned(node, stacked, len(after))
        return found if found is not None and found < len(after) - 2 else None
    if first is not node.inputs[0] and kind != "Concat":
        return None
    if kind == "Transpose":
        return perm_of(node, len(before)).index(axis)
    if kind in ("Reshape", "Squeeze", "Unsqueeze"):
        target = constant(node.inputs[1]) if kind == "Reshape" else np.ones(1)
        if target is None or 0 in target:
            return None  # a 0 says the same as another axis, which will be at another place
        paired = groups(before, after)
        own = [
            theirs for ours, theirs in paired or () if axis in ours and all(before[i] == 1 for i in ours if i != axis)
        ]
        places = [i for i in own[0] if after[i] == before[axis]] if own else []
        return places[0] if len(places) == 1 and before[axis] != 1 else None
    if kind in ("Softmax", "LayerNormalization"):
        own_axis = int(attribute(node, "axis", -1)) % len(before)
        return axis if (own_axis != axis if kind == "Softmax" else axis < own_axis) else None
    if kind in ("ReduceSum", "ReduceMean"):
        return _reduced(node, axis, len(before))
    if kind in ("Slice", "Gather", "Split"):
        return _chosen(node, axis)
    if kind == "Concat":
        same = all(value in stacked and stacked[value].axis == axis for value in node.inputs if value is not None)
        return axis if same and int(attribute(node, "axis", 0)) % len(before) != axis else None
    return None


def _aligned(node: ir.Node, stacked: dict[ir.Value, Stacked], rank: int) -> int | None:
    """The axis of the output; every input has it at the same place, or not at all."""
    found = set()
    for value in node.inputs:
        if value in stacked:
            found.add(stacked[value].axis + rank - len(sizes(value) or ()))
    if len(found) != 1:
        return None
    axis = found.pop()
    for value in node.inputs:
        shape = sizes(value)
        if value is None or value in stacked:
            continue
        if shape is None or (axis - (rank - len(shape)) >= 0 and shape[axis - (rank - len(shape))] != 1):
            return None
    return axis


def _reduced(node: ir.Node, axis: int, rank: int) -> int | None:
    gone = axes_of(node, rank)
    if gone is None:
        return None
    if axis in gone:
        return ENDS if set(gone) == {axis} else None
    return axis if attribute(node, "keepdims", 1) else axis - sum(i < axis for i in gone)


def _chosen(node: ir.Node, axis: int) -> int | None:
    found = [selection_of(value) for value in node.outputs]
    if any(one is None for one in found):
        return None
    one = found[0]
    assert one is not None
    if one.axis != axis:
        return axis - int(not one.keeps and one.axis < axis)
    return ENDS if all(other is not None and len(other.places) == 1 for other in found) else None


# --- taking apart -----------------------------------------------------------------------------------


def _take_apart(model: ir.Model, stacked: dict[ir.Value, Stacked], roots: set[ir.Node]) -> Iterator[Change]:
    pieces: dict[ir.Value, list[ir.Value]] = {}
    for node in tuple(model.graph):
        if node in roots:
            write = Writer(model, node)
            axis = stacked[node.outputs[0]].axis
            pieces[node.outputs[0]] = [_without(write, value, axis) for value in node.inputs if value is not None]
            yield Change(
                rewrite=UNSTACK.name, place=node.name or "", told=f"{len(node.inputs)} stacked branches -> one by one"
            )
            continue
        if not any(value in pieces for value in node.inputs):
            continue
        ends = node.outputs[0] not in stacked
        (_finish if ends else _repeat)(model, node, stacked, pieces)


def _without(write: Writer, value: ir.Value, axis: int) -> ir.Value:
    """A value without an axis of length 1."""
    shape = sizes(value)
    assert shape is not None
    new = write("Squeeze", value, write.constant([axis]))
    set_shape(new, (*shape[:axis], *shape[axis + 1 :]), value)
    return new


def _with(write: Writer, value: ir.Value, axis: int) -> ir.Value:
    shape = sizes(value)
    assert shape is not None
    new = write("Unsqueeze", value, write.constant([axis]))
    set_shape(new, (*shape[:axis], 1, *shape[axis:]), value)
    return new


def _repeat(
    model: ir.Model, node: ir.Node, stacked: dict[ir.Value, Stacked], pieces: dict[ir.Value, list[ir.Value]]
) -> None:
    """The node once for every branch."""
    import onnx_ir as ir

    write = Writer(model, node)
    axis = stacked[node.outputs[0]].axis
    count = len(next(pieces[value] for value in node.inputs if value in pieces))
    made: list[list[ir.Value]] = [[] for _ in node.outputs]
    fixed = {value: _unstacked_input(write, node, value, axis) for value in node.inputs if value not in pieces}
    for branch in range(count):
        inputs = [pieces[value][branch] if value in pieces else fixed[value] for value in node.inputs]
        attributes = _attributes(node, stacked, axis)
        inputs = _inputs(write, node, inputs, stacked)
        new = ir.node(node.op_type, inputs, attributes, domain=node.domain, num_outputs=len(node.outputs))
        new.name = f"{node.name}.{branch}"
        for old, output, found in zip(node.outputs, new.outputs, made, strict=True):
            shape = sizes(old)
            assert shape is not None
            output.name = f"{old.name}.{branch}"
            set_shape(output, (*shape[:axis], *shape[axis + 1 :]), old)
            found.append(output)
        model.graph.insert_before(node, new)
    pieces |= dict(zip(node.outputs, made, strict=True))


def _unstacked_input(write: Writer, node: ir.Node, value: ir.Value | None, axis: int) -> ir.Value | None:
    """What all branches share, without the axis of length 1 that stood for them."""
    shape, out = sizes(value), sizes(node.outputs[0])
    aligned = node.op_type == "MatMul" or node.op_type in POINTWISE
    if value is None or shape is None or out is None or not aligned:
        return value
    mine = axis - (len(out) - len(shape))
    if mine < 0:
        return value
    numbers = constant(value)
    return write.constant(numbers.squeeze(mine), like=value) if numbers is not None else _without(write, value, mine)


def _less(index: int, axis: int) -> int:
    return index - int(index > axis)


def _attributes(node: ir.Node, stacked: dict[ir.Value, Stacked], axis: int) -> dict[str, Any]:
    found = {name: entry.value for name, entry in node.attributes.items()}
    first = next(value for value in node.inputs if value in stacked)
    inner, rank = stacked[first].axis, len(sizes(first) or ())
    if node.op_type == "Transpose":
        found["perm"] = [_less(i, inner) for i in perm_of(node, rank) if i != inner]
    elif "axis" in found:
        found["axis"] = _less(int(found["axis"]) % rank, inner)
    if "axes" in found:
        found["axes"] = [_less(int(i) % rank, inner) for i in found["axes"]]
    return found


def _inputs(
    write: Writer, node: ir.Node, inputs: list[ir.Value | None], stacked: dict[ir.Value, Stacked]
) -> list[ir.Value | None]:
    """Axes and shapes that are inputs, for a value with one axis less."""
    first = next(value for value in node.inputs if value in stacked)
    inner, rank = stacked[first].axis, len(sizes(first) or ())
    if node.op_type == "Reshape":
        axis = stacked[node.outputs[0]].axis
        target = constant(node.inputs[1])
        assert target is not None
        return [inputs[0], write.constant(np.delete(target, axis))]
    if node.op_type in ("Squeeze", "ReduceSum", "ReduceMean") and len(inputs) > 1:
        return [inputs[0], write.constant([_less(i, inner) for i in axes_of(node, rank) or []])]
    if node.op_type == "Unsqueeze":
        axis, wide = stacked[node.outputs[0]].axis, len(sizes(node.outputs[0]) or ())
        return [inputs[0], write.constant([_less(i, axis) for i in axes_of(node, wide) or []])]
    if node.op_type == "Slice":
        found = selection_of(node.outputs[0])
        assert found is not None
        return [*inputs[:3], write.constant([_less(found.axis, inner)]), *inputs[4:]]
    return inputs


def _finish(
    model: ir.Model, node: ir.Node, stacked: dict[ir.Value, Stacked], pieces: dict[ir.Value, list[ir.Value]]
) -> None:
    """A sum over the branches, or one of them."""
    source = node.inputs[0]
    assert source is not None
    write, axis, branches = Writer(model, node), stacked[source].axis, pieces[source]
    if node.op_type in ("ReduceSum", "ReduceMean"):
        total = branches[0]
        for other in branches[1:]:
            new = write("Add", total, other)
            set_shape(new, sizes(total), total)
            total = new
        if node.op_type == "ReduceMean":
            mean = write("Mul", total, write.constant(1 / len(branches)))
            set_shape(mean, sizes(total), total)
            total = mean
        write.replace(node.outputs[0], _with(write, total, axis) if attribute(node, "keepdims", 1) else total)
        return
    for value in node.outputs:
        found = selection_of(value)
        assert found is not None
        one = branches[int(found.places[0])]
        write.replace(value, _with(write, one, axis) if found.keeps else one)


UNSTACK = Rewrite("unstack", "where every operator on the stack treats every branch alike", apply)
