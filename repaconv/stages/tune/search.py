"""The search for the fastest configuration: trials to start from, candidate graphs, and which are measured when."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from repaconv.core import plugins
from repaconv.core.errors import Refused, RepaconvError, UsageProblem
from repaconv.core.files import sha256_of_bytes, write_bytes
from repaconv.core.progress import Progress
from repaconv.core.thread_pool import usable_cpus
from repaconv.engines.tunable_session_settings import Tunable
from repaconv.results import Candidate, Deployment, ImageSize, Ratio, Sensitivity
from repaconv.rewrites.presets import chosen
from repaconv.sources.source_model import DEPLOY, GraphSpec, SourceModel
from repaconv.stages.bench.options import LATENCY
from repaconv.stages.shared.engine_files import runtime_lowers, takes_networks
from repaconv.stages.shared.input_selection import Split
from repaconv.stages.shared.lower_precision import int8_for, loader_for, to_precision
from repaconv.stages.shared.target_lookup import default_rewrites, load_target
from repaconv.stages.shared.task_choice import evaluation_by
from repaconv.stages.tune.options import TuneOptions
from repaconv.stages.tune.speed_prediction import ROUND_NOISE, Observation, Predictor, observed
from repaconv.verification.model_runners import named

if TYPE_CHECKING:
    import onnx

    from repaconv.engines.contract import Engine, Feeds, Network
    from repaconv.engines.targets import Target
    from repaconv.graph.rewrite_contract import Rewrite
    from repaconv.tasks.evaluation import Evaluation
    from repaconv.tasks.task_of_network import Choice


# The search
#
# A trial is a runtime in a precision. All trials, their rewrites and their settings are one field: each configuration
# has a predicted speedup (`speed_prediction`), and the one whose expected improvement on the best so far is largest for
# its cost is measured next (Jones, Schonlau and Welch 1998), a few at a time. What is expected to improve nothing is
# not measured. Lower precision is evaluated when it is the fastest of what was measured, not before; a trial that loses
# more than is allowed is replaced by variants that keep more layers in FP32, if they can still win. The best are
# measured in more and more rounds (successive halving, Jamieson and Talwalkar 2016), the last ones in as many as a
# result needs. The time of these last measurements, and of evaluating what they choose, is set aside from the start. If
# it is too short for all of them, the result is a configuration that was evaluated already.


class Measured(NamedTuple):
    """A speedup over the baseline, and its number of rounds, which is larger than requested if it was known."""

    ratio: Ratio
    rounds: int


Measure = Callable[[Sequence[Deployment], int], Mapping[Deployment, Measured]]
"""Measures configurations in so many rounds with the baseline; returns speedups, without those that were skipped."""
Work = Callable[[Deployment], int]
"""Multiply-accumulates."""
Allowed = Callable[[Deployment], bool]
"""Whether a configuration's loss is within the budget; FP32 always is."""

