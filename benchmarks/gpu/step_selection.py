"""Which steps a session runs, in which order: those with the largest expected gain for their seconds.

A step measures numbers of docs/gpu.md: the speedup of repaconv over the manual baseline and over the vanilla network,
or, by `tune`, that of a preset over the default one. The logarithm of such a number is a sum of effects: of the method,
of the network, of GPUs in contrast to CPUs, of the runtime, of the precision. A Gaussian process whose covariance is
the sum of these parts predicts each number from those that are known (Rasmussen and Williams 2006, algorithm 2.1), as
in `repaconv.stages.tune.speed_prediction`.

The expected gain of a cell of the table is E|x - mean|, the expected error of the best prediction without it, and a
little more for an empty cell. That of a preset is E[max(0, x)]: the expected speedup of networks. Both are logarithms
of speedups, shown in percent. A number that is known, or well predicted from others, gains little.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpu.plan import ANY, BATCHES, MADE, OFFICIAL, OURS, VANILLA, Step, needs

Outcome = Mapping[str, Any]
"""What a step has written."""
PRESET = "preset"

# Standard deviations of the logarithm of a speedup, by what two numbers have in common. Those of methods, networks and
# devices are from CPUs (benchmarks/results/preset_speed.json, manual_baseline_speed.json). That of the kind of device
# is from the papers: their speedups on GPUs and ours on CPUs differ by 0.06 to 0.16. The others are assumed.
METHOD, MODEL, KIND, DEVICE, RUNTIME, PRECISION, OWN = 0.3, 0.05, 0.12, 0.05, 0.08, 0.08, 0.04
OF_PRESETS = 0.3
"""The same of a preset's speedup over the default one, relative to these; on CPUs it is 1.00 to 1.07."""
NOISE = 0.02
"""Standard deviation of a measured number."""
CLAIMED = 2
"""A cell next to a paper's own number counts as so many."""
EXPORTS, EXPORTS_OF_ANY = 20, 60
"""Cells for which a preset counts: every export for its target has it, and most are of networks without a method."""
EMPTY = 0.02
"""Gain of a cell that is empty, however well it is predicted."""
BUILT = 0.002
"""Gain of an engine that is built but cannot be opened here."""

# Seconds of a step before one like it was run: of any network, and per million parameters. Those of making networks and
# graphs, and of building an engine, are CPU seconds of RePaViT-Tiny and PYRA on one core; those of the GPU are assumed.
PREPARE_S, GRAPHS_S, ENGINE_S, OPEN_S = (8.0, 0.3), (48.0, 0.7), (28.0, 1.0), (15.0, 0.1)
COMPILE_S, TUNE_MORE_S = 90.0, 40.0
ROUNDS_S, ROUNDS, FEWEST, CALL_S, TERA_MACS = 15.0, 100, 20, 0.01, 5.0
"""A row's rounds take so many seconds, if so many rounds do; an inference so much, and its operations at that rate."""
TOGETHER = 4
"""Networks, or graphs, that are made at once, while nothing is timed."""
MODELS = {
    "repavit-deit-base-0.75": (10.0, 51.0), "repavit-deit-tiny-0.75": (0.8, 3.5), "riformer-s12": (1.8, 12.0),
    "nondeep-6x2-value-sum": (0.7, 10.0), "pyra-vit-base-low": (8.7, 86.0), "pyra-vit-base-high": (5.1, 86.0),
    "dwconv-vit-large-12": (42.0, 250.0), "dwconv-vit-base-6": (14.0, 70.0),
    "graph-deit_small_patch16_224": (4.3, 22.0), "graph-resnet50": (4.1, 26.0), "graph-convnext_tiny": (4.5, 29.0),
    "graph-swin_tiny_patch4_window7_224": (4.5, 28.0), "graph-efficientnet_b0": (0.4, 5.3),
    "graph-fastvit_t8": (0.7, 4.0),
}  # fmt: skip
"""Billions of multiply-accumulates per image, and millions of parameters, of our form."""
RUNTIME_GIB = 1.0
"""GPU memory that a runtime takes without any network."""
FORMS = 4
"""Networks of a row."""


