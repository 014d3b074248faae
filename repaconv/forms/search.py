"""The search for the fastest form: what each rewrite does alone, then the best sums of it, ever longer measured.

Effects of rewrites on the logarithm of the time nearly add up, so measuring each alone tells which compositions are
worth measuring; those go through successive halving (Jamieson and Talwalkar 2016), the last with as many rounds as a
result needs. What multiplies more than the default form by `HOPELESS` is not measured at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

from repaconv.artefacts import Candidate, Ratio

Form = tuple[str, ...]
"""Names of rewrites, in their order."""
Measure = Callable[[Sequence[Form], int], Mapping[Form, Ratio]]
"""Rounds of these forms, interleaved with the default form, to their ratios against it; what is missing was left."""

HOPELESS = 1.3
"""Times the multiplications of the default form: GEMMs are most of the time."""
HARMLESS = -0.01
"""A rewrite whose effect alone is below this is in no composition."""
SCREENING, MIDDLE = 6, 12
"""Rounds of a rewrite alone and of a composition in the first rung."""
COMPOSITIONS, FINALISTS = 8, 3
PROMISING = 8
"""Rewrites of which all compositions are considered."""


def search(
    default: Form, rewrites: Sequence[str], work: Callable[[Form], int], measure: Measure, rounds: int
) -> list[Candidate]:
    """Every form that was considered, the winner first.

    Args:
        default: Where the search starts.
        rewrites: All that change this graph, in their order.
        work: Multiply-accumulates of a form.
        measure: See `Measure`.
        rounds: Of the finalists.
    """
    found: dict[Form, Candidate] = {default: Candidate(rewrites=default, expected=1.0, told="the default form")}
    singles = {name: _toggled(default, {name}, rewrites) for name in rewrites}
    limit = HOPELESS * work(default)
    for name, form in list(singles.items()):
        if work(form) > limit:
            found[form] = Candidate(rewrites=form, told=f"hopeless: {work(form) / work(default):.2f} times the MACs")
            del singles[name]
    alone = measure(list(singles.values()), min(SCREENING, rounds))
    _note(found, alone, min(SCREENING, rounds), "alone")
    effects = {name: math.log(alone[form].median) for name, form in singles.items() if form in alone}
    ranked = _compositions(default, effects, rewrites)
    for form, expected in ranked[COMPOSITIONS:]:
        found.setdefault(form, Candidate(rewrites=form, expected=expected, told="not among the best expected"))
    best = ranked[:COMPOSITIONS]
    for form, expected in best:
        known = found.get(form, Candidate(rewrites=form, told="left: the budget was spent"))
        found[form] = known.model_copy(update={"expected": expected})
    half = min(MIDDLE, rounds)
    middle = measure([form for form, _ in best], half)
    _note(found, middle, half, "composed")
    finalists = sorted(middle, key=lambda form: -middle[form].median)[:FINALISTS]
    last = measure(finalists, rounds)
    _note(found, last, rounds, "finalist")
    winner = max(last, key=lambda form: last[form].median, default=default)
    if winner not in last or last[winner].low <= 1:
        winner = default  # nothing is shown to be faster
    first = found.pop(winner)
    told = "the fastest" if winner != default else "the default form; nothing is shown to be faster"
    return [first.model_copy(update={"told": told}), *found.values()]


def every(default: Form, rewrites: Sequence[str], measure: Measure, rounds: int) -> list[Candidate]:
    """Every composition, fully measured, the fastest first; arguments as of `search`."""
    forms = [form for form in _all(default, rewrites, rewrites) if form != default]
    ratios = measure(forms, rounds)
    rows = [Candidate(rewrites=form, rounds=rounds, ratio=ratio, told="measured") for form, ratio in ratios.items()]
    rows.append(Candidate(rewrites=default, told="the default form"))
    return sorted(rows, key=lambda row: -(row.ratio.median if row.ratio else 1.0))


def _compositions(default: Form, effects: Mapping[str, float], order: Sequence[str]) -> list[tuple[Form, float]]:
    """Forms but the default one with what they should gain, the best first."""
    helpful = sorted((name for name in effects if effects[name] >= HARMLESS), key=lambda name: -effects[name])
    forms = [form for form in _all(default, helpful[:PROMISING], order) if form != default]
    expected = {form: math.exp(sum(effects[name] for name in set(form) ^ set(default))) for form in forms}
    return sorted(expected.items(), key=lambda pair: -pair[1])


def _all(default: Form, names: Sequence[str], order: Sequence[str]) -> list[Form]:
    toggles = [set(some) for count in range(len(names) + 1) for some in combinations(names, count)]
    return list(dict.fromkeys(_toggled(default, some, order) for some in toggles))


def _toggled(default: Form, names: set[str], order: Sequence[str]) -> Form:
    wanted = set(default) ^ names
    return tuple(name for name in order if name in wanted)


def _note(found: dict[Form, Candidate], ratios: Mapping[Form, Ratio], rounds: int, told: str) -> None:
    for form, ratio in ratios.items():
        known = found.get(form, Candidate(rewrites=form, told=told))
        found[form] = known.model_copy(update={"rounds": rounds, "ratio": ratio, "told": told})
