"""The measurement of `bench`: several models in interleaved rounds on the same inputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from repaconv.core import plugins, run_folder
from repaconv.core.errors import EnvironmentProblem, Refused, RepaconvError, UsageProblem, first_line
from repaconv.core.progress import Progress
from repaconv.engines.contract import shapes_text
from repaconv.results import ImageSize, Profile
from repaconv.stages.bench.benchmark_inputs import BenchmarkInputs, choose_benchmark_inputs, memory_per_image
from repaconv.stages.bench.benchmark_subjects import BenchmarkSubject, BenchmarkSubjects, without_original
from repaconv.stages.bench.options import BenchOptions
from repaconv.stages.shared.model_opening import OpenedModel, open_model
from repaconv.verification.model_runners import call_of

if TYPE_CHECKING:
    from repaconv.benchmark.interleaved_protocol import Measurement
    from repaconv.benchmark.paper_protocols import PaperProtocol
    from repaconv.engines.contract import Feeds, Session
    from repaconv.engines.targets import Target

PROFILE_RUNS = 20
"""Inferences that a profile measures."""


class TrainingRefused(Refused):
    """The runtime does not take the training-time network; it may still take the inference-time one."""


class Plan(NamedTuple):
    """The resolved options of `bench`: which models are measured, and how."""

    options: BenchOptions
    device: Target
    protocol: PaperProtocol
    run: run_folder.Run | None
    known: BenchmarkSubjects
    lowering: str | None
    size: ImageSize | None
    threads: int
    rounds: int
    warmup_rounds: int
    variant: str
    place: Path | None
    settings: tuple[str, ...] = ()

    @property
    def subjects(self) -> list[BenchmarkSubject]:
        """The model under test, then its reference."""
        return self.known.subjects

    def opened(
        self, subject: BenchmarkSubject, dims: Mapping[str, int], *, threads: int | None = None, streams: int = 1
    ) -> OpenedModel:
        """Open one of them. Precision and runtime settings apply to the model under test alone."""
        first = subject is self.subjects[0]
        try:
            return open_model(
                subject.network or subject.path,
                self.device,
                self.lowering if first else None,
                threads=threads or self.threads,
                dims=dims,
                streams=streams,
                settings=self.settings if first else (),
            )
        except Refused as error:
            if subject.is_original:
                raise TrainingRefused(error.message, hint=error.hint, code=error.code) from error
            raise

    def without_training(self, why: str) -> Plan:
        """The same plan without the training-time network; ``why`` is added to the note."""
        kept = [subject for subject in self.subjects if not subject.is_original]
        name = next(subject.name for subject in self.subjects if subject.is_original)
        note = "; ".join(filter(None, [without_original(name, why), self.known.note]))
        return self._replace(known=self.known._replace(subjects=kept, note=note))

    def dims(self, batch: int) -> dict[str, int]:
        """Sizes of the dynamic dimensions, by name."""
        source_model = self.known.source_model
        if source_model is not None and self.size is None:
            return source_model.free_sizes(batch)
        return {"batch": batch, **({"height": self.size[0], "width": self.size[1]} if self.size else {})}

    def batch(self) -> int:
        """Batch size; for a protocol that fills the memory it is measured here."""
        # a protocol's batch size that the model does not take is refused
        fixed = self.known.fixed_batch if self.protocol.batch is None else self.known.batch_of_network
        if given := self.options.batch or fixed:
            return given
        if self.known.source_model and self.size is None:
            return self.device.bench.batch
        return self.protocol.images(
            self.device.bench.batch, lambda: memory_per_image(self.subjects, self.opened, self.size)
        )


class MeasuredOutputs(NamedTuple):
    """The inputs on which the models were measured, and their outputs.

    Attributes:
        calls: The inputs.
        outputs: The outputs by batch, model and output name.
    """

    calls: BenchmarkInputs
    outputs: list[dict[str, Mapping[str, Any]]]

    def feeds(self, model: OpenedModel) -> Feeds:
        """The first batch as feeds of a model."""
        return self.calls.batches[0].feeds(model.session.inputs)

    def call(self, model: OpenedModel) -> Callable[[], Any]:
        """A function that runs one inference of a model."""
        return call_of(model.session, self.feeds(model))

    @classmethod
    def of(cls, plan: Plan, batch: int, models: Mapping[str, OpenedModel]) -> MeasuredOutputs:
        """Choose the inputs for these models, and run each of them once."""
        calls = choose_benchmark_inputs(plan.known, models, batch, plan.size, plan.options.seed)
        return cls(
            calls,
            [
                {
                    name: _first_run(name, model.session, call.feeds(model.session.inputs), alone=len(models) == 1)
                    for name, model in models.items()
                }
                for call in calls.batches
            ],
        )


def _first_run(name: str, session: Session, feeds: Feeds, *, alone: bool) -> Mapping[str, Any]:
    try:
        return session.run(feeds)
    except RepaconvError:
        raise
    except Exception as error:
        raise UsageProblem(
            f"{name} does not run on {shapes_text(feeds)}: {first_line(error)}.",
            hint="repaconv fold says what is wrong with a model." if alone else "All models must take the same inputs.",
            code="bench.shape",
        ) from error


class BenchMeasurement(NamedTuple):
    """The measured samples and models, the batch size, and the time by module if it was requested."""

    measured: Measurement
    batch: int
    profile: Profile | None

    @property
    def on(self) -> MeasuredOutputs:
        """Inputs and outputs of the models."""
        return cast("MeasuredOutputs", self.measured.inputs)


def measure_models(plan: Plan, progress: Progress) -> BenchMeasurement:
    """Measure the models in interleaved rounds on the same inputs; if the GPU's memory is too small, halve the batch.

    Raises:
        EnvironmentProblem: If the GPU's memory is too small; only the batch of a paper's protocol is halved.
    """
    batch, of_paper = plan.batch(), plan.options.batch is None and plan.protocol.batch is not None
    while True:
        try:
            return _measure_batch(plan, batch, progress)
        except EnvironmentProblem as problem:
            if problem.code != "gpu.memory" or not of_paper or batch == 1:
                raise
            batch //= 2


def _measure_batch(plan: Plan, batch: int, progress: Progress) -> BenchMeasurement:
    from repaconv.benchmark.interleaved_protocol import (
        MOST_LOADS,
        SESSION_LOAD_BUDGET_S,
        Entrant,
        Protocol,
        measure,
        pinned_to_cores,
    )

    dims = plan.dims(batch)
    # more rounds of the same session loads would not narrow the interval, so more rounds also mean more loads
    asked = max(1.0, (plan.options.rounds or 0) / plan.device.bench.rounds)
    measured = measure(
        {
            each.name: Entrant(partial(plan.opened, each, dims), lambda model, on: on.call(model))
            for each in plan.subjects
        },
        Protocol(
            rounds=plan.rounds,
            warmup_rounds=plan.warmup_rounds,
            seed=plan.options.seed,
            cores=plan.threads,
            session_loads=int(MOST_LOADS * asked),
            more=plan.options.rounds is None and plan.protocol.rounds is None,
            seconds=SESSION_LOAD_BUDGET_S * asked,
            real_time=plan.protocol.first_in_line,
        ),
        inputs=partial(MeasuredOutputs.of, plan, batch),
        tick=lambda done, total: progress("bench", done, total),
    )
    profile = None
    if plan.options.profile:
        with pinned_to_cores(plan.threads):
            profile = _profile(plan.subjects[0], measured, plan.threads)
    return BenchMeasurement(measured, batch, profile)


def _seconds(run: Callable[[], Any], runs: int) -> list[float]:
    """The time of each of some inferences, after as many that are not timed: the caches are the model's again."""
    found = []
    for number in range(2 * runs):
        begin = time.perf_counter()
        run()
        found += [time.perf_counter() - begin] if number >= runs else []
    return found


