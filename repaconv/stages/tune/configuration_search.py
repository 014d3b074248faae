"""The search for the fastest deployment: what each change does alone, then the best sums of them, ever longer measured.

An arm is a runtime in a precision. Arms that are far behind in their default form, or lose more than is allowed, are
left; in place of one that loses too much come such that leave ever more of its layers in float32, the fastest allowed
one stays. In those arms, effects of rewrites on the logarithm of the time nearly add up, so measuring each alone tells
which compositions are worth measuring; those, and then settings on the best of them, go through successive halving
(Jamieson and Talwalkar 2016) across all arms, the last with as many rounds as a result needs. What multiplies more than
the arm's default form by `HOPELESS` is not measured at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

from repaconv.results import Candidate, Deployment, Ratio

Form = tuple[str, ...]
"""Names of rewrites, in their order."""
Measure = Callable[[Sequence[Deployment], int], Mapping[Deployment, Ratio]]
"""Rounds of these, interleaved with the baseline, to their ratios against it; what is missing was left."""
Work = Callable[[Deployment], int]
"""Multiply-accumulates."""
Allowed = Callable[[Deployment], bool]
"""Whether it loses no more than is allowed; what is exact loses nothing."""

HOPELESS = 1.3
"""Times the multiplications of the default form: GEMMs are most of the time."""
HARMLESS = -0.01
"""A rewrite whose effect alone is below this is in no composition."""
BEHIND = 0.75
"""Of the best arm's speed, what an arm must have before it is searched: rewrites and settings won at most a third."""
SCREENING, MIDDLE = 6, 12
"""Rounds of a change alone, and of a composition or a setting."""
COMPOSITIONS, FINALISTS = 8, 3
PROMISING = 8
"""Rewrites of which all compositions are considered."""


class Arm(NamedTuple):
    """A runtime in a precision, with some layers in float32 or none.

    Attributes:
        start: Its default form and settings.
        rewrites: All that change its graph, in their order.
        tries: Other values of a deployment's fields, worth measuring each alone.
    """

    start: Deployment
    rewrites: tuple[str, ...] = ()
    tries: tuple[Mapping[str, Any], ...] = ()

    def toggled(self, names: set[str]) -> Deployment:
        """Its start with these rewrites more or less."""
        wanted = set(self.start.rewrites) ^ names
        return self.start.model_copy(update={"rewrites": tuple(name for name in self.rewrites if name in wanted)})


Milder = Callable[[Arm], Sequence[Arm]]
"""Those in place of one that loses too much: with more in float32."""


def _none(_arm: Arm) -> Sequence[Arm]:
    return ()


def search(
    arms: Sequence[Arm], work: Work, measure: Measure, allowed: Allowed, rounds: int, milder: Milder = _none
) -> list[Candidate]:
    """Every deployment that was considered, the winner first.

    Args:
        arms: The first one's start is the baseline, against which all is measured.
        work: See `Work`.
        measure: See `Measure`.
        allowed: See `Allowed`.
        rounds: Of the finalists.
        milder: See `Milder`.
    """
    few, half = min(SCREENING, rounds), min(MIDDLE, rounds)
    rows = _Rows(arms[0].start, measure)
    rows.screened(arms, few)
    alive = _alive(arms, rows, allowed, lambda arm: rows.screened(milder(arm), few))
    alone = {arm.start: _alone(arm, work, rows) for arm in alive}
    rows.measured([each for singles in alone.values() for each in singles.values()], few, "alone")
    composed = [each for arm in alive for each in _composed(arm, alone[arm.start], rows)]
    best = rows.measured([*(arm.start for arm in alive), *composed], half, "composed")
    tried = {arm.start: _tried(arm, best, composed, rows) for arm in alive}
    best |= rows.measured([each for several in tried.values() for each in several], half, "another setting")
    together = [each for several in tried.values() for each in _together(several, rows)]
    best |= rows.measured(together, half, "settings together")
    return rows.decided(_finalists(best, allowed), rounds)


def every(
    arms: Sequence[Arm], measure: Measure, allowed: Allowed, rounds: int, milder: Milder = _none
) -> list[Candidate]:
    """Every composition of rewrites with every one of its arm's tries; arguments as of `search`."""
    rows = _Rows(arms[0].start, measure)
    arms = [other for arm in arms for other in (arm, *milder(arm))]
    forms = [(arm, arm.toggled(names)) for arm in arms for names in _subsets(arm.rewrites)]
    wanted = [form.model_copy(update=dict(each)) for arm, form in forms for each in ({}, *arm.tries)]
    found = rows.measured(wanted, min(MIDDLE, rounds), "measured")
    return rows.decided(_finalists(found, allowed), rounds)


