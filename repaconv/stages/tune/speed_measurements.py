"""Latency of candidates relative to the baseline, on this machine or on a worker, and the log of every measurement."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from repaconv.core.errors import RepaconvError, first_line
from repaconv.core.files import canonical_json, sha256_of_bytes, write_text
from repaconv.core.progress import Progress
from repaconv.engines.contract import GpuSession
from repaconv.results import Deployment, ImageSize, Ratio
from repaconv.stages.shared.input_selection import CALIBRATION_IMAGES
from repaconv.stages.shared.preset_choice import open_deployment
from repaconv.stages.tune.candidate_graphs import Candidates
from repaconv.stages.tune.output_check import OutputCheck
from repaconv.stages.tune.search import Measured
from repaconv.verification.model_runners import call_of, load_onnx

if TYPE_CHECKING:
    from repaconv.engines.contract import Feeds, Session


# Measurements in rounds with the baseline: on this machine, or on a worker

Measurer = Callable[..., Mapping[str, Ratio | str]]
"""Takes (reference, graphs by name, rounds, image_size=) and returns, by name, the speedup over the reference, or the
reason why there is none."""
Found = Mapping[Deployment, Ratio | str]
"""The ratio of each configuration, or why it was not measured."""


class Timing(NamedTuple):
    """How long a configuration took, in seconds: to write its graph, to load it, and to run it once."""

    prepare_s: float
    load_s: float
    run_s: float


@dataclass
class LocalMeasurement:
    """Measures on this machine, on pinned cores.

    Attributes:
        graphs: The configurations' graphs.
        check: Checks outputs.
        baseline: The configuration that runs in every round.
        cores: Number of cores.
        seed: Seed of images, measuring order and intervals.
        together: Whether several inferences run at once; times are per image in both cases.
        memory: Bytes that loading and the first inference took, by configuration, from the latest load that measured
        it.
        timings: How long each configuration took when it was loaded first.
    """

    graphs: Candidates
    check: OutputCheck
    baseline: Deployment
    cores: int
    seed: int
    together: bool
    memory: dict[Deployment, int] = field(default_factory=dict)
    timings: dict[Deployment, Timing] = field(default_factory=dict)

    def __call__(self, deployments: Sequence[Deployment], rounds: int) -> Found:
        """Measure these in rounds with the baseline."""
        from repaconv.benchmark.interleaved_protocol import Entrant, Protocol, measure

        known: set[Deployment] = set()
        names = {each: str(place) for place, each in enumerate((self.baseline, *deployments))}
        entrants = {
            name: Entrant(
                partial(self._load, each, known),
                lambda loaded, _: call_of(*loaded),
                streams=each.streams if self.together else 0,
                images=each.batch,
                optional=each != self.baseline,
            )
            for each, name in names.items()
        }
        found = measure(entrants, Protocol(rounds, warmup_rounds=2, seed=self.seed, cores=self.cores))
        called = {"subject": "deployment", "other": "baseline"}
        return {
            each: f"skipped: {_reason(found.failed[name])}"
            if name in found.failed
            else found.ratio(name, names[self.baseline]).model_copy(update=called)
            for each, name in names.items()
            if each != self.baseline
        }

    def time_baseline(self) -> None:
        """Load and run the baseline once, so that costs are expected from this machine's speed.

        On a GPU it is loaded twice: the first load also starts the runtime, which takes seconds.
        """
        session, _ = self._load(self.baseline, set())
        if isinstance(session, GpuSession):
            del session, self.timings[self.baseline]
            self._load(self.baseline, set())

    def _load(self, deployment: Deployment, known: set[Deployment]) -> tuple[Session, Feeds]:
        """Load a configuration and its inputs; the first load measures its memory and checks its outputs.

        Raises:
            Refused: If its outputs differ from the baseline's, or no batch decides; or see `open_deployment`.
        """
        from repaconv.benchmark.system_monitor import PeakMemory

        deployable, sizes = self.graphs.deployable(deployment), self.graphs.sizes(deployment.batch)
        drawn = self.graphs.source_model.random_inputs(
            deployment.batch, self.seed, self.graphs.image_size, batch=deployment.batch
        )
        begun, taken = time.monotonic(), None if deployment in known else PeakMemory()
        session = open_deployment(deployment, deployable, sizes, self.graphs.device_of(deployment))
        feeds = drawn.piece(0, deployment.batch).feeds(session.inputs)
        session.run(feeds)
        if taken:
            loaded = time.monotonic()
            self._remember(deployment, session, taken.peak())
            session.run(feeds)
            done = time.monotonic()
            prepare_s = self.graphs.written_s(deployment)
            self.timings.setdefault(deployment, Timing(prepare_s, loaded - begun, done - loaded))
            if (refused := self.check.refusal(deployment, session, deployment.batch)) is not None:
                raise refused
        known.add(deployment)
        return session, feeds

    def _remember(self, deployment: Deployment, session: Session, taken: int | None) -> None:
        """Record the memory; for a model in GPU memory, the host's memory has no meaning."""
        if taken is not None and not isinstance(session, GpuSession):
            self.memory[deployment] = taken


