"""The search for the fastest configuration: trials to start from, candidate graphs, and which are measured when."""

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
from repaconv.engines.tunable_session_settings import Tunable
from repaconv.results import Candidate, Deployment, Ratio, Sensitivity
from repaconv.rewrites.presets import chosen
from repaconv.sources.source_model import DEPLOY, GraphSpec, Subject
from repaconv.stages.bench.options import LATENCY
from repaconv.stages.shared.common_checks import default_rewrites, load_target
from repaconv.stages.shared.engine_files import runtime_lowers, takes_networks
from repaconv.stages.shared.input_selection import Split
from repaconv.stages.shared.lower_precision import int8_for, loader_for, to_precision
from repaconv.stages.tune.options import TuneOptions
from repaconv.verification.model_runners import named

if TYPE_CHECKING:
    import onnx

    from repaconv.engines.contract import Engine, Feeds, Network
    from repaconv.engines.targets import Target
    from repaconv.graph.rewrite_contract import Rewrite
    from repaconv.verification.input_batches import Batch


# The search
#
# A trial is a runtime in a precision. A trial that is much slower with its default preset is dropped. A trial that
# loses more than is allowed is replaced by variants that keep more and more layers in FP32; the fastest allowed one
# remains. Within a trial, each rewrite is measured alone first: the effects of rewrites on the logarithm of the time
# nearly add up, so their sums predict which combinations are worth measuring. The best combinations, and then other
# settings on the best of these, go through successive halving (Jamieson and Talwalkar 2016) across all trials; the
# finalists get as many rounds as a result needs. A graph with more than `MAX_RELATIVE_MACS` times the MACs of the
# default one is not measured.

Form = tuple[str, ...]
"""Names of rewrites, in the order of their application."""
Measure = Callable[[Sequence[Deployment], int], Mapping[Deployment, Ratio]]
"""Measures configurations in so many rounds with the baseline; returns speedups, without those that were skipped."""
Work = Callable[[Deployment], int]
"""Multiply-accumulates."""
Allowed = Callable[[Deployment], bool]
"""Whether a configuration's loss is within the budget; FP32 always is."""

MAX_RELATIVE_MACS = 1.3
"""Limit of the MACs relative to the default preset: GEMMs take most of the time."""
MIN_EFFECT = -0.01
"""A rewrite whose effect alone (log of the speedup) is below this is in no combination."""
MIN_RELATIVE_SPEED = 0.75
"""Smallest speed of a trial that is searched, relative to the fastest: rewrites and settings gained a third at most."""
SCREENING, MIDDLE = 6, 12
"""Rounds of a single change, and of a combination or a setting."""
COMPOSITIONS, FINALISTS = 8, 3
PROMISING = 8
"""Number of rewrites whose combinations are all considered."""


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

    def toggled(self, names: set[str]) -> Deployment:
        """The start configuration with these rewrites switched: those present are removed, the others added."""
        wanted = set(self.start.rewrites) ^ names
        return self.start.model_copy(update={"rewrites": tuple(name for name in self.rewrites if name in wanted)})


Fp32Variants = Callable[[Trial], Sequence[Trial]]
"""The variants of a trial whose loss is too large: they keep more layers in FP32."""


def _no_variants(_arm: Trial) -> Sequence[Trial]:
    return ()


