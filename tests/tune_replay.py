"""The search of `tune` on recorded measurements: how near it comes to the best in its time, without a clock.

    python tests/tune_replay.py                      # the table of docs/design/tuner.md
    python tests/tune_replay.py amx repavit 10.9     # what one search measures, in its order

Every row of the table of competing toolchains is a network whose runtimes, precisions, quantizers and settings were
measured (`benchmarks/results/competing_toolchains_methods.jsonl`). The real search and the real journal run on it with
a clock that moves by what writing, quantizing, loading and running is known to cost, with noise in costs and speedups.
Effects of single rewrites are random, in the size that measured ones have. What is known of a network itself is
withheld from the search: its predictions come from other networks.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from repaconv.benchmark.interleaved_protocol import session_load_count
from repaconv.results import Deployment, Ratio
from repaconv.stages.tune.search import Trial, search
from repaconv.stages.tune.speed_measurements import MeasurementLog, Timing
from repaconv.stages.tune.speed_prediction import Observation, shipped_records

RECORDED = Path(__file__).resolve().parents[1] / "benchmarks/results/competing_toolchains_methods.jsonl"
DEFAULT, EXACT, LOWER = "ours, default form", "ours, tuned", "ours, within 0.5%"
ALLOWED = 0.005
OTHERS = 5
"""Rewrites that change a graph and are not in the default preset."""
EFFECT = (-0.01, 0.02)
"""Mean and standard deviation of what switching a rewrite of the default preset does to the logarithm of the speedup:
the default presets are nearly the best, and tuned graphs of the records were 0% to 8% faster."""
ROUND_NOISE, LOAD_NOISE = 0.03, 0.01
"""Relative errors of one round and of one session load."""
ROUNDS, IMAGES = 50, 16
"""Of the last measurement, and images on which a loss is evaluated, as in the table."""

LOWERED_S = {
    ("fp16", ""): (0.3, 1.3),
    ("int8", ""): (0.8, 0.6),
    ("int8", "onnxruntime-symmetric"): (0.8, 0.6),
    ("int8", "nncf"): (1.5, 1.1),
    ("int8", "nncf-symmetric"): (1.5, 1.1),
}
"""Seconds to write a graph in lower precision on an AMD EPYC with Zen 5, by quantizer: of any, and per billion MACs."""


class Setting(NamedTuple):
    """A runtime in a precision, by a quantizer, with settings."""

    runtime: str
    precision: str
    quantizer: str
    settings: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Net:
    """A recorded network on a machine.

    Attributes:
        name: Its name, and the machine.
        isa: The CPU ISA level.
        macs: Of its default preset.
        latency_s: Of the default preset.
        gains: Logarithms of speedups over the default preset.
        starts: Rewrites of each start.
        allowed: Trials whose loss is within the budget.
    """

    name: str
    isa: str
    macs: float
    latency_s: float
    gains: dict[Setting, float]
    starts: dict[tuple[str, str, str], tuple[str, ...]]
    allowed: frozenset[tuple[str, str, str]]

    @property
    def slowness(self) -> float:
        """Time to write a graph on this machine, relative to a Zen 5: as for inferences of RePaViT-Base."""
        if " 26.2 " in self.name:
            return 1.0
        return {"amx": 1.4, "avx2": 2.5, "avx512-bf16": 2.3}[self.isa]

    @property
    def budget_s(self) -> float:
        """Of the target: a minute up to 20 ms, three up to 200."""
        return 60.0 if self.latency_s <= 0.020 else 180.0

    def trials(self) -> list[Trial]:
        """The baseline's first."""
        found = []
        for (runtime, precision, quantizer), rewrites in self.starts.items():
            target = "x86-64" if runtime == "onnxruntime" else "x86-64-openvino"
            start = Deployment(
                target=target, runtime=runtime, precision=precision, quantizer=quantizer, rewrites=rewrites
            )
            others = self.settings((runtime, precision, quantizer))
            found.append(Trial(start, self.toggles(rewrites), tuple({"settings": (each,)} for each in others)))
        return found

    def settings(self, kind: tuple[str, str, str]) -> dict[str, float]:
        """What each setting does."""
        found: dict[str, float] = {}
        for own in sorted((own for own in self.gains if own[:3] == kind), key=lambda own: len(own.settings)):
            new = [word for word in own.settings if word not in found]
            rest = self.gains[own] - self.gains[Setting(*kind, ())] - sum(found.get(word, 0.0) for word in own.settings)
            found |= {word: rest / len(new) for word in new}
        return found

    def toggles(self, rewrites: tuple[str, ...]) -> tuple[str, ...]:
        """Rewrites that change the graph: those of the default preset, and others."""
        return (*rewrites, *(f"other-{place}" for place in range(OTHERS)))

    def effect(self, deployment: Deployment, name: str) -> float:
        """What switching a rewrite does."""
        mean, deviation = EFFECT
        return mean + deviation * normal_sample(self.name, deployment.runtime, deployment.precision != "fp32", name)

    def gain(self, deployment: Deployment) -> float:
        """The logarithm of the true speedup."""
        kind = (deployment.runtime, deployment.precision, deployment.quantizer)
        switched = set(deployment.rewrites) ^ set(self.starts[kind])
        rest = 0.005 * normal_sample(self.name, deployment.model_dump_json()) if switched else 0.0
        effects = self.settings(kind)
        settings = sum(effects[word] for word in deployment.settings)
        return self.gains[Setting(*kind, ())] + settings + rest + sum(self.effect(deployment, x) for x in switched)

    def allows(self, deployment: Deployment) -> bool:
        """Whether the loss is within the budget."""
        kind = (deployment.runtime, deployment.precision, deployment.quantizer)
        return deployment.precision == "fp32" or kind in self.allowed

    def best(self) -> float:
        """The largest gain of the complete grid, of which all effects but the small rest add up."""
        return max(self._best_of(trial) for trial in self.trials() if self.allows(trial.start))

    def recorded_best(self) -> float:
        """The largest gain that was measured within the budget of the loss."""
        return max(gain for own, gain in self.gains.items() if own.precision == "fp32" or own[:3] in self.allowed)

    def _best_of(self, trial: Trial) -> float:
        effects = [self.effect(trial.start, name) for name in trial.rewrites]
        kind = (trial.start.runtime, trial.start.precision, trial.start.quantizer)
        return self.gain(trial.start) + sum(
            effect for effect in (*effects, *self.settings(kind).values()) if effect > 0
        )

    def records(self) -> list[Observation]:
        """What is known of other networks on CPUs of this ISA level."""
        own = self.name.partition(" on ")[0]
        return [each for each in shipped_records(self.isa) if each.network.partition(" on ")[0] != own]


