"""The linear graph: values as vertices, linear maps over channels as edges, and what can be left out of it.

Along one axis (the last of tokens, or axis 1 of an image) a value is

    v = sum_p M_pv p + c_v

over other values p. BatchNorm, LayerScale, a norm's affine, splits, concats, masks, shortcuts, linear layers and 1x1
convolutions are edges. A vertex v that nothing but edges reads can be left out: for every pair of edges p -> v -> s

    M_ps += M_vs M_pv,    c_s += M_vs c_v

which composes affine maps in a row, adds those in parallel and takes shortcuts in. It is done where the whole costs no
more multiply-accumulates than before. Channels that no edge reads are dropped, also in front of an activation.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from repaconv.folds.arranging import arrange
from repaconv.folds.maps import (
    Pick,
    after,
    applied,
    plus,
    selection,
)
from repaconv.folds.returning import Removal, before, give_back, removal
from repaconv.folds.vertices import Vertex, are_equal, gain_of, is_plain, kind_of, operator_of


class LinearGraph:
    """All vertices along one axis; built by `repaconv.folds.edges`."""

    def __init__(self) -> None:
        self.vertices: dict[Vertex, None] = {}  # in the order of the graph
        self._removals: list[Removal] = []

    def add(self, vertex: Vertex) -> Vertex:
        """Take a vertex in, and its edges."""
        self.vertices[vertex] = None
        for source in vertex.inputs:
            source.outputs[vertex] = None
        return vertex

    def fold(self) -> None:
        """Leave out all that pays, until nothing does."""
        while True:
            self._leave_out()
            again = [self._merge_equals(), self._drop_channels(), arrange(self)]
            if not any(again):
                break
        give_back(self, self._removals)
        arrange(self)

    def let_go(self) -> None:
        """Forget all maps: vertices name each other, so they would stay, in float64, until somebody collects."""
        for vertex in self.vertices:
            for named in (vertex.inputs, vertex.outputs, vertex.activations):
                named.clear()
        self.vertices.clear()
        self._removals.clear()

    # --- leaving out ---------------------------------------------------------------------------------

    def _leave_out(self) -> None:
        gains = {vertex: gain for vertex in self.vertices if (gain := gain_of(vertex)) is not None}
        while gains:
            vertex = max(gains, key=lambda v: gains[v])  # the first of equals
            gain = gains.pop(vertex)
            if gain < 0:
                return
            beside = (*vertex.inputs, *vertex.outputs)
            near = dict.fromkeys((*beside, *(other for one in beside for other in (*one.outputs, *one.inputs))))
            kept = before(vertex, gain)
            self._remove(vertex)
            self._removals += [removal(vertex, kept)] if kept is not None else []
            for one in near:
                if one not in self.vertices:
                    continue
                now = gain_of(one)
                if now is None:
                    gains.pop(one, None)
                else:
                    gains[one] = now

    def _remove(self, vertex: Vertex) -> None:
        told = operator_of(vertex)
        for user in tuple(vertex.outputs):
            outer = user.inputs.pop(vertex)
            trivial = isinstance(outer, Pick) and outer.is_identity
            kept = not user.changed and not vertex.changed and is_plain(vertex, outer, trivial)
            nothing = next(iter(vertex.inputs)), outer
            for source, inner in vertex.inputs.items():
                new = after(outer, inner)
                if source in user.inputs:
                    new, kept = plus(user.inputs[source], new), False
                if new.rows.any():
                    user.inputs[source] = new
                    source.outputs[user] = None
                else:
                    user.inputs.pop(source, None)
                    source.outputs.pop(user, None)
                    kept, nothing = False, (source, new)
            if not user.inputs:  # all cancelled: one edge of zeros says over what
                user.inputs[nothing[0]] = nothing[1]
                nothing[0].outputs[user] = None
            if vertex.shift is not None:
                moved = applied(outer, vertex.shift)
                kept = kept and user.shift is None
                had = user.shift is not None and bool(user.shift.any())
                user.shift = moved if user.shift is None else user.shift + moved
                if had and not user.shift.any():
                    user.shift = None  # they cancel
            if not kept:
                user.changed = True
            user.took, user.shared = [*user.took, *vertex.took, told], user.shared or vertex.shared
        for source in vertex.inputs:
            source.outputs.pop(vertex, None)
        del self.vertices[vertex]

    # --- equals and dead channels ----------------------------------------------------------------------

    def _merge_equals(self) -> bool:
        """Vertices that are the same sum become one."""
        found: dict[Any, list[Vertex]] = {}
        merged = False
        for vertex in tuple(self.vertices):
            if not vertex.inputs or vertex.value is None:
                continue
            key = (vertex.width, frozenset(vertex.inputs))
            twin = next((v for v in found.setdefault(key, []) if are_equal(v, vertex)), None)
            if twin is None:
                found[key].append(vertex)
            elif not vertex.value.is_graph_output():
                self._merge(twin, vertex)
                merged = True
        return merged

    def _merge(self, kept: Vertex, gone: Vertex) -> None:
        assert kept.value is not None
        assert gone.value is not None
        gone.value.replace_all_uses_with(kept.value)
        for user in tuple(gone.outputs):
            moved = user.inputs.pop(gone)
            user.inputs[kept] = plus(user.inputs[kept], moved) if kept in user.inputs else moved
            kept.outputs[user] = None
            user.changed = True
        for activation in gone.activations:
            assert activation.through is not None
            activation.through = (activation.through[0], kept)
        kept.activations += gone.activations
        kept.sink, kept.took = kept.sink or gone.sink, [*kept.took, *gone.took, "equal"]
        for source in gone.inputs:
            source.outputs.pop(gone, None)
        del self.vertices[gone]
        self._merge_activations(kept)

    def _merge_activations(self, vertex: Vertex) -> None:
        """The same activation of the same vertex is one."""
        kinds: dict[Any, Vertex] = {}
        for activation in tuple(vertex.activations):
            assert activation.through is not None
            twin = kinds.setdefault(kind_of(activation.through[0]), activation)
            if twin is activation or activation.value is None or activation.value.is_graph_output():
                continue
            vertex.activations.remove(activation)
            assert twin.value is not None
            activation.value.replace_all_uses_with(twin.value)
            for user in tuple(activation.outputs):
                moved = user.inputs.pop(activation)
                user.inputs[twin] = plus(user.inputs[twin], moved) if twin in user.inputs else moved
                twin.outputs[user] = None
                user.changed = True
            twin.sink = twin.sink or activation.sink
            twin.activations += activation.activations
            del self.vertices[activation]

    def _drop_channels(self) -> bool:
        """Channels that nobody reads; an activation's go, too, and those in front of it."""
        dropped = False
        for vertex in tuple(self.vertices):
            if vertex.sink or vertex.activations or not vertex.outputs:
                if not vertex.sink and not vertex.activations and not vertex.outputs and vertex.inputs:
                    self.forget(vertex)
                continue
            read = np.logical_or.reduce([user.inputs[vertex].cols for user in vertex.outputs])
            if read.all() or not read.any() or not (vertex.inputs or vertex.through):
                continue
            self._narrow(vertex, np.flatnonzero(read))
            dropped = True
        return dropped

    def forget(self, vertex: Vertex) -> None:
        """Take out what nothing reads any more."""
        for source in vertex.inputs:
            source.outputs.pop(vertex, None)
        del self.vertices[vertex]

    def _narrow(self, vertex: Vertex, places: Any) -> None:
        """A vertex of these channels alone in place of it."""
        chosen = selection(places, vertex.width)
        new = Vertex(len(places), None, changed=True, took=[*vertex.took, f"{vertex.width - len(places)} channels"])
        new.through = vertex.through
        if vertex.through is not None:
            node, behind = vertex.through
            front = self.add(Vertex(len(places), None, inputs={behind: chosen}, changed=True, took=["channels"]))
            behind.activations.remove(vertex)
            front.activations.append(new)
            new.through = (node, front)
        else:
            new.inputs = {source: after(chosen, edge) for source, edge in vertex.inputs.items()}
            new.shift = None if vertex.shift is None else vertex.shift[places]
        self.add(new)
        back = np.full(vertex.width, -1)
        back[places] = np.arange(len(places))
        embed = Pick(back, (back >= 0).astype(np.float64), len(places))
        for user in tuple(vertex.outputs):
            user.inputs[new] = after(user.inputs.pop(vertex), embed)
            user.changed = True
            new.outputs[user] = None
        self.forget(vertex)
