"""unstack: split branches that were stacked along a new axis, so that each branch has its own operators.

Some networks stack n branches with torch.stack as [n, ...], apply operators that treat every branch alike, and then sum
over the branches or select one. The same operators can be applied to each branch separately. Then equal branches can be
found, and sums of branches composed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from repaconv.graph import activation_patterns
from repaconv.graph.axis_tracking import FULL, axis_after, axis_before
from repaconv.graph.canonical_form import normalize
from repaconv.graph.index_selections import axes_of, perm_of, selection_of, slices
from repaconv.graph.models_in_onnx_ir import clean
from repaconv.graph.nodes_and_constants import Writer, attribute, constant
from repaconv.graph.operator_facts import POINTWISE, SELECTIONS, VIEWS
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import rank_of, set_shape, shaped_like, sizes
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir

MOST_BRANCHES = 16
"""The largest number of branches; a longer axis is assumed to be data."""


@dataclass(frozen=True)
class Stacked:
    """A value that stacks branches.

    Attributes:
        axis: The axis of branches.
        roots: The Concat nodes that stacked them.
    """

    axis: int
    roots: frozenset[ir.Node]


_SUMS = ("ReduceSum", "ReduceMean")
_OTHERS = ("MatMul", "Softmax", "LayerNormalization", "Concat")
_REPEATED = POINTWISE.union(VIEWS, SELECTIONS, _SUMS, _OTHERS) - {"Flatten"}
"""Operators that can be written for a single branch by removing the axis of branches."""
ENDS = -2
"""Returned instead of an axis: the node sums over the branches or selects one, so its result is not stacked."""


def apply(model: ir.Model) -> Iterator[Change]:
    """Split all stacks of branches whose operators treat every branch alike; in place."""
    normalize(model)
    activation_patterns.group(model)
    roots = {node for node in model.graph if _is_stack(node)}
    while roots:
        stacked, bad = _stacked_values(model, roots)
        if not bad:
            break
        roots -= bad
    if roots:
        yield from _split_stacks(model, stacked, roots)
    clean(model)
    activation_patterns.ungroup(model)


def _is_stack(node: ir.Node) -> bool:
    if node.op_type != "Concat" or node.domain or not 2 <= len(node.inputs) <= MOST_BRANCHES:
        return False
    shapes = [sizes(value) for value in node.inputs]
    axis = int(attribute(node, "axis", 0))
    floats = all(v is not None and v.dtype is not None and v.dtype.is_floating_point() for v in node.inputs)
    return floats and all(s is not None and len(s) > 1 and s[axis] == 1 and s == shapes[0] for s in shapes)


def _stacked_values(model: ir.Model, roots: set[ir.Node]) -> tuple[dict[ir.Value, Stacked], set[ir.Node]]:
    """The values that stack branches, and the stacking nodes that have to stay because an operator is not supported."""
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
            axis_or_none = _axis_after(node, stacked)
            if axis_or_none is None or any(sizes(value) is None for value in node.outputs):
                bad |= origins
            elif axis_or_none >= 0:
                stacked |= {value: Stacked(axis_or_none, origins) for value in node.outputs}
    for value, one in stacked.items():
        if value.is_graph_output() or any(user.graph is not model.graph for user, _ in value.uses()):
            bad |= one.roots
    return stacked, bad


def _axis_after(node: ir.Node, stacked: dict[ir.Value, Stacked]) -> int | None:
    """The axis of branches in a node's output; `ENDS` if there is none any more, None if the node is not supported.

    A node is not supported if it mixes branches, or if it cannot be written without the axis.
    """
    own = {place: stacked[value].axis for place, value in enumerate(node.inputs) if value in stacked}
    first, axis = next(iter(own.items()))
    if activation_patterns.is_activation(node):
        return axis
    if node.domain or node.op_type not in _REPEATED:
        return None
    target = constant(node.inputs[1]) if node.op_type == "Reshape" else np.ones(1)
    if target is None or 0 in target:
        return None  # a 0 copies the length of an axis by its position, which changes
    if node.op_type in SELECTIONS and (found := _axis_after_selection(node, axis)) != axis:
        return found
    gone = axes_of(node, rank_of(node.inputs[first])) if node.op_type in _SUMS else None
    if gone == [axis]:
        return ENDS
    after = axis_after(node, first, axis)
    if after is None or (node.op_type == "MatMul" and after >= rank_of(node.outputs[0]) - 2):
        return None
    given = [place for place, value in enumerate(node.inputs) if value is not None]
    return after if all(axis_before(node, place, after) == own.get(place, FULL) for place in given) else None


def _axis_after_selection(node: ir.Node, axis: int) -> int | None:
    """The axis of branches after a selection: `ENDS` if every output is one branch, None if an output is several.

    The axis stays as it is if the selection is along another axis.
    """
    found = [one for value in node.outputs if (one := selection_of(value)) is not None]
    if len(found) < len(node.outputs):
        return None
    if found[0].axis != axis:
        return axis
    return ENDS if all(len(one.places) == 1 for one in found) else None


# Writing the branches separately


def _split_stacks(model: ir.Model, stacked: dict[ir.Value, Stacked], roots: set[ir.Node]) -> Iterator[Change]:
    pieces: dict[ir.Value, list[ir.Value]] = {}
    for node in tuple(model.graph):
        if node in roots:
            write = Writer(model, node)
            axis = stacked[node.outputs[0]].axis
            pieces[node.outputs[0]] = [_squeezed(write, value, axis) for value in node.inputs if value is not None]
            yield Change(
                rewrite=UNSTACK.name,
                place=node.name or "",
                description=f"{len(node.inputs)} stacked branches -> one by one",
            )
            continue
        if not any(value in pieces for value in node.inputs):
            continue
        ends = node.outputs[0] not in stacked
        (_write_sum_or_selection if ends else _repeat)(model, node, stacked, pieces)


def _squeezed(write: Writer, value: ir.Value, axis: int) -> ir.Value:
    """Squeeze an axis of length 1."""
    shape = sizes(value)
    assert shape is not None
    new = write("Squeeze", value, write.constant([axis]))
    set_shape(new, (*shape[:axis], *shape[axis + 1 :]), value)
    return new


def _unsqueezed(write: Writer, value: ir.Value, axis: int) -> ir.Value:
    shape = sizes(value)
    assert shape is not None
    new = write("Unsqueeze", value, write.constant([axis]))
    set_shape(new, (*shape[:axis], 1, *shape[axis:]), value)
    return new


def _repeat(
    model: ir.Model, node: ir.Node, stacked: dict[ir.Value, Stacked], pieces: dict[ir.Value, list[ir.Value]]
) -> None:
    """Write the node once for every branch."""
    import onnx_ir as ir

    write = Writer(model, node)
    axis = stacked[node.outputs[0]].axis
    count = len(next(pieces[value] for value in node.inputs if value in pieces))
    made: list[list[ir.Value]] = [[] for _ in node.outputs]
    fixed = {value: _unstacked_input(write, node, value, axis) for value in node.inputs if value not in pieces}
    for branch in range(count):
        inputs = [pieces[value][branch] if value in pieces else fixed[value] for value in node.inputs]
        attributes = _branch_attributes(node, stacked, axis)
        inputs = _branch_inputs(write, node, inputs, stacked)
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
    """An input that all branches share, without the axis of length 1 that is broadcast over the branches."""
    shape, out = sizes(value), sizes(node.outputs[0])
    aligned = node.op_type == "MatMul" or node.op_type in POINTWISE
    if value is None or shape is None or out is None or not aligned:
        return value
    mine = axis - (len(out) - len(shape))
    if mine < 0:
        return value
    numbers = constant(value)
    return write.constant(numbers.squeeze(mine), like=value) if numbers is not None else _squeezed(write, value, mine)


def _axis_without(index: int, axis: int) -> int:
    return index - int(index > axis)


def _branch_attributes(node: ir.Node, stacked: dict[ir.Value, Stacked], axis: int) -> dict[str, Any]:
    found = {name: entry.value for name, entry in node.attributes.items()}
    first = next(value for value in node.inputs if value in stacked)
    inner, rank = stacked[first].axis, rank_of(first)
    if node.op_type == "Transpose":
        found["perm"] = [_axis_without(i, inner) for i in perm_of(node, rank) if i != inner]
    elif "axis" in found:
        found["axis"] = _axis_without(int(found["axis"]) % rank, inner)
    if "axes" in found:
        found["axes"] = [_axis_without(int(i) % rank, inner) for i in found["axes"]]
    return found


def _branch_inputs(
    write: Writer, node: ir.Node, inputs: list[ir.Value | None], stacked: dict[ir.Value, Stacked]
) -> list[ir.Value | None]:
    """The inputs of the node for one branch: axes and shapes among them are adapted to one axis less."""
    first = next(value for value in node.inputs if value in stacked)
    inner, rank = stacked[first].axis, rank_of(first)
    if node.op_type == "Reshape":
        axis = stacked[node.outputs[0]].axis
        target = constant(node.inputs[1])
        assert target is not None
        return [inputs[0], write.constant(np.delete(target, axis))]
    if node.op_type in ("Squeeze", *_SUMS) and len(inputs) > 1:
        return [inputs[0], write.constant([_axis_without(i, inner) for i in axes_of(node, rank) or []])]
    if node.op_type == "Unsqueeze":
        axis, wide = stacked[node.outputs[0]].axis, rank_of(node.outputs[0])
        return [inputs[0], write.constant([_axis_without(i, axis) for i in axes_of(node, wide) or []])]
    if node.op_type == "Slice":
        numbers = [constant(entry) for entry in node.inputs[1:]]
        parts = slices([None if each is None else each.tolist() for each in numbers], rank)
        return [*inputs[:3], write.constant([_axis_without(axis, inner) for axis, _ in parts]), *inputs[4:]]
    return inputs


def _write_sum_or_selection(
    model: ir.Model, node: ir.Node, stacked: dict[ir.Value, Stacked], pieces: dict[ir.Value, list[ir.Value]]
) -> None:
    """Write a sum over the branches, or a selection of one, for separate branches."""
    source = node.inputs[0]
    assert source is not None
    write, axis, branches = Writer(model, node), stacked[source].axis, pieces[source]
    if node.op_type in _SUMS:
        total = branches[0]
        for other in branches[1:]:
            new = shaped_like(write("Add", total, other), total)
            total = new
        if node.op_type == "ReduceMean":
            mean = shaped_like(write("Mul", total, write.constant(1 / len(branches))), total)
            total = mean
        write.replace(node.outputs[0], _unsqueezed(write, total, axis) if attribute(node, "keepdims", 1) else total)
        return
    for value in node.outputs:
        found = selection_of(value)
        assert found is not None
        one = branches[int(found.places[0])]
        write.replace(value, _unsqueezed(write, one, axis) if found.keeps else one)


UNSTACK = Rewrite("unstack", "where every operator on the stack treats every branch alike", apply)
