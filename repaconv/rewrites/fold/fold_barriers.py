"""Keep values of the original graph, so that nothing is folded across them.

A fold may move a large constant to where it rounds worse than in the original: `mean(x) - 300` instead of
`mean(x - 300)`. The value that the constant cancels in is kept then, and everything else is folded. Every rewrite
keeps the outputs of a graph; so the value is an output while the graph is folded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from typing import TYPE_CHECKING

from repaconv.graph.nodes_and_constants import nodes_of
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir

PREFIX = "value:"
"""Prefix of the name of a value in `reverted`; entries without it are names of rewrites."""
COUNT = "repaconv.kept_values"
"""Metadata key: how many outputs of the graph are such values; they are the last ones."""


def kept_values(reverted: Collection[str]) -> tuple[str, ...]:
    """The names of the values among what is reverted."""
    return tuple(name.removeprefix(PREFIX) for name in reverted if name.startswith(PREFIX))


def keep(names: Collection[str]) -> Rewrite:
    """The rewrite before all others: it makes the values of these names outputs of the graph."""
    return Rewrite("keep", "everywhere: values that nothing is folded across", partial(_keep, names), keeps=True)


def _keep(names: Collection[str], model: ir.Model) -> Iterator[Change]:
    found = [value for node in model.graph for value in node.outputs if value.name in names]
    kept = [value for value in found if not value.is_graph_output()]
    model.graph.outputs.extend(kept)
    model.meta[COUNT] = len(kept)
    yield from ()


def _release(model: ir.Model) -> Iterator[Change]:
    for _ in range(model.meta.pop(COUNT, 0)):
        model.graph.outputs.pop()
    for node in nodes_of(model, "Identity"):  # a value that was equal to another one had to have its own name
        value, source = node.outputs[0], node.inputs[0]
        if source is not None and not value.is_graph_output():
            value.replace_all_uses_with(source)
            model.graph.remove(node, safe=True)
    yield from ()


RELEASE = Rewrite("release", "everywhere: kept values are values inside the graph again", _release, keeps=True)
