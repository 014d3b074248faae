"""The search for the fastest configuration: where it starts, its candidates, and which are measured when."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv.core import plugins
from repaconv.core.errors import Refused, RepaconvError, UsageProblem
from repaconv.core.files import sha256_of_bytes, write_bytes
from repaconv.core.progress import Progress
from repaconv.engines.session_settings import Tunable
from repaconv.results import Candidate, Deployment, Ratio, Sensitivity
from repaconv.rewrites.presets import chosen
from repaconv.sources.source_model import DEPLOY, GraphSpec, Subject
from repaconv.stages.bench.options import LATENCY
from repaconv.stages.shared.common_checks import load_target, usual_form
from repaconv.stages.shared.engine_files import lowers, takes_networks
from repaconv.stages.shared.input_selection import Split
from repaconv.stages.shared.lower_precision import in_precision, int8_for, loader_for
from repaconv.stages.tune.options import TuneOptions
from repaconv.verification.model_runners import named

if TYPE_CHECKING:
    import onnx

    from repaconv.engines.contract import Engine, Feeds, Network
    from repaconv.engines.targets import Target
    from repaconv.graph.rewrite_contract import Rewrite
    from repaconv.verification.input_batches import Batch


# --- The search for the fastest deployment: what each change does alone, then the best sums of them, ever longer
# measured.
#
# An arm is a runtime in a precision. Arms that are far behind in their default form, or lose more than is allowed, are
# left; in place of one that loses too much come such that leave ever more of its layers in float32, the fastest allowed
# one stays. In those arms, effects of rewrites on the logarithm of the time nearly add up, so measuring each alone
# tells which compositions are worth measuring; those, and then settings on the best of them, go through successive
# halving
# (Jamieson and Talwalkar 2016) across all arms, the last with as many rounds as a result needs. What multiplies more
# than the arm's default form by `HOPELESS` is not measured at all.

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


# --- The deployments of one network, each graph written once: what a search chooses among.

ROOM = 8 * 1024**3
"""Bytes of graphs that lie on the disk at once."""


@dataclass
class Graphs:
    """The graph of a network for one target, and the rewrites that change it."""

    raw: onnx.ModelProto
    rewrites: dict[str, Rewrite]

    def model(self, rewrites: Iterable[str]) -> onnx.ModelProto:
        """It in a form, as far as rewrites are its own: they may be of another checkpoint."""
        from repaconv.graph.model_rewriting import rewritten

        return rewritten(self.raw, [self.rewrites[name] for name in rewrites if name in self.rewrites])[0]


@dataclass
class Candidates:
    """The deployments of one network.

    Attributes:
        subject: The network.
        names: Of rewrites that are considered.
        given: Images, of which some calibrate lower precisions; None where there are none.
        scratch: Where graphs go.
        progress: See `Progress`.
        sensitive: Which layers lose most in int8, by target, where that was asked.
    """

    subject: Subject
    names: Sequence[str]
    given: Split | None
    scratch: Path
    progress: Progress
    known: dict[str, Graphs] = field(default_factory=dict)
    made: dict[tuple[Any, ...], Path] = field(default_factory=dict)
    counted: dict[Path, int] = field(default_factory=dict)
    sensitive: dict[str, tuple[Sensitivity, ...]] = field(default_factory=dict)

    @property
    def place_of_scores(self) -> int:
        """Which of the outputs is the scores of classes."""
        scores = self.subject.scores
        return self.subject.outputs.index(scores.output) if scores else 0

    def arm(self, start: Deployment, tries: Sequence[Any]) -> Arm:
        """A runtime in a precision, from its target's default form; another quantizer's in that form alone, which takes
        half a minute.

        Raises:
            EnvironmentProblem: If its quantizer is not here.
            Refused: If the export is not sound or its weights take more than 2 GiB.
            UsageProblem: If the runtime takes networks, and this is a graph.
        """

        device = load_target(start.target)
        if takes_networks(device):
            self.subject.network(DEPLOY)
            return Arm(start, (), tuple(tries))
        graphs, precision = self._graphs(device), start.precision
        newest = int8_for(device, start.quantizer).opset(device.newest) if precision == "int8" else device.newest
        fit = tuple(name for name, rewrite in graphs.rewrites.items() if rewrite.opset <= newest)
        fit = device.kept(fit, precision)
        usual = usual_form(device, self.subject.folded.called)
        default = tuple(name for name in fit if name in usual)
        return Arm(start.model_copy(update={"rewrites": default}), () if start.quantizer else fit, tuple(tries))

    def _graphs(self, device: Target) -> Graphs:
        """The network exported for a target, and which of the rewrites change that."""
        from repaconv.graph.model_rewriting import rewritten

        spec = GraphSpec(
            size=self.subject.folded.image_size,
            opset=device.opset,
            newest=device.newest,
            lacks=device.unsupported_ops,
            free_size=self.subject.folded.any_image_size,
            simplifiers=(),
        )
        if str(spec) not in self.known:
            graph = self.subject.graph(DEPLOY, spec, scratch=self.scratch, progress=self.progress)
            if graph.data is not None or not graph.sound:
                raise Refused(
                    "the weights take more than 2 GiB."
                    if graph.data
                    else "the exported graph and the folded network give different outputs.",
                    hint="tune supports graphs that fit into one file." if graph.data else "See `repaconv export`.",
                    code="tune.graph",
                )
            self.progress("what applies", 0, 0)
            known = chosen(self.names, device.newest).rewrites
            fitting = sorted(known, key=lambda rewrite: (rewrite.order, rewrite.name))
            rewrites = {rewrite.name: rewrite for rewrite in fitting if rewritten(graph.model, [rewrite])[1]}
            self.known[str(spec)] = Graphs(graph.model, rewrites)
        return self.known[str(spec)]

    def macs(self, deployment: Deployment) -> int:
        """What its form multiplies and adds for one image; 1 where there is no graph to count in."""
        import onnx

        from repaconv.graph.compute_costs import macs_of

        if takes_networks(load_target(deployment.target)):
            return 1
        path = self._named(deployment)
        if path not in self.counted:
            self.counted[path] = macs_of(onnx.load(self.exact(deployment)))
        return self.counted[path]

    def exact(self, deployment: Deployment) -> Path:
        """Its form in float32 as a file; equal graphs are one file."""
        device = load_target(deployment.target)
        return self._file((device.name, deployment.rewrites), lambda: self._graphs(device).model(deployment.rewrites))

    def same(self, deployment: Deployment) -> str:
        """Equal for deployments whose forms come to equal graphs."""
        return "" if takes_networks(load_target(deployment.target)) else self._named(deployment).stem

    def _named(self, deployment: Deployment) -> Path:
        """Of its form in float32, whether or not it lies there now."""
        known = self.made.get((deployment.target, deployment.rewrites))
        return known or self.exact(deployment)

    def bytes(self, deployment: Deployment) -> int:
        """Of its weights, about."""
        if takes_networks(load_target(deployment.target)):
            return self.subject.folded.payload.bytes
        return self.exact(deployment).stat().st_size

    def path(self, deployment: Deployment) -> Path:
        """Its graph as a file, typed where its precision stands in the graph."""
        import onnx

        device, precision = load_target(deployment.target), deployment.precision
        plain = self.exact(deployment)
        if precision == "fp32" or lowers(device, precision):
            return plain
        how = int8_for(device, deployment.quantizer)

        def typed() -> onnx.ModelProto:
            self.progress(f"to {precision}", 0, 0)
            calls = self.given.calibrating() if self.given else []
            return in_precision(onnx.load(plain), precision, calls, how, deployment.fp32_modules)[0]

        return self._file((plain, precision, how, deployment.fp32_modules), typed)

    def mixed(self, arm: Arm) -> list[Arm]:
        """In place of one in int8 those that leave ever more of the most sensitive layers in float32."""
        import onnx

        from repaconv.onnx_export.quantization_layer_groups import nested

        start = arm.start
        if start.precision != "int8" or start.fp32_modules or self.given is None:
            return []
        if start.target not in self.sensitive:
            plain, calls = onnx.load(self.exact(start)), self.given.calibrating()
            found = sensitivities(plain, calls, load_target(start.target), self.place_of_scores, progress=self.progress)
            self.sensitive[start.target] = tuple(found)
        steps = nested([each.layers for each in self.sensitive[start.target]])
        return [arm._replace(start=start.model_copy(update={"fp32_modules": keep})) for keep in steps]

    def deployable(self, deployment: Deployment) -> Path | Network:
        """What its runtime opens."""
        if takes_networks(load_target(deployment.target)):
            return self.subject.network(DEPLOY)
        return self.path(deployment)

    def sizes(self, batch: int) -> dict[str, int]:
        """Of a graph's free dimensions, by name."""
        size = self.subject.folded.image_size
        return {"batch": batch, "height": size[0], "width": size[1]} if size else self.subject.free_sizes(batch)

    def _file(self, key: tuple[Any, ...], make: Callable[[], onnx.ModelProto]) -> Path:
        """A graph, written unless it lies there; equal ones are one file."""
        path = self.made.pop(key, None)
        if path is None or not path.is_file():
            content = make().SerializeToString(deterministic=True)
            path = self.scratch / f"{sha256_of_bytes(content)}.onnx"
            if not path.is_file():
                write_bytes(path, content)
        self.made[key] = path  # the last: in the order of their use
        self._make_room()
        return path

    def _make_room(self) -> None:
        """Remove those that were not used for longest; they are written again where they are wanted."""
        there = [path for path in dict.fromkeys(reversed(self.made.values())) if path.is_file()]
        total = 0
        for path in there:
            total += path.stat().st_size
            if total > ROOM and path != there[0]:
                path.unlink()


