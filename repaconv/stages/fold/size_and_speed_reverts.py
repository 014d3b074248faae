"""Revert rewrites that make the folded graph larger or slower than the original, the most harmful one first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv.core.errors import RepaconvError
from repaconv.core.progress import Progress
from repaconv.graph.index_selections import swaps_last
from repaconv.graph.nodes_and_constants import nodes_of
from repaconv.graph.symbolic_shapes import sizes
from repaconv.results import Change, Ratio
from repaconv.rewrites.fold.max_pool_padding import POOL_PADDING
from repaconv.rewrites.fold.shared_weights import UNSHARE
from repaconv.verification.evaluated_graph import Evaluated

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

    from repaconv.benchmark.interleaved_protocol import Measurement
    from repaconv.engines.contract import Feeds
    from repaconv.verification.onnx_model_loading import Folded

Refold = Callable[[tuple[str, ...]], "Folded"]
"""A function that folds the graph without the rewrites of these names."""


CORRECTIONS = frozenset({POOL_PADDING.name})
"""Rewrites that correct a graph; they are kept, whatever they cost."""


class Reverts(NamedTuple):
    """Names of the reverted rewrites, and a message about each."""

    names: tuple[str, ...] = ()
    messages: tuple[str, ...] = ()

    def with_revert(self, name: str, why: str) -> Reverts:
        """A copy with one more reverted rewrite."""
        return Reverts((*self.names, name), (*self.messages, f"{name}: reverted, because {why}"))


class Kept(NamedTuple):
    """What is kept of a fold: its graph, its changes, and what was reverted."""

    graph: Evaluated
    changes: Sequence[Change]
    reverts: Reverts = Reverts()


class FoldEvaluation(NamedTuple):
    """The evaluation of a fold: its rank (the lowest is best), and why it is not acceptable; empty if it is."""

    rank: Any
    why: str


def revert_harmful(fold: Kept, given: Evaluated, refold: Refold, judge: Callable[[Kept], FoldEvaluation]) -> Kept:
    """Revert rewrites one by one until the fold is acceptable; the original graph if no change remains, or none helps.

    Args:
        fold: The fold, without what is reverted already.
        given: The original graph.
        refold: Folds the graph again without some of the rewrites.
        judge: Evaluates a fold.
    """
    evaluation = judge(fold)
    while evaluation.why and (names := _revertible(fold)):
        tries = (refold_without(fold, name, refold, evaluation.why) for name in names)
        fold, evaluation = min(((one, judge(one)) for one in tries), key=lambda found: found[1].rank)
    harmful = evaluation.why and not all(change.rewrite in CORRECTIONS for change in fold.changes)
    changes = () if harmful else fold.changes
    return fold._replace(graph=fold.graph if changes else given, changes=changes)


def _revertible(fold: Kept) -> list[str]:
    """Names of the rewrites that may be reverted, and are not yet: what is made in spite of that, another one makes."""
    kept = CORRECTIONS.union(fold.reverts.names)
    return list(dict.fromkeys(change.rewrite for change in fold.changes if change.rewrite not in kept))


def refold_without(fold: Kept, name: str, refold: Refold, why: str) -> Kept:
    """Fold again without one more rewrite; ``why`` is the reason that is recorded."""
    reverts = fold.reverts.with_revert(name, why)
    return _kept(refold(reverts.names), reverts)


def _kept(fold: Folded, reverts: Reverts) -> Kept:
    return Kept(Evaluated(fold.model, in_float64=fold.in_float64), fold.changes, reverts)


# Size: revert rewrites that enlarge the graph; the rule is the same on every machine
#
# What counts is what the file holds: a weight that several layers share counts once. A fold is reverted if
# - it needs more multiplications;
# - its matrices grow by a larger factor than its multiplications shrink;
# - its parameters or nodes grow, and the product of multiplications, parameters and nodes grows, too;
# - none of the three shrinks.
# A shared weight is split into several only if the multiplications shrink by at least the same factor.


class Size(NamedTuple):
    """Size of a graph: multiply-accumulates of one image, numbers in matrices, all numbers, and nodes.

    A Transpose of the last two axes that only MatMuls read is not counted: they can read their matrix transposed.
    ``shares`` is how many more numbers the graph would hold if every product had its own matrix.
    """

    macs: int
    matrices: int
    numbers: int
    nodes: int
    shares: int = 0

    @property
    def weighed(self) -> int:
        """Product of multiplications, numbers and nodes, to compare relative changes; an unknown one counts as 1."""
        return max(self.macs, 1) * max(self.numbers, 1) * max(self.nodes, 1)

    @property
    def rank(self) -> tuple[int, ...]:
        """Sort key for folds with and without shared weights; the lowest is best."""
        return max(self.macs, 1) * max(self.matrices, 1), self.numbers, self.nodes


def revert_larger(fold: Kept, given: Evaluated, before: Evaluated, refold: Refold) -> Kept:
    """Revert what enlarges the graph; the original graph if no change remains.

    Args:
        fold: The fold with all rewrites.
        given: The original graph.
        before: The graph that is folded: the original, possibly converted to a newer opset.
        refold: Folds the graph again without some of the rewrites.
    """

    if not fold.changes:
        return fold
    at = _sizes_of_use(given)
    least = size_of(before, at)

    def judge(one: Kept) -> FoldEvaluation:
        size = size_of(one.graph, at)
        return FoldEvaluation(size, why_too_large(least, size))

    return revert_harmful(_revert_unsharing(fold, least, at, refold), given, refold, judge)


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
        return fold
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
    dearer = after.weighed > before.weighed
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
    found = graph.matrices
    counted = graph.macs(at)
    macs = known_macs(model) if counted is None else counted
    return Size(macs, found.held, graph.parameters, nodes, found.read - found.held)


def _is_read_by_matmuls_only(node: ir.Node) -> bool:
    """Whether a Transpose swaps the last two axes and is read only by MatMuls."""
    out = node.outputs[0]
    return swaps_last(node) and not out.is_graph_output() and {user.op_type for user in out.consumers()} == {"MatMul"}


# Speed: revert rewrites that make the graph slower than the original on this machine, measured in interleaved rounds
#
# A fold that is no slower in a short measurement is kept. A rewrite is reverted only if a long one shows a clear loss,
# and a second one, with the rewrite preset of the target, confirms it. So a noisy machine keeps what is faster. An
# inconclusive measurement reverts nothing.

LOSS = 0.98
"""A fold is reverted if the whole confidence interval of its speedup over the original is below this."""
LEAST_MS, LARGEST_MS = 2.0, 1500.0
"""Shortest and longest inference that is measured, in ms: a shorter one cannot be measured reliably within seconds, and
20 rounds of a longer one and its fold take more than a minute."""
SECONDS, ROUNDS = 2.0, (20, 30)
"""Fewer rounds than 20 are inconclusive (`repaconv.benchmark.measurement_quality.FEWEST`)."""
FIRST_ROUNDS, FIRST_LOADS = 8, 2
"""Rounds and session loads of a short measurement. A fold that is no slower in it is kept; most are."""
TARGET = "x86-64"
"""The target whose rewrite preset is measured; it stands for this machine."""


def fold_with_reverts(
    given: Evaluated,
    before: Evaluated,
    refold: Refold,
    *,
    measured: bool,
    progress: Progress,
    reverts: Reverts | None = None,
) -> Kept:
    """Fold the graph, and revert what makes it larger or, if ``measured``, slower.

    Args:
        given: The original graph.
        before: The graph that is folded: the original, possibly converted to a newer opset.
        refold: Folds the graph without some of the rewrites.
        measured: Whether its speed is measured.
        progress: See `Progress`.
        reverts: What is reverted from the start.
    """
    reverts = reverts or Reverts()
    found = refold(reverts.names)
    fold = _kept(found, reverts) if found.changes else Kept(given, (), reverts)
    fold = revert_larger(fold, given, before, refold)
    if not measured:
        return fold
    progress("measure", 0, 0)
    return revert_slower(fold, given, refold)


def revert_slower(fold: Kept, given: Evaluated, refold: Refold) -> Kept:
    """Revert what makes the graph slower here, measured in a few seconds; keep all of it if that is inconclusive.

    Args:
        fold: The fold, which is no larger than the original.
        given: The original graph.
        refold: Folds the graph again without some of the rewrites.
    """
    from repaconv.benchmark.machine_fingerprint import cpu_model

    call = _usual_inference(given.single) if fold.changes else None
    if call is None:
        return fold
    given.single.close()
    if _is_as_fast_at_first(given, fold.graph, call) or not _is_slower(_measured_speedup(given, fold.graph, call)):
        return fold
    where = str(cpu_model())

    def judge(one: Kept) -> FoldEvaluation:
        form = Evaluated(_with_target_preset(one.graph.model)) if one.changes else None
        return evaluate_speed(_measured_speedup(given, form, call) if form else None, where)

    return revert_harmful(fold, given, refold, judge)


def evaluate_speed(speed: Ratio | None, where: str) -> FoldEvaluation:
    """Evaluate a fold by its speedup over the original on a machine; None means inconclusive and is acceptable."""
    if speed is None:
        return FoldEvaluation(-1.0, "")
    slower = f"with it the graph is {_speed_message(speed)} the one given, measured on {where}"
    return FoldEvaluation(-speed.median, slower if _is_slower(speed) else "")


def _speed_message(found: Ratio) -> str:
    return f"{found.median:.2f} ({found.low:.2f} to {found.high:.2f}) of the speed of"


def _is_slower(found: Ratio | None) -> bool:
    return found is not None and found.high < LOSS


class _Inference(NamedTuple):
    """Inputs of one inference, and how many rounds of it are measured."""

    feeds: Feeds
    rounds: int


def _usual_inference(given: Evaluated) -> _Inference | None:
    """Inputs of a usual inference of the graph; None if it does not run or is too short or too long to be measured."""
    from repaconv.verification.probe_inputs import Unrunnable

    try:
        found = given.probes
        feeds = found.call(given.model, 0)
        given.session.run(feeds)
        begin = perf_counter()
        given.session.run(feeds)
    except (Unrunnable, RepaconvError):
        return None  # the verification reports why
    seconds = perf_counter() - begin
    rounds = min(max(int(SECONDS / 2 / seconds), ROUNDS[0]), ROUNDS[1])
    return _Inference(feeds, rounds) if LEAST_MS <= seconds * 1e3 <= LARGEST_MS else None


def _measured_speedup(given: Evaluated, folded: Evaluated, call: _Inference) -> Ratio | None:
    """Speedup of the folded graph over the original, from interleaved rounds.

    None if a graph does not run, the measurement is inconclusive, or the fastest inferences do not confirm a loss.
    """
    found = _measured(given, folded, call, call.rounds)
    if found is None:
        return None
    speed = found.ratio("folded", "given")
    return speed if speed.conclusive and (_fastest(found) < LOSS or not _is_slower(speed)) else None


def _is_as_fast_at_first(given: Evaluated, folded: Evaluated, call: _Inference) -> bool:
    """Whether a short measurement sees no loss at all, so that a long one need not look for one of more than 2%."""
    found = _measured(given, folded, call, FIRST_ROUNDS, FIRST_LOADS)
    return found is not None and min(_fastest(found), found.ratio("folded", "given").median) >= 1


def _measured(
    given: Evaluated, folded: Evaluated, call: _Inference, rounds: int, loads: int | None = None
) -> Measurement | None:
    """Both graphs in interleaved rounds, and in at most so many session loads; None if one does not run."""
    from repaconv.benchmark.interleaved_protocol import MOST_LOADS, Entrant, Protocol, measure
    from repaconv.verification.model_runners import load_onnx

    def loaded(graph: Evaluated) -> Callable[[], Any]:
        return partial(load_onnx(graph.single.model, timed=True).run, call.feeds)

    entrants = {"given": Entrant(partial(loaded, given)), "folded": Entrant(partial(loaded, folded))}
    try:
        return measure(entrants, Protocol(rounds, warmup_rounds=1, session_loads=loads or MOST_LOADS))
    except Exception:  # runtimes raise errors of many classes; the verification reports why
        return None


def _fastest(found: Measurement) -> float:
    """The ratio of the fastest inferences, given over folded."""
    return float(found.samples_ms["given"].min() / found.samples_ms["folded"].min())


def _with_target_preset(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph after the rewrites that this machine runs fastest."""
    from repaconv.graph.model_rewriting import rewritten
    from repaconv.rewrites.presets import chosen
    from repaconv.stages.shared.common_checks import default_rewrites, load_target

    device = load_target(TARGET)
    return rewritten(model, chosen(default_rewrites(device, "graph"), device.newest).rewrites)[0]
