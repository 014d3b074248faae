"""transposes: compute elementwise operators between Transposes in the order of axes that is outside of these.

    f(x^T)^T = f(x),    (x^T + y^T + c)^T = x + y + c^T

Converters from TensorFlow write each convolution between two Transposes, and all other operators with channels last. A
group of elementwise operators, concatenations and Pads is computed with channels first, with constants turned likewise,
if that removes more Transposes than it adds, and moves fewer numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from repaconv.graph.index_selections import perm_of
from repaconv.graph.models_in_onnx_ir import clean
from repaconv.graph.nodes_and_constants import (
    Writer,
    attribute,
    constant,
    input_at,
    is_constant,
    made_by,
    nodes_of,
    scalar,
)
from repaconv.graph.operator_facts import ARITHMETIC, UNARY
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import known_product, rank_of, set_shape, sizes
from repaconv.graph.tensor_views import transposed
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir

INSIDE = UNARY.union(ARITHMETIC, ("Clip", "Concat", "Max", "Min", "PRelu", "Pad", "Pow", "Sum"))


class _Group(NamedTuple):
    """Operators that are connected, and can be computed in another order of axes.

    Attributes:
        nodes: The operators.
        read: The values that they read from elsewhere, but constants.
        written: The values that others read.
    """

    nodes: set[ir.Node]
    read: list[ir.Value]
    written: list[ir.Value]


def apply(model: ir.Model) -> Iterator[Change]:
    """Remove the Transposes around every group of operators that saves some, until no other does; in place."""
    made = True
    while made:
        made = False
        seen: set[tuple[ir.Node, tuple[int, ...]]] = set()
        for node in nodes_of(model, "Transpose"):
            perm = perm_of(node, rank_of(node.outputs[0])) if node.graph is not None else []
            groups = _groups(model, node, perm, seen) if perm != sorted(perm) else ()
            for group, saved in groups:
                made = True
                _turn(model, group, perm)
                yield Change(
                    rewrite=TRANSPOSES.name,
                    place=node.name or "",
                    description=f"{saved} fewer around {len(group.nodes)} elementwise operators",
                )
        clean(model)


def _groups(
    model: ir.Model, node: ir.Node, perm: list[int], seen: set[tuple[ir.Node, tuple[int, ...]]]
) -> Iterator[tuple[_Group, int]]:
    """The groups after a Transpose that save some, with how many: each by itself, then all of which none does."""
    rest: list[_Group] = []
    for user in dict.fromkeys(node.outputs[0].consumers()):
        if (user, tuple(perm)) in seen or not _is_elementwise(model, user, len(perm)):
            continue
        group = _grown(model, user, len(perm))
        seen |= {(one, tuple(perm)) for one in group.nodes}
        if (saved := _saved(group, perm)) > 0:
            yield group, saved
        else:
            rest.append(group)
    if len(rest) > 1:
        group = _group(model, {one for each in rest for one in each.nodes})
        if (saved := _saved(group, perm)) > 0:
            yield group, saved


def _is_elementwise(model: ir.Model, node: ir.Node, rank: int) -> bool:
    """Whether a node computes the same, up to an order of axes, of inputs in that order."""
    if node.domain or node.op_type not in INSIDE or node.graph is not model.graph or len(node.outputs) > 1:
        return False
    out = node.outputs[0]
    if rank_of(out) != rank or out.is_graph_output() or any(user.graph is not model.graph for user in out.consumers()):
        return False
    if node.op_type == "Pad" and (constant(input_at(node, 1)) is None or input_at(node, 3) is not None):
        return False
    if node.op_type in ("Clip", "Pad"):
        numbers = node.inputs[2:] if node.op_type == "Pad" else node.inputs[1:]
        return rank_of(node.inputs[0]) == rank and all(one is None or scalar(one) is not None for one in numbers)
    arrays = [one for one in node.inputs if is_constant(one)]
    if node.op_type == "Concat" and arrays:
        return False
    moved = [one for one in node.inputs if one is not None and not is_constant(one)]
    return bool(moved) and all(sizes(one) is not None and rank_of(one) == rank for one in moved)


def _grown(model: ir.Model, first: ir.Node, rank: int) -> _Group:
    """All operators that are connected with one."""
    nodes, todo = {first}, [first]
    while todo:
        node = todo.pop()
        before = [value.producer() for value in node.inputs if value is not None]
        for one in (*before, *node.outputs[0].consumers()):
            if one is not None and one not in nodes and _is_elementwise(model, one, rank):
                nodes.add(one)
                todo.append(one)
    return _group(model, nodes)


def _group(model: ir.Model, nodes: set[ir.Node]) -> _Group:
    """Operators with what they read and write."""
    order = [node for node in model.graph if node in nodes]
    moved = [value for node in order for value in node.inputs if value is not None and not is_constant(value)]
    read = [value for value in dict.fromkeys(moved) if value.producer() not in nodes]
    written = [node.outputs[0] for node in order if not nodes.issuperset(node.outputs[0].consumers())]
    return _Group(nodes, read, written)


def _reads_itself(group: _Group) -> bool:
    """Whether a group reads a value in two orders of axes, such as x + x^T: a Transpose between these remains."""
    before = [node.inputs[0] for value in group.read if (node := made_by(value, "Transpose")) is not None]
    return any(value in group.read or (value is not None and value.producer() in group.nodes) for value in before)


def _saved(group: _Group, perm: list[int]) -> int:
    """How many Transposes a group needs less with its axes in the order before one; 0 if it moves more numbers."""
    if _reads_itself(group):
        return 0
    count = numbers = 0
    for value in group.read:
        if (node := made_by(value, "Transpose")) is not None and perm_of(node, len(perm)) == perm:
            change = int(group.nodes.issuperset(value.consumers()) and not value.is_graph_output())
        else:
            change = 0 if _inverse(value, perm) else -1
        count, numbers = count + change, numbers + change * known_product(sizes(value) or ())
    for value in group.written:
        inverse = _inverse(value, perm)
        others = [user for user in value.consumers() if user not in group.nodes and user not in inverse]
        change = len(inverse) - bool(others)
        count, numbers = count + change, numbers + change * known_product(sizes(value) or ())
    return count if numbers > 0 else 0


def _inverse(value: ir.Value, perm: list[int]) -> list[ir.Node]:
    """The Transposes of a value that undo one; those in subgraphs remain, whose outputs must be computed there."""
    undone = np.argsort(perm).tolist()
    users = (user for user in value.consumers() if user.op_type == "Transpose" and user.graph is value.graph)
    return [user for user in users if not user.domain and perm_of(user, len(perm)) == undone]


def _turn(model: ir.Model, group: _Group, perm: list[int]) -> None:
    """Compute a group with its axes in the order before a Transpose, and remove what computed it."""
    undone: list[int] = np.argsort(perm).tolist()
    turned: dict[ir.Value, ir.Value] = {}
    gone = set(group.nodes)
    for node in [node for node in model.graph if node in group.nodes]:
        write = Writer(model, node)
        for value in node.inputs:
            if value in group.read and value not in turned:
                before = made_by(value, "Transpose")
                same = before is not None and perm_of(before, len(perm)) == perm
                source = before.inputs[0] if before is not None and same else None
                known = _inverse(value, perm)
                turned[value] = source if source is not None else transposed(write, value, undone)
                for user in known if source is None else ():
                    write.replace(user.outputs[0], turned[value])
                    turned |= {one: turned[value] for one, new in turned.items() if new is user.outputs[0]}
                gone.update(known if source is None else ())
        out = node.outputs[0]
        attributes = {name: entry.value for name, entry in node.attributes.items()}
        if node.op_type == "Concat":
            attributes["axis"] = perm[int(attribute(node, "axis", 0))]
        inputs = [turned.get(value) or _constant_turned(write, node, value, undone) for value in node.inputs]
        new = write(node.op_type, *inputs, **attributes)
        set_shape(new, [(sizes(out) or ())[axis] for axis in undone], out)
        turned[out] = new
        inverse = _inverse(out, perm)
        if any(user not in group.nodes and user not in inverse for user in out.consumers()):
            back = transposed(write, new, perm)
            for user, place in tuple(out.uses()):
                if user not in group.nodes and user not in inverse:
                    user.replace_input_with(place, back)
        for user in inverse:
            write.replace(user.outputs[0], new)
        gone.update(inverse)
    read = [node for value in group.read if (node := made_by(value, "Transpose")) is not None and node not in gone]
    gone.update(
        node for node in read if not (node.outputs[0].is_graph_output() or {*node.outputs[0].consumers()} - gone)
    )
    model.graph.remove(gone, safe=True)  # or they would count as readers of what the next group reads


def _constant_turned(write: Writer, node: ir.Node, value: ir.Value | None, order: list[int]) -> ir.Value | None:
    """A constant with its axes in an order; numbers that have none, and the pads of a Pad, as these are then."""
    numbers = constant(value)
    if value is None or numbers is None:
        return value
    if node.op_type == "Pad" and value is node.inputs[1]:
        return write.exactly(numbers.reshape(2, -1)[:, order].reshape(-1))
    if numbers.size == 1 and numbers.ndim < len(order):
        return value
    whole = numbers.reshape((1,) * (len(order) - numbers.ndim) + numbers.shape)
    return write.constant(whole.transpose(order), value)


TRANSPOSES = Rewrite("transposes", "elementwise operators between Transposes, if that saves Transposes", apply)
