"""The search for the fastest configuration: which configurations are measured when, and in how many rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple, Protocol

from repaconv.results import Candidate, Deployment, Ratio
from repaconv.stages.tune.speed_prediction import ROUND_NOISE, Observation, Predictor, observed

# The search
#
# A trial is a runtime in a precision. The configurations of all trials, with all their rewrites and settings, compete:
#
# - Each has a predicted speedup (`speed_prediction`). The one with the largest expected improvement on the best one, in
#   relation to its cost, is measured next (Jones, Schonlau and Welch 1998), with a few others. Configurations without
#   an expected improvement are not measured.
# - The loss of a lower precision is evaluated only when it is the fastest configuration so far. If it is too large, the
#   trial is replaced by variants that keep more layers in FP32, if they can still win.
# - The best configurations are measured in more and more rounds (successive halving, Jamieson and Talwalkar 2016), the
#   finalists in as many as a result needs. Time for these measurements, and for evaluating their winner, is set aside
#   from the start. If it is too short for all of them, the result is a configuration that was evaluated already.


class Measured(NamedTuple):
    """A speedup over the baseline and its number of rounds; an earlier measurement may have more than requested."""

    ratio: Ratio
    rounds: int


Measure = Callable[[Sequence[Deployment], int], Mapping[Deployment, Measured]]
"""Measures configurations with the baseline in this many rounds; returns their speedups, without skipped ones."""
Work = Callable[[Deployment], int]
"""Multiply-accumulates."""
Allowed = Callable[[Deployment], bool]
"""Whether a configuration's loss is within the budget; FP32 always is."""

MAX_RELATIVE_MACS = 1.3
"""Limit of the MACs relative to the default preset: GEMMs take most of the time."""
LEAST_IMPROVEMENT = 0.003
"""Expected improvement (log of the speedup) below which a configuration is not measured."""
LEAST_EFFECT = 0.001
"""Smallest predicted effect (log of the speedup) of a change that is combined with others."""
FEWEST, FIRST, MIDDLE = 3, 6, 12
"""Rounds of a measurement when little time is left or inferences are slow, of a first measurement, and of the one that
chooses finalists."""
FIRST_SHARE = 0.1
"""Largest share of the time that a first measurement of one configuration may take; above it, inferences are slow."""
GROUP, SEMIFINALISTS, FINALISTS = 6, 6, 3
"""Number of configurations that are measured together, and that are measured again as semifinalists and finalists."""
SIMILAR_WORTH = 0.4
"""A configuration joins a group if its improvement per cost is at least this share of the first one's."""
LEAST_COST_S = 0.5
"""Least cost of a measurement, so that an improvement can be divided by it."""
CLEARLY_LARGER = 0.1
"""If there is no time to measure both of two configurations, the one whose expected improvement (log of the speedup) is
larger by this is measured, although the other one improves more per second."""
FINAL_SHARE, LARGEST_FINAL_SHARE = 0.15, 0.4
"""Largest share of the time that is set aside for the last measurements, and for one of them if inferences are slow."""
EXACT_SHARE = 0.1
"""Largest share of the time that FP32 trials keep for their first measurements."""
LAST_COST = 1.2
"""Factor on the expected time of the last measurements: nothing after them can make up for an estimate that was too
low."""
GROUP_SHARE = 0.5
"""Largest share of the other time that one group may take: expected costs may be too low, and are corrected after each
group."""


class SpeedSource(Protocol):
    """Where speedups come from: this machine, a worker, or a recorded search.

    Attributes:
        cut: Set by the search if it skipped something for lack of time.
    """

    cut: bool

    def measure(self, deployments: Sequence[Deployment], rounds: int) -> Mapping[Deployment, Measured]:
        """See `Measure`."""
        ...

    def known(self) -> Sequence[Deployment]:
        """Earlier measurements for weights of the same shapes."""
        ...

    def predicted_s(self, deployments: Sequence[Deployment], rounds: int, *, written: bool = False) -> float:
        """Seconds that measuring them is expected to take, 0 if all are known; without writing graphs if `written`."""
        ...

    def evaluation_s(self, deployment: Deployment) -> float:
        """Seconds that running it on the validation split is expected to take."""
        ...

    def variants_s(self, deployment: Deployment) -> float:
        """Seconds that `Fp32Variants` of its trial are expected to take, before any of them is measured."""
        ...

    def left_s(self) -> float:
        """Seconds that are left."""
        ...