def judging_call(subject: Subject) -> Batch:
    """Three images, as many as a call takes where that is fixed, or a call where it takes no images."""
    count = subject.folded.batch if isinstance(subject.folded.batch, int) else 1 if subject.folded.whole else 3
    return subject.drawn(count, 0).piece(0, count)


# --- How much each group of layers loses in int8 while all others stay in float32: a forward pass each.


def sensitivities(
    model: onnx.ModelProto, calls: Sequence[Feeds], device: Target, output: int = 0, *, progress: Progress
) -> list[Sensitivity]:
    """The groups of a float32 graph that gives logits, the most sensitive first.

    Args:
        model: It.
        calls: Images: they calibrate, and on them it is measured. What a deployment loses others judge.
        device: For which int8 would be.
        output: The place of the logits among the outputs.
        progress: See `Progress`.
    """
    from repaconv.onnx_export.fp16_and_int8 import to_int8
    from repaconv.onnx_export.quantization_layer_groups import groups_of, nodes_of, only_in_int8
    from repaconv.verification.difference_metrics import Meter
    from repaconv.verification.tolerances import tolerance

    low = to_int8(model, calls, how=int8_for(device))
    groups, load = groups_of(model), loader_for(device.architecture, "int8")

    def logits(graph: onnx.ModelProto) -> list[Any]:
        session = load(graph.SerializeToString())
        ports = [port.name for port in session.inputs]
        return [list(session.run(named(ports, call)).values())[output] for call in calls]

    right = logits(model)
    found = []
    for place, group in enumerate(groups):
        progress("tune: layers in int8", place, len(groups))
        meter = Meter(tolerance("int8"), logits=True)
        for got, expected in zip(logits(only_in_int8(model, low, nodes_of(model, group))), right, strict=True):
            meter.add(got, expected)
        seen = meter.metrics()
        flips = seen.top1_flips / seen.images
        found.append(Sensitivity(layers=group, disagreement=flips, kl_divergence=seen.kl_divergence or 0.0))
    return sorted(found, key=lambda each: (-each.kl_divergence, -each.disagreement))


