"""The measurement of `bench`: several models in interleaved rounds on the same inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv.core import run_folder
from repaconv.core.errors import EnvironmentProblem, Refused
from repaconv.core.progress import Progress
from repaconv.results import ImageSize, Profile
from repaconv.sources.source_model import TRAINING
from repaconv.stages.bench.benchmark_inputs import BenchmarkInputs, choose_benchmark_inputs, memory_per_image
from repaconv.stages.bench.benchmark_subjects import BenchmarkSubject, BenchmarkSubjects, without_training
from repaconv.stages.bench.options import BenchOptions
from repaconv.stages.bench.repeated_session_loads import SessionLoads
from repaconv.stages.shared.model_opening import OpenedModel, open_model

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from repaconv.benchmark.interleaved_protocol import Measured
    from repaconv.benchmark.paper_protocols import Protocol
    from repaconv.engines.contract import Feeds
    from repaconv.engines.targets import Target

PROFILE_RUNS = 20
"""Inferences that a profile measures."""


class TrainingRefused(Refused):
    """The runtime does not take the training-time network; it may still take the inference-time one."""


class Plan(NamedTuple):
    """The resolved options of `bench`: which models are measured, and how."""

    options: BenchOptions
    device: Target
    protocol: Protocol
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

    def opened(self, subject: BenchmarkSubject, dims: Mapping[str, int]) -> OpenedModel:
        """Open one of them. Precision and runtime settings apply to the model under test alone."""
        first = subject is self.subjects[0]
        try:
            return open_model(
                subject.network or subject.path,
                self.device,
                self.lowering if first else None,
                threads=self.threads,
                dims=dims,
                settings=self.settings if first else (),
            )
        except Refused as error:
            if subject.name == TRAINING:
                raise TrainingRefused(error.message, hint=error.hint, code=error.code) from error
            raise

    def without_training(self, why: str) -> Plan:
        """The same plan without the training-time network; ``why`` becomes a note."""
        kept = [subject for subject in self.subjects if subject.name != TRAINING]
        return self._replace(known=self.known._replace(subjects=kept, note=without_training(why)))

    def dims(self, batch: int) -> dict[str, int]:
        """Sizes of the dynamic dimensions, by name."""
        subject = self.known.subject
        if subject is not None and self.size is None:
            return subject.free_sizes(batch)
        return {"batch": batch, **({"height": self.size[0], "width": self.size[1]} if self.size else {})}

    def batch(self) -> int:
        """Batch size; for a protocol that fills the memory it is measured here."""
        fixed = self.known.subject.folded.batch if self.known.subject else "dynamic"
        if self.options.batch is not None or fixed != "dynamic":
            return self.options.batch or int(fixed)
        if self.known.subject and self.size is None:
            return self.device.bench.batch
        return self.protocol.images(
            self.device.bench.batch, lambda: memory_per_image(self.subjects, self.opened, self.size)
        )


class InterleavedMeasurement(NamedTuple):
    """What was measured.

    Attributes:
        models: The open models, by name.
        calls: Their inputs.
        outputs: Their outputs by batch, model and output name.
        batch: Batch size.
        measured: The samples.
        machine: Fingerprint of the machine.
        profile: Time by module, if it was asked for.
        note: A remark on the measurement; empty if there is none.
    """

    models: dict[str, OpenedModel]
    calls: BenchmarkInputs
    outputs: list[dict[str, Mapping[str, Any]]]
    batch: int
    measured: Measured
    machine: dict[str, Any]
    profile: Profile | None
    note: str


def measure_interleaved(plan: Plan, cores: Sequence[int], progress: Progress) -> InterleavedMeasurement:
    """Measure the models in interleaved rounds on the same inputs; if the GPU's memory is too small, halve the batch.

    Raises:
        EnvironmentProblem: If the GPU's memory is too small; only the batch of a paper's protocol is halved.
    """
    batch, of_paper = plan.batch(), plan.options.batch is None and plan.protocol.batch is not None
    while True:
        try:
            return _measure_batch(plan, batch, cores, progress)
        except EnvironmentProblem as problem:
            if problem.code != "card.memory" or not of_paper or batch == 1:
                raise
            batch //= 2


def _measure_batch(plan: Plan, batch: int, cores: Sequence[int], progress: Progress) -> InterleavedMeasurement:
    from repaconv.benchmark.interleaved_protocol import (
        MOST_LOADS,
        SESSION_LOAD_BUDGET_S,
        measure_session_loads,
        real_time_priority,
    )
    from repaconv.benchmark.machine_fingerprint import fingerprint

    subject, dims = plan.subjects[0], plan.dims(batch)
    # more rounds of the same session loads would not narrow the interval, so more rounds also mean more loads
    asked = max(1.0, (plan.options.rounds or 0) / plan.device.bench.rounds)
    openings = SessionLoads(
        {each.name: partial(plan.opened, each, dims) for each in plan.subjects},
        lambda models: choose_benchmark_inputs(plan.known, models, batch, plan.size, plan.options.seed),
    )
    with real_time_priority(plan.protocol.first_in_line) as why_not:
        measured = measure_session_loads(
            openings,
            rounds=plan.rounds,
            warmup_rounds=plan.warmup_rounds,
            seed=plan.options.seed,
            cores=cores,
            more=plan.options.rounds is None and plan.protocol.rounds is None,
            most=int(MOST_LOADS * asked),
            spend_s=SESSION_LOAD_BUDGET_S * asked,
            tick=lambda done, total: progress("bench", done, total),
        )
    profile = None
    if plan.options.profile:
        model = openings.models[subject.name]
        profile = _profile(subject, model, openings.feeds(subject.name), measured.samples_ms)
    return InterleavedMeasurement(
        models=openings.models,
        calls=openings.calls,
        outputs=openings.outputs,
        batch=batch,
        measured=measured,
        machine=fingerprint(tuple(cores), card=bool(openings.clocked)),
        profile=profile,
        note=f"chrt -f 99: {why_not}" if why_not else "",
    )


def _profile(
    subject: BenchmarkSubject, model: OpenedModel, feeds: Feeds, samples: Mapping[str, NDArray[np.float64]]
) -> Profile:
    """Time by module of the model under test, next to its measured latency.

    Raises:
        EnvironmentProblem: If its runtime has no profiler that repaconv reads.
    """
    import numpy as np

    from repaconv.benchmark.module_profile import events_of, profile_of

    if not model.profiles:
        raise EnvironmentProblem(
            f"{model.engine.partition(' ')[0]} gives no profile of {subject.path.name}.",
            hint="Profile the ONNX model of a target that uses ONNX Runtime.",
            code="bench.profile",
        )
    found = model.session.profile(feeds, runs=PROFILE_RUNS, warmup_runs=PROFILE_RUNS // 4)
    return profile_of(
        events_of(found.kernels, found.weights),
        PROFILE_RUNS,
        end_to_end_ms=float(np.median(samples[subject.name])),
        peak_gflops=found.peak_gflops,
        order={node: place for place, node in enumerate(found.weights)},
    )