def search(
    trials: Sequence[Trial],
    work: Work,
    measure: Measure,
    allowed: Allowed,
    rounds: int,
    milder: Fp32Variants = _no_variants,
) -> list[Candidate]:
    """Search for the fastest allowed configuration; returns every configuration considered, the winner first.

    Args:
        trials: The trials; the start of the first one is the baseline of all measurements.
        work: MACs of a configuration; see `Work`.
        measure: Measures configurations; see `Measure`.
        allowed: Whether a loss is within the budget; see `Allowed`.
        rounds: Rounds of the finalists.
        milder: Variants with more layers in FP32; see `Fp32Variants`.
    """
    few, half = min(SCREENING, rounds), min(MIDDLE, rounds)
    rows = _Rows(trials[0].start, measure)
    rows.screened(trials, few)
    alive = _trials_to_search(trials, rows, allowed, lambda trial: rows.screened(milder(trial), few))
    alone = {trial.start: _single_changes(trial, work, rows) for trial in alive}
    rows.measured([each for singles in alone.values() for each in singles.values()], few, "alone")
    composed = [each for trial in alive for each in _combinations(trial, alone[trial.start], rows)]
    best = rows.measured([*(trial.start for trial in alive), *composed], half, "composed")
    tried = {trial.start: _single_settings(trial, best, composed, rows) for trial in alive}
    best |= rows.measured([each for several in tried.values() for each in several], half, "another setting")
    together = [each for several in tried.values() for each in _combined_settings(several, rows)]
    best |= rows.measured(together, half, "settings together")
    return rows.finished(_finalists(best, allowed), rounds)


def search_exhaustively(
    trials: Sequence[Trial], measure: Measure, allowed: Allowed, rounds: int, milder: Fp32Variants = _no_variants
) -> list[Candidate]:
    """Measure every combination of rewrites with each of the trial's other settings; arguments as for `search`."""
    rows = _Rows(trials[0].start, measure)
    trials = [other for trial in trials for other in (trial, *milder(trial))]
    forms = [(trial, trial.toggled(names)) for trial in trials for names in _subsets(trial.rewrites)]
    wanted = [form.model_copy(update=dict(each)) for trial, form in forms for each in ({}, *trial.tries)]
    found = rows.measured(wanted, min(MIDDLE, rounds), "measured")
    return rows.finished(_finalists(found, allowed), rounds)


@dataclass
class _Rows:
    """Everything known about the configurations considered so far."""

    baseline: Deployment
    measure: Measure
    found: dict[Deployment, Candidate] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.found[self.baseline] = Candidate(deployment=self.baseline, expected=1.0, description="the baseline")

    def measured(self, wanted: Iterable[Deployment], rounds: int, told: str) -> dict[Deployment, float]:
        """Measure and record; returns the speedup over the baseline of those whose speedup is known."""
        asked = [each for each in dict.fromkeys(wanted) if each != self.baseline]
        for each, ratio in self.measure(asked, rounds).items():
            self.record(each, rounds=rounds, ratio=ratio, description=told)
        return {each: self.speedup(each) for each in asked if self.found.get(each) and self.found[each].ratio}

    def screened(self, trials: Sequence[Trial], rounds: int) -> Sequence[Trial]:
        """Measure each trial with its default preset."""
        self.measured([trial.start for trial in trials], rounds, "measured with the default preset")
        return trials

    def record(self, deployment: Deployment, **more: Any) -> None:
        """Change fields of a configuration's row; the row is created if there is none."""
        known = self.found.get(deployment, Candidate(deployment=deployment, description="left: the budget was spent"))
        self.found[deployment] = known.model_copy(update=more)

    def speedup(self, deployment: Deployment) -> float:
        """Speedup over the baseline; 0 if unknown."""
        ratio = self.found[deployment].ratio if deployment in self.found else None
        return 1.0 if deployment == self.baseline else ratio.median if ratio else 0.0

    def finished(self, finalists: Sequence[Deployment], rounds: int) -> list[Candidate]:
        """Measure the finalists; returns all rows, first the fastest that is faster than the baseline, else the
        baseline.
        """
        self.measured(finalists, rounds, "finalist")
        shown = [each for each in finalists if (ratio := self.found[each].ratio) and ratio.low > 1]
        winner = max(shown, key=self.speedup, default=self.baseline)
        best = self.found[winner].ratio
        taken = "the fastest" if best is None or best.conclusive else "taken; its measurement is not conclusive"
        self.record(winner, description=taken if shown else "the baseline; nothing is shown to be better")
        return [self.found.pop(winner), *self.found.values()]