def normal_sample(*of: object) -> float:
    """A standard normal number that depends on these alone."""
    seed = int.from_bytes(hashlib.sha256(repr(of).encode()).digest()[:8], "big")
    return float(np.random.default_rng(seed).standard_normal())


@cache
def recorded() -> tuple[Net, ...]:
    """All recorded networks with one image on one thread, of each machine the last row."""
    macs = {each.network: each.macs for level in ("avx2", "avx512-bf16", "amx") for each in shipped_records(level)}
    found = {}
    for line in RECORDED.read_text().splitlines():
        row = json.loads(line)
        if (row["batch"], row["threads"]) != (1, 1):
            continue
        names = [name for name in macs if name.startswith(f"{row['net']} on ") and _is_of(name, row["machine"])]
        found[names[0]] = _net(names[0], row, macs[names[0]])
    return tuple(found.values())


def _words(net: Net) -> str:
    return f"{net.name} {1e3 * net.latency_s:.3g}"


def _is_of(name: str, machine: dict[str, Any]) -> bool:
    number = machine.get("cpu_number")
    return f"({machine['family']})" in name and (f" {number} (" in name if number else "EPYC (" in name)


def _net(name: str, row: dict[str, Any], macs: float) -> Net:
    base = row["times_hand"][DEFAULT][0]
    gains: dict[Setting, float] = {}
    starts: dict[tuple[str, str, str], tuple[str, ...]] = {}
    allowed = set()
    plain_first = sorted(row["ways"], key=lambda name: name in (EXACT, LOWER))
    for label in plain_first:
        if label not in row["times_hand"]:
            continue
        kind = row["ways"][label]
        own = Setting(
            kind["runtime"],
            kind["precision"],
            kind.get("quantizer", kind.get("quantiser", "")),
            tuple(kind["settings"]),
        )
        if own in gains:
            continue
        gains[own] = math.log(row["times_hand"][label][0] / base)
        starts.setdefault(own[:3], tuple(kind["rewrites"]))
        if own.settings:
            gains.setdefault(own._replace(settings=()), gains[own] - 0.05)
        if own.precision != "fp32":
            allowed.add(own[:3])
    latency_s = row["p50_ms"][DEFAULT] / 1e3
    return Net(name, row["machine"]["family"], macs, latency_s, gains, starts, frozenset(allowed))