class Trial(NamedTuple):
    """A trial: a runtime in a precision, possibly with some layers kept in FP32.

    Attributes:
        start: Its configuration with the default preset and settings.
        rewrites: All rewrites that change its graph, in the order of their application.
        tries: Other values of fields of `Deployment`; each is measured alone.
    """

    start: Deployment
    rewrites: tuple[str, ...] = ()
    tries: tuple[Mapping[str, Any], ...] = ()

    def toggled(self, names: set[str], of: Deployment | None = None) -> Deployment:
        """A configuration (the start if None) with these rewrites switched: the present are removed, others added."""
        of = of or self.start
        wanted = set(of.rewrites) ^ names
        return of.model_copy(update={"rewrites": tuple(name for name in self.rewrites if name in wanted)})

    def has(self, one: Deployment) -> bool:
        """Whether a configuration is one of this trial's."""
        free = {name: getattr(self.start, name) for name in ("rewrites", "settings", "threads", "streams", "batch")}
        return one.model_copy(update=free) == self.start and set(one.rewrites) <= set(self.rewrites)

    def neighbors(self, of: Deployment) -> list[Deployment]:
        """The configurations with one rewrite or one setting changed."""
        changed = [self.toggled({name}, of) for name in self.rewrites]
        for fields in self.tries:
            settings = dict.fromkeys((*of.settings, *fields.get("settings", ())))
            update = {**fields, "settings": tuple(settings)}
            changed.append(of.model_copy(update=update))
        changed += [
            of.model_copy(update={"settings": tuple(s for s in of.settings if s != one)}) for one in of.settings
        ]
        return [each for each in changed if each != of]


Fp32Variants = Callable[[Trial], Sequence[Trial]]
"""The variants of a trial whose loss is too large: they keep more layers in FP32."""


def _no_variants(_trial: Trial) -> Sequence[Trial]:
    return ()


def search(
    trials: Sequence[Trial],
    work: Work,
    source: SpeedSource,
    allowed: Allowed,
    rounds: int,
    milder: Fp32Variants = _no_variants,
    records: Sequence[Observation] = (),
) -> list[Candidate]:
    """Search for the fastest allowed configuration; returns every configuration considered, the winner first.

    Args:
        trials: The trials; the start of the first one is the baseline of all measurements.
        work: MACs of a configuration; see `Work`.
        source: Measures configurations.
        allowed: Whether a loss is within the budget; see `Allowed`.
        rounds: Rounds of the finalists.
        milder: Variants with more layers in FP32; see `Fp32Variants`.
        records: What is known of other networks on CPUs of this ISA level.
    """
    rows = _Rows(trials[0].start, source.measure)
    one = _Search(list(trials), work, source, allowed, rounds, milder, records, rows)
    one.explore(exact=False)
    one.explore(exact=True)
    return one.finished()


