"""What repaconv makes of a network: its default preset, and what `tune` finds, exact and within an accuracy budget."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import repaconv
from competing_toolchains.competitors import Contender, Run
from repaconv.core import plugins, run_folder
from repaconv.core.errors import RepaconvError
from repaconv.core.progress import silent
from repaconv.results import Candidate, Deployment, TuneArtefact
from repaconv.sources.source_of_run import source_model_of
from repaconv.stages.shared.input_selection import Split, choose_inputs, fixed_batch
from repaconv.stages.shared.preset_choice import open_deployment
from repaconv.stages.shared.target_lookup import load_target
from repaconv.stages.tune.accuracy_loss import LossEvaluation, require_evaluation_images
from repaconv.stages.tune.candidate_graphs import Candidates
from repaconv.stages.tune.options import TuneOptions
from repaconv.stages.tune.output_check import OutputCheck
from repaconv.stages.tune.runtimes_and_initial_trials import (
    MachineRuntimes,
    Workload,
    available_runtimes,
    initial_trials,
)
from repaconv.stages.tune.search import MIDDLE, Trial
from repaconv.verification.accuracy_budget import Budget
from repaconv.verification.model_runners import ImageSession

TARGET = "x86-64"
ALLOWED = 0.005
"""The share of images that may get another first class."""
REST = "INFERENCE_PRECISION_HINT=bf16"


class Ours(NamedTuple):
    """A folded network: its run, its images (.npz), and how it is called."""

    run: Path
    images: Path
    batch: int
    threads: int


def way_of(deployment: Deployment) -> str:
    """What its rounding depends on: runtime, precision, and what computes what an int8 graph leaves in float."""
    rest = " with bf16" if REST in deployment.settings else ""
    by = f" by {deployment.quantizer}" if deployment.quantizer else ""
    return f"{deployment.runtime} {deployment.precision}{by}{rest}"


def tuned(ours: Ours, loss: float | None, budget_s: float) -> TuneArtefact:
    """What `tune` finds in so many seconds."""
    given: dict[str, Any] = {"inputs": ours.images, "max_disagreement": loss} if loss is not None else {}
    return repaconv.tune(ours.run, batch=ours.batch, threads=ours.threads, budget_s=budget_s, rerun=True, **given)


def fastest(found: TuneArtefact, taken: Callable[[Deployment], bool]) -> Deployment | None:
    """What was found if it is of those; else the fastest, by the longest measurements; None if none was measured."""
    if found.ratio is not None and taken(found.deployment):
        return found.deployment
    rows = [row for row in found.candidates if row.ratio is not None and taken(row.deployment)]
    rows = [row for row in rows if not row.description.startswith(("skipped", "left"))]
    for least in (_most(rows), MIDDLE, 0):
        if several := [row for row in rows if row.rounds >= least]:
            return max(several, key=_gain).deployment
    return None


def by_runtime(found: TuneArtefact) -> dict[str, dict[str, Any]]:
    """What the search found of every runtime in FP32: its fastest by the longest measurements, or why none counted."""
    told: dict[str, dict[str, Any]] = {}
    for runtime in dict.fromkeys(row.deployment.runtime for row in found.candidates):
        rows = [row for row in found.candidates if row.deployment.runtime == runtime]
        rows = [row for row in rows if row.deployment.precision == "fp32" and row.deployment != found.baseline]
        timed = [row for row in rows if row.ratio is not None and not row.description.startswith(("skipped", "left"))]
        best = max((row for row in timed if row.rounds == _most(timed)), key=_gain, default=None)
        if best is not None and best.ratio is not None:
            ratio = [round(value, 4) for value in (best.ratio.median, best.ratio.low, best.ratio.high)]
            told[runtime] = {"ratio": ratio, "rounds": best.rounds}
        elif rows:
            told[runtime] = {"left": rows[0].description}
    return told


def _most(rows: list[Candidate]) -> int:
    return max((row.rounds for row in rows), default=0)


def _gain(row: Candidate) -> float:
    return row.ratio.median if row.ratio else 0.0


def searched(found: TuneArtefact) -> set[str]:
    """The ways that were measured again: a lossy one of seeded weights may not pass as a link, and is left then."""
    return {way_of(row.deployment) for row in found.candidates if row.rounds >= MIDDLE}


def losses(ours: Ours, scratch: Path) -> dict[str, float]:
    """The share of a trained net's images that get another first class, by way.

    Those that do not pass, or do not run on this processor, are not there.
    They are the images that `tune` judges by in the end, and each way is in the default form of its runtime.
    """
    graphs = _graphs(ours, scratch, ALLOWED)
    arms = _arms(ours, graphs)
    judge = LossEvaluation(graphs, arms[0].start, Budget(ALLOWED), True, silent)
    judged = {}
    for each in _lossy(arms):
        with suppress(RepaconvError):
            judged[way_of(each)] = judge.final_loss(each)
    passed = {way: loss for way, loss in judged.items() if loss.link is not None and loss.link.verdict == "passed"}
    return {way: loss.disagreement for way, loss in passed.items() if loss.disagreement is not None}


def plain(ours: Ours, scratch: Path) -> dict[str, Deployment]:
    """Every lossy way in the default form of its runtime."""
    return {way_of(each): each for each in _lossy(_arms(ours, _graphs(ours, scratch)))}


def output_check(ours: Ours, scratch: Path) -> OutputCheck:
    """What `tune` compares outputs by, with random inputs."""
    graphs = _graphs(ours, scratch)
    baseline = next(start for start, _ in initial_trials(_runtimes(), _workload(ours), lossy=False, here=True))
    return OutputCheck(graphs, graphs.trial(baseline, ()).start)


def _graphs(ours: Ours, scratch: Path, allowed: float | None = None) -> Candidates:
    """Its graphs; whether losses can be evaluated on its images is checked if some are allowed."""
    subject = source_model_of(run_folder.Run(ours.run))
    given = _split(ours)
    if allowed is not None:
        given = require_evaluation_images(TuneOptions(inputs=ours.images, max_disagreement=allowed), subject) or given
    return Candidates(subject, sorted(plugins.registered(plugins.REWRITES)), given, scratch, silent)


def _split(ours: Ours) -> Split:
    subject = source_model_of(run_folder.Run(ours.run))
    return Split.of(choose_inputs(subject, inputs=ours.images), batch=fixed_batch(subject)).halved()


def _arms(ours: Ours, graphs: Candidates) -> list[Trial]:
    """Every runtime in every precision that takes the network, the baseline first."""
    arms = []
    for each in initial_trials(_runtimes(), _workload(ours), lossy=True, here=True):
        with suppress(RepaconvError):
            arms.append(graphs.trial(*each))
    return arms


def _runtimes() -> MachineRuntimes:
    return available_runtimes(TuneOptions(), load_target(TARGET), here=True)


def _workload(ours: Ours) -> Workload:
    return Workload("latency", ours.threads, ours.batch, False)


def _lossy(arms: list[Trial]) -> Iterator[Deployment]:
    """Their starts in lower precision, and with bf16 for what an int8 graph leaves in float."""
    for arm in arms:
        if arm.start.precision != "fp32":
            yield arm.start
            yield from (arm.start.model_copy(update=dict(each)) for each in arm.tries if REST in each["settings"])


class Written(NamedTuple):
    """A deployment whose graph is a file, and the sizes of its dynamic dimensions."""

    way: Deployment
    graph: Path
    sizes: dict[str, int]

    def opened(self) -> Run:
        """As its runtime takes it."""
        run: Run = ImageSession(open_deployment(self.way, self.graph, self.sizes)).run
        return run


def written(ours: Ours, scratch: Path, chosen: dict[str, Deployment]) -> dict[str, Written]:
    """Those deployments that can be written, each with a file of its own in a folder."""
    graphs, made = _graphs(ours, scratch), {}
    for name, way in chosen.items():
        with suppress(RepaconvError):
            graph = graphs.deployable(way)
            assert isinstance(graph, Path)
            kept = scratch / f"{name.replace(' ', '-').replace('%', '')}{graph.suffix}"
            shutil.copy(graph, kept)
            made[name] = Written(way, kept, dict(graphs.sizes(way.batch)))
    return made


def contenders(ours: Ours, scratch: Path, chosen: dict[str, Deployment]) -> Iterator[Contender]:
    """Those deployments, each opened as its runtime takes it; the images calibrate what is in int8."""
    graphs = _graphs(ours, scratch)

    def opened(way: Deployment) -> Run:
        run: Run = ImageSession(open_deployment(way, graphs.deployable(way), graphs.sizes(way.batch))).run
        return run

    for name, way in chosen.items():
        yield Contender(name, partial(opened, way), way.precision != "fp32")


def fitting(ours: Ours) -> tuple[list[int], list[int]]:
    """Places of the images that calibrate, ours and everybody's, and of those that judge everybody."""
    given = _split(ours)
    return given.calibration, given.test
