"""Find the layers (nodes with weights) that each rewrite removed from a graph and added to it, for the fold report.

Layers are matched by their readers: what a surviving node read before the rewrite and what it reads now.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from repaconv.graph.compute_costs import fixed_values, flops_in
from repaconv.graph.operator_facts import COUNTED_PRODUCTS
from repaconv.graph.symbolic_shapes import known_product, sizes
from repaconv.results import Change, FoldedLayer

if TYPE_CHECKING:
    import onnx_ir as ir


class _Snapshot(NamedTuple):
    """A snapshot of a graph.

    Attributes:
        reads: The input values of every node that contributes to an output.
        layers: Those of the nodes that have weights.
        outputs: The graph's outputs.
    """

    reads: Mapping[ir.Node, tuple[ir.Value, ...]]
    layers: Mapping[ir.Node, FoldedLayer]
    outputs: tuple[ir.Value, ...]


def changed_layers(model: ir.Model) -> Callable[[list[Change]], list[Change]]:
    """A function that adds the removed and added layers to the `Change` records of a rewrite.

    Args:
        model: The graph before the first rewrite. The returned function is called after each rewrite that changed it in
            place, before unused nodes are removed.
    """
    held = _snapshot(model)

    def completed(changes: list[Change]) -> list[Change]:
        nonlocal held
        now = _snapshot(model)
        groups = _groups(held, now)
        found = [_layers(group, held, now) for group in groups]
        names = [{node.name for node in (*group.nodes, *group.old)} for group in groups]
        held = now
        taken: dict[int, int] = {}  # change -> group: the one with the change's node, else the next free one
        for number, change in enumerate(changes):
            own = (n for n, known in enumerate(names) if change.place in known and n not in taken.values())
            if (first := next(own, None)) is not None:
                taken[number] = first
        rest = iter([n for n in range(len(found)) if n not in taken.values()])
        for number in range(len(changes)):
            if number not in taken and (following := next(rest, None)) is not None:
                taken[number] = following
        return [
            change.model_copy(update=found[taken[number]]) if number in taken else change
            for number, change in enumerate(changes)
        ]

    return completed


class _Group(NamedTuple):
    """Layers that were removed and added in one connected place of the graph.

    Attributes:
        pairs: For each changed input of a reader: the removed and the added layers.
        nodes: All these layers.
        old: All removed nodes, with or without weights.
    """

    pairs: list[tuple[set[ir.Node], set[ir.Node]]]
    nodes: set[ir.Node]
    old: set[ir.Node]


def _groups(before: _Snapshot, now: _Snapshot) -> list[_Group]:
    """The groups of changed layers, one per connected place, in graph order."""
    groups: list[_Group] = []
    for old, new in _changed_inputs(before, now):
        gone = set(_nodes_before(old, before.reads, now.reads))
        come = set(_nodes_before(new, now.reads, before.reads))
        pair = {node for node in gone if node in before.layers}, {node for node in come if node in now.layers}
        if not (pair[0] or pair[1]):
            continue
        met = [group for group in groups if group.nodes & (pair[0] | pair[1])]
        joined = _Group([pair], pair[0] | pair[1], gone)
        for group in met:
            joined = _Group([*group.pairs, *joined.pairs], group.nodes | joined.nodes, group.old | joined.old)
        groups = [group for group in groups if not any(group is one for one in met)] + [joined]
    return groups


def _changed_inputs(before: _Snapshot, now: _Snapshot) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Pairs of the value read before and the value read now, for every input of a node or graph output that changed."""
    readers = [(before.reads[node], now.reads[node]) for node in now.reads if node in before.reads]
    for old, new in (*readers, (before.outputs, now.outputs)):
        if len(old) == len(new):
            yield from ((a, b) for a, b in zip(old, new, strict=True) if a is not b)


def _nodes_before(
    value: ir.Value, reads: Mapping[ir.Node, tuple[ir.Value, ...]], others: Collection[ir.Node]
) -> Iterator[ir.Node]:
    """The nodes before a value, back to nodes that the other snapshot has as well."""
    todo, seen = [value], set()
    while todo:
        node = todo.pop().producer()
        if node is not None and node in reads and node not in others and node not in seen:
            seen.add(node)
            yield node
            todo += reads[node]


def _layers(group: _Group, before: _Snapshot, now: _Snapshot) -> dict[str, tuple[FoldedLayer, ...]]:
    """The removed (``before``) and added (``after``) layers of a group, in graph order."""
    old, new = ([node for node in side.layers if node in group.nodes] for side in (before, now))
    into = {node: {to for gone, come in group.pairs if node in gone for to in come} for node in old}

    def folded_layer(node: ir.Node) -> FoldedLayer:
        names = tuple(now.layers[to].name for to in new if to in into[node])
        return before.layers[node].model_copy(update={"into": names})

    return {"before": tuple(map(folded_layer, old)), "after": tuple(now.layers[node] for node in new)}


def _snapshot(model: ir.Model) -> _Snapshot:
    todo = [value.producer() for value in model.graph.outputs]
    used: set[ir.Node] = set()
    while todo:
        node = todo.pop()
        if node is not None and node not in used:
            used.add(node)
            todo += [value.producer() for value in (*node.inputs, *_read_inside(node)) if value is not None]
    fixed = fixed_values(model)
    nodes = [node for node in model.graph if node in used]
    return _Snapshot(
        {node: tuple(value for value in node.inputs if value is not None) for node in nodes},
        {node: layer for node in nodes if (layer := _layer(node, fixed)) is not None},
        tuple(model.graph.outputs),
    )


def _read_inside(node: ir.Node) -> list[ir.Value]:
    """The values that subgraphs of a node read."""
    graphs = [graph for each in node.attributes.values() for graph in _graphs(each)]
    inner = [other for graph in graphs for other in graph.all_nodes()]
    return [value for other in inner for value in other.inputs if value is not None] + [
        value for graph in graphs for value in graph.outputs
    ]


def _graphs(attribute: ir.Attr) -> list[ir.Graph]:
    import onnx_ir as ir

    if attribute.type == ir.AttributeType.GRAPH:
        return [attribute.as_graph()]
    return list(attribute.as_graphs()) if attribute.type == ir.AttributeType.GRAPHS else []


def _layer(node: ir.Node, fixed: Collection[ir.Value]) -> FoldedLayer | None:
    """The node as a layer, if it computes with weights; these may be computed from constants."""
    weights = [value for value in node.inputs if value is not None and value in fixed]
    parameters = sum(number for value in weights if (number := _parameter_count(value)) > 1)
    if not parameters or node.outputs[0] in fixed:
        return None
    name = node.name or node.outputs[0].name or node.op_type
    return FoldedLayer(name=name, kind=node.op_type, parameters=parameters, macs=_macs(node))


def _macs(node: ir.Node) -> int | None:
    """Multiply-accumulates for one image; None if a dimension other than the batch is dynamic, since the numbers before
    and after would not be comparable."""
    if node.op_type not in COUNTED_PRODUCTS or node.domain:
        return 0
    shape, flops = sizes(node.outputs[0]), flops_in(node)
    free = shape is None or not all(isinstance(size, int) for size in shape[1:])
    return None if free or flops is None else flops // 2


def _parameter_count(value: ir.Value) -> int:
    """How many floating-point numbers a constant has."""
    if value.dtype is None or not value.dtype.is_floating_point():
        return 0
    shape = sizes(value)
    if value.const_value is not None:
        return int(value.const_value.size)
    return known_product(shape) if shape else 0
