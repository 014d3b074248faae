"""Models run side by side on the same images, round by round: what `bench` measures, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv import runs
from repaconv.artefacts import ImageSize, Profile
from repaconv.errors import EnvironmentProblem, RepaconvError, UsageProblem
from repaconv.orders.stages import BenchOrder
from repaconv.steps.common import Progress
from repaconv.steps.comparing import COMPARED, Opened, opened
from repaconv.steps.contenders import Contender, Contenders, any_preprocessing, image_shape, memory_an_image

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from repaconv.measure.protocol import Measured
    from repaconv.measure.protocols import Protocol
    from repaconv.proof.data import Batch
    from repaconv.targets import Target

PROFILED = 20
"""Runs of a profile."""


class Plan(NamedTuple):
    """What an order comes to for a model: what is measured beside what, and how."""

    order: BenchOrder
    device: Target
    protocol: Protocol
    run: runs.Run | None
    known: Contenders
    lowering: str | None
    size: ImageSize | None
    threads: int
    rounds: int
    warmup_rounds: int
    variant: str
    place: Path | None

    @property
    def subjects(self) -> list[Contender]:
        """The one to measure, and what runs beside it."""
        return self.known.subjects

    def opened(self, subject: Contender, dims: Mapping[str, int]) -> Opened:
        """One of them, ready to run; of one file beside itself, one alone is lowered."""
        lower = self.lowering if subject is self.subjects[0] else None
        return opened(subject.network or subject.path, self.device, lower, threads=self.threads, dims=dims)

    def batch(self) -> int:
        """Images a call; of a protocol that fills the memory, measured here."""
        if self.order.batch is not None:
            return self.order.batch
        return self.protocol.images(
            self.device.bench.batch, lambda: memory_an_image(self.subjects, self.opened, self.size)
        )


class Found(NamedTuple):
    """What was measured: the models, their outputs by batch and name, the samples, and on what machine."""

    models: dict[str, Opened]
    outputs: list[dict[str, NDArray[np.floating]]]
    batch: int
    shape: tuple[int, int, int]
    measured: Measured
    machine: dict[str, Any]
    profile: Profile | None
    note: str


def side_by_side(plan: Plan, cores: Sequence[int], progress: Progress) -> Found:
    """Run them side by side on the same images, round by round; on half as many where the card holds no more.

    Raises:
        EnvironmentProblem: If its memory does not hold what was asked for, and the protocol names no largest batch.
    """
    batch = plan.batch()
    while True:
        try:
            return _side_by_side(plan, batch, cores, progress)
        except EnvironmentProblem as problem:
            if problem.code != "card.memory" or not plan.protocol.scaled_to_memory or batch == 1:
                raise
            batch //= 2


def _side_by_side(plan: Plan, batch: int, cores: Sequence[int], progress: Progress) -> Found:
    from repaconv.measure.fingerprint import fingerprint
    from repaconv.measure.protocol import first_in_line, measure
    from repaconv.proof.data import random_pixels

    subject = plan.subjects[0]
    dims = {"batch": batch, **({"height": plan.size[0], "width": plan.size[1]} if plan.size else {})}
    models = {each.name: plan.opened(each, dims=dims) for each in plan.subjects}
    sessions = {name: each.session for name, each in models.items()}
    shape = image_shape(sessions[subject.name].input_shape, batch, plan.size, subject.path)
    wanted = plan.known.preprocessing or any_preprocessing(shape)
    given = random_pixels(shape, wanted, count=max(1, COMPARED // batch) * batch, seed=plan.order.seed)
    fed = [_feeds(piece, sessions) for piece in given.batches(batch)]
    outputs = [{name: _first_run(session, each[name]) for name, session in sessions.items()} for each in fed]
    clocked = {name for name, session in sessions.items() if session.on_card}
    with first_in_line(plan.protocol.first_in_line) as why_not:
        measured = measure(
            {name: session.call(fed[0][name]) for name, session in sessions.items()},
            rounds=plan.rounds,
            warmup_rounds=plan.warmup_rounds,
            seed=plan.order.seed,
            cores=cores,
            clocked=clocked,
            tick=lambda done, total: progress("bench", done, total),
        )
    return Found(
        models=models,
        outputs=outputs,
        batch=batch,
        shape=shape,
        measured=measured,
        machine=fingerprint(tuple(cores), card=bool(clocked)),
        profile=_profile(subject, models[subject.name], fed[0], measured.samples_ms) if plan.order.profile else None,
        note=f"chrt -f 99: {why_not}" if why_not else "",
    )


def _feeds(piece: Batch, sessions: Mapping[str, Any]) -> dict[str, Any]:
    """The same images for each, as it takes them."""
    return {name: piece.pixels if session.takes_pixels else piece.images for name, session in sessions.items()}


def _profile(
    subject: Contender, opened: Opened, feeds: Mapping[str, Any], samples: Mapping[str, NDArray[np.float64]]
) -> Profile:
    """The first model's, beside the latency that was measured of it.

    Raises:
        EnvironmentProblem: If its runtime has no profiler that we read.
    """
    import numpy as np

    from repaconv.measure.profile import events_of, profile_of

    if not opened.profiles:
        raise EnvironmentProblem(
            f"there is no profile of {subject.path.name} by {opened.engine.partition(' ')[0]}.",
            hint="Profile the ONNX model of a target that runs ONNX Runtime.",
            code="bench.profile",
        )
    session = opened.session.session
    found = session.profile({session.inputs[0].name: feeds[subject.name]}, runs=PROFILED, warmup_runs=PROFILED // 4)
    return profile_of(
        events_of(found.kernels, found.weights),
        PROFILED,
        end_to_end_ms=float(np.median(samples[subject.name])),
        peak_gflops=found.peak_gflops,
        order={node: place for place, node in enumerate(found.weights)},
    )


def _first_run(session: Any, images: NDArray[Any]) -> NDArray[np.floating]:
    try:
        found: NDArray[np.floating] = session.run(images)
    except RepaconvError:
        raise
    except Exception as error:
        raise UsageProblem(
            f"the model does not run on images {list(images.shape)}: {str(error).splitlines()[0]}.",
            hint="Both models must take the same images.",
            code="bench.shape",
        ) from error
    return found
