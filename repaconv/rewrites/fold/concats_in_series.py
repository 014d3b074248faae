"""concats: join several values at once where a Concat reads another Concat along the same axis.

UNet++ concatenates the images of a level, and these with the one from below: the inner Concat copies them once more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from repaconv.graph.models_in_onnx_ir import clean
from repaconv.graph.nodes_and_constants import Writer, attribute, is_read_once, made_by, nodes_of
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import rank_of, shaped_like
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir


def apply(model: ir.Model) -> Iterator[Change]:
    """Write one Concat in place of each that reads others along its axis, if nothing else reads those; in place."""
    for node in nodes_of(model, "Concat"):  # in the order of the graph, so that three become one
        axis = _axis(node)
        inner = [_joined(value, axis) for value in node.inputs]
        if axis is None or not any(inner):
            continue
        values = [one for value, joined in zip(node.inputs, inner, strict=True) for one in joined or [value]]
        write = Writer(model, node)
        write.replace(node.outputs[0], shaped_like(write("Concat", *values, axis=axis), node.outputs[0]))
        count = 1 + sum(map(bool, inner))
        yield Change(rewrite=CONCATS.name, place=node.name or "", description=f"{count} Concats -> one")
    clean(model)


def _joined(value: ir.Value | None, axis: int | None) -> list[ir.Value | None]:
    """The values that a Concat along this axis joins to a value that is read once; empty for other values."""
    node = made_by(value, "Concat")
    if value is None or node is None or axis is None or not is_read_once(value) or _axis(node) != axis:
        return []
    return list(node.inputs)


def _axis(concat: ir.Node) -> int | None:
    """The axis of a Concat, counted from the front; None if its rank is unknown."""
    rank = rank_of(concat.outputs[0])
    return int(attribute(concat, "axis", 0)) % rank if rank else None


CONCATS = Rewrite("concats", "a Concat that is read only by another one along the same axis", apply, keeps=True)
