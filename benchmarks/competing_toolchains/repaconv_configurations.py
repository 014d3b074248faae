"""The configurations of repaconv: its default preset, and what `tune` finds, exact and within an accuracy budget."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import repaconv
from competing_toolchains.competitors import BenchmarkSubject, Run
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
"""The maximum share of changed top-1 predictions."""
REST = "INFERENCE_PRECISION_HINT=bf16"


class RepaconvModel(NamedTuple):
    """A folded network: its run folder, its images (.npz), batch size and threads."""

    run: Path
    images: Path
    batch: int
    threads: int


def rounding_configuration(deployment: Deployment) -> str:
    """What the rounding depends on: runtime, precision, quantizer, and BF16 for the layers that INT8 keeps in float."""
    rest = " with bf16" if REST in deployment.settings else ""
    by = f" by {deployment.quantizer}" if deployment.quantizer else ""
    return f"{deployment.runtime} {deployment.precision}{by}{rest}"


def tuned(model: RepaconvModel, loss: float | None, budget_s: float) -> TuneArtefact:
    """The result of `tune` with a budget of that many seconds."""
    given: dict[str, Any] = {"inputs": model.images, "max_disagreement": loss} if loss is not None else {}
    return repaconv.tune(
        model.run,
        batch=model.batch,
        threads=model.threads,
        budget_s=budget_s,
        rerun=True,
        **given,
    )


def fastest(found: TuneArtefact, taken: Callable[[Deployment], bool]) -> Deployment | None:
    """The chosen deployment if it is accepted; otherwise the fastest accepted one among the longest measurements.

    None if no accepted deployment was measured.
    """
    if found.ratio is not None and taken(found.deployment):
        return found.deployment
    rows = [row for row in found.candidates if row.ratio is not None and taken(row.deployment)]
    rows = [row for row in rows if not row.description.startswith(("skipped", "left"))]
    for least in (_most(rows), MIDDLE, 0):
        if several := [row for row in rows if row.rounds >= least]:
            return max(several, key=_gain).deployment
    return None


def best_by_runtime(found: TuneArtefact) -> dict[str, dict[str, Any]]:
    """Per runtime in FP32: the fastest deployment among the longest measurements, or why there is none."""
    best: dict[str, dict[str, Any]] = {}
    for runtime in dict.fromkeys(row.deployment.runtime for row in found.candidates):
        rows = [row for row in found.candidates if row.deployment.runtime == runtime]
        rows = [row for row in rows if row.deployment.precision == "fp32" and row.deployment != found.baseline]
        timed = [row for row in rows if row.ratio is not None and not row.description.startswith(("skipped", "left"))]
        fastest_row = max((row for row in timed if row.rounds == _most(timed)), key=_gain, default=None)
        if fastest_row is not None and fastest_row.ratio is not None:
            ratio = [
                round(value, 4) for value in (fastest_row.ratio.median, fastest_row.ratio.low, fastest_row.ratio.high)
            ]
            best[runtime] = {"ratio": ratio, "rounds": fastest_row.rounds}
        elif rows:
            best[runtime] = {"left": rows[0].description}
    return best


def _most(rows: list[Candidate]) -> int:
    return max((row.rounds for row in rows), default=0)


def _gain(row: Candidate) -> float:
    return row.ratio.median if row.ratio else 0.0


def searched(found: TuneArtefact) -> set[str]:
    """The configurations that were measured again.

    A lossy configuration of a network with seeded weights may fail verification; `tune` skips it then.
    """
    return {rounding_configuration(row.deployment) for row in found.candidates if row.rounds >= MIDDLE}


def losses(model: RepaconvModel, scratch: Path) -> dict[str, float]:
    """Share of changed top-1 predictions of a trained network, by configuration.

    Each configuration has the default preset of its runtime. It is evaluated on the test split of `tune`.
    Configurations that fail verification, or do not run on this CPU, are missing.
    """
    graphs = _graphs(model, scratch, ALLOWED)
    trials = _trials(model, graphs)
    evaluation = LossEvaluation(graphs, trials[0].start, Budget(ALLOWED), True, silent)
    evaluated = {}
    for each in _lossy(trials):
        with suppress(RepaconvError):
            evaluated[rounding_configuration(each)] = evaluation.final_loss(each)
    passed = {
        configuration: loss
        for configuration, loss in evaluated.items()
        if loss.link is not None and loss.link.verdict == "passed"
    }
    return {configuration: loss.disagreement for configuration, loss in passed.items() if loss.disagreement is not None}


def default_presets(model: RepaconvModel, scratch: Path) -> dict[str, Deployment]:
    """Every lossy configuration with the default preset of its runtime."""
    return {rounding_configuration(each): each for each in _lossy(_trials(model, _graphs(model, scratch)))}


def output_check(model: RepaconvModel, scratch: Path) -> OutputCheck:
    """The output check of `tune`, with random inputs."""
    graphs = _graphs(model, scratch)
    baseline = next(start for start, _ in initial_trials(_runtimes(), _workload(model), lossy=False, here=True))
    return OutputCheck(graphs, graphs.trial(baseline, ()).start)


def _graphs(model: RepaconvModel, scratch: Path, allowed: float | None = None) -> Candidates:
    """Candidate graphs of the model; with ``allowed``, checks that losses can be evaluated on its images."""
    subject = source_model_of(run_folder.Run(model.run))
    given = _split(model)
    if allowed is not None:
        given = require_evaluation_images(TuneOptions(inputs=model.images, max_disagreement=allowed), subject) or given
    return Candidates(subject, sorted(plugins.registered(plugins.REWRITES)), given, scratch, silent)


def _split(model: RepaconvModel) -> Split:
    subject = source_model_of(run_folder.Run(model.run))
    return Split.of(choose_inputs(subject, inputs=model.images), batch=fixed_batch(subject)).halved()


def _trials(model: RepaconvModel, graphs: Candidates) -> list[Trial]:
    """Trials of every runtime and precision that support the network, the baseline first."""
    trials = []
    for each in initial_trials(_runtimes(), _workload(model), lossy=True, here=True):
        with suppress(RepaconvError):
            trials.append(graphs.trial(*each))
    return trials


def _runtimes() -> MachineRuntimes:
    return available_runtimes(TuneOptions(), load_target(TARGET), here=True)


def _workload(model: RepaconvModel) -> Workload:
    return Workload("latency", model.threads, model.batch, False)


def _lossy(trials: list[Trial]) -> Iterator[Deployment]:
    """The initial deployments in lower precision, and those with BF16 for the layers that INT8 keeps in float."""
    for trial in trials:
        if trial.start.precision != "fp32":
            yield trial.start
            yield from (trial.start.model_copy(update=dict(each)) for each in trial.tries if REST in each["settings"])


class WrittenDeployment(NamedTuple):
    """A deployment, the file of its graph, and the sizes of its dynamic dimensions."""

    deployment: Deployment
    graph: Path
    sizes: dict[str, int]

    def opened(self) -> Run:
        """A function from images to outputs in the deployment's runtime."""
        run: Run = ImageSession(open_deployment(self.deployment, self.graph, self.sizes)).run
        return run


