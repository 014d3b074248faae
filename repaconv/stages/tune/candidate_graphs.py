"""The graphs of candidate configurations as files, and the INT8 sensitivity of their layers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repaconv.core.errors import Refused
from repaconv.core.files import sha256_of_bytes, write_bytes
from repaconv.core.progress import Progress
from repaconv.results import Deployment, ImageSize, Sensitivity
from repaconv.rewrites.presets import chosen
from repaconv.sources.source_model import DEPLOY, GraphSpec, SourceModel
from repaconv.stages.shared.engine_files import runtime_lowers, takes_networks
from repaconv.stages.shared.input_selection import Split
from repaconv.stages.shared.lower_precision import int8_for, loader_for, to_precision
from repaconv.stages.shared.target_lookup import default_rewrites, load_target
from repaconv.stages.shared.task_choice import evaluation_by
from repaconv.stages.tune.search import Trial
from repaconv.verification.model_runners import named

if TYPE_CHECKING:
    import onnx

    from repaconv.engines.contract import Feeds, Network
    from repaconv.engines.targets import Target
    from repaconv.graph.rewrite_contract import Rewrite
    from repaconv.tasks.evaluation import Evaluation
    from repaconv.tasks.task_of_network import Choice


GRAPH_BYTES = 8 * 1024**3
"""Bytes of graph files that are kept on disk."""


@dataclass
class Graphs:
    """The network's graph for one target, and the rewrites that change it."""

    raw: onnx.ModelProto
    rewrites: dict[str, Rewrite]

    def model(self, rewrites: Iterable[str]) -> onnx.ModelProto:
        """The graph with these rewrites; names that do not change this graph are ignored."""
        from repaconv.graph.models_in_onnx_ir import rewritten

        return rewritten(self.raw, [self.rewrites[name] for name in rewrites if name in self.rewrites])[0]