class Machine(NamedTuple):
    """Where the session runs.

    Attributes:
        device: Name of the GPU; empty if there is none.
        capability: Its compute capability.
        memory_gib: Its memory; 0 if unknown.
        capabilities: Of each target the compute capability that it is for; empty if it is for any GPU, or for CPUs.
        absent: Targets whose runtime is not here, with the reason.
        ahead: Targets whose float32 engines are built without their GPU.
    """

    device: str
    capability: str
    memory_gib: float
    capabilities: Mapping[str, str]
    absent: Mapping[str, str]
    ahead: Collection[str]


class Cell(NamedTuple):
    """A number: how many times as fast ours is as ``over``, or a preset as the default one if that is `PRESET`."""

    over: str
    method: str
    model: str
    batch: int
    target: str
    precision: str
    device: str


class Known(NamedTuple):
    """A cell and the logarithm of its number."""

    cell: Cell
    gain: float


class Chosen(NamedTuple):
    """A step that is run, with what it needs: expected gain, expected seconds of all of them, and why it is chosen."""

    step: Step
    needed: tuple[Step, ...]
    gain: float
    seconds: float
    why: str


# Numbers that steps measure, and what is known of them


def cells_of(step: Step, device: str) -> list[Cell]:
    """The numbers that a step measures."""
    given = step.given
    if step.kind in MADE:
        return []
    overs = (PRESET,) if step.kind == "tune" else (OFFICIAL, VANILLA)
    batches = BATCHES if step.kind == "engine" else (given["batch"],)
    fixed = (given["target"], given.get("precision", "fp32"), device)
    return [Cell(over, given["method"], step.model, batch, *fixed) for batch in batches for over in overs]


def known_of(step: Step, outcome: Outcome, device: str) -> Iterator[Known]:
    """The result of a step that was run, from its samples or from ratios that were computed of them."""
    if step.kind == "tune" and "tuned" in outcome:
        ratio = outcome["tuned"]["ratio"]
        yield Known(cells_of(step, device)[0], math.log(ratio["median"]) if ratio else 0.0)
        return
    rows = {row.get("batch"): speedups(row) for row in outcome.get("batches", (outcome,))}
    for cell in cells_of(step, device):
        found = rows.get(cell.batch) if step.kind == "engine" else next(iter(rows.values()))
        if found and cell.over in found:
            yield Known(cell, math.log(found[cell.over]))


def speedups(row: Outcome) -> dict[str, float]:
    """Of a row's measurements, by what ours is compared with."""
    if "ratios" in row:
        return {name: ratio["median"] for name, ratio in row["ratios"].items()}
    samples = {name: np.asarray(values) for name, values in row.get("samples_ms", {}).items()}
    return {name: float(np.median(each / samples[OURS])) for name, each in samples.items() if name != OURS}


class Prediction:
    """Logarithms of speedups, as far as they are known."""

    def __init__(self, cells: Sequence[Cell], known: Sequence[Known]) -> None:
        every = list(dict.fromkeys([*cells, *(each.cell for each in known)]))
        self.place = {cell: number for number, cell in enumerate(every)}
        self.mean, self.covariance = np.zeros(len(every)), covariance(every)
        self.known = {each.cell for each in known}
        self.measured_cells = {(cell.over, cell.method) for cell in self.known}
        for each in known:
            self.observe(each.cell, each.gain)

    def observe(self, cell: Cell, gain: float | None = None) -> None:
        """Take in a number; None for one that will be known: it makes others certain, and changes no mean."""
        row = self.covariance[self.place[cell]].copy()
        weights = row / (row[self.place[cell]] + NOISE**2)
        if gain is not None:
            self.mean += weights * (gain - self.mean[self.place[cell]])
        self.covariance -= np.outer(weights, row)

    def deviations(self, cells: Sequence[Cell]) -> NDArray[np.float64]:
        """By how much a measurement reduces the standard deviation of each number when those before it are known."""
        own = [self.place[cell] for cell in cells]
        found = np.linalg.cholesky(self.covariance[np.ix_(own, own)] + 1e-9 * np.eye(len(own))).diagonal()
        return np.asarray(np.maximum(found - NOISE, 1e-6))

    def gain(self, cells: Sequence[Cell], claimed: bool) -> float:
        """Expected gain of knowing these numbers."""
        found = 0.0
        for cell, deviation in zip(cells, self.deviations(cells).tolist(), strict=True):
            if cell.over == PRESET:
                exports = EXPORTS_OF_ANY if cell.method == ANY else EXPORTS
                found += exports * _expected_excess(self._lead(cell), deviation)
            else:
                off = math.sqrt(2 / math.pi) * deviation + (cell not in self.known) * EMPTY
                found += off * (CLAIMED if claimed and cell.over == VANILLA else 1)
        return found

    def _lead(self, cell: Cell) -> float:
        """Expected logarithm of the speedup over the preset that the target has, which may be a measured one."""
        measured = any(
            (each.over, each.method, each.target) == (PRESET, cell.method, cell.target) for each in self.known
        )
        return 0.0 if measured else float(self.mean[self.place[cell]])

    def described(self, cell: Cell) -> str:
        """What is known of a number, and its standard deviation once the steps before are known."""
        best = (
            f" {math.exp(self.mean[self.place[cell]]):.2f}x" if (cell.over, cell.method) in self.measured_cells else ""
        )
        return f"{cell.over}{best} ± {float(self.deviations([cell])[0]):.0%}"


