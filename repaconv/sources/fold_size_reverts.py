"""Revert rewrites that make the folded graph larger than the original, the most harmful one first.

The rule is the same on every machine. What counts is what the file holds: a weight that several layers share counts
once. A fold is reverted if

- it needs more multiplications;
- its matrices grow by a larger factor than its multiplications shrink;
- its parameters or nodes grow, and the product of multiplications, parameters and nodes grows, too;
- none of the three shrinks.

A shared weight is split into several only if the multiplications shrink by at least the same factor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv.core.errors import RepaconvError
from repaconv.graph.index_selections import swaps_last
from repaconv.graph.nodes_and_constants import nodes_of
from repaconv.graph.symbolic_shapes import sizes
from repaconv.results import Change
from repaconv.rewrites.fold.common_factors_of_sums import COMMON_FACTOR
from repaconv.rewrites.fold.einsum_products import equivalent_nodes
from repaconv.rewrites.fold.gelu_formula import GELU
from repaconv.rewrites.fold.max_pools_in_series import POOLS_IN_SERIES
from repaconv.rewrites.fold.pool_padding import POOL_PADDING
from repaconv.rewrites.fold.shared_weights import UNSHARE
from repaconv.verification.graph_with_cached_outputs import Evaluated

if TYPE_CHECKING:
    import onnx_ir as ir

    from repaconv.sources.graph_fold import Folded

Refold = Callable[[tuple[str, ...]], "Folded"]
"""A function that folds the graph without the rewrites of these names."""


ALWAYS_KEPT = frozenset({COMMON_FACTOR.name, GELU.name, POOL_PADDING.name, POOLS_IN_SERIES.name})
"""Rewrites that are kept whatever the sizes say: what they save, or correct, no size counts."""


class Reverts(NamedTuple):
    """Names of the reverted rewrites, and a message about each."""

    names: tuple[str, ...] = ()
    messages: tuple[str, ...] = ()

    def with_revert(self, name: str, why: str) -> Reverts:
        """A copy with one more reverted rewrite."""
        return Reverts((*self.names, name), (*self.messages, f"{name}: reverted, because {why}"))


class Kept(NamedTuple):
    """A fold without the reverted rewrites: its graph, its changes, and what was reverted."""

    graph: Evaluated
    changes: Sequence[Change]
    reverts: Reverts = Reverts()


class FoldEvaluation(NamedTuple):
    """The evaluation of a fold: its rank (the lowest is best), and why it is not acceptable; empty if it is."""

    rank: Any
    why: str


def revert_harmful(fold: Kept, given: Evaluated, refold: Refold, evaluate: Callable[[Kept], FoldEvaluation]) -> Kept:
    """Revert rewrites one by one until the fold is acceptable; the original graph if no change remains, or none helps.

    Args:
        fold: The fold, without what is reverted already.
        given: The original graph.
        refold: Folds the graph again without some of the rewrites.
        evaluate: Evaluates a fold.
    """
    evaluation = evaluate(fold)
    while evaluation.why and (names := _revertible(fold)):
        before, why = fold, evaluation.why
        for place, name in enumerate(names):
            fold.graph.release_while_folding()  # the best so far
            other = refold_without(before, name, refold, why)
            found = evaluate(other)
            better = not place or found.rank < evaluation.rank
            (fold if better else other).graph.discard()
            fold, evaluation = (other, found) if better else (fold, evaluation)
    harmful = evaluation.why and not all(change.rewrite in ALWAYS_KEPT for change in fold.changes)
    changes = () if harmful else fold.changes
    return fold._replace(graph=fold.graph if changes else given, changes=changes)


def _revertible(fold: Kept) -> list[str]:
    """Names of the rewrites that may be reverted, and are not yet: what is made in spite of that, another one makes."""
    kept = ALWAYS_KEPT.union(fold.reverts.names)
    return list(dict.fromkeys(change.rewrite for change in fold.changes if change.rewrite not in kept))


def refold_without(fold: Kept, name: str, refold: Refold, why: str) -> Kept:
    """Fold again without one more rewrite; ``why`` is the reason that is recorded."""
    fold.graph.release_while_folding()
    reverts = fold.reverts.with_revert(name, why)
    return _kept(refold(reverts.names), reverts)


def _kept(fold: Folded, reverts: Reverts) -> Kept:
    return Kept(Evaluated(fold.model, in_float64=fold.in_float64), fold.changes, reverts)


class Size(NamedTuple):
    """Size of a graph: multiply-accumulates of one image, numbers in matrices, all numbers, and nodes.

    A Transpose of the last two axes that only MatMuls read is not counted: they can read their matrix transposed.
    An Einsum counts as the nodes that compute the same, and one more.
    ``shares`` is how many more numbers the graph would hold if every product had its own matrix.
    """

    macs: int
    matrices: int
    numbers: int
    nodes: int
    shares: int = 0

    @property
    def relative_cost(self) -> int:
        """Product of multiplications, numbers and nodes, to compare relative changes; an unknown one counts as 1."""
        return max(self.macs, 1) * max(self.numbers, 1) * max(self.nodes, 1)

    @property
    def rank(self) -> tuple[int, ...]:
        """Sort key for folds with and without shared weights; the lowest is best."""
        return max(self.macs, 1) * max(self.matrices, 1), self.numbers, self.nodes


def fold_no_larger(given: Evaluated, before: Evaluated, refold: Refold, reverts: Reverts) -> Kept:
    """Fold the graph, and revert what enlarges it.

    Args:
        given: The original graph.
        before: The graph that is folded: the original, possibly converted to a newer opset.
        refold: Folds the graph without some of the rewrites.
        reverts: What is reverted from the start.
    """
    fold = _kept(refold(reverts.names), reverts)
    if not fold.changes:
        return Kept(given, (), reverts)
    at = _sizes_of_use(given)
    least = size_of(before, at)

    def evaluate(one: Kept) -> FoldEvaluation:
        size = size_of(one.graph, at)
        return FoldEvaluation(size, why_too_large(least, size))

    return revert_harmful(_revert_unsharing(fold, least, at, refold), given, refold, evaluate)


def _sizes_of_use(given: Evaluated) -> Mapping[str, int]:
    """Sizes of dynamic dimensions at which products are counted; none if only the batch matters, or it does not run."""
    from repaconv.graph.compute_costs import macs_at_ones
    from repaconv.verification.probe_inputs import Unrunnable

    first = [shape[0] for value in given.settled.graph.inputs if (shape := sizes(value))]
    batch = {name for size in first if not isinstance(size, int) for name in size.names}
    if macs_at_ones(given.settled, batch) is not None:
        return {}
    try:
        return given.single.probes.usual
    except (Unrunnable, RepaconvError):
        return {}  # the verification reports why
    finally:
        given.single.close()


def _revert_unsharing(fold: Kept, before: Size, at: Mapping[str, int], refold: Refold) -> Kept:
    """Revert the splitting of shared weights if it gained nothing."""
    size = size_of(fold.graph, at)
    if size.shares >= before.shares:
        return fold
    other = refold_without(fold, UNSHARE, refold, "")
    kept = size_of(other.graph, at)
    if kept.rank >= size.rank:
        other.graph.discard()
        return fold
    fold.graph.discard()
    why = f"with it layers that share weights have their own, {size.matrices:,} numbers, not {kept.matrices:,}"
    return other._replace(reverts=fold.reverts.with_revert(UNSHARE, why))


def why_too_large(before: Size, after: Size) -> str:
    """Why a fold is not worth it; empty if it is."""
    if after.macs > before.macs:
        return f"with it the graph multiplies {after.macs:,} times, not {before.macs:,}"
    if after.matrices * after.macs > before.matrices * before.macs:
        return f"with it the graph's matrices hold {after.matrices:,} numbers, not {before.matrices:,}"
    if not (after.macs < before.macs or after.numbers < before.numbers or after.nodes < before.nodes):
        return "it removes no multiplications, parameters or nodes"
    dearer = after.relative_cost > before.relative_cost
    if after.numbers > before.numbers and dearer:
        return f"with it the graph holds {after.numbers:,} numbers, not {before.numbers:,}"
    if after.nodes > before.nodes and dearer:
        return f"with it the graph has {after.nodes:,} nodes, not {before.nodes:,}"
    return ""


def size_of(graph: Evaluated, at: Mapping[str, int] = MappingProxyType({})) -> Size:
    """The size of a graph, products counted at these sizes or at 1; operators of unknown shape count as nothing."""
    from repaconv.graph.compute_costs import known_macs

    model = graph.settled
    nodes = len(graph.model.graph.node) - sum(map(_is_read_by_matmuls_only, nodes_of(model, "Transpose")))
    nodes += sum(map(equivalent_nodes, nodes_of(model, "Einsum")))
    found = graph.matrices
    counted = graph.macs(at)
    macs = known_macs(model) if counted is None else counted
    return Size(macs, found.held, graph.parameters, nodes, found.read - found.held)


def _is_read_by_matmuls_only(node: ir.Node) -> bool:
    """Whether a Transpose swaps the last two axes and is read only by MatMuls."""
    out = node.outputs[0]
    return swaps_last(node) and not out.is_graph_output() and {user.op_type for user in out.consumers()} == {"MatMul"}
