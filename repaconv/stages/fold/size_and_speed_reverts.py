"""What stays of a fold: the rewrite that does most harm is taken back, until none does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv.core.errors import RepaconvError
from repaconv.core.progress import Progress
from repaconv.graph.index_selections import swaps_last
from repaconv.graph.nodes_and_constants import nodes_of
from repaconv.results import Change, Ratio
from repaconv.rewrites.fold.max_pool_padding import POOL_PADDING
from repaconv.rewrites.fold.shared_weights import UNSHARE
from repaconv.verification.evaluated_graph import Evaluated

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

    from repaconv.engines.contract import Feeds

Refold = Callable[[tuple[str, ...]], tuple["onnx.ModelProto", Sequence[Change]]]
"""The fold without the rewrites of these names, as it is run."""


CURES = frozenset({POOL_PADDING.name})
"""Rewrites without which a graph comes out wrong: they stay, whatever they cost."""


class TakenBack(NamedTuple):
    """Names of rewrites, and what is told of them."""

    names: tuple[str, ...] = ()
    told: tuple[str, ...] = ()

    def with_(self, name: str, why: str) -> TakenBack:
        """One more."""
        return TakenBack((*self.names, name), (*self.told, f"{name}: reverted, because {why}"))


class Kept(NamedTuple):
    """What stays of a fold: its graph, what it did, and what of it was taken back."""

    graph: Evaluated
    changes: Sequence[Change]
    back: TakenBack = TakenBack()


class Judged(NamedTuple):
    """Of a fold: its rank among others, the least is best, and why it may not stay; empty where it may."""

    rank: Any
    why: str


def without_harm(fold: Kept, given: Evaluated, refold: Refold, judge: Callable[[Kept], Judged]) -> Kept:
    """The fold without what may not stay; the graph as given where nothing is left of it.

    Args:
        fold: All of it, but for what is taken back already.
        given: The graph as given.
        refold: Makes it without some of its rewrites.
        judge: Says whether one may stay.
    """
    judged = judge(fold)
    while judged.why and (names := _harmful(fold)):
        tries = [without(fold, name, refold, judged.why) for name in names]
        fold, judged = min(((one, judge(one)) for one in tries), key=lambda found: found[1].rank)
    return fold if fold.changes else fold._replace(graph=given)


def _harmful(fold: Kept) -> list[str]:
    """Names of what may be taken back."""
    return list(dict.fromkeys(change.rewrite for change in fold.changes if change.rewrite not in CURES))


def without(fold: Kept, name: str, refold: Refold, why: str) -> Kept:
    """The fold without one more rewrite; ``why`` it is taken back."""
    back = fold.back.with_(name, why)
    model, changes = refold(back.names)
    return Kept(Evaluated(model), changes, back)


# --- Whether a fold leaves the graph smaller: rewrites that in sum enlarge it are taken back, the same on every
# machine.
#
# What counts is what the file holds: a weight that several layers share counts once. A fold never multiplies more. Its
# matrices are larger only where they save a greater share of the multiplications; numbers and nodes are more only where
# that saves a greater share of the others. A weight that was shared is several weights only where that multiplies less
# in the same proportion. And where none of the three is fewer, nothing was gained: the graph stays as it was given,
# unless it comes out wrong as it is.


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
        return "it removes no multiplications, parameters or nodes"
    dearer = after.weighed > before.weighed
    if after.numbers > before.numbers and dearer:
        return f"with it the graph holds {after.numbers:,} numbers, not {before.numbers:,}"
    if after.nodes > before.nodes and dearer:
        return f"with it the graph has {after.nodes:,} nodes, not {before.nodes:,}"
    return ""


def size_of(graph: Evaluated) -> Size:
    """What is not known of its shapes counts as nothing."""
    from repaconv.graph.compute_costs import macs_in, matrices, parameters

    model = graph.settled
    nodes = len(graph.model.graph.node) - sum(map(_in_products, nodes_of(model, "Transpose")))
    found = matrices(graph.stored)
    return Size(macs_in(model), found.held, parameters(graph.stored), nodes, found.read - found.held)


def _in_products(node: ir.Node) -> bool:
    """Whether a Transpose is of the last two axes, and only products read it."""
    out = node.outputs[0]
    return swaps_last(node) and not out.is_graph_output() and {user.op_type for user in out.consumers()} == {"MatMul"}


# --- Whether a fold of a graph pays on this machine: it and the graph as given run by turns; what is slower is taken
# back.
#
# Folds go by multiplications, memory and nodes, the same everywhere. This only takes back, where the loss is clear, and
# a second look in the target's form says so, too; so that a noisy machine keeps what pays.

LOSS = 0.98
"""Times as fast as the graph as given, below which the whole interval lies where a fold is taken back."""
LEAST_MS = 2.0
"""A call that takes less says nothing within seconds."""
SECONDS, ROUNDS = 2.0, (6, 30)
TARGET = "x86-64"
"""Whose form is measured: that of the machine at hand."""


def worthwhile(given: Evaluated, before: Evaluated, refold: Refold, *, measured: bool, progress: Progress) -> Kept:
    """What stays of a fold: what leaves the graph no larger and, if that is measured, no slower.

    Args:
        given: The graph as given.
        before: What is folded: the same, of a newer opset perhaps.
        refold: Folds it, without some of the rewrites.
        measured: Whether it is run.
        progress: See `Progress`.
    """
    model, changes = refold(())
    fold = no_larger(Kept(Evaluated(model) if changes else given, changes), given, before, refold)
    if not measured:
        return fold
    progress("measure", 0, 0)
    return what_pays(fold, given, refold)


def what_pays(fold: Kept, given: Evaluated, refold: Refold) -> Kept:
    """What of a fold pays here, measured in a few seconds; all of it where that tells nothing.

    Args:
        fold: What is no larger than the graph.
        given: The graph as given.
        refold: Makes it without some of its rewrites.
    """
    from repaconv.benchmark.machine_fingerprint import cpu_model

    call = _call(given.single) if fold.changes else None
    if call is None:
        return fold
    given.single.close()
    if not _is_slower(_beside(given, fold.graph, call)):
        return fold
    where = str(cpu_model())

    def judge(one: Kept) -> Judged:
        form = Evaluated(_in_form(one.graph.model)) if one.changes else None
        return judged(_beside(given, form, call) if form else None, where)

    return without_harm(fold, given, refold, judge)


def judged(speed: Ratio | None, where: str) -> Judged:
    """A fold by its speed beside that of the graph as given, on some machine; None where that tells nothing."""
    if speed is None:
        return Judged(-1.0, "")
    slower = f"with it the graph is {_told(speed)} the one given, measured on {where}"
    return Judged(-speed.median, slower if _is_slower(speed) else "")


def _told(found: Ratio) -> str:
    return f"{found.median:.2f} ({found.low:.2f} to {found.high:.2f}) of the speed of"


def _is_slower(found: Ratio | None) -> bool:
    return found is not None and found.high < LOSS


class _Call(NamedTuple):
    """Inputs, and how many rounds of it say something in a few seconds."""

    feeds: Feeds
    rounds: int


def _call(given: Evaluated) -> _Call | None:
    """A usual call of the graph, if it is long enough to be measured."""
    from repaconv.verification.probe_inputs import Unrunnable

    try:
        found = given.probes
        feeds = found.call(given.model, 0)
        given.session.run(feeds)
        begin = perf_counter()
        given.session.run(feeds)
    except (Unrunnable, RepaconvError):
        return None  # the proof says why
    seconds = perf_counter() - begin
    rounds = min(max(int(SECONDS / 2 / seconds), ROUNDS[0]), ROUNDS[1])
    return _Call(feeds, rounds) if seconds * 1e3 >= LEAST_MS else None


def _beside(given: Evaluated, folded: Evaluated, call: _Call) -> Ratio | None:
    """By turns; None where the graph does not run, or the fastest calls do not say the same as the median."""
    from repaconv.benchmark.interleaved_protocol import anew, measure_anew
    from repaconv.benchmark.latency_statistics import ratio
    from repaconv.verification.model_runners import load_onnx

    def loaded(graph: Evaluated) -> Callable[[], Any]:
        return partial(load_onnx(graph.single.model, timed=True).run, call.feeds)

    openings = anew({"given": partial(loaded, given), "folded": partial(loaded, folded)})
    try:
        found = measure_anew(openings, rounds=call.rounds, warmup_rounds=1, seed=0)
    except Exception:  # the runtime's own, of many classes: the proof says so
        return None
    samples = found.samples_ms
    speed = ratio("folded", samples["folded"], "given", samples["given"], 0, found.openings)
    fastest = float(samples["given"].min() / samples["folded"].min())
    return speed if fastest < LOSS or not _is_slower(speed) else None


def _in_form(model: onnx.ModelProto) -> onnx.ModelProto:
    """As the machine at hand runs it fastest."""
    from repaconv.graph.model_rewriting import rewritten
    from repaconv.rewrites.presets import chosen
    from repaconv.stages.shared.common_checks import load_target, usual_form

    device = load_target(TARGET)
    return rewritten(model, chosen(usual_form(device, "graph"), device.newest).rewrites)[0]
