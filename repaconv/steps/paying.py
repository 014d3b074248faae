"""Whether a fold of a graph pays on this machine: it and the graph as given run by turns; what is slower is taken back.

Folds go by multiplications, memory and nodes, the same everywhere. This only takes back, where the loss is clear, and a
second look in the target's form says so, too; so that a noisy machine keeps what pays.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv.artefacts import Ratio
from repaconv.errors import RepaconvError
from repaconv.progress import Progress
from repaconv.steps.growing import no_larger
from repaconv.steps.taken_back import Judged, Kept, Refold, without_harm
from repaconv.subjects.evaluated import Evaluated

if TYPE_CHECKING:
    import onnx

    from repaconv.engines.contract import Feeds

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
    from repaconv.measure.fingerprint import cpu_model

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
    from repaconv.proof.probes import Unrunnable

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
    from repaconv.measure.protocol import anew, measure_anew
    from repaconv.measure.statistics import ratio
    from repaconv.proof.runners import load_onnx

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
    from repaconv.forms.choice import chosen
    from repaconv.graphs.graph import rewritten
    from repaconv.steps.common import load_target, usual_form

    device = load_target(TARGET)
    return rewritten(model, chosen(usual_form(device, "graph"), device.newest).rewrites)[0]
