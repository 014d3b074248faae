"""`convert --speedup`: choose the merging schedule or the number of replaced blocks that reaches a speedup."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repaconv.core import plugins
from repaconv.core.errors import EnvironmentProblem, GateFailed, Inconclusive, UsageProblem
from repaconv.core.file_replacement import write_payload
from repaconv.core.files import payload_of
from repaconv.core.progress import Progress
from repaconv.core.run_folder import UNCONVERTED
from repaconv.core.temporary_folders import scratch_folder
from repaconv.results import Ratio, SpeedTarget, SpeedTrial
from repaconv.rewrites.presets import chosen
from repaconv.sources.source_model import DEPLOY, GraphSpec
from repaconv.sources.verified_onnx_export import Proving, exported_graph, write_graph
from repaconv.stages.shared.engine_files import takes_networks
from repaconv.stages.shared.model_opening import open_model
from repaconv.stages.shared.target_lookup import default_rewrites, load_target
from repaconv.stages.shared.unavailable_targets import why_not_here
from repaconv.verification.model_runners import call_of

if TYPE_CHECKING:
    from repaconv.checkpoints import Checkpoint
    from repaconv.conversion.conversion_evaluation import Evaluation
    from repaconv.conversion.image_splits import ImageSplits
    from repaconv.conversion.kernel_fitting import ConversionSettings
    from repaconv.conversion.plain_vit import PlainViT
    from repaconv.conversion.speed_target_search import Schedule
    from repaconv.engines.targets import Target
    from repaconv.method_api.contract import Reading
    from repaconv.stages.convert.options import ConvertOptions


# Speedup of converted networks over the original one

ORIGINAL = "unconverted"
MethodNetwork = tuple["Reading", str]
"""A network, and the method that folds it and sets its rewrite preset."""


def require_speed_target(options: ConvertOptions) -> Target | None:
    """Return the target on which the speed is measured; None if no speedup was requested.

    Raises:
        UsageProblem: If the speedup is not above 1, other options choose the conversion, or the target runs no graphs.
        EnvironmentProblem: If the target is not this machine.
    """
    if options.speedup is None and not options.curve:
        return None
    said = options.method == "pyra" and (options.schedule or options.keep)
    if options.speedup is not None and (not options.speedup > 1 or said):
        what = "is not more than 1" if not options.speedup > 1 else "chooses what merges, as --schedule and --keep do"
        raise UsageProblem(
            f"--speedup {options.speedup:g} {what}.",
            hint="Give the target speedup as a number, e.g. --speedup 1.5.",
            code="convert.speedup",
        )
    device, asked = load_target(options.target), "--curve" if options.speedup is None else "--speedup"
    if takes_networks(device):
        raise UsageProblem(
            f"{device.name} runs PyTorch modules, but {asked} measures ONNX models.",
            hint="Give the target on which the network will run, e.g. --target x86-64.",
            code="convert.speedup",
        )
    if why := why_not_here(device):
        raise EnvironmentProblem(
            f"{device.name} is not this machine ({why}), and {asked} measures on this machine.",
            hint="Run it there, or give --schedule, --keep or --blocks and measure the run there.",
            code="bench.elsewhere",
        )
    return device


@dataclass(frozen=True)
class SpeedMeasurement:
    """Measures converted networks as ONNX models on a target, in interleaved rounds with the original network.

    Attributes:
        device: The target, which is this machine.
        original: The original network, with the method that folds it and sets its rewrite preset.
        scratch: Folder for graphs.
        progress: See `Progress`.
    """

    device: Target
    original: MethodNetwork
    scratch: Path
    progress: Progress

    @cached_property
    def graph(self) -> Path:
        """ONNX file of the original network, folded exactly."""
        return self._graph(*self.original, ORIGINAL)

    def speeds(self, readings: Mapping[str, MethodNetwork]) -> dict[str, Ratio]:
        """Speedups of converted networks over the original one, by name.

        Raises:
            GateFailed: If a graph's outputs differ from those of its network.
        """
        from repaconv.benchmark.interleaved_protocol import Entrant, Protocol, measure
        from repaconv.verification.input_batches import random_inputs

        paths = {ORIGINAL: self.graph, **{name: self._graph(*each, name) for name, each in readings.items()}}
        usual, config = self.device.bench, self.original[0].config
        shape = (config.in_channels, *config.image_size)
        images = random_inputs(shape, count=usual.batch, seed=0).piece(0, usual.batch)

        def loaded(path: Path) -> Callable[[], Any]:
            model = open_model(path, self.device, threads=usual.threads, dims={"batch": usual.batch})
            return call_of(model.session, images.feeds(model.session.inputs))

        found = measure(
            {name: Entrant(partial(loaded, path)) for name, path in paths.items()},
            Protocol(usual.rounds, usual.warmup_rounds, cores=usual.threads),
            tick=lambda done, total: self.progress("measure", done, total),
        )
        return {name: found.ratio(name, ORIGINAL) for name in readings}

    def _graph(self, reading: Reading, method: str, name: str) -> Path:
        """Write the ONNX file that `export` would write for this target."""
        device, config = self.device, reading.config
        spec = GraphSpec(
            size=config.image_size,
            opset=device.opset,
            newest=device.newest,
            unsupported_ops=device.unsupported_ops,
            rewrites=chosen(default_rewrites(device, method), device.newest).rewrites,
        )
        ways = Proving(DEPLOY, spec, reading.tolerances, self.scratch, self.progress)
        deploy: Any = plugins.load(plugins.BACKBONES, reading.backbone).deploy(config)
        tensors = {key: value for part in reading.parts() for key, value in part.tensors.items()}
        shape = (config.in_channels, *config.image_size)
        made = exported_graph(ways, deploy, tensors, shape, output="logits" if config.classes else "features")
        if not made.sound:
            raise GateFailed(
                f"the exported graph of {name} gives other outputs than the network: {made.links[0].note}.",
                hint="Export it alone to see where they differ: repaconv export.",
                code="convert.graph",
            )
        path = self.scratch / f"{name}.onnx"
        write_graph(made.model, path, made.data)
        return path


# The search for a conversion with the wanted speedup

FITTING_IMAGES = 8
"""Number of images for fitting a conversion of which only the speed is measured."""


@dataclass(frozen=True)
class SpeedSearch:
    """All measurements for a requested speedup."""

    measurement: SpeedMeasurement
    wanted: float
    measured: dict[tuple[int, ...], Ratio] = field(default_factory=dict)

    def speeds(self, networks: dict[tuple[int, ...], MethodNetwork]) -> dict[tuple[int, ...], float]:
        """Measure these together; returns the speedup of each by its blocks or schedule."""
        names = {"-".join(map(str, each)): each for each in networks}
        found = self.measurement.speeds({name: networks[each] for name, each in names.items()})
        self.measured.update({names[name]: ratio for name, ratio in found.items()})
        return {each: self.measured[each].median for each in networks}

    def artefact_fields(self, taken: tuple[int, ...], of: str, folder: Path) -> dict[str, Any]:
        """Fields of `repaconv.results.ConvertArtefact`; also writes the original network's graph, to be measured again.

        Args:
            taken: The blocks or the schedule of the chosen conversion.
            of: The field of `SpeedTrial` for them: "blocks" or "schedule".
            folder: The run folder.
        """
        from repaconv.benchmark.machine_fingerprint import cpu_model

        speed_target = SpeedTarget(
            target=self.measurement.device.name,
            wanted=self.wanted,
            reached=self.measured[taken],
            speed_trials=tuple(
                SpeedTrial.model_validate({of: each, "speed": ratio}) for each, ratio in self.measured.items()
            ),
            machine=str(cpu_model()),
        )
        write_payload(folder / UNCONVERTED, self.measurement.graph.read_bytes())
        return {"speed_target": speed_target, "other_files": (payload_of(folder / UNCONVERTED, folder),)}

    def unreachable(self, what: str) -> GateFailed | Inconclusive:
        """The error when no conversion reaches the speedup, or none is close enough to it."""
        best = max(self.measured.values(), key=lambda ratio: ratio.median)
        if not all(ratio.conclusive for ratio in self.measured.values()):
            return Inconclusive(
                f"whether a speedup of {self.wanted:g}x is reached on {self.measurement.device.name} is not known: the "
                f"measurement was disturbed. The best of {len(self.measured)} measured configurations: {best.cell}.",
                hint="Convert again on a quieter machine, or choose the conversion: --schedule, --keep or --blocks.",
                code="convert.inconclusive",
            )
        speeds = sorted(ratio.median for ratio in self.measured.values())
        nearest = min(speeds, key=lambda speed: abs(speed / self.wanted - 1))
        return GateFailed(
            f"{what} a speedup of {self.wanted:g}x on {self.measurement.device.name}: of {len(speeds)} measured "
            f"configurations the fastest reaches {speeds[-1]:.2f}x, the nearest {nearest:.2f}x.",
            hint="Ask for a smaller speedup, or try the other method: --method dwconv or --method pyra.",
            code="convert.speedup",
        )


@contextmanager
def speed_search(
    wanted: float | None, device: Target | None, original: Reading, folder: Path, progress: Progress
) -> Iterator[SpeedSearch | None]:
    """Prepare the measurements if a speedup was requested; else yield None."""
    if wanted is None or device is None:
        yield None
        return
    with scratch_folder(folder) as scratch:
        yield SpeedSearch(SpeedMeasurement(device, (original, "dwconv"), scratch, progress), wanted)


def search_schedule(
    search: SpeedSearch, plain: PlainViT, checkpoint: Checkpoint, settings: dict[str, str], evaluation: Evaluation
) -> Schedule:
    """Return the merging schedule whose speedup is within 5% of the requested one.

    Raises:
        Refused: If the network outputs one vector per patch.
        GateFailed: If no schedule reaches the speedup.
    """
    from repaconv.conversion.speed_target_search import TokenCounts, schedule_for_speedup
    from repaconv.conversion.token_merging import schedule_text, with_merging
    from repaconv.methods.pyra import METHOD
    from repaconv.verification.accuracy_budget import Budget

    def network(schedule: Schedule) -> MethodNetwork:
        return METHOD.read(checkpoint, {**settings, "schedule": schedule_text(schedule)}), METHOD.name

    def measure(schedules: Sequence[Schedule]) -> dict[Schedule, float]:
        return search.speeds({each: network(each) for each in schedules})

    def loss(schedule: Schedule) -> float:
        net, _ = with_merging(checkpoint, {**settings, "schedule": schedule_text(schedule)})
        return evaluation.tried(net, (), Budget()).error

    found = schedule_for_speedup(TokenCounts.of(plain.config), search.wanted, measure, loss)
    if found is None:
        raise search.unreachable("no merging schedule reaches")
    return found.schedule


def search_block_count(
    search: SpeedSearch, plain: PlainViT, how: ConversionSettings, splits: ImageSplits, options: Sequence[int]
) -> int:
    """The smallest number of replaced blocks that reaches the speedup.

    Raises:
        GateFailed: If replacing all blocks does not reach it.
    """
    from repaconv.conversion.original_activations import OriginalActivations
    from repaconv.conversion.sequential_conversion import convert
    from repaconv.conversion.speed_target_search import fewest_blocks

    streams = OriginalActivations(plain, splits.calibration.images[:FITTING_IMAGES])

    def measure(count: int) -> float:
        blocks = tuple(sorted(options[:count]))
        if blocks not in search.measured:
            made = convert(streams, blocks, how)
            search.speeds({blocks: (made.reading, "dwconv")})
        return search.measured[blocks].median

    count = fewest_blocks(len(options), search.wanted, measure)
    if count is None:
        raise search.unreachable(f"replacing all blocks ({how.kind}) does not reach")
    return count
