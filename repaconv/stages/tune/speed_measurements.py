"""Deployments measured beside the baseline, in the same rounds: on this machine, or by whoever measures elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv.core.errors import Refused, RepaconvError, first_line
from repaconv.engines.contract import OnCard
from repaconv.results import Deployment, ImageSize, Ratio
from repaconv.stages.shared.tuned_deployment import session_of
from repaconv.stages.tune.candidates import Candidates, judging_call
from repaconv.verification.float32_rounding_error import sway_of
from repaconv.verification.model_runners import FixedBatch, call_of, load_onnx

if TYPE_CHECKING:
    from repaconv.benchmark.interleaved_protocol import Opening
    from repaconv.engines.contract import Session

Measurer = Callable[..., Mapping[str, Ratio]]
"""(reference, graphs by name, rounds, image_size=) to the graphs' ratios: what is above 1 is faster than it."""
Found = Mapping[Deployment, Ratio | str]
"""What was measured of each deployment, or why it was not."""


@dataclass
class Sound:
    """Whether exact deployments compute what the baseline does, on one call; a wrong one is not worth measuring."""

    graphs: Candidates
    baseline: Deployment
    expected: Any = None

    def of(self, deployment: Deployment, session: Session, batch: int | None) -> bool:
        """Whether it does, by a session that takes so many images at once; what is lossy is judged otherwise."""
        from repaconv.verification.output_comparison import Comparison
        from repaconv.verification.tolerances import tolerance, verdict_of

        if deployment.precision != "fp32":
            return True
        subject = self.graphs.subject
        call = judging_call(subject)
        if self.expected is None:
            right = load_onnx(self.graphs.path(self.baseline))
            self.expected = right.run(call.feeds(right.inputs))
        found = Comparison("form", tolerance("form", usual=subject.folded.tolerances))
        got = FixedBatch(session, None if call.whole else batch).run(call.feeds(session.inputs))
        sway = sway_of(subject, call.feeds(subject.inputs))
        found.add(dict(zip(self.expected, got.values(), strict=True)), self.expected, whole=call.whole, sway=sway)
        return verdict_of(found.links("form", "default preset")) == "passed"


class Ready(NamedTuple):
    """What a round calls: of how many images, and whether it returns its own milliseconds."""

    call: Callable[[], Any]
    images: int
    clocked: bool


@dataclass
class Here:
    """Measures on this machine, on cores of its own.

    Attributes:
        graphs: The deployments'.
        sound: Which of them are.
        baseline: Runs in every round.
        cores: As many are used.
        seed: Of images, order and bootstrap.
        together: Whether several calls are made at once; the time is an image's either way.
        memory: Bytes that each took to be opened and to run once, when that was done last.
    """

    graphs: Candidates
    sound: Sound
    baseline: Deployment
    cores: int
    seed: int
    together: bool
    memory: dict[Deployment, int] = field(default_factory=dict)

    def __call__(self, deployments: Sequence[Deployment], rounds: int) -> Found:
        """Rounds of these beside the baseline."""
        from repaconv.benchmark.interleaved_protocol import measure_anew, pinned
        from repaconv.benchmark.measurement_quality import compared

        images: dict[Deployment, int] = {}
        left: dict[Deployment, str] = {}
        names = {each: str(place) for place, each in enumerate((self.baseline, *deployments))}
        with pinned(self.cores) as cores, closing(self._openings(names, images, left)) as openings:
            found = measure_anew(openings, rounds=rounds, warmup_rounds=2, seed=self.seed, cores=cores)
        times = {each: found.samples_ms[names[each]] / count for each, count in images.items()}
        base = times.pop(self.baseline)
        ratios = {
            each: compared(found, ("deployment", own), ("baseline", base), self.seed) for each, own in times.items()
        }
        return {**left, **ratios}

    def _openings(
        self, names: Mapping[Deployment, str], images: dict[Deployment, int], left: dict[Deployment, str]
    ) -> Generator[Opening]:
        """Of those that are named; here it is said how many images a round of each is, or why it is left."""
        from repaconv.benchmark.interleaved_protocol import Opening

        order = list(names)
        while True:
            with ExitStack() as stack:
                ready: dict[Deployment, Ready] = {}
                for each in order:
                    try:
                        ready[each] = self._open(each, stack, known=each in images)
                    except Exception as error:  # what a runtime raises, too, where it runs what it took
                        if each == self.baseline or each in images:
                            raise
                        left[each] = f"left: {_told(error)}"
                images |= {each: one.images for each, one in ready.items()}
                clocked = {names[each] for each, one in ready.items() if one.clocked}
                yield Opening({names[each]: one.call for each, one in ready.items()}, clocked)
                del ready
            order = [each for each in reversed(order) if each in images]

    def _open(self, deployment: Deployment, stack: ExitStack, *, known: bool) -> Ready:
        """Ready to be measured.

        Raises:
            Refused: If it does not compute what the baseline does, unless it is known to; and see `session_of`.
        """
        from repaconv.benchmark.concurrent_inferences import Burst
        from repaconv.benchmark.peak_memory import Taken

        deployable, sizes = self.graphs.deployable(deployment), self.graphs.sizes(deployment.batch)
        drawn = self.graphs.subject.drawn(deployment.batch, self.seed, batch=deployment.batch)
        taken = None if known else Taken()
        session = session_of(deployment, deployable, sizes)
        feeds = drawn.piece(0, deployment.batch).feeds(session.inputs)
        session.run(feeds)
        if taken:
            self._remember(deployment, session, taken.peak())
        if not known and not self.sound.of(deployment, session, deployment.batch):
            raise Refused("its outputs differ from those of the baseline.", hint="Do not use it.", code="tune.wrong")
        call = call_of(session, feeds)
        if not self.together:
            return Ready(call, deployment.batch, isinstance(session, OnCard))
        burst = Burst(call, deployment.streams)
        stack.callback(burst.close)
        return Ready(burst, deployment.batch * burst.calls, False)

    def _remember(self, deployment: Deployment, session: Session, taken: int | None) -> None:
        """Of what lies on a card the host's memory tells nothing."""
        if taken is not None and not isinstance(session, OnCard):
            self.memory[deployment] = taken


@dataclass
class Elsewhere:
    """Has graphs measured on machines of the target, each by that target's own runtime; nothing tells its memory."""

    graphs: Candidates
    sound: Sound
    baseline: Deployment
    measurer: Measurer
    image_size: ImageSize | None
    memory: dict[Deployment, int] = field(default_factory=dict)

    def __call__(self, deployments: Sequence[Deployment], rounds: int) -> Found:
        """Rounds of these beside the baseline; what is exact is looked at here first."""
        paths = {each: self.graphs.path(each) for each in deployments}
        right = {each: self.sound.of(each, load_onnx(path), None) for each, path in paths.items() if _exact(each)}
        names = {f"{each.precision}-{path.stem[:16]}": each for each, path in paths.items() if right.get(each, True)}
        others = {name: paths[each] for name, each in names.items()}
        reference = self.graphs.path(self.baseline)
        found = self.measurer(reference, others, rounds, image_size=self.image_size) if others else {}
        wrong = {each: "left: it does not compute what the baseline does." for each, fine in right.items() if not fine}
        return {**wrong, **{names[name]: ratio for name, ratio in found.items()}}


def _told(error: Exception) -> str:
    return error.message if isinstance(error, RepaconvError) else f"it does not run: {first_line(error)}"


def _exact(deployment: Deployment) -> bool:
    return deployment.precision == "fp32"