def covariance(cells: Sequence[Cell]) -> NDArray[np.float64]:
    """Covariance of the logarithms of the numbers before any is known."""

    def same(things: Iterable[object]) -> NDArray[np.bool_]:
        numbers: dict[object, int] = {}
        codes = np.array([numbers.setdefault(thing, len(numbers)) for thing in things])
        return np.asarray(codes[:, None] == codes[None, :])

    kind = same(cell.target.startswith(("x86-64", "cpu")) for cell in cells)
    shared = (
        METHOD**2
        + MODEL**2 * same((cell.model, cell.batch) for cell in cells)
        + KIND**2 * kind
        + DEVICE**2 * same(cell.device for cell in cells)
        + RUNTIME**2 * same(cell.target for cell in cells)
        + PRECISION**2 * kind * same(cell.precision for cell in cells)
        + OWN**2 * same(cells)
    )
    scale = np.array([OF_PRESETS if cell.over == PRESET else 1.0 for cell in cells])
    return np.asarray(same((cell.over, cell.method) for cell in cells) * shared * scale[:, None] * scale[None, :])


def _expected_excess(mean: float, deviation: float) -> float:
    """E[max(0, x)] of a normal x."""
    z = mean / deviation
    return float(
        0.5 * mean * math.erfc(-z / math.sqrt(2)) + deviation * math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    )


# Seconds


def usual_s(step: Step) -> float:
    """Seconds of a step, before one like it was run."""
    macs, parameters = MODELS.get(step.model, (1.0, 6.0))

    def sized(seconds: tuple[float, float]) -> float:
        return seconds[0] + seconds[1] * parameters

    def timed(batch: int) -> float:
        once = FORMS * (CALL_S + batch * macs / 1e3 / TERA_MACS)
        return min(max(ROUNDS_S, FEWEST * once), ROUNDS * once)

    if step.kind == "prepare":
        return sized(PREPARE_S)
    if step.kind == "graphs":
        return sized(GRAPHS_S)
    if step.kind == "tune":
        return step.given["budget_s"] + TUNE_MORE_S + sized(OPEN_S)
    if step.kind == "engine":
        return sized(ENGINE_S) + sum(map(timed, BATCHES))
    compiled = COMPILE_S if step.given["target"].endswith("@compiled") else 0.0
    return sized(OPEN_S) + compiled + timed(step.given["batch"])