def _profile(subject: BenchmarkSubject, measured: Measurement, threads: int) -> Profile:
    """Time by module of the model under test, next to its latency right before and after it was profiled.

    The latency of the whole measurement may be of another clock or of busier neighbors than the profile.

    Raises:
        EnvironmentProblem: If its runtime has no profiler that repaconv reads.
    """
    import numpy as np

    from repaconv.benchmark.module_profile import events_of, profile_of
    from repaconv.benchmark.roofline import measured_limits

    model: OpenedModel = measured.loaded[subject.name]
    if not model.profiles:
        raise EnvironmentProblem(
            f"{model.engine.partition(' ')[0]} gives no profile of {subject.path.name}.",
            hint="Profile the ONNX model of a target that uses ONNX Runtime or OpenVINO.",
            code="bench.profile",
        )
    run, feeds = measured.inputs.call(model), measured.inputs.feeds(model)
    before = _seconds(run, PROFILE_RUNS // 2)
    found = model.session.profile(feeds, runs=PROFILE_RUNS, warmup_runs=PROFILE_RUNS // 4)
    after = _seconds(run, PROFILE_RUNS // 2)
    events = events_of(found.kernels, found.weights)
    limits = measured_limits(
        plugins.load(plugins.ENGINES, model.engine.partition(" ")[0]),
        {event.precision for event in events if event.operations},
        threads,
        run,
    )
    return profile_of(
        events,
        PROFILE_RUNS,
        end_to_end_ms=float(np.median([*before, *after])) * 1e3,
        limits=limits,
        order={node: place for place, node in enumerate(found.weights)},
    )