MAX_RELATIVE_MACS = 1.3
"""Limit of the MACs relative to the default preset: GEMMs take most of the time."""
LEAST_IMPROVEMENT = 0.003
"""Expected improvement (log of the speedup) below which a configuration is not measured."""
LEAST_EFFECT = 0.001
"""Predicted effect (log of the speedup) from which a change is combined with others."""
FEWEST, FIRST, MIDDLE = 3, 6, 12
"""Rounds of a measurement when little time is left, of a first one, and of one that decides about the finalists."""
GROUP, SEMIFINALISTS, FINALISTS = 6, 6, 3
"""Configurations that are measured together, and those that are measured again."""
SIMILAR_WORTH = 0.4
"""Improvement for its cost, relative to the first of a group, from which a configuration joins it."""
LEAST_COST_S = 0.5
"""Cost of measuring what costs nothing, so that costs can be divided by."""
FINAL_SHARE = 0.4
"""Largest share of the time that is set aside for the last measurements."""
GROUP_SHARE = 0.5
"""Largest share of the other time that several configurations take together: expected costs may be too small, and after
each group they are corrected."""


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
    most_s = FINAL_SHARE * source.left_s()

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
    """Seconds of so many evaluations of the slowest lossy one of these.

    The last of them is on the test split, on which FP32 has to be run as well.
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
        late: Starts of the trials of which something was not measured for lack of time.
        accepted: Those (see `Lossy`) of which a configuration's loss is within the budget.
        rejected: Those whose loss is not.
        evaluated: Whether the loss of a configuration is within the budget.
        final_s: Seconds set aside for the last measurements, at most.
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
    final_s: float = 0.0
    macs: float = 1.0

    def __post_init__(self) -> None:
        self.trial_of[self.rows.baseline] = self.trials[0]
        self.final_s = FINAL_SHARE * self.source.left_s()
        self.macs = float(self.work(self.rows.baseline))
        self._measured({each: trial for each in self.source.known() for trial in self.trials if trial.has(each)})
        self._evaluate_leader()

    def explore(self, *, exact: bool) -> None:
        """Measure configurations that may be faster than the best one, or the best exact one, until none is left."""
        while batch := self._batch(exact=exact):
            self._measured(batch)
            self._evaluate_leader()

    def _measured(self, batch: Mapping[Deployment, Trial]) -> None:
        found = self.rows.measured(batch, min(FIRST, self.rounds), "measured")
        self.dropped |= {each for each in batch if each not in found}
        self.trial_of |= {each: batch[each] for each in found}

    # Which configurations are measured next

    def _batch(self, *, exact: bool) -> dict[Deployment, Trial]:
        """The configurations to measure next, each with its trial; empty if none is worth it, or the time is over."""
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
            free_s, cost_s = self._free_s([*batch, best]), self._cost([*batch, best])
            if batch and cost_s > GROUP_SHARE * free_s:
                break
            trial = pool.pop(best)
            if cost_s >= free_s:
                self.source.cut = True
                self.late.add(trial.start)
                continue
            if self._too_much_work(best, trial):
                continue
            gain = gains[every.index(best)]
            self.rows.record(best, expected=math.exp(gain))
            assumed.append(Observation("", self.macs, best, gain, ROUND_NOISE / math.sqrt(FIRST)))
            least_worth = least_worth or SIMILAR_WORTH * worth[best]
            batch[best] = trial
        return batch

    def _pool(self, *, exact: bool) -> dict[Deployment, Trial]:
        """Configurations that were not measured: of a new trial its start, alone and with each other setting; of
        another trial what differs from its best by one change, and by the changes that help together.
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
        return self.source.predicted_s(wanted, min(FIRST, self.rounds))

    def _free_s(self, wanted: Sequence[Deployment]) -> float:
        """Seconds that are left for measuring these, without what the end of the search needs after that."""
        finalists = self._ranked()[:FINALISTS] or list(wanted)[:FINALISTS]
        end_s = self._final_s(finalists) + self._decision_s([*finalists, *wanted], evaluations=2)
        return self.source.left_s() - end_s

    def _final_s(self, finalists: Sequence[Deployment]) -> float:
        return min(self.source.predicted_s(finalists[:FINALISTS], self.rounds, written=True), self.final_s)

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
        """Evaluate the fastest of what was measured until it is allowed, unless one of its kind was accepted."""
        while (ranked := self._ranked()) and _lossy(leader := ranked[0]) not in self.accepted:
            if not self._time_to_evaluate(leader):
                return
            if self._allowed(leader):
                self.accepted.add(_lossy(leader))
                return
            self.rejected.add(_lossy(leader))
            self._add_variants(leader)

    def _add_variants(self, leader: Deployment) -> None:
        """Trials that keep more layers in FP32 than one that lost too much, if they can still win and there is time."""
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
        """Whether there is time to evaluate it, unless that was done, and to decide on the test split afterwards."""
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
        if not self._ranked():
            self._measure_most_promising()
        some = self._ranked()[:SEMIFINALISTS]
        if self.rounds > MIDDLE and self._rounds_in_time(some, (MIDDLE,), self._final_s(some)):
            self.rows.measured(some, MIDDLE, "semifinalist")
        finalists = self._finalists()
        wanted = finalists
        while wanted and not (rounds := self._rounds_in_time(wanted, (self.rounds, self.rounds // 2, MIDDLE))):
            self.source.cut = True
            wanted = wanted[:-1]
        if wanted:
            self.source.cut |= rounds < self.rounds
            self.rows.measured(wanted, rounds, "finalist")
        self._describe_rest()
        return self.rows.finished(wanted or finalists)

    def _measure_most_promising(self) -> None:
        """Measure one FP32 configuration, if there was no time for a search: an inference takes seconds."""
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
        """See `_finalists`; of what was not evaluated, only what there is time for."""
        ranked = self._ranked()
        rest_s = self._final_s(ranked)
        return _finalists(ranked, lambda each: self._time_to_evaluate(each, rest_s) and self._allowed(each))

    def _rounds_in_time(self, wanted: Sequence[Deployment], choices: Sequence[int], rest_s: float = 0.0) -> int:
        """The largest of these numbers of rounds for which there is time; 0 if there is none."""
        left = self.source.left_s() - rest_s - self._decision_s(wanted)
        return next((rounds for rounds in choices if rounds and self.source.predicted_s(wanted, rounds) < left), 0)

    def _describe_rest(self) -> None:
        """Say of every trial that was not measured what was expected of it."""
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
    """A configuration with what changed from one to another changed in it, too."""
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


# The candidate configurations of one network, and their graphs

GRAPH_BYTES = 8 * 1024**3
"""Bytes of graph files that are kept on disk."""


@dataclass
class Graphs:
    """The network's graph for one target, and the rewrites that change it."""

    raw: onnx.ModelProto
    rewrites: dict[str, Rewrite]

    def model(self, rewrites: Iterable[str]) -> onnx.ModelProto:
        """The graph with these rewrites; names that do not change this graph are ignored."""
        from repaconv.graph.model_rewriting import rewritten

        return rewritten(self.raw, [self.rewrites[name] for name in rewrites if name in self.rewrites])[0]


@dataclass
class Candidates:
    """All configurations of one network, and their graphs as files.

    Attributes:
        source_model: The source model.
        names: Names of the rewrites to consider.
        given: Images; some calibrate lower precision. None if no loss is allowed.
        scratch: Folder for graphs.
        progress: See `Progress`.
        known: Exported graphs, by export settings.
        made: Files of written graphs, the least recently used first.
        counted: MACs of written FP32 graphs.
        took_s: Seconds that each graph took to be written, by what it is.
        sensitive: INT8 sensitivity of layer groups by target, if it was measured.
        choice: The task in which losses are evaluated; None for class scores.
        fixed_size: (height, width) of the images that graphs take; None if that is the network's size, dynamic if it
            may be.
        devices: The targets that are tried; others are found by their registered names.
        clock: Seconds on a clock that never goes back.
    """

    source_model: SourceModel
    names: Sequence[str]
    given: Split | None
    scratch: Path
    progress: Progress
    known: dict[str, Graphs] = field(default_factory=dict)
    made: dict[tuple[Any, ...], Path] = field(default_factory=dict)
    counted: dict[Path, int] = field(default_factory=dict)
    took_s: dict[tuple[Any, ...], float] = field(default_factory=dict)
    sensitive: dict[str, tuple[Sensitivity, ...]] = field(default_factory=dict)
    choice: Choice | None = None
    fixed_size: ImageSize | None = None
    devices: Sequence[Target] = ()
    clock: Callable[[], float] = time.monotonic

    def device_of(self, deployment: Deployment) -> Target:
        """The target of a configuration, which may be of the user's own file."""
        own = (device for device in self.devices if device.name == deployment.target)
        return next(own, None) or load_target(deployment.target)

    @property
    def image_size(self) -> ImageSize | None:
        """(height, width) of the images that are measured; None if the network takes no images."""
        return self.fixed_size or self.source_model.folded.image_size

    @property
    def place_of_scores(self) -> int:
        """Index of the output with class scores."""
        scores = self.source_model.scores
        return self.source_model.outputs.index(scores.output) if scores else 0

    def evaluation(self, precision: str) -> Evaluation | None:
        """A new evaluation of a precision in the network's task; None if it is evaluated by its class scores."""
        return None if self.choice is None else evaluation_by(self.choice, self.source_model, precision)

    def trial(self, start: Deployment, tries: Sequence[Any]) -> Trial:
        """A trial with its target's default preset.

        Raises:
            EnvironmentProblem: If its quantizer is not installed.
            Refused: If the export's outputs are wrong, or its weights take more than 2 GiB.
            UsageProblem: If the runtime takes PyTorch modules, and the source is a graph.
        """

        device = self.device_of(start)
        if takes_networks(device):
            self.source_model.network(DEPLOY)
            return Trial(start, (), tuple(tries))
        graphs, precision = self._graphs(device), start.precision
        newest = int8_for(device, start.quantizer).opset(device.newest) if precision == "int8" else device.newest
        usable = chosen(device.rewrites_for(tuple(graphs.rewrites), precision), newest, precision).rewrites
        fit = tuple(rewrite.name for rewrite in usable)
        usual = default_rewrites(device, self.source_model.folded.called)
        default = tuple(name for name in fit if name in usual)
        return Trial(start.model_copy(update={"rewrites": default}), fit, tuple(tries))

    def _graphs(self, device: Target) -> Graphs:
        """The network exported for a target, and which rewrites change that graph."""
        from repaconv.graph.model_rewriting import rewritten

        spec = GraphSpec(
            size=self.image_size,
            opset=device.opset,
            newest=device.newest,
            unsupported_ops=device.unsupported_ops,
            dynamic_size=self.source_model.folded.any_image_size and self.fixed_size is None,
            simplifiers=(),
        )
        if str(spec) not in self.known:
            graph = self.source_model.graph(DEPLOY, spec, scratch=self.scratch, progress=self.progress)
            if graph.data is not None or not graph.sound:
                raise Refused(
                    "the weights take more than 2 GiB."
                    if graph.data
                    else "the exported graph and the folded network give different outputs.",
                    hint="tune supports graphs that fit into one file." if graph.data else "See `repaconv export`.",
                    code="tune.graph",
                )
            self.progress("tune: choose the rewrites that apply", 0, 0)
            known = chosen(self.names, device.newest).rewrites
            fitting = sorted(known, key=lambda rewrite: (rewrite.order, rewrite.name))
            usual = default_rewrites(device, self.source_model.folded.called)
            # Some rewrites of the default preset find only what others of it have written.
            together = rewritten(graph.model, [rewrite for rewrite in fitting if rewrite.name in usual])[1]
            used = {change.rewrite for change in together}
            rewrites = {each.name: each for each in fitting if each.name in used or rewritten(graph.model, [each])[1]}
            self.known[str(spec)] = Graphs(graph.model, rewrites)
        return self.known[str(spec)]

    def macs(self, deployment: Deployment) -> int:
        """MACs per image of the configuration's graph; 1 if it runs a PyTorch module."""
        import onnx

        from repaconv.graph.compute_costs import known_macs_of_file

        if takes_networks(self.device_of(deployment)):
            return 1
        path = self._named(deployment)
        if path not in self.counted:
            self.counted[path] = known_macs_of_file(onnx.load(self.exact(deployment)))
        return self.counted[path]

    def exact(self, deployment: Deployment) -> Path:
        """File of the configuration's FP32 graph; equal graphs share a file."""
        device = self.device_of(deployment)
        return self._file(_exact_key(deployment), lambda: self._graphs(device).model(deployment.rewrites))

    def same(self, deployment: Deployment) -> str:
        """A key that is equal for configurations with equal graphs."""
        return "" if takes_networks(self.device_of(deployment)) else self._named(deployment).stem

    def _named(self, deployment: Deployment) -> Path:
        """Path of the FP32 graph, whose file may have been removed to free disk space."""
        known = self.made.get(_exact_key(deployment))
        return known or self.exact(deployment)

    def bytes(self, deployment: Deployment) -> int:
        """Approximate size of its weights in bytes."""
        if takes_networks(self.device_of(deployment)):
            return self.source_model.folded.payload.bytes
        return self.exact(deployment).stat().st_size

    def path(self, deployment: Deployment) -> Path:
        """File of the configuration's graph, in its precision unless the runtime lowers an FP32 graph."""
        import onnx

        device, precision = self.device_of(deployment), deployment.precision
        plain = self.exact(deployment)
        if precision == "fp32" or runtime_lowers(device, precision):
            return plain

        def typed() -> onnx.ModelProto:
            self.progress(f"to {precision}", 0, 0)
            calls = self.given.calibration_batches() if self.given else []
            quantizer, modules = deployment.quantizer, deployment.fp32_modules
            return to_precision(onnx.load(plain), precision, calls, device, quantizer=quantizer, modules=modules)[0]

        return self._file((plain, *self._lowered_key(deployment)), typed)

    def written_s(self, deployment: Deployment) -> float:
        """Seconds that its graph took to be written, whenever that was: counting its MACs writes it as well."""
        exact = _exact_key(deployment)
        plain_s = self.took_s.get(exact, 0.0)
        if deployment.precision == "fp32":
            return plain_s
        return plain_s + self.took_s.get((self.made.get(exact), *self._lowered_key(deployment)), 0.0)

    def mixed(self, trial: Trial) -> list[Trial]:
        """Replacements of an INT8 trial that keep more and more of the most sensitive layers in FP32."""
        import onnx

        from repaconv.onnx_export.fp32_layer_selection import growing_sets

        start = trial.start
        if start.precision != "int8" or start.fp32_modules or self.given is None:
            return []
        if start.target not in self.sensitive:
            plain, calls = onnx.load(self.exact(start)), self.given.calibration_batches()
            device = self.device_of(start)
            found = sensitivities(
                plain, calls, device, self.place_of_scores, evaluation=self.evaluation, progress=self.progress
            )
            self.sensitive[start.target] = tuple(found)
        steps = growing_sets([each.layers for each in self.sensitive[start.target]])
        return [trial._replace(start=start.model_copy(update={"fp32_modules": keep})) for keep in steps]

    def deployable(self, deployment: Deployment) -> Path | Network:
        """Return what the runtime of a configuration opens: a graph file or a PyTorch module."""
        if takes_networks(self.device_of(deployment)):
            return self.source_model.network(DEPLOY)
        return self.path(deployment)

    def sizes(self, batch: int) -> dict[str, int]:
        """Sizes of the graph's dynamic dimensions, by name."""
        size = self.image_size
        return {"batch": batch, "height": size[0], "width": size[1]} if size else self.source_model.free_sizes(batch)

    def _lowered_key(self, deployment: Deployment) -> tuple[Any, ...]:
        """Return what the graph of lower precision depends on, in addition to the FP32 graph."""
        device, precision = self.device_of(deployment), deployment.precision
        without_kernel = device.fp32_operators.get(precision, ())
        return precision, int8_for(device, deployment.quantizer), deployment.fp32_modules, without_kernel

    def _file(self, key: tuple[Any, ...], make: Callable[[], onnx.ModelProto]) -> Path:
        """A graph's file, written if it does not exist; equal graphs share a file."""
        path = self.made.pop(key, None)
        if path is None or not path.is_file():
            begun = self.clock()
            content = make().SerializeToString(deterministic=True)
            path = self.scratch / f"{sha256_of_bytes(content)}.onnx"
            if not path.is_file():
                write_bytes(path, content)
            self.took_s[key] = self.clock() - begun
        self.made[key] = path  # moved to the end: the order is that of use
        self._make_room()
        return path

    def _make_room(self) -> None:
        """Remove the least recently used files; they are written again when needed."""
        there = [path for path in dict.fromkeys(reversed(self.made.values())) if path.is_file()]
        total = 0
        for path in there:
            total += path.stat().st_size
            if total > GRAPH_BYTES and path != there[0]:
                path.unlink()


def _exact_key(deployment: Deployment) -> tuple[Any, ...]:
    """Return what the FP32 graph of a configuration depends on."""
    return deployment.target, deployment.rewrites


# INT8 sensitivity of groups of layers


def sensitivities(
    model: onnx.ModelProto,
    calls: Sequence[Feeds],
    device: Target,
    output: int = 0,
    *,
    evaluation: Callable[[str], Evaluation | None] = lambda _: None,
    progress: Progress,
) -> list[Sensitivity]:
    """INT8 sensitivity of the layer groups of an FP32 graph, the most sensitive first: by its logits, or in its task.

    One group at a time is in INT8 and all others in FP32, with one pass over the images for each group.

    Args:
        model: The FP32 graph.
        calls: The calibration images, on which the sensitivity is measured as well.
        device: The target of the INT8 graph.
        output: Index of the logits among the outputs.
        evaluation: Returns a new evaluation of a precision in the network's task; None if it outputs logits.
        progress: See `Progress`.
    """
    from repaconv.onnx_export.fp16_and_int8 import to_int8
    from repaconv.onnx_export.fp32_layer_selection import groups_of, nodes_of, with_int8_rounding
    from repaconv.verification.comparison import Comparison
    from repaconv.verification.tolerances import tolerance

    low = to_int8(model, calls, how=int8_for(device))
    groups, load = groups_of(model), loader_for(device.architecture, "int8")

    def outputs(graph: onnx.ModelProto) -> list[Mapping[str, Any]]:
        session = load(graph.SerializeToString())
        ports = [port.name for port in session.inputs]
        return [session.run(named(ports, call)) for call in calls]

    right = outputs(model)
    found = []
    for place, group in enumerate(groups):
        progress("tune: layers in int8", place, len(groups))
        compared, of_task = Comparison("int8", tolerance("int8")), evaluation("int8")
        for got, expected in zip(outputs(with_int8_rounding(model, low, nodes_of(model, group))), right, strict=True):
            if of_task is not None:
                of_task.add(named(list(expected), got), expected)
            else:
                compared.add(*({"logits": list(each.values())[output]} for each in (got, expected)))
        if of_task is not None:
            found.append(Sensitivity(layers=group, disagreement=of_task.disagreement(), kl_divergence=0.0))
            continue
        seen = compared.metrics("logits")
        flips = seen.top1_flips / seen.images
        found.append(Sensitivity(layers=group, disagreement=flips, kl_divergence=seen.kl_divergence or 0.0))
    return sorted(found, key=lambda each: (-each.kl_divergence, -each.disagreement))


# The start of a search: runtimes, precisions, threads and batch sizes

AUTO = "auto"
BATCHES = (4, 16)
"""Factors of the batch size that throughput tries as well: a batch reads the weights once."""


class MachineRuntimes(NamedTuple):
    """The runtimes to try.

    Attributes:
        devices: A target per runtime, the user's own first.
        versions: Versions, by runtime.
        left_out: Runtimes that are not available, each with the reason.
    """

    devices: tuple[Target, ...]
    versions: dict[str, str]
    left_out: tuple[str, ...]


class Workload(NamedTuple):
    """How the network is run.

    Attributes:
        objective: latency or throughput.
        threads: Number of threads in total.
        batch: Batch size.
        free: Whether other batch sizes may be tried.
    """

    objective: str
    threads: int
    batch: int
    free: bool


def available_runtimes(options: TuneOptions, device: Target, *, here: bool) -> MachineRuntimes:
    """Return the requested runtimes that are available; on a cluster only the target's own runtime.

    Raises:
        EnvironmentProblem: If the target's own runtime is not installed here.
        UsageProblem: If a runtime is unknown for the target, or see `_require_on_cluster`.
    """
    own: Engine = plugins.load(plugins.ENGINES, device.runtime)
    beside = {other.runtime: other for other in map(load_target, device.beside)}
    asked = _requested_runtimes(options, beside) - {device.runtime}
    if unknown := sorted(asked - set(beside)):
        raise UsageProblem(
            f"{device.name} cannot use the runtime {', '.join(unknown)}.",
            hint=f"It can use {', '.join([device.runtime, *beside])}.",
            code="tune.runtimes",
        )
    if not here:
        _require_on_cluster(options, device, asked)
        return MachineRuntimes((device,), {own.name: device.runtime_version}, ())
    devices, versions, left = [device], {own.name: own.version()}, []
    for name, other in beside.items():
        try:
            if name in asked:
                versions[name] = plugins.load(plugins.ENGINES, name).version()
                devices.append(other)
        except RepaconvError as problem:
            left.append(f"{name}: {problem.message} {problem.hint}")
    return MachineRuntimes(tuple(devices), versions, tuple(left))


def _require_on_cluster(options: TuneOptions, device: Target, asked: set[str]) -> None:
    """Refuse what workers do not measure: they run ONNX models, one inference at a time, by the target's own runtime.

    Raises:
        UsageProblem: If other runtimes, PyTorch modules or throughput are asked for.
    """
    if options.runtimes and asked and AUTO not in options.runtimes:
        raise UsageProblem(
            f"on a cluster only the target's own runtime, {device.runtime}, can be measured.",
            hint="Leave --runtimes out.",
            code="tune.runtimes",
        )
    if takes_networks(device):
        raise UsageProblem(
            f"{device.name} runs PyTorch modules in memory, which are not sent to workers.",
            hint="Tune on that machine itself, or give a target that runs ONNX models.",
            code="farm.no-graph",
        )
    if options.objective != LATENCY:
        raise UsageProblem(
            f"workers measure the latency of one inference at a time, and no {options.objective}.",
            hint="Leave --objective out, or tune on that machine itself.",
            code="tune.objective",
        )


def _requested_runtimes(options: TuneOptions, beside: Mapping[str, Target]) -> set[str]:
    """Return the requested runtimes. By default, all that run graphs: compiling PyTorch modules takes minutes and
    was never the fastest.
    """
    named = set(options.runtimes or (AUTO,))
    graphs = {name for name, other in beside.items() if not takes_networks(other)}
    return (named - {AUTO}) | (graphs if AUTO in named else set())


def threads_of(options: TuneOptions, device: Target) -> int:
    """Threads per inference; for throughput, all CPUs of this process."""
    if options.threads is not None or options.objective == LATENCY:
        return options.threads or device.bench.threads
    return usable_cpus()


def initial_trials(
    machine: MachineRuntimes, called: Workload, *, lossy: bool, here: bool
) -> Iterator[tuple[Deployment, list[Any]]]:
    """Every runtime in every precision, with the other settings to try; the baseline first."""
    for device in machine.devices:
        engine: Engine = plugins.load(plugins.ENGINES, device.runtime)
        for precision in ("fp32", *(name for name in device.precisions if lossy and name not in ("fp32", "tf32"))):
            start = Deployment(
                target=device.name,
                runtime=device.runtime,
                rewrites=(),
                precision=precision,
                threads=called.threads,
                batch=called.batch,
            )
            settings = engine.tries(precision) if here and isinstance(engine, Tunable) else ()
            tries = [{"settings": each} for each in settings] + _concurrency_settings(called, "streams" in engine.can)
            yield start, tries
            for quantizer in device.quantizers if precision == "int8" else ():
                yield start.model_copy(update={"quantizer": quantizer}), tries


def _concurrency_settings(called: Workload, streams: bool) -> list[dict[str, int]]:
    """Other ways to use all cores for throughput: one stream per core, larger batches."""
    if called.objective == LATENCY:
        return []
    each = [{"streams": called.threads, "threads": 1}] if streams and called.threads > 1 else []
    batches = [size * called.batch for size in BATCHES] if called.free else []
    return [*each, *({"batch": size} for size in batches)]