@dataclass
class WorkerMeasurement:
    """Measures on machines of the target, by the target's own runtime; memory is not measured."""

    graphs: Candidates
    check: OutputCheck
    baseline: Deployment
    measurer: Measurer
    image_size: ImageSize | None
    memory: dict[Deployment, int] = field(default_factory=dict)
    timings: dict[Deployment, Timing] = field(default_factory=dict)

    def __call__(self, deployments: Sequence[Deployment], rounds: int) -> Found:
        """Measure these in rounds with the baseline; the outputs of FP32 graphs are checked here first."""
        paths = {each: self.graphs.path(each) for each in deployments}
        refused = {
            each: self.check.refusal(each, load_onnx(path), None)
            for each, path in paths.items()
            if each.precision == "fp32"
        }
        wrong = {each: f"skipped: {refusal.message}" for each, refusal in refused.items() if refusal is not None}
        names = {f"{each.precision}-{path.stem[:16]}": each for each, path in paths.items() if each not in wrong}
        others = {name: paths[each] for name, each in names.items()}
        reference = self.graphs.path(self.baseline)
        found = self.measurer(reference, others, rounds, image_size=self.image_size) if others else {}
        why = {names[name]: f"skipped: {reason}" for name, reason in found.items() if isinstance(reason, str)}
        return {**wrong, **why, **{names[name]: ratio for name, ratio in found.items() if isinstance(ratio, Ratio)}}


def _reason(error: Exception) -> str:
    return error.message if isinstance(error, RepaconvError) else f"it does not run: {first_line(error)}"


# How long measurements take

PREPARE_S = {
    ("fp16", ""): (0.3, 1.3),
    ("int8", ""): (0.8, 0.6),
    ("int8", "onnxruntime-symmetric"): (0.8, 0.6),
    ("int8", "nncf"): (1.5, 1.1),
    ("int8", "nncf-symmetric"): (1.5, 1.1),
}
"""Seconds to write a graph in lower precision, by quantizer: of any, and per billion MACs (five networks of 0.002 to 10
billion MACs with 24 calibration images, on an AMD EPYC with Zen 5)."""
WRITE_S = (0.1, 0.12)
"""The same of an FP32 graph."""
GMAC_S, SLOWEST_CPU, UNKNOWN_CPU = 0.009, 3.0, 2.0
"""Seconds of an inference per billion MACs on that CPU, on one thread. Where the baseline takes longer, writing graphs
is expected to take longer by the same factor, up to the second number: beyond it, the network is slow and not the CPU.
The third one is the factor if the baseline was not timed here, because a worker measures."""
LOAD_S, RUN_S = (0.3, 0.1), (0.0, 0.02)
"""Seconds to load a graph, and of an inference; each until one was timed."""
WARMUP_ROUNDS, SETTLING_ROUNDS = 2, 3
"""Rounds before the first measured one, and after each further load."""