@dataclass
class Candidates:
    """All configurations of one network, and their graphs as files.

    Attributes:
        source_model: The source model.
        names: Names of the rewrites to consider.
        given: Images; some calibrate lower precision. None if no loss is allowed.
        scratch: Folder for graphs.
        progress: See `Progress`.
        known: Exported graphs, by export settings.
        made: Files of written graphs, the least recently used first.
        counted: MACs of written FP32 graphs.
        took_s: Seconds that writing each graph took, by the key of `made`.
        sensitive: INT8 sensitivity of layer groups by target, if it was measured.
        choice: The task in which losses are evaluated; None for class scores.
        fixed_size: (height, width) of the images that graphs take; None if that is the network's size, dynamic if it
            may be.
        devices: The targets that are tried; others are found by their registered names.
        clock: Seconds on a clock that never goes back.
    """

    source_model: SourceModel
    names: Sequence[str]
    given: Split | None
    scratch: Path
    progress: Progress
    known: dict[str, Graphs] = field(default_factory=dict)
    made: dict[tuple[Any, ...], Path] = field(default_factory=dict)
    counted: dict[Path, int] = field(default_factory=dict)
    took_s: dict[tuple[Any, ...], float] = field(default_factory=dict)
    sensitive: dict[str, tuple[Sensitivity, ...]] = field(default_factory=dict)
    choice: Choice | None = None
    fixed_size: ImageSize | None = None
    devices: Sequence[Target] = ()
    clock: Callable[[], float] = time.monotonic

    def device_of(self, deployment: Deployment) -> Target:
        """The target of a configuration, which may be of the user's own file."""
        own = (device for device in self.devices if device.name == deployment.target)
        return next(own, None) or load_target(deployment.target)

    @property
    def image_size(self) -> ImageSize | None:
        """(height, width) of the images that are measured; None if the network takes no images."""
        return self.fixed_size or self.source_model.folded.image_size

    @property
    def place_of_scores(self) -> int:
        """Index of the output with class scores."""
        scores = self.source_model.scores
        return self.source_model.outputs.index(scores.output) if scores else 0

    def evaluation(self, precision: str) -> Evaluation | None:
        """A new evaluation of a precision in the network's task; None if it is evaluated by its class scores."""
        return None if self.choice is None else evaluation_by(self.choice, self.source_model, precision)

    def trial(self, start: Deployment, tries: Sequence[Any]) -> Trial:
        """A trial with its target's default preset.

        Raises:
            EnvironmentProblem: If its quantizer is not installed.
            Refused: If the export's outputs are wrong, or its weights take more than 2 GiB.
            UsageProblem: If the runtime takes PyTorch modules, and the source is a graph.
        """

        device = self.device_of(start)
        if takes_networks(device):
            self.source_model.network(DEPLOY)
            return Trial(start, (), tuple(tries))
        graphs, precision = self._graphs(device), start.precision
        newest = int8_for(device, start.quantizer).opset(device.newest) if precision == "int8" else device.newest
        usable = chosen(device.rewrites_for(tuple(graphs.rewrites), precision), newest, precision).rewrites
        fit = tuple(rewrite.name for rewrite in usable)
        usual = default_rewrites(device, self.source_model.folded.called)
        default = tuple(name for name in fit if name in usual)
        return Trial(start.model_copy(update={"rewrites": default}), fit, tuple(tries))

    def _graphs(self, device: Target) -> Graphs:
        """The network exported for a target, and which rewrites change that graph."""
        from repaconv.graph.models_in_onnx_ir import rewritten

        spec = GraphSpec(
            size=self.image_size,
            opset=device.opset,
            newest=device.newest,
            unsupported_ops=device.unsupported_ops,
            dynamic_size=self.source_model.folded.any_image_size and self.fixed_size is None,
            simplifiers=(),
        )
        if str(spec) not in self.known:
            graph = self.source_model.graph(DEPLOY, spec, scratch=self.scratch, progress=self.progress)
            if graph.data is not None or not graph.sound:
                raise Refused(
                    "the weights take more than 2 GiB."
                    if graph.data
                    else "the exported graph and the folded network give different outputs.",
                    hint="tune supports graphs that fit into one file."
                    if graph.data
                    else "Run `repaconv export`: its table has how far they differ.",
                    code="tune.graph",
                )
            self.progress("tune: choose the rewrites that apply", 0, 0)
            known = chosen(self.names, device.newest).rewrites
            fitting = sorted(known, key=lambda rewrite: (rewrite.order, rewrite.name))
            usual = default_rewrites(device, self.source_model.folded.called)
            # Some rewrites of the default preset apply only after others of the preset.
            together = rewritten(graph.model, [rewrite for rewrite in fitting if rewrite.name in usual])[1]
            used = {change.rewrite for change in together}
            rewrites = {each.name: each for each in fitting if each.name in used or rewritten(graph.model, [each])[1]}
            self.known[str(spec)] = Graphs(graph.model, rewrites)
        return self.known[str(spec)]

    def macs(self, deployment: Deployment) -> int:
        """MACs per image of the configuration's graph at the measured size; 1 if it runs a PyTorch module."""
        import onnx

        from repaconv.graph.compute_costs import known_macs_at

        if takes_networks(self.device_of(deployment)):
            return 1
        path = self._named(deployment)
        if path not in self.counted:
            self.counted[path] = known_macs_at(onnx.load(self.exact(deployment)), self.sizes(1))
        return self.counted[path]

    def exact(self, deployment: Deployment) -> Path:
        """File of the configuration's FP32 graph; equal graphs share a file."""
        device = self.device_of(deployment)
        return self._file(_exact_key(deployment), lambda: self._graphs(device).model(deployment.rewrites))

    def same(self, deployment: Deployment) -> str:
        """A key that is equal for configurations with equal graphs."""
        return "" if takes_networks(self.device_of(deployment)) else self._named(deployment).stem

    def _named(self, deployment: Deployment) -> Path:
        """Path of the FP32 graph, whose file may have been removed to free disk space."""
        known = self.made.get(_exact_key(deployment))
        return known or self.exact(deployment)

    def bytes(self, deployment: Deployment) -> int:
        """Approximate size of its weights in bytes."""
        if takes_networks(self.device_of(deployment)):
            return self.source_model.folded.payload.bytes
        return self.exact(deployment).stat().st_size

    def path(self, deployment: Deployment) -> Path:
        """File of the configuration's graph, in its precision unless the runtime lowers an FP32 graph."""
        import onnx

        device, precision = self.device_of(deployment), deployment.precision
        plain = self.exact(deployment)
        if precision == "fp32" or runtime_lowers(device, precision):
            return plain

        def typed() -> onnx.ModelProto:
            self.progress(f"to {precision}", 0, 0)
            calls = self.given.calibration_batches() if self.given else []
            quantizer, modules = deployment.quantizer, deployment.fp32_modules
            return to_precision(onnx.load(plain), precision, calls, device, quantizer=quantizer, modules=modules)[0]

        return self._file((plain, *self._lowered_key(deployment)), typed)

    def written_s(self, deployment: Deployment) -> float:
        """Seconds that its graph took to be written, whenever that was: counting its MACs writes it as well."""
        exact = _exact_key(deployment)
        plain_s = self.took_s.get(exact, 0.0)
        if deployment.precision == "fp32":
            return plain_s
        return plain_s + self.took_s.get((self.made.get(exact), *self._lowered_key(deployment)), 0.0)

    def mixed(self, trial: Trial) -> list[Trial]:
        """Replacements of an INT8 trial that keep more and more of the most sensitive layers in FP32."""
        import onnx

        from repaconv.onnx_export.fp32_layer_selection import growing_sets

        start = trial.start
        if start.precision != "int8" or start.fp32_modules or self.given is None:
            return []
        if start.target not in self.sensitive:
            plain, calls = onnx.load(self.exact(start)), self.given.calibration_batches()
            device = self.device_of(start)
            found = sensitivities(
                plain, calls, device, self.place_of_scores, evaluation=self.evaluation, progress=self.progress
            )
            self.sensitive[start.target] = tuple(found)
        steps = growing_sets([each.layers for each in self.sensitive[start.target]])
        return [trial._replace(start=start.model_copy(update={"fp32_modules": keep})) for keep in steps]

    def deployable(self, deployment: Deployment) -> Path | Network:
        """Return what the runtime of a configuration opens: a graph file or a PyTorch module."""
        if takes_networks(self.device_of(deployment)):
            return self.source_model.network(DEPLOY)
        return self.path(deployment)

    def sizes(self, batch: int) -> dict[str, int]:
        """Sizes of the graph's dynamic dimensions, by name."""
        size = self.image_size
        return {"batch": batch, "height": size[0], "width": size[1]} if size else self.source_model.free_sizes(batch)

    def _lowered_key(self, deployment: Deployment) -> tuple[Any, ...]:
        """Everything that a graph in lower precision depends on, in addition to the FP32 graph."""
        device, precision = self.device_of(deployment), deployment.precision
        without_kernel = device.fp32_operators.get(precision, ())
        return precision, int8_for(device, deployment.quantizer), deployment.fp32_modules, without_kernel

    def _file(self, key: tuple[Any, ...], make: Callable[[], onnx.ModelProto]) -> Path:
        """A graph's file, written if it does not exist; equal graphs share a file."""
        path = self.made.pop(key, None)
        if path is None or not path.is_file():
            begun = self.clock()
            content = make().SerializeToString(deterministic=True)
            path = self.scratch / f"{sha256_of_bytes(content)}.onnx"
            if not path.is_file():
                write_bytes(path, content)
            self.took_s[key] = self.clock() - begun
        self.made[key] = path  # moved to the end, so that the least recently used file is first
        self._make_room()
        return path

    def _make_room(self) -> None:
        """Remove the least recently used files; they are written again when needed."""
        there = [path for path in dict.fromkeys(reversed(self.made.values())) if path.is_file()]
        total = 0
        for path in there:
            total += path.stat().st_size
            if total > GRAPH_BYTES and path != there[0]:
                path.unlink()


