"""Whether a fold leaves the graph smaller: rewrites that in sum enlarge it are taken back, the same on every machine.

A fold never multiplies more. Its matrices are larger only where they save a greater share of the multiplications; a
matrix that several layers share counts for each of them, so that a BatchNormalization may go into every reader of one.
And where neither multiplications nor numbers nor nodes are fewer, nothing was gained: the graph stays as it was given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from repaconv.steps.paying import Kept, Refold, TakenBack
from repaconv.subjects.evaluated import Evaluated

if TYPE_CHECKING:
    import onnx


class Size(NamedTuple):
    """Of a graph: multiply-accumulates of one image, numbers in matrices, reader by reader, all numbers, and nodes."""

    macs: int
    matrices: int
    numbers: int
    nodes: int


def no_larger(given: Evaluated, before: onnx.ModelProto, refold: Refold) -> Kept:
    """The fold without what enlarges the graph; the graph as given where nothing is left of it.

    Args:
        given: The graph as given.
        before: What is folded: the same, of a newer opset perhaps.
        refold: Folds it, without some of the rewrites.
    """
    (model, changes), back = refold(()), TakenBack()
    whole = size_of(before) if changes else None
    while whole is not None and changes and (why := larger(whole, size_of(model))):
        tries = {name: refold((*back.names, name)) for name in dict.fromkeys(change.rewrite for change in changes)}
        best = min(tries, key=lambda name: size_of(tries[name][0]))
        told = f"{best}: taken back, as {why}"
        back = TakenBack((*back.names, best), (*back.told, told))
        model, changes = tries[best]
    return Kept(Evaluated(model) if changes else given, changes, back)


def larger(before: Size, after: Size) -> str:
    """Why a fold is not worth it, in words; empty where it is."""
    if after.macs > before.macs:
        return f"with it the graph multiplies {after.macs:,} times, not {before.macs:,}"
    if after.matrices * after.macs > before.matrices * before.macs:
        return f"with it the graph's matrices hold {after.matrices:,} numbers, not {before.matrices:,}"
    saves = after.macs < before.macs or after.numbers < before.numbers or after.nodes < before.nodes
    return "" if saves else "it saves neither multiplications nor numbers nor nodes"


def size_of(proto: onnx.ModelProto) -> Size:
    """What is not known of its shapes counts as nothing."""
    from repaconv.graphs.costs import macs_in, matrices, parameters
    from repaconv.graphs.graph import read
    from repaconv.graphs.settling import settle

    model = read(proto)
    settle(model)
    return Size(macs_in(model), matrices(model), parameters(model), len(proto.graph.node))