def _trials_to_search(trials: Sequence[Trial], rows: _Rows, allowed: Allowed, milder: Fp32Variants) -> list[Trial]:
    """The trials to search in, the fastest first. The fastest FP32 trial is always among them: it shows what a loss
    buys.
    """
    found: list[Trial] = []
    waiting = list(trials)
    while waiting:
        waiting.sort(key=lambda trial: -rows.speedup(trial.start))
        trial = waiting.pop(0)
        gain, first_exact = rows.speedup(trial.start), _is_fp32(trial) and not any(map(_is_fp32, found))
        behind = bool(found) and gain < MIN_RELATIVE_SPEED * rows.speedup(found[0].start)
        if not gain:
            rows.record(trial.start)
        elif behind and not first_exact:
            rows.record(trial.start, description="much slower with the default preset")
        elif any(_runtime_and_precision(trial.start) == _runtime_and_precision(other.start) for other in found):
            rows.record(trial.start, description="not better than another that is like it")
        elif allowed(trial.start):
            found.append(trial)
        else:
            waiting += milder(trial)
    return found


def _runtime_and_precision(way: Deployment) -> tuple[str, str, str]:
    """Target, runtime and precision of a configuration."""
    return way.target, way.runtime, way.precision


def _is_fp32(trial: Trial) -> bool:
    return trial.start.precision == "fp32"


def _single_changes(trial: Trial, work: Work, rows: _Rows) -> dict[str, Deployment]:
    """The start configuration with one rewrite switched, by rewrite name; without those that have far more MACs."""
    singles = {name: trial.toggled({name}) for name in trial.rewrites}
    usual = work(trial.start)
    for name, each in list(singles.items()):
        if work(each) > MAX_RELATIVE_MACS * usual:
            rows.record(each, description=f"hopeless: {work(each) / usual:.2f} times the MACs")
            del singles[name]
    return singles


def _combinations(trial: Trial, singles: Mapping[str, Deployment], rows: _Rows) -> list[Deployment]:
    """The combinations with the largest expected speedup, predicted from the effect of each rewrite alone."""
    start = rows.speedup(trial.start)
    effects = {name: math.log(gain / start) for name, each in singles.items() if (gain := rows.speedup(each))}
    helpful = sorted((name for name in effects if effects[name] >= MIN_EFFECT), key=lambda name: -effects[name])
    sets = [names for names in _subsets(helpful[:PROMISING]) if names]
    sums = {trial.toggled(names): sum(effects[name] for name in names) for names in sets}
    ranked = sorted(sums, key=lambda each: -sums[each])
    for place, each in enumerate(ranked):
        told = {} if place < COMPOSITIONS or each in rows.found else {"description": "not among the best expected"}
        if each != rows.baseline:
            rows.record(each, expected=start * math.exp(sums[each]), **told)
    return ranked[:COMPOSITIONS]


def _single_settings(
    trial: Trial, best: Mapping[Deployment, float], composed: Sequence[Deployment], rows: _Rows
) -> dict[Deployment, tuple[Deployment, Mapping[str, Any]]]:
    """The trial's best graph with each other setting: the new configuration to (the old one, the changed fields)."""
    forms = [
        trial.start,
        *(each for each in composed if _runtime_and_precision(each) == _runtime_and_precision(trial.start)),
    ]
    form = max(forms, key=lambda each: best.get(each, rows.speedup(each)))
    return {form.model_copy(update=dict(each)): (form, each) for each in trial.tries}


def _combined_settings(
    tried: Mapping[Deployment, tuple[Deployment, Mapping[str, Any]]], rows: _Rows
) -> list[Deployment]:
    """All settings that helped alone, combined, if there are several. Runtime settings add up; of two values of another
    field the faster one is taken.
    """
    helped = sorted(
        (each for each, (form, _) in tried.items() if rows.speedup(each) > rows.speedup(form)), key=rows.speedup
    )
    if len(helped) < 2:
        return []
    form = tried[helped[0]][0]
    changed: dict[str, Any] = {}
    for each in helped:
        settings = (*changed.get("settings", form.settings), *tried[each][1].get("settings", ()))
        changed |= {**tried[each][1], "settings": settings}
    return [form.model_copy(update=changed)]


