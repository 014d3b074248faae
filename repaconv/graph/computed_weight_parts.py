"""Split off the parts of an ONNX graph that compute weights from its large constants alone.

ONNX Runtime computes them when it loads a graph, as constants, and holds every value on the way until all are computed:
for the weight standardization of NFNets, six times the weights. Computed part by part, one part's values are held.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING

from repaconv.graph.graph_without_weights import with_initializers
from repaconv.graph.onnx_files import names_read, subgraphs_of
from repaconv.graph.operator_facts import QUANTIZING, RANDOM

if TYPE_CHECKING:
    import onnx


PART_ENTRIES = 2**22
"""Entries of the constants that a part reads, from which it computes no further weight: 16 MiB in FP32."""


def split_off_computed_weights(
    model: onnx.ModelProto, large: Collection[str]
) -> tuple[onnx.ModelProto, list[onnx.ModelProto]]:
    """Return a graph without the nodes that compute weights, and graphs of these nodes, each for few of the weights.

    The first lacks the computed weights: they are the outputs of the others, which have no inputs.

    Args:
        model: The graph.
        large: Names of its large weights. A part reads at least one of them.
    """
    makers = _constant_nodes(model)
    outputs = {value.name for value in model.graph.output}
    others = [node for node in model.graph.node if not _is_made_by(makers, node)]
    read = dict.fromkeys(name for node in others for name in names_read(node) if name in makers)
    found = {name: _nodes_computing(name, makers) for name in read if name not in outputs}
    found = {name: nodes for name, nodes in found.items() if not _read_by(nodes).isdisjoint(large)}
    kept, needed = _nodes_kept(model, makers, found, outputs)
    while both := found.keys() & {name for node in kept for name in node.output}:
        # another output of such a node is needed, so that the graph has the node
        found = {name: nodes for name, nodes in found.items() if name not in both}
        kept, needed = _nodes_kept(model, makers, found, outputs)
    if not found:
        return model, []
    needed.update(value.name for value in model.graph.input)
    return _with_nodes(model, kept[::-1], needed), [*_parts(model, found)]


def _nodes_kept(
    model: onnx.ModelProto, makers: dict[str, onnx.NodeProto], computed: Collection[str], outputs: Collection[str]
) -> tuple[list[onnx.NodeProto], set[str]]:
    """The nodes of a graph that is given the computed values, the last first, and the names that they read."""
    needed = {*outputs}
    kept: list[onnx.NodeProto] = []
    for node in reversed(model.graph.node):
        if not _is_made_by(makers, node) or not needed.isdisjoint(node.output):
            kept.append(node)
            needed.update(name for name in names_read(node) if name not in computed)
    return kept, needed


def _constant_nodes(model: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    """The nodes that compute the same in every inference, by the names of their outputs."""
    constant = {weight.name for weight in model.graph.initializer} - {value.name for value in model.graph.input}
    found: dict[str, onnx.NodeProto] = {}
    for node in model.graph.node:
        fixed = not node.domain and node.op_type not in (*RANDOM, *QUANTIZING) and constant.issuperset(node.input)
        if fixed and not subgraphs_of(node):
            constant.update(node.output)
            found |= dict.fromkeys(node.output, node)
    return found


def _is_made_by(makers: dict[str, onnx.NodeProto], node: onnx.NodeProto) -> bool:
    return any(name in makers for name in node.output if name)


def _nodes_computing(name: str, makers: dict[str, onnx.NodeProto]) -> list[onnx.NodeProto]:
    """The nodes from which a value is computed, in order."""
    found: dict[str, onnx.NodeProto] = {}

    def visit(value: str) -> Iterator[str]:
        yield from (read for read in makers[value].input if read in makers)

    waiting = [(name, visit(name))]
    while waiting:
        value, reads = waiting[-1]
        following = next((read for read in reads if makers[read].output[0] not in found), None)
        if following is None:
            waiting.pop()
            found[makers[value].output[0]] = makers[value]
        else:
            waiting.append((following, visit(following)))
    return [*found.values()]


def _read_by(nodes: Iterable[onnx.NodeProto]) -> set[str]:
    return {name for node in nodes for name in node.input}


def _parts(model: onnx.ModelProto, found: Mapping[str, list[onnx.NodeProto]]) -> Iterator[onnx.ModelProto]:
    """Graphs that compute the values of these names from the nodes that each needs, several at a time."""
    weights = {weight.name: weight for weight in model.graph.initializer}
    names, count = list[str](), 0
    for name, nodes in found.items():
        names.append(name)
        count += sum(prod(weights[one].dims) for one in _read_by(nodes) if one in weights)
        if count >= PART_ENTRIES:
            yield _part(model, names, [node for one in names for node in found[one]])
            names, count = [], 0
    if names:
        yield _part(model, names, [node for one in names for node in found[one]])


def _part(model: onnx.ModelProto, names: list[str], nodes: list[onnx.NodeProto]) -> onnx.ModelProto:
    import onnx

    found = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    read = _read_by(nodes)
    found.graph.name = names[0]
    found.graph.node.extend({node.output[0]: node for node in nodes}.values())
    found.graph.initializer.extend(weight for weight in model.graph.initializer if weight.name in read)
    for name in names:
        found.graph.output.add(name=name)
    return found


def _with_nodes(model: onnx.ModelProto, nodes: list[onnx.NodeProto], read: Collection[str]) -> onnx.ModelProto:
    """Copy a graph with these of its nodes, and those of its weights that they read."""
    found = with_initializers(model, (weight for weight in model.graph.initializer if weight.name in read))
    del found.graph.node[:]
    found.graph.node.extend(nodes)
    return found