def written(model: RepaconvModel, scratch: Path, chosen: dict[str, Deployment]) -> dict[str, WrittenDeployment]:
    """Write each deployment's graph to its own file in the folder; deployments that cannot be written are missing."""
    graphs, written_deployments = _graphs(model, scratch), {}
    for name, deployment in chosen.items():
        with suppress(RepaconvError):
            graph = graphs.deployable(deployment)
            assert isinstance(graph, Path)
            copied = scratch / f"{name.replace(' ', '-').replace('%', '')}{graph.suffix}"
            shutil.copy(graph, copied)
            written_deployments[name] = WrittenDeployment(deployment, copied, dict(graphs.sizes(deployment.batch)))
    return written_deployments


def subjects(model: RepaconvModel, scratch: Path, chosen: dict[str, Deployment]) -> Iterator[BenchmarkSubject]:
    """The deployments as benchmark subjects; INT8 ones are calibrated on the model's images."""
    graphs = _graphs(model, scratch)

    def opened(deployment: Deployment) -> Run:
        run: Run = ImageSession(
            open_deployment(deployment, graphs.deployable(deployment), graphs.sizes(deployment.batch))
        ).run
        return run

    for name, deployment in chosen.items():
        yield BenchmarkSubject(name, partial(opened, deployment), deployment.precision != "fp32")


def calibration_and_test_indices(model: RepaconvModel) -> tuple[list[int], list[int]]:
    """Indices of the images for calibration, the same for every tool, and of the images of the test split."""
    given = _split(model)
    return given.calibration, given.test
