"""Whether a fold leaves the graph smaller: rewrites that in sum enlarge it are taken back, the same on every machine.

A fold never multiplies more. Its matrices are larger only where they save a greater share of the multiplications; a
matrix that several layers share counts for each of them, so that a BatchNormalization may go into every reader of one.
Nodes are more only where that saves a greater share of multiplications and numbers. And where none of the three is
fewer, nothing was gained: the graph stays as it was given, unless it comes out wrong as it is.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

from repaconv.graphs.graph import nodes_of
from repaconv.graphs.selections import swaps_last
from repaconv.steps.taken_back import Judged, Kept, Refold, without_harm
from repaconv.subjects.evaluated import Evaluated

if TYPE_CHECKING:
    import onnx_ir as ir


class Size(NamedTuple):
    """Of a graph: multiply-accumulates of one image, numbers in matrices, reader by reader, all numbers, and nodes.

    A Transpose of the last two axes that only products read is none: they take their matrix so.
    """

    macs: int
    matrices: int
    numbers: int
    nodes: int

    @property
    def shared(self) -> tuple[int, int, int]:
        """What is weighed by its shares; 1 for what is not known."""
        return max(self.macs, 1), max(self.numbers, 1), self.nodes


def no_larger(fold: Kept, given: Evaluated, before: Evaluated, refold: Refold) -> Kept:
    """The fold without what enlarges the graph; the graph as given where nothing is left of it.

    Args:
        fold: All of it.
        given: The graph as given.
        before: What is folded: the same, of a newer opset perhaps.
        refold: Makes it without some of its rewrites.
    """

    def judge(one: Kept) -> Judged:
        size = size_of(one.graph)
        return Judged(size, larger(size_of(before), size))

    return without_harm(fold, given, refold, judge) if fold.changes else fold


def larger(before: Size, after: Size) -> str:
    """Why a fold is not worth it, in words; empty where it is."""
    if after.macs > before.macs:
        return f"with it the graph multiplies {after.macs:,} times, not {before.macs:,}"
    if after.matrices * after.macs > before.matrices * before.macs:
        return f"with it the graph's matrices hold {after.matrices:,} numbers, not {before.matrices:,}"
    if not (after.macs < before.macs or after.numbers < before.numbers or after.nodes < before.nodes):
        return "it saves neither multiplications nor numbers nor nodes"
    if after.nodes > before.nodes and prod(after.shared) > prod(before.shared):
        return f"with it the graph has {after.nodes:,} nodes, not {before.nodes:,}"
    return ""


def size_of(graph: Evaluated) -> Size:
    """What is not known of its shapes counts as nothing."""
    from repaconv.graphs.costs import macs_in, matrices, parameters

    model = graph.settled
    nodes = len(graph.model.graph.node) - sum(map(_in_products, nodes_of(model, "Transpose")))
    return Size(macs_in(model), matrices(model), parameters(model), nodes)


def _in_products(node: ir.Node) -> bool:
    """Whether a Transpose is of the last two axes, and only products read it."""
    out = node.outputs[0]
    return swaps_last(node) and not out.is_graph_output() and {user.op_type for user in out.consumers()} == {"MatMul"}
