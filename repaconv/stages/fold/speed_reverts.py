"""Revert rewrites that make the folded graph slower than the original on this machine, measured in interleaved rounds.

A fold that is no slower in a short measurement is kept. A rewrite is reverted only if a long one shows a clear loss,
and a second one, with the rewrite preset of the target, confirms it. A noisy machine therefore keeps rewrites that are
faster. An inconclusive measurement reverts nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv.core.errors import RepaconvError
from repaconv.core.memory_release import release_freed_memory
from repaconv.core.progress import Progress
from repaconv.results import Ratio
from repaconv.sources.fold_size_reverts import FoldEvaluation, Kept, Refold, Reverts, fold_no_larger, revert_harmful
from repaconv.verification.graph_with_cached_outputs import Evaluated

if TYPE_CHECKING:
    import onnx

    from repaconv.benchmark.interleaved_protocol import Measurement
    from repaconv.engines.contract import Feeds
    from repaconv.graph.graph_without_weights import Numbers

SLOWER_SPEEDUP = 0.98
"""A fold is reverted if the whole confidence interval of its speedup over the original is below this."""
LEAST_MS, LARGEST_MS = 2.0, 1500.0
"""Shortest and longest inference that is measured, in ms: a shorter one cannot be measured reliably within seconds, and
20 rounds of a longer one and its fold take more than a minute."""
SECONDS, ROUNDS = 2.0, (20, 30)
"""Fewer rounds than 20 are inconclusive (`repaconv.benchmark.measurement_quality.FEWEST_ROUNDS`)."""
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
    fold = fold_no_larger(given, before, refold, reverts or Reverts())
    if not measured:
        return fold
    progress("measure the speed", 0, 0)
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

    def evaluate(one: Kept) -> FoldEvaluation:
        rewritten_fold = Evaluated(_with_target_preset(one.graph.model)) if one.changes else None
        speed = _measured_speedup(given, rewritten_fold, call) if rewritten_fold else None
        return evaluate_speed(speed, where)

    return revert_harmful(fold, given, refold, evaluate)


def evaluate_speed(speed: Ratio | None, where: str) -> FoldEvaluation:
    """Evaluate a fold by its speedup over the original on a machine; None means inconclusive and is acceptable."""
    if speed is None:
        return FoldEvaluation(-1.0, "")
    slower = f"with it the graph runs at {_speed_message(speed)} the original's speed, measured on {where}"
    return FoldEvaluation(-speed.median, slower if _is_slower(speed) else "")


def _speed_message(found: Ratio) -> str:
    return f"{found.median:.2f}x ({found.low:.2f}x to {found.high:.2f}x)"


def _is_slower(found: Ratio | None) -> bool:
    return found is not None and found.high < SLOWER_SPEEDUP


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
    return speed if speed.conclusive and (_fastest(found) < SLOWER_SPEEDUP or not _is_slower(speed)) else None


def _is_as_fast_at_first(given: Evaluated, folded: Evaluated, call: _Inference) -> bool:
    """Whether a short measurement shows no loss at all, so that no long one is needed to find a loss of over 2%."""
    found = _measured(given, folded, call, FIRST_ROUNDS, FIRST_LOADS)
    return found is not None and min(_fastest(found), found.ratio("folded", "given").median) >= 1


def _measured(
    given: Evaluated, folded: Evaluated, call: _Inference, rounds: int, loads: int | None = None
) -> Measurement | None:
    """Measure both graphs in interleaved rounds; None if one does not run."""
    from repaconv.benchmark.interleaved_protocol import MOST_LOADS, Entrant, Protocol, measure
    from repaconv.verification.model_runners import load_onnx, weights_in_file

    def load(model: onnx.ModelProto, weights: Path | Numbers) -> Callable[[], Any]:
        release_freed_memory()  # of the sessions before
        return partial(load_onnx(model, weights, timed=True).run, call.feeds)

    try:
        with weights_in_file(given.single.model) as one, weights_in_file(folded.single.model) as other:
            entrants = {"given": Entrant(partial(load, *one)), "folded": Entrant(partial(load, *other))}
            return measure(entrants, Protocol(rounds, warmup_rounds=1, session_loads=loads or MOST_LOADS))
    except Exception:  # runtimes raise errors of many classes; the verification reports why
        return None


def _fastest(found: Measurement) -> float:
    """The ratio of the fastest inferences, given over folded."""
    return float(found.samples_ms["given"].min() / found.samples_ms["folded"].min())


def _with_target_preset(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph after the default rewrites of `TARGET`."""
    from repaconv.graph.models_in_onnx_ir import rewritten
    from repaconv.rewrites.presets import chosen
    from repaconv.stages.shared.target_lookup import default_rewrites, load_target

    device = load_target(TARGET)
    return rewritten(model, chosen(default_rewrites(device, "graph"), device.newest).rewrites)[0]
