"""Recognize activations that a graph writes as several nodes, replace each by one node, and expand it again.

Examples are Gelu written with Erf, and x sigmoid(x). Such a subgraph acts elementwise, so facts about channels hold
before and after it. As a single node it cannot be torn apart by other rewrites. After `ungroup` the nodes are those of
the original graph, which runtimes recognize.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from repaconv.graph.nodes_and_constants import Writer, is_constant, scalar
from repaconv.graph.operator_facts import ARITHMETIC, UNARY
from repaconv.graph.symbolic_shapes import set_shape, shaped_like, sizes

if TYPE_CHECKING:
    import onnx_ir as ir

DOMAIN, GROUP = "repaconv", "Activation"
_INSIDE = UNARY.union(ARITHMETIC, ("Pow",))
MOST_NODES = 12
"""Maximum number of nodes in one activation."""


def is_activation(node: ir.Node) -> bool:
    """Return whether a node applies an elementwise function to its only input."""
    return (node.domain, node.op_type) == (DOMAIN, GROUP) or (node.domain == "" and node.op_type in UNARY)


def group(model: ir.Model, *operators: str) -> None:
    """Replace every activation that consists of several nodes by one temporary node, in place.

    With operators, only those that have one of them. A number that multiplies x a second time stays outside then: a
    convolution takes it.
    """
    kinds: dict[str, int] = model.graph.meta.setdefault("repaconv.activations", {})
    order = {node: place for place, node in enumerate(model.graph)}
    for node in order:
        if node.op_type == "Mul" and not node.domain and node.graph is not None:
            _group(model, node, kinds, order, operators)


def _group(
    model: ir.Model, last: ir.Node, kinds: dict[str, int], order: dict[ir.Node, int], operators: tuple[str, ...]
) -> None:
    """Replace the activation that ends in a Mul, if there is one; ``order`` has the place of each node."""
    import onnx_ir as ir

    for root in _roots(last):
        inside = _elementwise_nodes(last, root)
        if inside is None or sizes(last.outputs[0]) != sizes(root):
            continue  # a constant has more axes than x
        if operators and all(node.op_type not in operators for node in inside):
            continue
        nodes, output = sorted(inside, key=order.__getitem__), last.outputs[0]
        if output.is_graph_output():
            return
        users = [user for user, _ in output.uses()]
        if (
            (not operators or root in last.inputs)
            and len(users) == 1
            and users[0].op_type in ("Mul", "Div")
            and any(scalar(v) is not None for v in users[0].inputs)
            and users[0].graph is model.graph
            and not users[0].outputs[0].is_graph_output()
            and sizes(users[0].outputs[0]) == sizes(output)
        ):
            nodes.append(users[0])
            output = users[0].outputs[0]
        recipe = _recipe(nodes, root)
        number = kinds.setdefault(str(recipe), len(kinds))
        model.graph.meta[f"repaconv.activation.{number}"] = recipe
        one = ir.node(GROUP, [root], {"kind": number}, domain=DOMAIN)
        one.name = f"{(last.name or '').rpartition('/')[0]}/{GROUP}"
        one.outputs[0].name = f"{output.name}.activation"
        set_shape(one.outputs[0], sizes(output), output)
        model.graph.insert_before(nodes[-1], one)
        output.replace_all_uses_with(one.outputs[0])
        model.graph.remove(nodes, safe=True)
        return


def _roots(last: ir.Node) -> list[ir.Value]:
    """Return the values that may be the input x of an activation whose last node is this Mul."""
    if any(value is None or is_constant(value) for value in last.inputs):
        return []
    found = []
    for value in last.inputs:
        assert value is not None
        found.append(value)
        node = value.producer()
        if node is not None and node.op_type in ("Mul", "Div") and any(scalar(v) is not None for v in node.inputs):
            found += [v for v in node.inputs if v is not None and not is_constant(v)]
    return found


def _elementwise_nodes(last: ir.Node, root: ir.Value) -> set[ir.Node] | None:
    """Return all nodes between a value and a node if they are elementwise and have no other readers, else None."""
    inside: set[ir.Node] = set()
    todo = [last]
    while todo:
        node = todo.pop()
        if node in inside:
            continue
        inside.add(node)
        if len(inside) > MOST_NODES or node.domain or (node.op_type not in _INSIDE):
            return None
        for value in node.inputs:
            if value is root or scalar(value) is not None:
                continue
            before = value.producer() if value is not None else None
            if before is None:
                return None
            todo.append(before)
    if not any(node.op_type in UNARY for node in inside):
        return None
    for node in inside - {last}:
        for value in node.outputs:
            if value.is_graph_output() or any(user not in inside for user, _ in value.uses()):
                return None
    return inside


NodeDescription = tuple[str, tuple[tuple[str, Any], ...], tuple[int | float, ...]]
"""One node of an activation: operator, attributes and inputs.

An integer input is 0 for x, or the 1-based number of an earlier step. A float input is a constant.
"""


def _recipe(nodes: list[ir.Node], root: ir.Value) -> tuple[NodeDescription, ...]:
    """Describe an activation as steps; equal activations have equal steps."""
    places: dict[Any, int] = {root: 0}
    steps: list[NodeDescription] = []
    for node in nodes:
        inputs = tuple(places[v] if v in places else float(scalar(v) or 0.0) for v in node.inputs)
        entries = tuple(sorted((name, entry.value) for name, entry in node.attributes.items()))
        steps.append((node.op_type, entries, inputs))
        places[node.outputs[0]] = len(steps)
    return tuple(steps)


def ungroup(model: ir.Model) -> None:
    """Expand every temporary activation node into its original nodes, in place."""
    for node in tuple(model.graph):
        if (node.domain, node.op_type) != (DOMAIN, GROUP):
            continue
        write, x = Writer(model, node), node.inputs[0]
        assert x is not None
        made = [x]
        for operator, entries, inputs in model.graph.meta[f"repaconv.activation.{node.attributes['kind'].value}"]:
            values = [made[i] if isinstance(i, int) else write.constant(i) for i in inputs]
            new = shaped_like(write(operator, *values, **dict(entries)), x)
            made.append(new)
        write.replace(node.outputs[0], made[-1])
        model.graph.remove(node, safe=True)