def search_exhaustively(
    trials: Sequence[Trial],
    source: SpeedSource,
    allowed: Allowed,
    rounds: int,
    milder: Fp32Variants = _no_variants,
) -> list[Candidate]:
    """Measure every combination of rewrites with each of the trial's other settings; arguments as for `search`.

    Time is set aside for the last measurements, and for evaluating what they choose on both splits. At least one
    configuration is measured if there is any time, so that repeating the search completes it.
    """
    rows = _Rows(trials[0].start, source.measure)
    most_s = LARGEST_FINAL_SHARE * source.left_s()

    def end_s(found: Mapping[Deployment, float]) -> float:
        """Seconds set aside after these measurements."""
        finalists = _finalists(_fastest_first(found), lambda _: True)
        final_s = min(source.predicted_s(finalists, rounds, written=True), most_s)
        return final_s + _decision_s(finalists, source.evaluation_s, rows.baseline, evaluations=2)

    def in_time(each: Deployment) -> bool:
        """Whether a configuration is allowed, and there is time to evaluate it and to decide on the test split."""
        if each.precision == "fp32":
            return True
        final_s = min(source.predicted_s([each], rounds, written=True), most_s)
        enough = final_s + _decision_s([each], source.evaluation_s, rows.baseline, evaluations=2) < source.left_s()
        source.cut |= not enough
        return enough and allowed(each)

    trials = [other for trial in trials for other in (trial, *milder(trial))]
    forms = [(trial, trial.toggled(names)) for trial in trials for names in _subsets(trial.rewrites)]
    every = [form.model_copy(update=dict(each)) for trial, form in forms for each in ({}, *trial.tries)]
    first = min(MIDDLE, rounds)
    known = set(source.known())
    found = rows.measured([each for each in every if each in known], first, "measured")
    wanted = [each for each in dict.fromkeys(every) if each not in found and each != rows.baseline]
    begun = False
    while wanted:
        some = wanted[:GROUP]
        while some and source.predicted_s(some, first) + end_s(found) >= source.left_s():
            some = some[: len(some) // 2]
        if not some and (begun or source.left_s() <= 0):
            source.cut = True
            break
        some = some or wanted[:1]
        found |= rows.measured(some, first, "measured")
        wanted, begun = wanted[len(some) :], True
    finalists = _finalists(_fastest_first(found), in_time)
    left_s = source.left_s() - _decision_s(finalists, source.evaluation_s, rows.baseline)
    fewer = (count for count in (rounds, rounds // 2, MIDDLE) if source.predicted_s(finalists, count) < left_s)
    if finalists and (last := next(fewer, 0)):
        source.cut |= last < rounds
        rows.measured(finalists, last, "finalist")
    else:
        source.cut |= bool(finalists)
    return rows.finished(finalists)


def _fastest_first(found: Mapping[Deployment, float]) -> list[Deployment]:
    return sorted(found, key=lambda each: -found[each])


def _decision_s(
    candidates: Iterable[Deployment],
    evaluation_s: Callable[[Deployment], float],
    baseline: Deployment,
    evaluations: int = 1,
) -> float:
    """Seconds to evaluate the slowest lossy candidate this many times.

    The last evaluation is on the test split, on which FP32 has to be run as well.
    """
    lossy = [evaluation_s(each) for each in candidates if each.precision != "fp32"]
    return evaluations * max(lossy) + evaluation_s(baseline) if lossy else 0.0


@dataclass
class _Rows:
    """Everything known about the configurations considered so far."""

    baseline: Deployment
    measure: Measure
    found: dict[Deployment, Candidate] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.found[self.baseline] = Candidate(deployment=self.baseline, expected=1.0, description="the baseline")

    def measured(self, wanted: Iterable[Deployment], rounds: int, description: str) -> dict[Deployment, float]:
        """Measure and record; returns the speedup over the baseline of those whose speedup is known."""
        asked = [each for each in dict.fromkeys(wanted) if each != self.baseline]
        for each, known in self.measure(asked, rounds).items() if asked else ():
            self.record(each, rounds=known.rounds, ratio=known.ratio, description=description)
        return {each: self.speedup(each) for each in asked if self.found.get(each) and self.found[each].ratio}

    def record(self, deployment: Deployment, **more: Any) -> None:
        """Change fields of a configuration's row; the row is created if there is none."""
        known = self.found.get(deployment, Candidate(deployment=deployment, description=""))
        self.found[deployment] = known.model_copy(update=more)

    def speedup(self, deployment: Deployment) -> float:
        """Speedup over the baseline; 0 if unknown."""
        ratio = self.found[deployment].ratio if deployment in self.found else None
        return 1.0 if deployment == self.baseline else ratio.median if ratio else 0.0

    def finished(self, finalists: Sequence[Deployment]) -> list[Candidate]:
        """All rows, first the fastest finalist that is faster than the baseline, else the baseline."""
        shown = [each for each in finalists if (ratio := self.found[each].ratio) and ratio.low > 1]
        winner = max(shown, key=self.speedup, default=self.baseline)
        best = self.found[winner].ratio
        taken = "the fastest" if best is None or best.conclusive else "taken; its measurement is not conclusive"
        self.record(winner, description=taken if shown else "the baseline; nothing was shown to be faster")
        return [self.found.pop(winner), *self.found.values()]


Lossy = tuple[Deployment, tuple[str, ...]]
"""A trial's start and settings: all that its loss depends on, apart from the rewrites, which are exact in FP32."""


@dataclass
class _Search:
    """A search that is under way; the attributes that are not arguments of `search`:

    Attributes:
        trial_of: The trial of each configuration that was measured.
        dropped: Configurations that do not run, or have too many MACs.
        late: Starts of trials with configurations that were not measured for lack of time.
        accepted: Trials (see `Lossy`) whose loss is within the budget.
        rejected: Trials whose loss is not.
        evaluated: Whether the loss of a configuration is within the budget.
        budget_s: Seconds at the start.
        first: Rounds of a first measurement.
        macs: MACs of the baseline.
    """

    trials: list[Trial]
    work: Work
    source: SpeedSource
    allowed: Allowed
    rounds: int
    milder: Fp32Variants
    records: Sequence[Observation]
    rows: _Rows
    trial_of: dict[Deployment, Trial] = field(default_factory=dict)
    dropped: set[Deployment] = field(default_factory=set)
    late: set[Deployment] = field(default_factory=set)
    accepted: set[Lossy] = field(default_factory=set)
    rejected: set[Lossy] = field(default_factory=set)
    evaluated: dict[Deployment, bool] = field(default_factory=dict)
    budget_s: float = 0.0
    first: int = FIRST
    macs: float = 1.0

    def __post_init__(self) -> None:
        self.trial_of[self.rows.baseline] = self.trials[0]
        self.budget_s = self.source.left_s()
        self.first = self._first_rounds()
        self.macs = float(self.work(self.rows.baseline))
        self._measured({each: trial for each in self.source.known() for trial in self.trials if trial.has(each)})
        self._evaluate_leader()

    def explore(self, *, exact: bool) -> None:
        """Measure configurations that may be faster than the best one, or the best exact one, until none is left."""
        while batch := self._batch(exact=exact):
            self._measured(batch)
            self._evaluate_leader()

    def _measured(self, batch: Mapping[Deployment, Trial]) -> None:
        found = self.rows.measured(batch, self.first, "measured")
        self.dropped |= {each for each in batch if each not in found}
        self.trial_of |= {each: batch[each] for each in found}

    # Which configurations are measured next

    def _batch(self, *, exact: bool) -> dict[Deployment, Trial]:
        """The configurations to measure next, each with its trial; empty if none is promising or the time is over."""
        pool = self._pool(exact=exact)
        batch: dict[Deployment, Trial] = {}
        least_worth = 0.0
        assumed: list[Observation] = []
        while pool and len(batch) < GROUP:
            every = list(pool)
            gains, improvements = self._improvements(every, assumed, exact=exact)
            costs = [self._cost([*batch, each]) - (self._cost(list(batch)) if batch else 0.0) for each in every]
            worth = {
                each: improvement / max(cost, LEAST_COST_S)
                for each, improvement, cost in zip(every, improvements, costs, strict=True)
                if improvement >= LEAST_IMPROVEMENT
            }
            best = max(worth, key=worth.__getitem__, default=None)
            if best is None or worth[best] < least_worth:
                break
            if not batch:
                best = self._larger_improvement(best, worth, dict(zip(every, improvements, strict=True)))
            free_s, cost_s = self._free_s([*batch, best], exact=exact), self._cost([*batch, best])
            if batch and cost_s > GROUP_SHARE * free_s:
                break
            trial = pool.pop(best)
            if cost_s >= free_s:
                self.source.cut = True
                self.late.add(trial.start)
                if not batch and self._waits_for_the_end(trial):
                    break
                continue
            if self._too_much_work(best, trial):
                continue
            gain = gains[every.index(best)]
            self.rows.record(best, expected=math.exp(gain))
            assumed.append(Observation("", self.macs, best, gain, ROUND_NOISE / math.sqrt(self.first)))
            least_worth = least_worth or SIMILAR_WORTH * worth[best]
            batch[best] = trial
        return batch

    def _larger_improvement(
        self, best: Deployment, worth: Mapping[Deployment, float], improvements: Mapping[Deployment, float]
    ) -> Deployment:
        """A configuration with a clearly larger improvement for which there is no time after the best one, or the best.

        The best one is that of the largest improvement for its cost. In a minute, a cheap lower precision would
        otherwise take the time in which a large network is quantized.

        Args:
            best: The configuration that would be measured next.
            worth: Expected improvement for its cost, of all configurations that are expected to improve.
            improvements: Expected improvements.
        """
        while True:
            larger = [
                each
                for each in worth
                if improvements[each] > improvements[best] + CLEARLY_LARGER
                and self._cost([each]) < self._free_s([each])
                and self._cost([best, each]) >= self._free_s([best, each])
            ]
            if not larger:
                return best
            best = max(larger, key=worth.__getitem__)

    def _pool(self, *, exact: bool) -> dict[Deployment, Trial]:
        """Candidates for the next measurement, each with its trial.

        For a new trial: its start, alone and with each other setting. For a trial with measurements: its best
        configuration with each single change, and with the most helpful changes together.
        """
        pool: dict[Deployment, Trial] = {}
        for trial in self.trials:
            if exact and not _is_fp32(trial):
                continue
            own = [each for each, other in self.trial_of.items() if other.start == trial.start]
            if not own:
                wanted = [trial.start, *(trial.start.model_copy(update=dict(fields)) for fields in trial.tries)]
            else:
                gains, _ = self._predicted(own)
                best = own[max(range(len(own)), key=gains.__getitem__)]
                wanted = [*trial.neighbors(best), *self._combinations(trial, best)]
            pool |= {each: trial for each in wanted if each not in self.trial_of and each not in self.dropped}
        return {each: trial for each, trial in pool.items() if _lossy(each) not in self.rejected}

    def _combinations(self, trial: Trial, best: Deployment) -> list[Deployment]:
        """The best configuration of a trial with the two most helpful changes, the three most helpful ones, and so
        on.
        """
        near = trial.neighbors(best)
        gains, _ = self._predicted([best, *near])
        helpful = sorted(range(len(near)), key=lambda place: -gains[place + 1])
        found: list[Deployment] = []
        one = best
        for place in helpful:
            if gains[place + 1] <= gains[0] + LEAST_EFFECT or len(found) > GROUP:
                break
            one = _with_change(trial, one, best, near[place])
            found.append(one)
        return found[1:]

    def _predicted(
        self, wanted: Sequence[Deployment], assumed: Sequence[Observation] = ()
    ) -> tuple[list[float], list[float]]:
        """Predicted logarithms of the speedups, and their standard deviations."""
        seen = [*self.records, Observation("", self.macs, self.rows.baseline, 0.0, 0.0), *assumed]
        for each in self.trial_of:
            row = self.rows.found[each]
            if row.ratio:
                seen.append(observed("", self.macs, each, row.ratio, row.rounds))
        found = Predictor(seen, self.macs).of(wanted)
        return found.means.tolist(), found.deviations.tolist()

    def _improvements(
        self, wanted: Sequence[Deployment], assumed: Sequence[Observation], *, exact: bool
    ) -> tuple[list[float], list[float]]:
        """Predicted gain of configurations, and by how much each is expected to improve on the best one so far."""
        known = [
            each for each in (*self.trial_of, *(each.deployment for each in assumed)) if self._counts(each, exact=exact)
        ]
        gains, deviations = self._predicted([*known, *wanted], assumed)
        best = max(gains[: len(known)])
        pairs = list(zip(gains, deviations, strict=True))[len(known) :]
        return gains[len(known) :], [_expected_improvement(gain - best, deviation) for gain, deviation in pairs]

    def _counts(self, each: Deployment, *, exact: bool) -> bool:
        """Whether a configuration may be the best one, as far as is known."""
        return each.precision == "fp32" or (not exact and _lossy(each) not in self.rejected)

    def _too_much_work(self, each: Deployment, trial: Trial) -> bool:
        """Whether a configuration has far more MACs than its trial's start."""
        if each.rewrites == trial.start.rewrites:
            return False
        usual, own = self.work(trial.start), self.work(each)
        if own <= MAX_RELATIVE_MACS * usual:
            return False
        self.rows.record(each, description=f"hopeless: {own / usual:.2f} times the MACs")
        self.dropped.add(each)
        return True

    # Time

    def _cost(self, wanted: Sequence[Deployment]) -> float:
        return self.source.predicted_s(wanted, self.first)

    def _first_rounds(self) -> int:
        """Rounds of a first measurement: few if inferences are slow."""
        fp32 = [trial.start for trial in self.trials if _is_fp32(trial)]
        costs = [self.source.predicted_s([each], FIRST, written=True) for each in fp32]
        most_s = FIRST_SHARE * self.source.left_s()
        return min(FEWEST if max(costs, default=0.0) > most_s else FIRST, self.rounds)

    def _free_s(self, wanted: Sequence[Deployment], *, exact: bool = False) -> float:
        """Seconds that are left for measuring these, without what the end of the search needs after that.

        Unless these are chosen among exact configurations, each FP32 trial also keeps the time for one measurement:
        the fastest of them is the result if a lossy winner is rejected on the test split.
        """
        finalists = self._ranked()[:FINALISTS] or list(wanted)[:FINALISTS]
        end_s = self._final_s(finalists) + self._decision_s([*finalists, *wanted], evaluations=2)
        return self.source.left_s() - end_s - (0.0 if exact else self._exact_s(wanted))

    def _exact_s(self, wanted: Sequence[Deployment]) -> float:
        """Seconds to measure the FP32 trials of which nothing was measured, at most `EXACT_SHARE`.

        0 if inferences are slow: these trials then use the time of the last measurements.
        """
        if self.first == FEWEST:
            return 0.0
        measured = {trial.start for trial in self.trial_of.values()} | self.dropped | {*wanted}
        starts = [trial.start for trial in self.trials if _is_fp32(trial) and trial.start not in measured]
        return min(self.source.predicted_s(starts, self.first), EXACT_SHARE * self.budget_s) if starts else 0.0

    def _final_s(self, finalists: Sequence[Deployment]) -> float:
        """Seconds set aside for the last measurements, which have fewer rounds if that is too short (`LAST_COST`)."""
        every_s = self.source.predicted_s(finalists[:FINALISTS], self.rounds, written=True)
        one_s = self.source.predicted_s(finalists[:1], FIRST, written=True)
        return min(every_s, max(FINAL_SHARE * self.budget_s, min(one_s, LARGEST_FINAL_SHARE * self.budget_s)))

    def _evaluation_s(self, deployment: Deployment) -> float:
        """Seconds that running it on a split is expected to take."""
        if deployment in self.trial_of:
            return self.source.evaluation_s(deployment)
        return self.source.evaluation_s(self.rows.baseline) / math.exp(self._predicted([deployment])[0][0])

    def _decision_s(self, candidates: Sequence[Deployment], evaluations: int = 1) -> float:
        """See `_decision_s`."""
        return _decision_s(candidates, self._evaluation_s, self.rows.baseline, evaluations)

    # Loss

    def _evaluate_leader(self) -> None:
        """Evaluate the fastest configuration, and drop it if its loss is too large, until the fastest is accepted."""
        while (ranked := self._ranked()) and _lossy(leader := ranked[0]) not in self.accepted:
            if not self._time_to_evaluate(leader):
                return
            if self._allowed(leader):
                self.accepted.add(_lossy(leader))
                return
            self.rejected.add(_lossy(leader))
            self._add_variants(leader)

    def _add_variants(self, leader: Deployment) -> None:
        """Add trials that keep more layers in FP32 than a rejected one, if they can still win and there is time."""
        trial, rest = self.trial_of[leader], self._ranked()[:1]
        gain, *others = self._predicted([leader, *rest])[0]
        if trial.start.fp32_modules or gain <= max(others, default=0.0) + LEAST_IMPROVEMENT:
            return
        if self.source.variants_s(trial.start) + self._final_s(rest) < self.source.left_s():
            self.trials += [each for each in self.milder(trial) if each.start not in self._starts()]
        else:
            self.source.cut = True

    def _starts(self) -> set[Deployment]:
        return {trial.start for trial in self.trials}

    def _time_to_evaluate(self, deployment: Deployment, rest_s: float = 0.0) -> bool:
        """Whether there is time to evaluate it, if that is still needed, and to decide on the test split afterwards."""
        if deployment.precision == "fp32" or deployment in self.evaluated:
            return True
        enough = self._decision_s([deployment], evaluations=2) + rest_s < self.source.left_s()
        self.source.cut |= not enough
        return enough

    def _allowed(self, deployment: Deployment) -> bool:
        """Whether its loss is within the budget."""
        if deployment.precision == "fp32":
            return True
        if deployment not in self.evaluated:
            self.evaluated[deployment] = self.allowed(deployment)
        return self.evaluated[deployment]

    # The end

    def _ranked(self) -> list[Deployment]:
        """Return the measured configurations that may be chosen, the fastest first."""
        known = [each for each in self.trial_of if self._counts(each, exact=False) and self.rows.found[each].ratio]
        gains, _ = self._predicted(known) if known else ([], [])
        return [known[place] for place in sorted(range(len(known)), key=lambda place: -gains[place])]

    def finished(self) -> list[Candidate]:
        """Measure the best in more rounds; returns all rows, the winner first."""
        if not self._ranked() or any(map(self._waits_for_the_end, self.trials)):
            self._measure_most_promising()
        some = self._ranked()[:SEMIFINALISTS]
        if self.rounds > MIDDLE and self._rounds_in_time(some, (MIDDLE,), self._final_s(some)):
            self.rows.measured(some, MIDDLE, "semifinalist")
        finalists = self._finalists()
        wanted = finalists
        while wanted and not (rounds := self._rounds_in_time(wanted, (self.rounds, self.rounds // 2, MIDDLE, FIRST))):
            self.source.cut = True
            wanted = wanted[:-1]
        if wanted:
            self.source.cut |= rounds < self.rounds
            self.rows.measured(wanted, rounds, "finalist")
        self._describe_rest()
        return self.rows.finished(wanted or finalists)

    def _waits_for_the_end(self, trial: Trial) -> bool:
        """Whether inferences are slow, and an FP32 trial without a measurement has to use the time of the last ones."""
        measured = {each.start for each in self.trial_of.values()}
        late = trial.start in self.late and trial.start not in measured
        slow = self.first == FEWEST and _is_fp32(trial)
        return slow and late and self._rounds_in_time([trial.start], (FEWEST,)) > 0

    def _measure_most_promising(self) -> None:
        """Measure one FP32 configuration for which the search had no time, in that of the last measurements.

        An unknown runtime that may be faster tells more than more rounds of the known ones.
        """
        pool = self._pool(exact=True)
        improvements = self._improvements(list(pool), (), exact=True)[1] if pool else []
        for each, improvement in sorted(zip(pool, improvements, strict=True), key=lambda pair: -pair[1]):
            if improvement < LEAST_IMPROVEMENT:
                return
            rounds = self._rounds_in_time([each], (FIRST, FEWEST))
            if rounds and not self._too_much_work(each, pool[each]):
                if self.rows.measured([each], rounds, f"measured in {rounds} rounds; there was no time for more"):
                    self.trial_of[each] = pool[each]
                return

    def _finalists(self) -> list[Deployment]:
        """See `_finalists`; configurations that there is no time to evaluate are left out."""
        ranked = self._ranked()
        rest_s = self._final_s(ranked)
        return _finalists(ranked, lambda each: self._time_to_evaluate(each, rest_s) and self._allowed(each))

    def _rounds_in_time(self, wanted: Sequence[Deployment], choices: Sequence[int], rest_s: float = 0.0) -> int:
        """The largest of these numbers of rounds for which there is time; 0 if there is none."""
        left = (self.source.left_s() - rest_s - self._decision_s(wanted)) / LAST_COST
        return next((rounds for rounds in choices if rounds and self.source.predicted_s(wanted, rounds) < left), 0)

    def _describe_rest(self) -> None:
        """Record for every trial that was not measured why it was skipped, and its expected speedup."""
        starts = [start for start in self._starts() if start not in self.rows.found]
        starts += [start for start in self._starts() if start in self.rows.found and not self.rows.found[start].ratio]
        starts = [start for start in dict.fromkeys(starts) if start != self.rows.baseline]
        gains, _ = self._predicted(starts) if starts else ([], [])
        for start, gain in zip(starts, gains, strict=True):
            if start not in self.dropped:
                why = (
                    "skipped: the budget was spent" if start in self.late else "skipped: not expected to be the fastest"
                )
                self.rows.record(start, expected=math.exp(gain), description=why)
        for way, row in self.rows.found.items():
            if not row.description:
                self.rows.record(way, description="skipped: it does not run")


def _lossy(deployment: Deployment) -> Lossy:
    plain = {"rewrites": (), "threads": 1, "streams": 1, "settings": ()}
    return deployment.model_copy(update=plain), deployment.settings


def _with_change(trial: Trial, one: Deployment, before: Deployment, after: Deployment) -> Deployment:
    """Apply the change between two configurations to a third one."""
    settings = dict.fromkeys(one.settings)
    settings = {name: None for name in settings if name not in set(before.settings) - set(after.settings)}
    settings |= dict.fromkeys(name for name in after.settings if name not in before.settings)
    changed = trial.toggled(set(before.rewrites) ^ set(after.rewrites), one)
    other = {name: getattr(after, name) for name in ("threads", "streams", "batch")}
    other = {name: value for name, value in other.items() if value != getattr(before, name)}
    return changed.model_copy(update={"settings": tuple(settings), **other})


def _expected_improvement(lead: float, deviation: float) -> float:
    """E[max(0, x)] of a normal x with this mean and standard deviation."""
    z = lead / deviation
    return lead * 0.5 * math.erfc(-z / math.sqrt(2)) + deviation * math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)


def _is_fp32(trial: Trial) -> bool:
    return trial.start.precision == "fp32"


def _finalists(ranked: Sequence[Deployment], allowed: Allowed) -> list[Deployment]:
    """The fastest allowed configurations, and the fastest FP32 one, which shows what the loss buys."""
    kept: list[Deployment] = []
    for each in ranked:
        if len(kept) < FINALISTS and allowed(each):
            kept.append(each)
    exact = [each for each in ranked if each.precision == "fp32"]
    return list(dict.fromkeys([*kept, *exact[:1]]))


def _subsets(names: Sequence[str]) -> list[set[str]]:
    return [set(some) for count in range(len(names) + 1) for some in combinations(names, count)]
