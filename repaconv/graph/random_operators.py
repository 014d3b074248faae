"""Find what makes a graph compute something else in every inference: random numbers, Dropout in training mode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from repaconv.graph.onnx_files import constants_of, names_read, subgraphs_of
from repaconv.graph.operator_facts import DEFAULT_DOMAIN, RANDOM

if TYPE_CHECKING:
    import onnx


def random_operators(model: onnx.ModelProto) -> list[str]:
    """Describe the nodes whose random numbers reach an output, in the order of the graph; empty if there are none.

    Nodes of subgraphs and of functions count for the node that holds or calls them. A Dropout whose mode an input
    decides is none: it is run in inference mode.
    """
    nodes = list(model.graph.node)
    found = {place: name for place, node in enumerate(nodes) if (name := next(_random(model, [node]), ""))}
    read, names = {value.name for value in model.graph.output}, list[str]()
    for place, node in reversed(list(enumerate(nodes)) if found else []):
        if read.isdisjoint(node.output):
            continue
        read.update(names_read(node))
        if place in found:
            names.append(found[place])
    return names[::-1]


def _random(model: onnx.ModelProto, nodes: Iterable[onnx.NodeProto]) -> Iterator[str]:
    """Describe the random nodes among these, and in what they hold or call."""
    functions = {(each.domain, each.name): each for each in model.functions}
    for node in nodes:
        function = functions.get((node.domain, node.op_type))
        if function is not None:
            yield from _random(model, function.node)
        elif node.domain in DEFAULT_DOMAIN and (node.op_type in RANDOM or _drops(model, node)):
            mode = " in training mode" if node.op_type == "Dropout" else ""
            yield f"{node.op_type} {node.name or next(iter(node.output), '')}{mode}"
        for inner in subgraphs_of(node):
            yield from _random(model, inner.node)


def _drops(model: onnx.ModelProto, node: onnx.NodeProto) -> bool:
    """Whether a Dropout drops values in every inference: its mode is a true constant, its share is not a constant 0."""
    from onnx import numpy_helper

    if node.op_type != "Dropout" or len(node.input) < 3:
        return False
    known = constants_of(model.graph)
    share, mode = known.get(node.input[1]), known.get(node.input[2])
    if mode is None or not numpy_helper.to_array(mode).all():
        return False
    return not node.input[1] or share is None or bool(numpy_helper.to_array(share).any())