@dataclass
class MeasurementCosts:
    """Predicts how long measurements take, from the measurements of this network so far.

    Attributes:
        baseline: The configuration that runs in every round.
        timings: How long each configuration took when it was loaded first.
        macs: MACs of the baseline.
    """

    baseline: Deployment
    timings: Mapping[Deployment, Timing]
    macs: float = 0.0

    def seconds(self, deployments: Sequence[Deployment], rounds: int, *, written: bool = False) -> float:
        """Seconds to measure these in so many rounds with the baseline; without writing their graphs if `written`."""
        from repaconv.benchmark.interleaved_protocol import session_load_count

        every = dict.fromkeys((self.baseline, *deployments))
        load_s = sum(self._load_s(each) for each in every)
        round_s = sum(self._run_s(each) for each in every)
        loads = session_load_count(rounds, round_s, load_s)
        run = (WARMUP_ROUNDS + rounds + SETTLING_ROUNDS * (loads - 1)) * round_s
        return loads * load_s + run + (0.0 if written else sum(self._prepare_s(each) for each in every))

    def evaluation_s(self, deployment: Deployment, images: int) -> float:
        """Seconds to load one and to run it on so many images, by one thread."""
        return self._load_s(deployment) + images * self._run_s(deployment) / deployment.batch

    def variants_s(self, deployment: Deployment) -> float:
        """Seconds to measure how sensitive each group of layers is: one pass over the calibration images per group."""
        from repaconv.onnx_export.fp32_layer_selection import MOST_GROUPS

        return self._usual_s(deployment) + MOST_GROUPS * self.evaluation_s(self.baseline, CALIBRATION_IMAGES)

    def _prepare_s(self, deployment: Deployment) -> float:
        if deployment in self.timings or self._plain(deployment) in map(self._plain, self.timings):
            return 0.0
        alike: dict[Deployment, float] = {}
        for each, timed in self.timings.items():
            if self._written_alike(each, deployment):
                alike.setdefault(self._plain(each), timed.prepare_s)  # the first configuration wrote the graph
        return sum(alike.values()) / len(alike) if alike else self._usual_s(deployment)

    def _written_alike(self, timed: Deployment, other: Deployment) -> bool:
        """Whether two graphs take equally long to write; the baseline is on disk before it is timed."""
        kinds = [(each.runtime, each.precision, each.quantizer) for each in (timed, other)]
        return timed != self.baseline and kinds[0] == kinds[1]

    def _usual_s(self, deployment: Deployment) -> float:
        lowered = PREPARE_S.get((deployment.precision, deployment.quantizer), (0.0, 0.0))
        return self._slowness() * (self._by_size(WRITE_S) + self._by_size(lowered))

    def _slowness(self) -> float:
        """Expected time to write a graph on this CPU, relative to the CPU of `PREPARE_S`."""
        timed, usual_s = self.timings.get(self.baseline), self._by_size((0.0, GMAC_S))
        if timed is None or not usual_s:
            return UNKNOWN_CPU
        run_s = timed.run_s * self.baseline.threads / self.baseline.batch
        return min(max(run_s / usual_s, 1.0), SLOWEST_CPU)

    def _load_s(self, deployment: Deployment) -> float:
        if deployment in self.timings:
            return self.timings[deployment].load_s
        alike = [timed.load_s for each, timed in self.timings.items() if each.runtime == deployment.runtime]
        alike = alike or [timed.load_s for timed in self.timings.values()]
        return sum(alike) / len(alike) if alike else self._by_size(LOAD_S)

    def _run_s(self, deployment: Deployment) -> float:
        own = deployment if deployment in self.timings else self.baseline
        run_s = self.timings[own].run_s if own in self.timings else self._by_size(RUN_S)
        return run_s * deployment.batch / (own.batch if own in self.timings else 1)

    def _by_size(self, seconds: tuple[float, float]) -> float:
        return seconds[0] + seconds[1] * self.macs / 1e9

    def _plain(self, deployment: Deployment) -> Deployment:
        """The configuration without the fields that do not change its graph."""
        return deployment.model_copy(update={"settings": (), "threads": 1, "streams": 1, "batch": 1})