@dataclass(frozen=True)
class Durations:
    """Expected seconds of steps, corrected by the steps that were run.

    Attributes:
        earlier: Seconds by the names of steps, from earlier sessions.
        now: Steps of this session with their seconds.
    """

    earlier: Mapping[str, float] = field(default_factory=dict)
    now: Sequence[tuple[Step, float]] = ()

    def all_seconds(self, plan: Iterable[Step]) -> dict[str, float]:
        """Expected seconds by name.

        They are those of an earlier session, or as usual, times how much longer than usual others took in earlier
        sessions; and that times how much longer than so expected the steps of this session took.
        """
        plan = list(plan)
        before = _Excess((step, self.earlier[step.name] / usual_s(step)) for step in plan if step.name in self.earlier)
        expected = {step.name: self.earlier.get(step.name) or usual_s(step) * before.of(step) for step in plan}
        now = _Excess((step, max(took, 0.1) / (expected.get(step.name) or usual_s(step))) for step, took in self.now)
        return {step.name: min(expected[step.name] * now.of(step), float(step.limit_s)) for step in plan}


class _Excess:
    """How much longer than expected steps took, by target or by kind; networks and graphs, made by CPUs, are one."""

    def __init__(self, took: Iterable[tuple[Step, float]]) -> None:
        self._logs: dict[tuple[str, ...], list[float]] = {}
        for step, factor in took:
            for key in self._keys(step):
                self._logs.setdefault(key, []).append(math.log(factor))

    def of(self, step: Step) -> float:
        """Of steps like this one, the geometric mean; 1 if none was run."""
        alike = next((self._logs[key] for key in self._keys(step) if key in self._logs), [0.0])
        return math.exp(sum(alike) / len(alike))

    def _keys(self, step: Step) -> list[tuple[str, ...]]:
        if step.kind in MADE:
            return [(step.kind,), MADE]
        return [(step.kind, step.given.get("target", "")), (step.kind,)]


# Which steps can be run, and which are chosen


def unable(step: Step, machine: Machine) -> str:
    """Why a step cannot be run on this machine; empty if it can."""
    target, precision = step.given.get("target", ""), step.given.get("precision", "fp32")
    needed, cpu = machine.capabilities.get(target, ""), target.startswith(("x86-64", "cpu"))
    if step.kind in MADE or cpu:
        return ""
    if not machine.device:
        ahead = step.kind == "engine" and precision == "fp32" and target in machine.ahead
        return machine.absent.get(target, "") if ahead else machine.absent.get(target) or "there is no NVIDIA GPU."
    if needed and needed != machine.capability:
        return f"{target} is for compute capability {needed}; the {machine.device} has {machine.capability}."
    if target in machine.absent:
        return machine.absent[target]
    if precision in ("bf16", "tf32") and _version(machine.capability) < (8, 0):
        return f"{precision} needs compute capability 8.0; the {machine.device} has {machine.capability}."
    gib = memory_gib(step)
    if machine.memory_gib and gib > machine.memory_gib:
        return f"the networks of {step.model} take {gib:.1f} GiB; the {machine.device} has {machine.memory_gib:.1f}."
    return ""


def memory_gib(step: Step) -> float:
    """GPU memory that a step takes at least: weights of all its networks. Its batch is halved if that does not fit."""
    parameters = MODELS.get(step.model, (1.0, 6.0))[1]
    size = 2 if step.given.get("precision") in ("fp16", "bf16") else 4
    return RUNTIME_GIB + (2 if step.kind == "tune" else FORMS) * parameters * 1e6 * size / 2**30


def _version(capability: str) -> tuple[int, ...]:
    return tuple(int(part) for part in capability.split(".")) if capability else ()


