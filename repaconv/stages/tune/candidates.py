"""The deployments of one network, each graph written once: what a search chooses among."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repaconv.core.errors import Refused
from repaconv.core.files import sha256_of_bytes, write_bytes
from repaconv.core.progress import Progress
from repaconv.results import Deployment, Sensitivity
from repaconv.rewrites.presets import chosen
from repaconv.sources.source_model import DEPLOY, GraphSpec, Subject
from repaconv.stages.shared.common_checks import load_target, usual_form
from repaconv.stages.shared.engine_files import lowers, takes_networks
from repaconv.stages.shared.input_selection import Split
from repaconv.stages.shared.lower_precision import in_precision, int8_for, loader_for
from repaconv.verification.model_runners import named

if TYPE_CHECKING:
    import onnx

    from repaconv.engines.contract import Feeds, Network
    from repaconv.engines.targets import Target
    from repaconv.graph.rewrite_contract import Rewrite
    from repaconv.stages.tune.configuration_search import Arm
    from repaconv.verification.input_batches import Batch

ROOM = 8 * 1024**3
"""Bytes of graphs that lie on the disk at once."""


@dataclass
class Graphs:
    """The graph of a network for one target, and the rewrites that change it."""

    raw: onnx.ModelProto
    rewrites: dict[str, Rewrite]

    def model(self, rewrites: Iterable[str]) -> onnx.ModelProto:
        """It in a form, as far as rewrites are its own: they may be of another checkpoint."""
        from repaconv.graph.model_rewriting import rewritten

        return rewritten(self.raw, [self.rewrites[name] for name in rewrites if name in self.rewrites])[0]


@dataclass
class Candidates:
    """The deployments of one network.

    Attributes:
        subject: The network.
        names: Of rewrites that are considered.
        given: Images, of which some calibrate lower precisions; None where there are none.
        scratch: Where graphs go.
        progress: See `Progress`.
        sensitive: Which layers lose most in int8, by target, where that was asked.
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
        """Which of the outputs is the scores of classes."""
        scores = self.subject.scores
        return self.subject.outputs.index(scores.output) if scores else 0

    def arm(self, start: Deployment, tries: Sequence[Any]) -> Arm:
        """A runtime in a precision, from its target's default form; another quantizer's in that form alone, which takes
        half a minute.

        Raises:
            EnvironmentProblem: If its quantizer is not here.
            Refused: If the export is not sound or its weights take more than 2 GiB.
            UsageProblem: If the runtime takes networks, and this is a graph.
        """
        from repaconv.stages.tune.configuration_search import Arm

        device = load_target(start.target)
        if takes_networks(device):
            self.subject.network(DEPLOY)
            return Arm(start, (), tuple(tries))
        graphs, precision = self._graphs(device), start.precision
        newest = int8_for(device, start.quantizer).opset(device.newest) if precision == "int8" else device.newest
        fit = tuple(name for name, rewrite in graphs.rewrites.items() if rewrite.opset <= newest)
        fit = device.kept(fit, precision)
        usual = usual_form(device, self.subject.folded.called)
        default = tuple(name for name in fit if name in usual)
        return Arm(start.model_copy(update={"rewrites": default}), () if start.quantizer else fit, tuple(tries))

    def _graphs(self, device: Target) -> Graphs:
        """The network exported for a target, and which of the rewrites change that."""
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
        """What its form multiplies and adds for one image; 1 where there is no graph to count in."""
        import onnx

        from repaconv.graph.compute_costs import macs_of

        if takes_networks(load_target(deployment.target)):
            return 1
        path = self._named(deployment)
        if path not in self.counted:
            self.counted[path] = macs_of(onnx.load(self.exact(deployment)))
        return self.counted[path]

    def exact(self, deployment: Deployment) -> Path:
        """Its form in float32 as a file; equal graphs are one file."""
        device = load_target(deployment.target)
        return self._file((device.name, deployment.rewrites), lambda: self._graphs(device).model(deployment.rewrites))

    def same(self, deployment: Deployment) -> str:
        """Equal for deployments whose forms come to equal graphs."""
        return "" if takes_networks(load_target(deployment.target)) else self._named(deployment).stem

    def _named(self, deployment: Deployment) -> Path:
        """Of its form in float32, whether or not it lies there now."""
        known = self.made.get((deployment.target, deployment.rewrites))
        return known or self.exact(deployment)

    def bytes(self, deployment: Deployment) -> int:
        """Of its weights, about."""
        if takes_networks(load_target(deployment.target)):
            return self.subject.folded.payload.bytes
        return self.exact(deployment).stat().st_size

    def path(self, deployment: Deployment) -> Path:
        """Its graph as a file, typed where its precision stands in the graph."""
        import onnx

        device, precision = load_target(deployment.target), deployment.precision
        plain = self.exact(deployment)
        if precision == "fp32" or lowers(device, precision):
            return plain
        how = int8_for(device, deployment.quantizer)

        def typed() -> onnx.ModelProto:
            self.progress(f"to {precision}", 0, 0)
            calls = self.given.calibrating() if self.given else []
            return in_precision(onnx.load(plain), precision, calls, how, deployment.fp32_modules)[0]

        return self._file((plain, precision, how, deployment.fp32_modules), typed)

    def mixed(self, arm: Arm) -> list[Arm]:
        """In place of one in int8 those that leave ever more of the most sensitive layers in float32."""
        import onnx

        from repaconv.onnx_export.quantization_layer_groups import nested

        start = arm.start
        if start.precision != "int8" or start.fp32_modules or self.given is None:
            return []
        if start.target not in self.sensitive:
            plain, calls = onnx.load(self.exact(start)), self.given.calibrating()
            found = sensitivities(plain, calls, load_target(start.target), self.place_of_scores, progress=self.progress)
            self.sensitive[start.target] = tuple(found)
        steps = nested([each.layers for each in self.sensitive[start.target]])
        return [arm._replace(start=start.model_copy(update={"fp32_modules": keep})) for keep in steps]

    def deployable(self, deployment: Deployment) -> Path | Network:
        """What its runtime opens."""
        if takes_networks(load_target(deployment.target)):
            return self.subject.network(DEPLOY)
        return self.path(deployment)

    def sizes(self, batch: int) -> dict[str, int]:
        """Of a graph's free dimensions, by name."""
        size = self.subject.folded.image_size
        return {"batch": batch, "height": size[0], "width": size[1]} if size else self.subject.free_sizes(batch)

    def _file(self, key: tuple[Any, ...], make: Callable[[], onnx.ModelProto]) -> Path:
        """A graph, written unless it lies there; equal ones are one file."""
        path = self.made.pop(key, None)
        if path is None or not path.is_file():
            content = make().SerializeToString(deterministic=True)
            path = self.scratch / f"{sha256_of_bytes(content)}.onnx"
            if not path.is_file():
                write_bytes(path, content)
        self.made[key] = path  # the last: in the order of their use
        self._make_room()
        return path

    def _make_room(self) -> None:
        """Remove those that were not used for longest; they are written again where they are wanted."""
        there = [path for path in dict.fromkeys(reversed(self.made.values())) if path.is_file()]
        total = 0
        for path in there:
            total += path.stat().st_size
            if total > ROOM and path != there[0]:
                path.unlink()


