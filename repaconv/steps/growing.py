"""Whether a fold leaves the graph smaller: rewrites that in sum enlarge it are taken back, the same on every machine.

What counts is what the file holds: a weight that several layers share counts once. A fold never multiplies more. Its
matrices are larger only where they save a greater share of the multiplications; numbers and nodes are more only where
that saves a greater share of the others. A weight that was shared is several weights only where that multiplies less
in the same proportion. And where none of the three is fewer, nothing was gained: the graph stays as it was given,
unless it comes out wrong as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from repaconv.folds.sharing import UNSHARE
from repaconv.graphs.nodes import nodes_of
from repaconv.graphs.selections import swaps_last
from repaconv.steps.taken_back import Judged, Kept, Refold, without, without_harm
from repaconv.subjects.evaluated import Evaluated

if TYPE_CHECKING:
    import onnx_ir as ir


class Size(NamedTuple):
    """Of a graph: multiply-accumulates of one image, numbers in matrices, all numbers, and nodes.

    A Transpose of the last two axes that only products read is none: they take their matrix so. ``shares`` are the
    numbers that the graph would hold besides, had every product its own matrix.
    """

    macs: int
    matrices: int
    numbers: int
    nodes: int
    shares: int = 0

    @property
    def weighed(self) -> int:
        """What is weighed by its shares, in one number; 1 for what is not known."""
        return max(self.macs, 1) * max(self.numbers, 1) * max(self.nodes, 1)

    @property
    def rank(self) -> tuple[int, ...]:
        """The least is best of folds that leave shared weights or not."""
        return max(self.macs, 1) * max(self.matrices, 1), self.numbers, self.nodes


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

    if not fold.changes:
        return fold
    return without_harm(_as_shared(fold, before, refold), given, refold, judge)


def _as_shared(fold: Kept, before: Evaluated, refold: Refold) -> Kept:
    """The fold; without what it did to weights that layers share, where that gained nothing."""
    size = size_of(fold.graph)
    if size.shares >= size_of(before).shares:
        return fold
    other = without(fold, UNSHARE, refold, "")
    kept = size_of(other.graph)
    if kept.rank >= size.rank:
        return fold
    why = f"with it layers that share weights have their own, {size.matrices:,} numbers, not {kept.matrices:,}"
    return other._replace(back=fold.back.with_(UNSHARE, why))


def larger(before: Size, after: Size) -> str:
    """Why a fold is not worth it, in words; empty where it is."""
    if after.macs > before.macs:
        return f"with it the graph multiplies {after.macs:,} times, not {before.macs:,}"
    if after.matrices * after.macs > before.matrices * before.macs:
        return f"with it the graph's matrices hold {after.matrices:,} numbers, not {before.matrices:,}"
    if not (after.macs < before.macs or after.numbers < before.numbers or after.nodes < before.nodes):
        return "it saves neither multiplications nor numbers nor nodes"
    dearer = after.weighed > before.weighed
    if after.numbers > before.numbers and dearer:
        return f"with it the graph holds {after.numbers:,} numbers, not {before.numbers:,}"
    if after.nodes > before.nodes and dearer:
        return f"with it the graph has {after.nodes:,} nodes, not {before.nodes:,}"
    return ""


def size_of(graph: Evaluated) -> Size:
    """What is not known of its shapes counts as nothing."""
    from repaconv.graphs.costs import macs_in, matrices, parameters

    model = graph.settled
    nodes = len(graph.model.graph.node) - sum(map(_in_products, nodes_of(model, "Transpose")))
    found = matrices(graph.stored)
    return Size(macs_in(model), found.held, parameters(graph.stored), nodes, found.read - found.held)


def _in_products(node: ir.Node) -> bool:
    """Whether a Transpose is of the last two axes, and only products read it."""
    out = node.outputs[0]
    return swaps_last(node) and not out.is_graph_output() and {user.op_type for user in out.consumers()} == {"MatMul"}
