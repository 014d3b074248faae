"""What was composed into all its readers stands again for itself where that came to nothing.

Leaving it out may be the first step to something: whoever reads a part of it takes in what comes next. Where in the end
all its readers are what they were made then, several products stand in place of one, of which several read, or which
reads several values in a row, and save next to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from repaconv.folds.maps import Dense, Map, Vector
from repaconv.folds.vertices import Vertex, is_row, product_of

if TYPE_CHECKING:
    from repaconv.folds.linear import LinearGraph

LEAST = 8
"""A product is worth several if they save this part of its multiplications."""


@dataclass(frozen=True)
class Reader:
    """One reader of a vertex that was left out: its edge, shift and state before, and its edges and shift since."""

    edge: Map
    shift: Vector | None
    changed: bool
    now: dict[Vertex, Map | None]
    shift_now: Vector | None


@dataclass(frozen=True)
class Removal:
    """A vertex that was left out."""

    vertex: Vertex
    readers: dict[Vertex, Reader]


def before(vertex: Vertex, gain: int) -> dict[Vertex, tuple[Map, Vector | None, bool]] | None:
    """What is kept of a vertex's readers before it is left out; None where it will not come back."""
    if any(user.inputs.keys() & vertex.inputs.keys() for user in vertex.outputs):
        return None
    dense = all(isinstance(edge, Dense) for edge in vertex.inputs.values())
    shared = len(vertex.outputs) > 1 and dense and LEAST * gain <= product_of(vertex)
    if not shared and not is_row(vertex):
        return None
    return {user: (user.inputs[vertex], user.shift, user.changed) for user in vertex.outputs}


def removal(vertex: Vertex, kept: dict[Vertex, tuple[Map, Vector | None, bool]]) -> Removal:
    """The same, once it was left out."""
    return Removal(
        vertex,
        {u: Reader(*was, {s: u.inputs.get(s) for s in vertex.inputs}, u.shift) for u, was in kept.items()},
    )


def give_back(graph: LinearGraph, removals: list[Removal]) -> None:
    """Those whose readers are what they were made then, in place; the last first."""
    for one in reversed(removals):
        vertex = one.vertex
        whole = all(source in graph.vertices for source in vertex.inputs)
        if not whole or not all(user in graph.vertices and _is(user, was) for user, was in one.readers.items()):
            continue
        vertex.outputs.clear()
        graph.add(vertex)
        for user, was in one.readers.items():
            for source in vertex.inputs:
                del user.inputs[source]
                source.outputs.pop(user, None)
            user.inputs[vertex], user.shift, user.changed = was.edge, was.shift, was.changed
            vertex.outputs[user] = None


def _is(user: Vertex, was: Reader) -> bool:
    return user.shift is was.shift_now and all(
        edge is not None and user.inputs.get(source) is edge for source, edge in was.now.items()
    )