def judging_call(subject: Subject) -> Batch:
    """Three images, as many as a call takes where that is fixed, or a call where it takes no images."""
    count = subject.folded.batch if isinstance(subject.folded.batch, int) else 1 if subject.folded.whole else 3
    return subject.drawn(count, 0).piece(0, count)


# --- How much each group of layers loses in int8 while all others stay in float32: a forward pass each.


def sensitivities(
    model: onnx.ModelProto, calls: Sequence[Feeds], device: Target, output: int = 0, *, progress: Progress
) -> list[Sensitivity]:
    """The groups of a float32 graph that gives logits, the most sensitive first.

    Args:
        model: It.
        calls: Images: they calibrate, and on them it is measured. What a deployment loses others judge.
        device: For which int8 would be.
        output: The place of the logits among the outputs.
        progress: See `Progress`.
    """
    from repaconv.onnx_export.fp16_and_int8 import to_int8
    from repaconv.onnx_export.quantization_layer_groups import groups_of, nodes_of, only_in_int8
    from repaconv.verification.difference_metrics import Meter
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
        meter = Meter(tolerance("int8"), logits=True)
        for got, expected in zip(logits(only_in_int8(model, low, nodes_of(model, group))), right, strict=True):
            meter.add(got, expected)
        seen = meter.metrics()
        flips = seen.top1_flips / seen.images
        found.append(Sensitivity(layers=group, disagreement=flips, kl_divergence=seen.kl_divergence or 0.0))
    return sorted(found, key=lambda each: (-each.kl_divergence, -each.disagreement))