# Log of the measurements, by shapes, so that a search with other weights of the same shapes can use it as well

HELD_BYTES = 4 * 1024**3
AT_A_TIME = 16
"""Configurations whose graphs are written before they are measured: an exhaustive search would fill a disk."""
SESSION_FACTOR = 3
"""Memory of a session relative to its file: the file, and the packed weights."""


@dataclass
class MeasurementLog:
    """The log of all measurements, from which an interrupted search resumes.

    Attributes:
        path: File of the log.
        begun: Start time, on the clock.
        deadline: Time after which nothing is measured.
        baseline: The configuration that the others are compared with.
        rounds: Number of rounds of the final measurement.
        measuring: Measures configurations with the baseline.
        graphs: The configurations' graphs.
        progress: See `Progress`.
        rows: (rounds, ratio) by configuration.
        deployments: The configurations.
        left: Why other configurations were not measured.
        cut: Whether something was skipped because the time was over.
        clock: Seconds on a clock that never goes back.
        macs: MACs of the baseline.
        images: Number of images that evaluate a loss.
        evaluations: Which configurations were evaluated, and how many seconds that took.
        alike: The first configuration with the same graph and settings, by configuration.
    """

    path: Path
    begun: float
    deadline: float
    baseline: Deployment
    rounds: int
    measuring: LocalMeasurement | WorkerMeasurement
    graphs: Candidates
    progress: Progress
    rows: dict[str, tuple[int, Ratio]] = field(default_factory=dict)
    deployments: dict[str, Deployment] = field(default_factory=dict)
    left: dict[Deployment, str] = field(default_factory=dict)
    cut: bool = False
    clock: Callable[[], float] = time.monotonic
    macs: float = 0.0
    images: int = 0
    evaluations: Sequence[tuple[Deployment, float]] = ()
    alike: dict[Deployment, Deployment] = field(default_factory=dict)
    _first: dict[str, Deployment] = field(default_factory=dict)

    def remembered(self) -> MeasurementLog:
        """The log with the rows of its file; a file of another version is ignored."""
        with suppress(OSError, ValueError, TypeError):
            known = json.loads(self.path.read_text("utf-8"))
            self.rows = {key: (int(rounds), Ratio.model_validate(row)) for key, (rounds, row, _) in known.items()}
            self.deployments = {key: Deployment.model_validate(each) for key, (_, _, each) in known.items()}
        return self

    def known(self) -> list[Deployment]:
        """Earlier measurements."""
        return [each for each in self.deployments.values() if each != self.baseline]

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return self.clock() - self.begun

    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - self.clock()

    def predicted_s(self, deployments: Sequence[Deployment], rounds: int, *, written: bool = False) -> float:
        """Seconds that measuring these is expected to take, without those that are known; see `MeasurementCosts`."""
        unknown = [each for each in deployments if not self._known(each, rounds) and each != self.baseline]
        return self._costs.seconds(unknown, rounds, written=written) if unknown else 0.0

    def evaluation_s(self, deployment: Deployment) -> float:
        """Seconds that running it on the validation split is expected to take, from what evaluations took so far."""
        costs = self._costs
        expected = sum(costs.evaluation_s(each, self.images) for each, _ in self.evaluations)
        share = sum(took for _, took in self.evaluations) / expected if expected else 1.0
        return share * costs.evaluation_s(deployment, self.images)

    def variants_s(self, deployment: Deployment) -> float:
        """Seconds that choosing layers of it to keep in FP32 is expected to take; 0 if that was done for its target."""
        return 0.0 if deployment.target in self.graphs.sensitive else self._costs.variants_s(deployment)

    @property
    def _costs(self) -> MeasurementCosts:
        return MeasurementCosts(self.baseline, self.measuring.timings, self.macs)

    def forget(self) -> None:
        """Remove all rows and the file."""
        self.rows, self.deployments = {}, {}
        self.path.unlink(missing_ok=True)

    def measure(self, deployments: Sequence[Deployment], rounds: int) -> dict[Deployment, Measured]:
        """Speedups over the baseline, without configurations that are wrong or exceed the time budget.

        Configurations with as many or more rounds in the log are not measured again.
        """
        for start in range(0, len(deployments), AT_A_TIME):
            if not self._measured(deployments[start : start + AT_A_TIME], rounds):
                self.cut = True
                break
        found = {each: self.rows[_key(each)] for each in deployments if self._known(each, rounds)}
        return {each: Measured(ratio, count) for each, (count, ratio) in found.items()}

    def _measured(self, deployments: Sequence[Deployment], rounds: int) -> bool:
        """Measure those without a result yet; returns whether the time was enough for all."""
        unknown = [each for each in deployments if not self._known(each, rounds) and each not in self.left]
        if unknown and self._over():
            return False
        same = {each: self._same(each) for each in unknown}
        self.alike |= same
        missing = [each for each in dict.fromkeys(same.values()) if not self._known(each, rounds)]
        for group in self._groups([each for each in missing if each not in (*self.left, self.baseline)]):
            if self._over():
                return False
            self.progress(f"tune: {rounds} rounds of {len(group)}", 0, 0)
            for each, found in self.measuring(group, rounds).items():
                if isinstance(found, str):
                    self.left[each] = found
                else:
                    self.rows[_key(each)] = (rounds, found)
            self._keep(same)
        self._keep(same)
        return True

    def memory(self, deployment: Deployment) -> int | None:
        """Bytes that loading and the first inference took, of it or of its equal; None if that was not measured."""
        return self.measuring.memory.get(self.alike.get(deployment, deployment))

    def time_left(self) -> bool:
        """Whether there is time left; if not, `cut` is set."""
        self.cut |= (over := self.left_s() <= 0)
        return not over

    def _over(self) -> bool:
        return self.left_s() <= 0

    def _keep(self, same: dict[Deployment, Deployment]) -> None:
        """Save all results so far, including those of configurations that are equal."""
        self.left |= {each: self.left[first] for each, first in same.items() if first in self.left}
        equal = [each for each, first in same.items() if first == self.baseline != each]
        self.left |= dict.fromkeys(equal, "skipped: the same as the baseline")
        self.rows |= {_key(each): self.rows[_key(first)] for each, first in same.items() if _key(first) in self.rows}
        self.deployments |= {_key(each): each for each in (*same, *same.values()) if _key(each) in self.rows}
        plain = {
            key: (count, row.model_dump(mode="json"), self.deployments[key].model_dump(mode="json"))
            for key, (count, row) in self.rows.items()
        }
        write_text(self.path, canonical_json(plain))

    def _known(self, deployment: Deployment, rounds: int) -> bool:
        return self.rows.get(_key(deployment), (0, None))[0] >= rounds

    def _same(self, deployment: Deployment) -> Deployment:
        """The first configuration with the same graph and settings: different rewrites may give equal graphs."""
        if not self._first:
            self._first[self._summary(self.baseline)] = self.baseline
        return self._first.setdefault(self._summary(deployment), deployment)

    def _summary(self, deployment: Deployment) -> str:
        """A key that is equal for configurations with the same graph and settings."""
        return canonical_json({**deployment.model_dump(mode="json"), "rewrites": self.graphs.same(deployment)})

    def _groups(self, deployments: Sequence[Deployment]) -> list[list[Deployment]]:
        """Groups of configurations that fit into memory together."""
        groups: list[list[Deployment]] = []
        held = HELD_BYTES
        for each in deployments:
            size = SESSION_FACTOR * each.streams * self.graphs.bytes(each)
            if held + size > HELD_BYTES:
                groups.append([])
                held = SESSION_FACTOR * self.graphs.bytes(self.baseline)
            groups[-1].append(each)
            held += size
        return groups


def _key(deployment: Deployment) -> str:
    return sha256_of_bytes(canonical_json(deployment.model_dump(mode="json")).encode())[:16]
