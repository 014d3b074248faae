"""One product that several read: its channels are put into the order, and take in the factors, that its readers want.

Queries, keys and values are one layer, head by head perhaps, and the queries alone are scaled. Three layers would be as
many multiplications, but three calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from repaconv.folds.maps import Pick, after, applied
from repaconv.folds.vertices import Vertex, arrangement

if TYPE_CHECKING:
    from repaconv.folds.linear import LinearGraph


def arrange(graph: LinearGraph) -> bool:
    """Do so wherever a reader would have to choose or to multiply, in place; whether there was one."""
    found = [(vertex, order) for vertex in tuple(graph.vertices) if (order := arrangement(vertex)) is not None]
    for vertex, order in found:
        _arrange(graph, vertex, order)
    return bool(found)


def _arrange(graph: LinearGraph, vertex: Vertex, order: Pick) -> None:
    new = Vertex(len(order.index), None, changed=True, took=[*vertex.took, "order"])
    new.inputs = {source: after(order, edge) for source, edge in vertex.inputs.items()}
    new.shift = None if vertex.shift is None else applied(order, vertex.shift)
    graph.add(new)
    back = np.full(vertex.width, -1)
    back[order.index] = np.arange(len(order.index))
    for user in tuple(vertex.outputs):
        edge = user.inputs.pop(vertex)
        assert isinstance(edge, Pick)
        places = np.where(edge.rows, back[edge.index], -1)
        user.inputs[new] = Pick(places, edge.rows.astype(np.float64), new.width)
        user.changed = True
        new.outputs[user] = None
    graph.forget(vertex)