@dataclass
class _Rows:
    """What is known of all that was considered."""

    baseline: Deployment
    measure: Measure
    found: dict[Deployment, Candidate] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.found[self.baseline] = Candidate(deployment=self.baseline, expected=1.0, description="the baseline")

    def measured(self, wanted: Iterable[Deployment], rounds: int, told: str) -> dict[Deployment, float]:
        """Measure, and remember; how many times as fast as the baseline those are of which that is known."""
        asked = [each for each in dict.fromkeys(wanted) if each != self.baseline]
        for each, ratio in self.measure(asked, rounds).items():
            self.say(each, rounds=rounds, ratio=ratio, description=told)
        return {each: self.gain(each) for each in asked if self.found.get(each) and self.found[each].ratio}

    def screened(self, arms: Sequence[Arm], rounds: int) -> Sequence[Arm]:
        """These, each measured in its default form."""
        self.measured([arm.start for arm in arms], rounds, "measured with the default preset")
        return arms

    def say(self, deployment: Deployment, **more: Any) -> None:
        known = self.found.get(deployment, Candidate(deployment=deployment, description="left: the budget was spent"))
        self.found[deployment] = known.model_copy(update=more)

    def gain(self, deployment: Deployment) -> float:
        """How many times as fast as the baseline; 0 where that is not known."""
        ratio = self.found[deployment].ratio if deployment in self.found else None
        return 1.0 if deployment == self.baseline else ratio.median if ratio else 0.0

    def decided(self, finalists: Sequence[Deployment], rounds: int) -> list[Candidate]:
        """All of them, the fastest first that is shown to be faster than the baseline; else that."""
        self.measured(finalists, rounds, "finalist")
        shown = [each for each in finalists if (ratio := self.found[each].ratio) and ratio.low > 1]
        winner = max(shown, key=self.gain, default=self.baseline)
        best = self.found[winner].ratio
        taken = "the fastest" if best is None or best.conclusive else "taken; its measurement is not conclusive"
        self.say(winner, description=taken if shown else "the baseline; nothing is shown to be better")
        return [self.found.pop(winner), *self.found.values()]


def _alive(arms: Sequence[Arm], rows: _Rows, allowed: Allowed, milder: Milder) -> list[Arm]:
    """Those to search in, the fastest first; the fastest exact one in any case, which says what a loss buys."""
    found: list[Arm] = []
    waiting = list(arms)
    while waiting:
        waiting.sort(key=lambda arm: -rows.gain(arm.start))
        arm = waiting.pop(0)
        gain, first_exact = rows.gain(arm.start), _exact(arm) and not any(map(_exact, found))
        behind = bool(found) and gain < BEHIND * rows.gain(found[0].start)
        if not gain:
            rows.say(arm.start)
        elif behind and not first_exact:
            rows.say(arm.start, description="much slower with the default preset")
        elif any(_own(arm.start) == _own(other.start) for other in found):
            rows.say(arm.start, description="not better than another that is like it")
        elif allowed(arm.start):
            found.append(arm)
        else:
            waiting += milder(arm)
    return found


def _own(way: Deployment) -> tuple[str, str, str]:
    """Which runtime in which precision."""
    return way.target, way.runtime, way.precision


def _exact(arm: Arm) -> bool:
    return arm.start.precision == "fp32"


def _alone(arm: Arm, work: Work, rows: _Rows) -> dict[str, Deployment]:
    """The start with one rewrite more or less, by its name, but for the hopeless."""
    singles = {name: arm.toggled({name}) for name in arm.rewrites}
    usual = work(arm.start)
    for name, each in list(singles.items()):
        if work(each) > HOPELESS * usual:
            rows.say(each, description=f"hopeless: {work(each) / usual:.2f} times the MACs")
            del singles[name]
    return singles


def _composed(arm: Arm, singles: Mapping[str, Deployment], rows: _Rows) -> list[Deployment]:
    """The compositions that should gain most, by the sums of what each rewrite does alone."""
    start = rows.gain(arm.start)
    effects = {name: math.log(gain / start) for name, each in singles.items() if (gain := rows.gain(each))}
    helpful = sorted((name for name in effects if effects[name] >= HARMLESS), key=lambda name: -effects[name])
    sets = [names for names in _subsets(helpful[:PROMISING]) if names]
    sums = {arm.toggled(names): sum(effects[name] for name in names) for names in sets}
    ranked = sorted(sums, key=lambda each: -sums[each])
    for place, each in enumerate(ranked):
        told = {} if place < COMPOSITIONS or each in rows.found else {"description": "not among the best expected"}
        if each != rows.baseline:
            rows.say(each, expected=start * math.exp(sums[each]), **told)
    return ranked[:COMPOSITIONS]


def _tried(
    arm: Arm, best: Mapping[Deployment, float], composed: Sequence[Deployment], rows: _Rows
) -> dict[Deployment, tuple[Deployment, Mapping[str, Any]]]:
    """The arm's best form with each of its tries: from which, and what is other."""
    forms = [arm.start, *(each for each in composed if _own(each) == _own(arm.start))]
    form = max(forms, key=lambda each: best.get(each, rows.gain(each)))
    return {form.model_copy(update=dict(each)): (form, each) for each in arm.tries}


def _together(tried: Mapping[Deployment, tuple[Deployment, Mapping[str, Any]]], rows: _Rows) -> list[Deployment]:
    """What helped alone, all at once, where it is several; of two values of a field, settings add, else the faster."""
    helped = sorted((each for each, (form, _) in tried.items() if rows.gain(each) > rows.gain(form)), key=rows.gain)
    if len(helped) < 2:
        return []
    form = tried[helped[0]][0]
    changed: dict[str, Any] = {}
    for each in helped:
        settings = (*changed.get("settings", form.settings), *tried[each][1].get("settings", ()))
        changed |= {**tried[each][1], "settings": settings}
    return [form.model_copy(update=changed)]


def _finalists(found: Mapping[Deployment, float], allowed: Allowed) -> list[Deployment]:
    """The fastest that are allowed, and the fastest exact one, which says what the loss buys."""
    ranked = sorted(found, key=lambda each: -found[each])
    kept: list[Deployment] = []
    for each in ranked:
        if len(kept) < FINALISTS and allowed(each):
            kept.append(each)
    exact = [each for each in ranked if each.precision == "fp32"]
    return list(dict.fromkeys([*kept, *exact[:1]]))


def _subsets(names: Sequence[str]) -> list[set[str]]:
    return [set(some) for count in range(len(names) + 1) for some in combinations(names, count)]