# --- Where a search begins: which runtimes of a machine, in which precisions, how called, and what of them is tried.

AUTO = "auto"
BATCHES = (4, 16)
"""Images a call that throughput tries besides its own: weights are read once for all of them."""


class Machine(NamedTuple):
    """The runtimes of a device, its target's own first, with their versions; and which were left out, and why."""

    devices: tuple[Target, ...]
    versions: dict[str, str]
    left_out: tuple[str, ...]


class Called(NamedTuple):
    """How a network is called: for what, on how many threads in all, with how many images, and whether those are
    free."""

    objective: str
    threads: int
    batch: int
    free: bool


def machine_of(options: TuneOptions, device: Target, *, here: bool) -> Machine:
    """The runtimes that are asked for and can run here; elsewhere a target's own alone.

    Raises:
        EnvironmentProblem: If the target's own runtime is not here, where it should be.
        UsageProblem: If there is none of a name, or another than its target's is wanted elsewhere.
    """
    own: Engine = plugins.load(plugins.ENGINES, device.runtime)
    beside = {other.runtime: other for other in map(load_target, device.beside)}
    asked = _asked(options, beside) - {device.runtime}
    if unknown := sorted(asked - set(beside)):
        raise UsageProblem(
            f"{device.name} cannot use the runtime {', '.join(unknown)}.",
            hint=f"It can use {', '.join([device.runtime, *beside])}.",
            code="tune.runtimes",
        )
    if not here:
        if options.runtimes and asked and AUTO not in options.runtimes:
            raise UsageProblem(
                f"on a cluster only the target's own runtime, {device.runtime}, can be measured.",
                hint="Leave --runtimes out.",
                code="tune.runtimes",
            )
        return Machine((device,), {own.name: device.runtime_version}, ())
    devices, versions, left = [device], {own.name: own.version()}, []
    for name, other in beside.items():
        try:
            if name in asked:
                versions[name] = plugins.load(plugins.ENGINES, name).version()
                devices.append(other)
        except RepaconvError as problem:
            left.append(f"{name}: {problem.message} {problem.hint}")
    return Machine(tuple(devices), versions, tuple(left))