def _finalists(found: Mapping[Deployment, float], allowed: Allowed) -> list[Deployment]:
    """The fastest allowed configurations, and the fastest FP32 one, which shows what the loss buys."""
    ranked = sorted(found, key=lambda each: -found[each])
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
        subject: The source model.
        names: Names of the rewrites to consider.
        given: Images; some calibrate lower precision. None if no loss is allowed.
        scratch: Folder for graphs.
        progress: See `Progress`.
        known: Exported graphs, by export settings.
        made: Files of written graphs, the least recently used first.
        counted: MACs of written FP32 graphs.
        sensitive: INT8 sensitivity of layer groups by target, if it was measured.
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
        """Index of the output with class scores."""
        scores = self.subject.scores
        return self.subject.outputs.index(scores.output) if scores else 0

    def arm(self, start: Deployment, tries: Sequence[Any]) -> Trial:
        """A trial with its target's default preset. With a named quantizer no other rewrites are tried: it takes half a
        minute.

        Raises:
            EnvironmentProblem: If its quantizer is not installed.
            Refused: If the export's outputs are wrong, or its weights take more than 2 GiB.
            UsageProblem: If the runtime takes PyTorch modules, and the source is a graph.
        """

        device = load_target(start.target)
        if takes_networks(device):
            self.subject.network(DEPLOY)
            return Trial(start, (), tuple(tries))
        graphs, precision = self._graphs(device), start.precision
        newest = int8_for(device, start.quantizer).opset(device.newest) if precision == "int8" else device.newest
        fit = tuple(name for name, rewrite in graphs.rewrites.items() if rewrite.opset <= newest)
        fit = device.kept(fit, precision)
        usual = default_rewrites(device, self.subject.folded.called)
        default = tuple(name for name in fit if name in usual)
        return Trial(start.model_copy(update={"rewrites": default}), () if start.quantizer else fit, tuple(tries))

    def _graphs(self, device: Target) -> Graphs:
        """The network exported for a target, and which rewrites change that graph."""
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
        """MACs per image of the configuration's graph; 1 if it runs a PyTorch module."""
        import onnx

        from repaconv.graph.compute_costs import known_macs_of_file

        if takes_networks(load_target(deployment.target)):
            return 1
        path = self._named(deployment)
        if path not in self.counted:
            self.counted[path] = known_macs_of_file(onnx.load(self.exact(deployment)))
        return self.counted[path]

    def exact(self, deployment: Deployment) -> Path:
        """File of the configuration's FP32 graph; equal graphs share a file."""
        device = load_target(deployment.target)
        return self._file((device.name, deployment.rewrites), lambda: self._graphs(device).model(deployment.rewrites))

    def same(self, deployment: Deployment) -> str:
        """A key that is equal for configurations with equal graphs."""
        return "" if takes_networks(load_target(deployment.target)) else self._named(deployment).stem

    def _named(self, deployment: Deployment) -> Path:
        """Path of the FP32 graph, whose file may have been removed to free disk space."""
        known = self.made.get((deployment.target, deployment.rewrites))
        return known or self.exact(deployment)

    def bytes(self, deployment: Deployment) -> int:
        """Approximate size of its weights in bytes."""
        if takes_networks(load_target(deployment.target)):
            return self.subject.folded.payload.bytes
        return self.exact(deployment).stat().st_size

    def path(self, deployment: Deployment) -> Path:
        """File of the configuration's graph, in its precision unless the runtime lowers an FP32 graph."""
        import onnx

        device, precision = load_target(deployment.target), deployment.precision
        plain = self.exact(deployment)
        if precision == "fp32" or runtime_lowers(device, precision):
            return plain
        how = int8_for(device, deployment.quantizer)

        def typed() -> onnx.ModelProto:
            self.progress(f"to {precision}", 0, 0)
            calls = self.given.calibration_batches() if self.given else []
            return to_precision(onnx.load(plain), precision, calls, how, deployment.fp32_modules)[0]

        return self._file((plain, precision, how, deployment.fp32_modules), typed)

    def mixed(self, trial: Trial) -> list[Trial]:
        """Replacements of an INT8 trial that keep more and more of the most sensitive layers in FP32."""
        import onnx

        from repaconv.onnx_export.fp32_layer_selection import growing_sets

        start = trial.start
        if start.precision != "int8" or start.fp32_modules or self.given is None:
            return []
        if start.target not in self.sensitive:
            plain, calls = onnx.load(self.exact(start)), self.given.calibration_batches()
            found = sensitivities(plain, calls, load_target(start.target), self.place_of_scores, progress=self.progress)
            self.sensitive[start.target] = tuple(found)
        steps = growing_sets([each.layers for each in self.sensitive[start.target]])
        return [trial._replace(start=start.model_copy(update={"fp32_modules": keep})) for keep in steps]

    def deployable(self, deployment: Deployment) -> Path | Network:
        """What its runtime opens: a graph file or a PyTorch module."""
        if takes_networks(load_target(deployment.target)):
            return self.subject.network(DEPLOY)
        return self.path(deployment)

    def sizes(self, batch: int) -> dict[str, int]:
        """Sizes of the graph's dynamic dimensions, by name."""
        size = self.subject.folded.image_size
        return {"batch": batch, "height": size[0], "width": size[1]} if size else self.subject.free_sizes(batch)

    def _file(self, key: tuple[Any, ...], make: Callable[[], onnx.ModelProto]) -> Path:
        """A graph's file, written if it does not exist; equal graphs share a file."""
        path = self.made.pop(key, None)
        if path is None or not path.is_file():
            content = make().SerializeToString(deterministic=True)
            path = self.scratch / f"{sha256_of_bytes(content)}.onnx"
            if not path.is_file():
                write_bytes(path, content)
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


