"""Conversions beside the network as it was, all in the form of a target: how many times as fast they are there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repaconv.core import plugins
from repaconv.core.errors import EnvironmentProblem, GateFailed, UsageProblem
from repaconv.core.progress import Progress
from repaconv.results import Ratio
from repaconv.rewrites.presets import chosen
from repaconv.sources.source_model import DEPLOY, GraphSpec
from repaconv.sources.verified_onnx_export import Proving, exported_graph, write_graph
from repaconv.stages.bench.benchmark_inputs import Calls
from repaconv.stages.bench.session_loads import Openings
from repaconv.stages.shared.common_checks import load_target, usual_form
from repaconv.stages.shared.engine_files import takes_networks
from repaconv.stages.shared.model_opening import Opened, opened
from repaconv.stages.shared.remote_targets import why_not_here

if TYPE_CHECKING:
    from repaconv.engines.targets import Target
    from repaconv.method_api.contract import Reading
    from repaconv.options.conversion_options import ConvertOrder

ORIGINAL = "unconverted"
Entrant = tuple["Reading", str]
"""A network as read, and the method whose fold and form it has."""


def require_pace(order: ConvertOrder) -> Target | None:
    """The target on which speeds are measured, if they are.

    Raises:
        UsageProblem: If the speed is none, something else says what is converted, or the target runs no graphs.
        EnvironmentProblem: If it is not this machine.
    """
    if order.speedup is None and not order.curve:
        return None
    said = order.method == "pyra" and (order.schedule or order.keep)
    if order.speedup is not None and (not order.speedup > 1 or said):
        what = "is not more than 1" if not order.speedup > 1 else "chooses what merges, as --schedule and --keep do"
        raise UsageProblem(
            f"--speedup {order.speedup:g} {what}.",
            hint="Give the target speedup as a number, e.g. --speedup 1.5.",
            code="convert.speedup",
        )
    device, asked = load_target(order.target), "--curve" if order.speedup is None else "--speedup"
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
class Track:
    """Where they run: by the target's own protocol, in rounds with the network as it was.

    Attributes:
        device: The target, which is this machine.
        original: The network as it was, and the method whose fold and form it has.
        scratch: A folder for graphs.
        progress: See `Progress`.
    """

    device: Target
    original: Entrant
    scratch: Path
    progress: Progress

    @cached_property
    def graph(self) -> Path:
        """The network as it was, folded exactly, as a graph."""
        return self._graph(*self.original, ORIGINAL)

    def speeds(self, readings: Mapping[str, Entrant]) -> dict[str, Ratio]:
        """How many times as fast conversions are, by name; each with the method whose fold and form it has.

        Raises:
            GateFailed: If a graph does not compute what its network does.
        """
        from repaconv.benchmark.interleaved_protocol import measure_anew, pinned
        from repaconv.benchmark.measurement_quality import compared
        from repaconv.verification.input_batches import random_inputs

        paths = {ORIGINAL: self.graph, **{name: self._graph(*each, name) for name, each in readings.items()}}
        usual, config = self.device.bench, self.original[0].config
        shape = (config.in_channels, *config.image_size)
        feeds = random_inputs(shape, count=usual.batch, seed=0).piece(0, usual.batch)
        openings = Openings(
            {name: partial(self._opened, path) for name, path in paths.items()}, lambda _: Calls([feeds], shape)
        )
        with pinned(usual.threads) as cores:
            found = measure_anew(
                openings,
                rounds=usual.rounds,
                warmup_rounds=usual.warmup_rounds,
                seed=0,
                cores=cores,
                tick=lambda done, total: self.progress("measure", done, total),
            )
        times = found.samples_ms
        return {name: compared(found, (name, times[name]), (ORIGINAL, times[ORIGINAL]), 0) for name in readings}

    def _opened(self, path: Path) -> Opened:
        usual = self.device.bench
        return opened(path, self.device, threads=usual.threads, dims={"batch": usual.batch})

    def _graph(self, reading: Reading, method: str, name: str) -> Path:
        """As `export` would write it for this target."""
        device, config = self.device, reading.config
        spec = GraphSpec(
            size=config.image_size,
            opset=device.opset,
            newest=device.newest,
            lacks=device.unsupported_ops,
            rewrites=chosen(usual_form(device, method), device.newest).rewrites,
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