def _asked(options: TuneOptions, beside: Mapping[str, Target]) -> set[str]:
    """By name; without a name all that run graphs, for what compiles networks takes minutes and was never the
    fastest."""
    named = set(options.runtimes or (AUTO,))
    graphs = {name for name, other in beside.items() if not takes_networks(other)}
    return (named - {AUTO}) | (graphs if AUTO in named else set())


def threads_of(options: TuneOptions, device: Target) -> int:
    """Of one inference; of throughput all that this process may use."""
    if options.threads is not None or options.objective == LATENCY:
        return options.threads or device.bench.threads
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def starts(machine: Machine, called: Called, *, lossy: bool, here: bool) -> Iterator[tuple[Deployment, list[Any]]]:
    """Every runtime in every precision, with what is tried of each; the baseline first."""
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
            tries = [{"settings": each} for each in settings] + _ways(called, "streams" in engine.can)
            yield start, tries
            for quantizer in device.quantizers if precision == "int8" else ():
                yield start.model_copy(update={"quantizer": quantizer}), tries


def _ways(called: Called, streams: bool) -> list[dict[str, int]]:
    """Other ways to keep a machine busy: a stream for every core, more images a call."""
    if called.objective == LATENCY:
        return []
    each = [{"streams": called.threads, "threads": 1}] if streams and called.threads > 1 else []
    batches = [size * called.batch for size in BATCHES] if called.free else []
    return [*each, *({"batch": size} for size in batches)]