@dataclass
class Simulation:
    """Measures a recorded network: it stands for the machine, the graphs and the clock of a `MeasurementLog`.

    Attributes:
        net: The network.
        seed: Of all noise.
        images: Images of the validation split, and of the test split.
        now: Seconds on its clock.
    """

    net: Net
    seed: int
    images: int = IMAGES
    now: float = 0.0
    timings: dict[Deployment, Timing] = field(default_factory=dict)
    memory: dict[Deployment, int] = field(default_factory=dict)
    written: dict[Any, float] = field(default_factory=dict)
    measured: list[Deployment] = field(default_factory=list)
    quantized: list[Any] = field(default_factory=list)
    sensitive: dict[str, Any] = field(default_factory=dict)
    evaluations: list[tuple[Deployment, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.baseline = self.net.trials()[0].start

    def same(self, deployment: Deployment) -> str:
        """A key of its graph."""
        return "+".join(deployment.rewrites)

    def bytes(self, _deployment: Deployment) -> int:
        """So few that all fit."""
        return 1

    def timing(self, deployment: Deployment) -> Timing:
        """What it costs: minutes for NNCF on a large network, a fraction of a second for a small one."""
        size, by = self.net.macs / 1e9, self.net.latency_s
        graph = (deployment.rewrites, deployment.precision, deployment.quantizer)
        prepare_s = 0.0
        if graph not in self.written:
            least, per_gmac = LOWERED_S.get(graph[1:], (0.0, 0.0))
            prepare_s = self.net.slowness * (0.1 + least + (0.12 + per_gmac) * size) * self._noise(0.3)
            self.written[graph] = prepare_s
            self.quantized += [graph] if least else []
        load_s = (0.1 + 0.12 * size) * (3.0 if deployment.runtime == "openvino" else 1.0) * self._noise(0.2)
        return Timing(prepare_s, load_s, by / math.exp(self.net.gain(deployment)))

    def _noise(self, deviation: float) -> float:
        return math.exp(deviation * self.random.standard_normal())

    def __call__(self, deployments: Sequence[Deployment], rounds: int) -> dict[Deployment, Ratio | str]:
        """Measure these in rounds with the baseline."""
        every = [self.baseline, *deployments]
        costs = [self.timing(each) for each in every]
        for each, cost in zip(every, costs, strict=True):
            self.timings.setdefault(each, cost)
        self.measured += deployments
        load_s, round_s = sum(cost.load_s for cost in costs), sum(cost.run_s for cost in costs)
        loads = session_load_count(rounds, round_s, load_s)
        self.now += sum(cost.prepare_s for cost in costs) + loads * load_s + (2 + rounds + 3 * (loads - 1)) * round_s
        error = math.hypot(ROUND_NOISE / math.sqrt(rounds), LOAD_NOISE / math.sqrt(loads))
        return {each: self._ratio(each, error) for each in deployments}

    def _ratio(self, deployment: Deployment, error: float) -> Ratio:
        seen = self.net.gain(deployment) + error * self.random.standard_normal()
        median, low, high = (math.exp(seen + away * error) for away in (0.0, -1.96, 1.96))
        return Ratio(
            subject="deployment", other="baseline", median=median, low=low, high=high, confidence=0.95, p10=low,
            p90=high, verdict="faster" if low > 1 else "no difference shown",
        )  # fmt: skip

    def time_baseline(self) -> None:
        """Load and run the baseline, as a search does first."""
        self.timings[self.baseline] = took = self.timing(self.baseline)
        self.now += took.load_s + 2 * took.run_s

    def allows(self, deployment: Deployment) -> bool:
        """Evaluate the loss, which takes time too."""
        self.evaluated(deployment)
        return self.net.allows(deployment)

    def evaluated(self, deployment: Deployment) -> None:
        """Run one on the images of a split."""
        timed = self.timings.get(deployment) or self.timing(deployment)
        took = timed.load_s + self.images * timed.run_s
        self.now += took
        self.evaluations.append((deployment, took))


class Outcome(NamedTuple):
    """Share of the best speedup that was lost, and the seconds that it took."""

    lost: float
    seconds: float
    winner: Deployment
    simulation: Simulation


def replayed(net: Net, seed: int, budget_s: float | None = None, *, images: int = IMAGES) -> Outcome:
    """Search one network."""
    simulation = Simulation(net, seed, images)
    trials = net.trials()
    with tempfile.TemporaryDirectory() as folder:
        journal = MeasurementLog(
            Path(folder) / "log.json",
            0.0,
            net.budget_s if budget_s is None else budget_s,
            trials[0].start,
            ROUNDS,
            simulation,
            simulation,
            lambda *_: None,
            clock=lambda: simulation.now,
            macs=net.macs,
            images=images,
            evaluations=simulation.evaluations,
        )
        simulation.time_baseline()
        if any(trial.start.precision != "fp32" for trial in trials):  # else nothing is lossy, and no image is run
            simulation.evaluated(trials[0].start)
        evaluated: dict[Deployment, bool] = {}

        def allowed(deployment: Deployment) -> bool:
            if deployment.precision != "fp32" and deployment not in evaluated:
                evaluated[deployment] = simulation.allows(deployment)
            return evaluated.get(deployment, True)

        rows = search(
            trials,
            lambda _: int(net.macs),
            journal,
            allowed,
            ROUNDS,
            records=net.records(),
        )
    winner = rows[0].deployment
    if winner.precision != "fp32":  # on the test split
        simulation.evaluated(trials[0].start)
        simulation.evaluated(winner)
    return Outcome(1 - math.exp(net.gain(winner) - net.best()), simulation.now, winner, simulation)


SEEDS = 3
BUDGETS_S = (60.0, 180.0)


def show(net: Net, seed: int = 0) -> Iterator[str]:
    """What one search measured, in its order."""
    one, best = replayed(net, seed), net.best()
    for each in one.simulation.measured:
        switched = set(each.rewrites) ^ set(net.starts[each.runtime, each.precision, each.quantizer])
        message = (
            f"{each.runtime} {each.precision} {each.quantizer} {' '.join(each.settings)}, {len(switched)} switched"
        )
        yield f"{message:90} {math.exp(net.gain(each) - best):.3f} of the best"
    yield f"lost {one.lost:.3f}, {one.seconds:.0f} of {net.budget_s:.0f} s"


def table() -> Iterator[str]:
    """Speedups over the baseline: the best, and what is found in each budget (mean of some seeds; largest seconds)."""
    budgets = "".join(f" in {budget_s:.0f} s | s |" for budget_s in BUDGETS_S)
    yield f"| CPU ISA level, network | ms | best recorded | best with rewrites |{budgets}"
    yield f"|---|---|---|---|{'---|---|' * len(BUDGETS_S)}"
    for net in sorted(recorded(), key=lambda net: (net.isa, net.latency_s)):
        name, _, machine = net.name.partition(" on ")
        number = re.search(r"EPYC [0-9.]+", machine)
        line = f"| {net.isa}, {f'{number[0]}, ' if number else ''}{name} | {1e3 * net.latency_s:.3g} "
        line += f"| {math.exp(net.recorded_best()):.2f} | {math.exp(net.best()):.2f} |"
        for budget_s in BUDGETS_S:
            found = [replayed(net, seed, budget_s) for seed in range(SEEDS)]
            gain = np.mean([math.exp(net.gain(each.winner)) for each in found])
            line += f" {gain:.2f} | {max(each.seconds for each in found):.0f} |"
        yield line


if __name__ == "__main__":
    wanted = sys.argv[1:]
    some = [net for net in recorded() if wanted[:1] == [net.isa] and all(word in _words(net) for word in wanted[1:])]
    print("\n".join(line for net in some for line in show(net)) if wanted else "\n".join(table()))