def output_check_batch(subject: Subject) -> Batch:
    """Random inputs for checking FP32 configurations: 3 images, the fixed batch, or one call of other inputs."""
    count = subject.folded.batch if isinstance(subject.folded.batch, int) else 1 if subject.folded.whole else 3
    return subject.drawn(count, 0).piece(0, count)


# INT8 sensitivity of groups of layers


def sensitivities(
    model: onnx.ModelProto, calls: Sequence[Feeds], device: Target, output: int = 0, *, progress: Progress
) -> list[Sensitivity]:
    """INT8 sensitivity of the layer groups of an FP32 graph that outputs logits, the most sensitive first.

    One group at a time is in INT8 and all others in FP32, with one pass over the images for each group.

    Args:
        model: The FP32 graph.
        calls: The calibration images, on which the sensitivity is measured as well.
        device: The target of the INT8 graph.
        output: Index of the logits among the outputs.
        progress: See `Progress`.
    """
    from repaconv.onnx_export.fp16_and_int8 import to_int8
    from repaconv.onnx_export.fp32_layer_selection import groups_of, nodes_of, with_int8_rounding
    from repaconv.verification.comparison import Comparison
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
        compared = Comparison("int8", tolerance("int8"))
        for got, expected in zip(logits(with_int8_rounding(model, low, nodes_of(model, group))), right, strict=True):
            compared.add({"logits": got}, {"logits": expected})
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
    """The runtimes that were asked for and are available; on a cluster the target's own alone.

    Raises:
        EnvironmentProblem: If the target's own runtime is not installed here.
        UsageProblem: If a runtime is unknown for the target, or a second one is asked for on a cluster.
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
        if options.runtimes and asked and AUTO not in options.runtimes:
            raise UsageProblem(
                f"on a cluster only the target's own runtime, {device.runtime}, can be measured.",
                hint="Leave --runtimes out.",
                code="tune.runtimes",
            )
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


def _requested_runtimes(options: TuneOptions, beside: Mapping[str, Target]) -> set[str]:
    """The runtimes that were asked for. By default, all that run graphs: compiling PyTorch modules takes minutes and
    was never the fastest.
    """
    named = set(options.runtimes or (AUTO,))
    graphs = {name for name, other in beside.items() if not takes_networks(other)}
    return (named - {AUTO}) | (graphs if AUTO in named else set())


def threads_of(options: TuneOptions, device: Target) -> int:
    """Threads per inference; for throughput, all CPUs of this process."""
    if options.threads is not None or options.objective == LATENCY:
        return options.threads or device.bench.threads
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
