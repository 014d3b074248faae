"""Whether a fold of a graph pays on this machine: it and the graph as given run by turns; what is slower is taken back.

Folds go by multiplications, memory and nodes, the same everywhere. This only takes back, where the loss is clear, and a
second look in the target's form says so, too; so that a noisy machine keeps what pays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from repaconv.artefacts import Change, Ratio
from repaconv.errors import RepaconvError
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

Refold = Callable[[tuple[str, ...]], tuple["onnx.ModelProto", list[Change]]]
"""The fold without the rewrites of these names, as it is run."""
Beside = Callable[["onnx.ModelProto"], Ratio | None]
"""A graph's speed beside that of the graph as given; None where that tells nothing."""


class TakenBack(NamedTuple):
    """Rewrites that do not pay, and what is told of them."""

    names: tuple[str, ...] = ()
    told: tuple[str, ...] = ()


class Kept(NamedTuple):
    """What stays of a fold: its graph, what it did, and what of it was taken back."""

    graph: Evaluated
    changes: Sequence[Change]
    back: TakenBack = TakenBack()


def what_pays(given: Evaluated, fold: Kept, refold: Refold) -> Kept:
    """What of a fold pays here, measured in a few seconds; all of it where that tells nothing.

    Args:
        given: The graph as given.
        fold: What is no larger than the graph.
        refold: Makes it without some of its rewrites.
    """
    single = given.single
    call = _call(single) if fold.changes else None
    if call is None or not _is_slower(_beside(single, fold.graph.single, call)):
        return fold

    def beside(model: onnx.ModelProto) -> Ratio | None:
        return _beside(single, Evaluated(_in_form(model)).single, call)

    gone = fold.back

    def again(names: tuple[str, ...]) -> tuple[onnx.ModelProto, list[Change]]:
        return refold((*gone.names, *names))

    back = without_losses(fold.changes, again, beside, _cpu())
    if not back.names:
        return fold
    model, changes = again(back.names)
    both = TakenBack((*gone.names, *back.names), (*gone.told, *back.told))
    return Kept(Evaluated(model) if changes else given, changes, both)


def without_losses(changes: Sequence[Change], refold: Refold, beside: Beside, where: str) -> TakenBack:
    """Leave out the rewrite without which it is fastest, until it is no slower than the graph as given.

    Args:
        changes: What the fold did.
        refold: Makes it without some of that.
        beside: How fast a graph is.
        where: On what machine.
    """
    names: tuple[str, ...] = ()
    told: tuple[str, ...] = ()
    found = beside(refold(names)[0])
    while changes and found is not None and _is_slower(found):
        tries = {name: refold((*names, name)) for name in dict.fromkeys(change.rewrite for change in changes)}
        speeds = {name: beside(model) if made else None for name, (model, made) in tries.items()}
        best = max(tries, key=lambda name: speed.median if (speed := speeds[name]) is not None else 1.0)
        names, changes = (*names, best), tries[best][1]
        told = (*told, f"{best}: taken back, as with it the graph is {_told(found)} the one given, measured on {where}")
        found = speeds[best]
    return TakenBack(names, told)


def _told(found: Ratio) -> str:
    return f"{found.median:.2f} ({found.low:.2f} to {found.high:.2f}) times as fast as"


def _is_slower(found: Ratio | None) -> bool:
    return found is not None and found.high < LOSS


def _call(given: Evaluated) -> Feeds | None:
    """A usual call of the graph, if it is long enough to be measured."""
    from repaconv.proof.probes import Unrunnable, drawn

    try:
        found = given.probes
        call = drawn(given.model, found.usual, 0, gain=found.gain, below=found.below)
        given.session.run(call)
        begin = perf_counter()
        given.session.run(call)
    except (Unrunnable, RepaconvError):
        return None  # the proof says why
    return call if (perf_counter() - begin) * 1e3 >= LEAST_MS else None


def _beside(given: Evaluated, other: Evaluated, call: Feeds) -> Ratio | None:
    """By turns; None where the graph does not run, or the fastest calls do not say the same as the median."""
    from repaconv.measure.protocol import measure
    from repaconv.measure.statistics import ratio

    try:
        begin = perf_counter()
        other.session.run(call)
        rounds = min(max(int(SECONDS / 2 / (perf_counter() - begin)), ROUNDS[0]), ROUNDS[1])
        calls = {"given": lambda: given.session.run(call), "folded": lambda: other.session.run(call)}
        samples = measure(calls, rounds=rounds, warmup_rounds=1, seed=0).samples_ms
    except Exception:  # the runtime's own, of many classes: the proof says so
        return None
    found = ratio("folded", samples["folded"], "given", samples["given"], seed=0)
    fastest = float(samples["given"].min() / samples["folded"].min())
    return found if fastest < LOSS or not _is_slower(found) else None


def _in_form(model: onnx.ModelProto) -> onnx.ModelProto:
    """As the machine at hand runs it fastest."""
    from repaconv.forms.choice import chosen
    from repaconv.graphs.graph import rewritten
    from repaconv.steps.common import load_target

    device = load_target(TARGET)
    return rewritten(model, chosen(device.form("graph"), device.newest_opset or device.opset).rewrites)[0]


def _cpu() -> str:
    from repaconv.measure.fingerprint import fingerprint

    return str(fingerprint(())["cpu"])
