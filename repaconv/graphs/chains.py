"""Chains of moves: what a value was moved or scaled from, and what is computed from one behind whatever moves it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from repaconv.graphs import views
from repaconv.graphs.graph import scalar
from repaconv.graphs.operators import MOVES

if TYPE_CHECKING:
    import onnx_ir as ir


class Read(NamedTuple):
    """A node that computes with a moved value: the chain from that up to its source; None is an output of the graph.

    ``place`` says which input of the node the value is.
    """

    chain: list[ir.Value]
    node: ir.Node | None
    place: int = 0


def reads(source: ir.Value) -> list[Read]:
    """All that is computed from a tensor, behind whatever moves or scales it."""
    found: list[Read] = []
    todo = [[source]]
    while todo:
        chain = todo.pop()
        if chain[0].is_graph_output():
            found.append(Read(chain, None))
        for node, place in chain[0].uses():
            if _moved(node) == place:
                todo += [[output, *chain] for output in node.outputs]
            else:
                found.append(Read(chain, node, place))
    return found


def chain_of(value: ir.Value) -> list[ir.Value]:
    """The value, what it was moved or scaled from, and so on, up to what computes it."""
    chain = [value]
    while (node := chain[-1].producer()) is not None and (place := _moved(node)) is not None:
        before = node.inputs[place]
        if before is None:
            break
        chain.append(before)
    return chain


def columns_of(chain: list[ir.Value]) -> set[int] | None:
    """The columns of its source, along the last axis, that a value holds."""
    view = views.seen(chain)
    held = view.held(len(view.of) - 1) if view is not None and view.of else None
    return None if held is None else {int(column) for column in held}


def _moved(node: ir.Node) -> int | None:
    """Which input a node only moves, or multiplies with a number; None if it does anything else."""
    if node.domain != "":
        return None
    if node.op_type in ("Mul", "Div"):
        first, second = (scalar(entry) is not None for entry in node.inputs)
        kind = node.outputs[0].dtype
        if first == second or (kind is not None and not kind.is_floating_point()):
            return None
        return 0 if second else 1 if node.op_type == "Mul" else None
    return 0 if node.op_type in MOVES else None