def _exact_key(deployment: Deployment) -> tuple[Any, ...]:
    """Everything that the FP32 graph of a configuration depends on."""
    return deployment.target, deployment.rewrites


# INT8 sensitivity of groups of layers


def sensitivities(
    model: onnx.ModelProto,
    calls: Sequence[Feeds],
    device: Target,
    output: int = 0,
    *,
    evaluation: Callable[[str], Evaluation | None] = lambda _: None,
    progress: Progress,
) -> list[Sensitivity]:
    """INT8 sensitivity of the layer groups of an FP32 graph, the most sensitive first: by its logits, or in its task.

    One group at a time is in INT8 and all others in FP32, with one pass over the images for each group.

    Args:
        model: The FP32 graph.
        calls: The calibration images, on which the sensitivity is measured as well.
        device: The target of the INT8 graph.
        output: Index of the logits among the outputs.
        evaluation: Returns a new evaluation of a precision in the network's task; None if it outputs logits.
        progress: See `Progress`.
    """
    from repaconv.onnx_export.fp16_and_int8 import to_int8
    from repaconv.onnx_export.fp32_layer_selection import groups_of, nodes_of, with_int8_rounding
    from repaconv.verification.comparison import Comparison
    from repaconv.verification.tolerances import tolerance

    low = to_int8(model, calls, how=int8_for(device))
    groups, load = groups_of(model), loader_for(device.architecture, "int8")

    def outputs(graph: onnx.ModelProto) -> list[Mapping[str, Any]]:
        session = load(graph.SerializeToString())
        ports = [port.name for port in session.inputs]
        return [session.run(named(ports, call)) for call in calls]

    right = outputs(model)
    found = []
    for place, group in enumerate(groups):
        progress("tune: layers in int8", place, len(groups))
        compared, of_task = Comparison("int8", tolerance("int8")), evaluation("int8")
        for got, expected in zip(outputs(with_int8_rounding(model, low, nodes_of(model, group))), right, strict=True):
            if of_task is not None:
                of_task.add(named(list(expected), got), expected)
            else:
                compared.add(*({"logits": list(each.values())[output]} for each in (got, expected)))
        if of_task is not None:
            found.append(Sensitivity(layers=group, disagreement=of_task.disagreement(), kl_divergence=0.0))
            continue
        seen = compared.metrics("logits")
        flips = seen.top1_flips / seen.images
        found.append(Sensitivity(layers=group, disagreement=flips, kl_divergence=seen.kl_divergence or 0.0))
    return sorted(found, key=lambda each: (-each.kl_divergence, -each.disagreement))