@dataclass(frozen=True)
class Selection:
    """What is known when steps are chosen.

    Attributes:
        plan: All steps.
        machine: The machine.
        done: Outcomes of the steps that were run, by name.
        left_out: Steps that are not run, with the reason.
        known: Numbers that are known: from this session, and from earlier results of this device and of others.
        earlier_s: Seconds by the names of steps, from earlier sessions.
    """

    plan: Sequence[Step]
    machine: Machine
    done: Mapping[str, Outcome]
    left_out: Mapping[str, str]
    known: Sequence[Known] = ()
    earlier_s: Mapping[str, float] = field(default_factory=dict)

    def chosen(self, left_s: float) -> list[Chosen]:
        """The steps that fit into the time, the one with the largest expected gain per second first.

        The gain of each is what it adds to those before it, and what several need is paid by the first of them.
        """
        pool = [step for step in self.plan if step.kind not in MADE and step.name not in self.done]
        pool = [step for step in pool if step.name not in self.left_out]
        needed = {step.name: [each for each in needs(step) if each.name not in self.done] for step in pool}
        cells = {step.name: cells_of(step, self.machine.device) for step in pool}
        predicted = Prediction([cell for each in cells.values() for cell in each], self.known)
        ran = [(step, self.done[step.name]) for step in self.plan if step.name in self.done]
        took = [(step, outcome["seconds"]) for step, outcome in ran if _is_whole(outcome)]
        expected_s, alike = Durations(self.earlier_s, took).all_seconds(self.plan), _came_out(ran)
        made, found = set(), []

        def gain_of(step: Step) -> float:
            gain = predicted.gain(cells[step.name], bool(step.given.get("claim"))) if self._opens(step) else BUILT
            out = alike[step.kind, step.given["target"]]
            return gain * (1 + sum(out)) / (1 + len(out))  # the chance that it comes out: 1 until one like it failed

        # Gains only become smaller: one of an earlier round is a bound, and only the best bounds are computed again.
        bounds = {step.name: gain_of(step) for step in pool}
        while True:
            options = []
            for step in pool:
                missing = [each for each in needed[step.name] if each.name not in made]
                seconds = expected_s[step.name] + sum(expected_s[each.name] for each in missing) / TOGETHER
                if seconds <= left_s:
                    options.append((bounds[step.name] / seconds, seconds, step, missing))
            options.sort(key=lambda option: -option[0])
            best: tuple[float, float, Step, list[Step]] | None = None
            for bound, seconds, step, missing in options:
                if best is not None and bound <= best[0]:
                    break
                bounds[step.name] = gain_of(step)
                if best is None or bounds[step.name] / seconds > best[0]:
                    best = (bounds[step.name] / seconds, seconds, step, missing)
            if best is None:
                return found
            _, seconds, step, missing = best
            why = self._why(step, cells[step.name], predicted, alike[step.kind, step.given["target"]])
            found.append(Chosen(step, tuple(missing), bounds[step.name], seconds, why))
            for cell in cells[step.name] if self._opens(step) else ():
                predicted.observe(cell)
            made |= {each.name for each in missing}
            left_s -= seconds
            pool.remove(step)

    def _opens(self, step: Step) -> bool:
        """Whether what the step makes is also measured here."""
        return bool(self.machine.device) or step.given["target"] not in self.machine.ahead

    def _why(self, step: Step, cells: Sequence[Cell], predicted: Prediction, alike: Sequence[bool]) -> str:
        if not self._opens(step):
            return "built ahead of time; its GPU is not here"
        lines = [predicted.described(cell) for cell in cells[:2]]
        if claim := step.given.get("claim"):
            lines.append(f"the paper has {claim['factor']:.2f}x")
        if not all(alike):
            lines.append(f"{sum(alike)} of {len(alike)} like it came out")
        return ", ".join(lines)


def _came_out(ran: Iterable[tuple[Step, Outcome]]) -> Mapping[tuple[str, str], list[bool]]:
    """Whether each step that was run came out, by kind and target."""
    found: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for step, outcome in ran:
        found[step.kind, step.given.get("target", "")].append(_is_whole(outcome))
    return found


def _is_whole(outcome: Outcome) -> bool:
    """Whether a step came out; an engine whose GPU is not here was built."""
    return outcome["status"] == "done" or "built" in outcome


def listed(chosen: Sequence[Chosen], left_out: Mapping[str, str]) -> Iterator[str]:
    """The chosen steps in order, with expected gain and seconds; then what is left out, by reason."""
    yield f"{'gain':>7} {'seconds':>8} {'total':>6}  step"
    total = 0.0
    for each in chosen:
        total += each.seconds
        needed = f" (with {', '.join(step.name for step in each.needed)})" if each.needed else ""
        yield f"{each.gain:7.1%} {each.seconds:8.0f} {total:6.0f}  {each.step.name}: {each.why}{needed}"
    causes: dict[str, list[str]] = {}
    for name, why in left_out.items():
        causes.setdefault(why, []).append(name)
    for why, names in causes.items():
        yield f"left out: {len(names)} step{'s' * (len(names) > 1)} ({names[0]} first): {why}"
