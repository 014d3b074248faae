"""Build engines with TensorRT's Python API, shared by TensorRT 8.6 to 11 and TensorRT-RTX.

Differences between versions are detected by feature, not by version number. TensorRT 10 added strongly typed networks,
11 removed the precision flags, and 8 has only the flags.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from repaconv.core.errors import Refused
from repaconv.engines.contract import BuildSpec
from repaconv.graph.onnx_files import require_external_files

# Layers whose type counts as the engine's precision.
COMPUTING = ("CONVOLUTION", "MATRIX_MULTIPLY")


class EngineBuild:
    """One engine build. The graph is parsed on construction, so that the network can be inspected before building."""

    def __init__(self, trt: Any, spec: BuildSpec, hint: str) -> None:
        """Parse the graph.

        Raises:
            Refused: If the parser rejects the graph; ``hint`` is the advice in the message.
        """
        require_external_files(spec.model)
        self.trt, self.spec = trt, spec
        self.log = logger(trt)
        self.builder = trt.Builder(self.log)
        self.typed = hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED")
        self.network = self.builder.create_network(self._network_flags())
        parser = trt.OnnxParser(self.network, self.log)
        if not parser.parse_from_file(str(spec.model)):
            raise Refused(f"{trt.__name__} does not support {_error(parser)}.", hint=hint, code="build.parser")
        self.config = self.builder.create_builder_config()
        self._configure()

    def plan(self) -> bytes:
        """Build and serialize the engine.

        Raises:
            Refused: If the build fails, with the builder's last error.
        """
        plan = self.builder.build_serialized_network(self.network, self.config)
        if plan is None:
            raise Refused(
                f"{self.trt.__name__} cannot build the graph: {self.log.last or 'it gave no reason'}.",
                hint="Export it for this target: repaconv export --target NAME.",
                code="build.failed",
            )
        return bytes(plan)

    def _network_flags(self) -> int:
        flags, wanted = self.trt.NetworkDefinitionCreationFlag, 0
        if self.typed:
            wanted |= 1 << int(flags.STRONGLY_TYPED)
        elif hasattr(flags, "EXPLICIT_BATCH"):
            wanted |= 1 << int(flags.EXPLICIT_BATCH)
        return wanted

    def _configure(self) -> None:
        spec, trt, config = self.spec, self.trt, self.config
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        if spec.workspace is not None:
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, spec.workspace)
        if spec.shapes:
            profile = self.builder.create_optimization_profile()
            for name, (least, usual, largest) in spec.shapes.items():
                profile.set_shape(name, least, usual, largest)
            config.add_optimization_profile(profile)
        if spec.precision == "fp32" and hasattr(trt.BuilderFlag, "TF32"):
            config.clear_flag(trt.BuilderFlag.TF32)  # on by default, with a 10-bit mantissa; as trtexec --noTF32
        if not self.typed:
            self._ask_for_precision()
        if hasattr(trt, "IProgressMonitor"):
            self.monitor = _monitor(trt, spec.tick)
            config.progress_monitor = self.monitor

    def _ask_for_precision(self) -> None:
        """Set the precision flags of TensorRT 8, and pin the FP32 nodes by name."""
        flags = self.trt.BuilderFlag
        for name in {"fp16": ("FP16",), "int8": ("INT8", "FP16"), "bf16": ("BF16",)}.get(self.spec.precision, ()):
            self.config.set_flag(getattr(flags, name))
        if self.spec.fp32_nodes:
            self.config.set_flag(flags.OBEY_PRECISION_CONSTRAINTS)
            for layer in self.layers:
                if layer.name in self.spec.fp32_nodes:
                    layer.precision = self.trt.float32

    @property
    def tf32(self) -> bool:
        """Whether float32 products may use TF32."""
        flag = getattr(self.trt.BuilderFlag, "TF32", None)
        return flag is not None and bool(self.config.get_flag(flag))

    def exchange_timings(self) -> None:
        """Load the timing cache of earlier builds, and record the timings of this one in it."""
        cache = self.config.create_timing_cache(self.spec.timing_cache or b"")
        if not self.config.set_timing_cache(cache, ignore_mismatch=False):
            raise Refused(
                "the timing cache was written by another TensorRT version or for another GPU.",
                hint="Give another --timing-cache, or leave it out.",
                code="build.timing-cache",
            )
        if self.spec.replay:
            self.config.set_flag(self.trt.BuilderFlag.ERROR_ON_TIMING_CACHE_MISS)

    @property
    def timings(self) -> bytes:
        """The serialized timing cache after the build."""
        return bytes(self.config.get_timing_cache().serialize())

    @property
    def layers(self) -> list[Any]:
        """The layers of the parsed network."""
        return [self.network.get_layer(index) for index in range(self.network.num_layers)]

    def types(self) -> dict[str, int]:
        """Count products in the parsed network by type; INT8 if all their inputs are dequantized int8."""
        layers = self.layers
        made_by = {layer.get_output(place).name: layer for layer in layers for place in range(layer.num_outputs)}

        def dequantized(tensor: Any) -> bool:
            layer = made_by.get(tensor.name)
            while layer is not None and _kind(layer) == "SHUFFLE":  # inserted by the parser to align ranks
                layer = made_by.get(layer.get_input(0).name)
            return layer is not None and _kind(layer) == "DEQUANTIZE"

        found: Counter[str] = Counter()
        for layer in layers:
            if _kind(layer) in COMPUTING:
                inputs = [layer.get_input(place) for place in range(min(layer.num_inputs, 2))]
                kind = "INT8" if all(map(dequantized, inputs)) else str(inputs[0].dtype).rpartition(".")[2]
                found[f"{_kind(layer)}.{kind}"] += 1
        return dict(sorted(found.items()))


def _kind(layer: Any) -> str:
    return str(layer.type).rpartition(".")[2]


def _error(parser: Any) -> str:
    first = parser.get_error(0)
    operator = first.node_operator() if hasattr(first, "node_operator") else ""
    name = first.node_name() if hasattr(first, "node_name") else ""
    return f"{name or operator or 'the graph'} ({operator or 'no operator is named'}): {first.desc()}"


def logger(trt: Any) -> Any:
    """Return a TensorRT logger that keeps all messages and the last error."""

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.lines: list[str] = []
            self.last = ""

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.Severity.INFO:
                self.lines.append(f"{str(severity).rpartition('.')[2]}: {message}")
            if severity <= trt.ILogger.Severity.ERROR:
                self.last = message.splitlines()[0]

    return Log()


def _monitor(trt: Any, tick: Callable[[str, int, int], None]) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.steps: dict[str, int] = {}

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            self.steps[phase] = steps

        def step_complete(self, phase: str, step: int) -> bool:
            tick(phase, step, self.steps.get(phase, 0))
            return True

        def phase_finish(self, phase: str) -> None:
            self.steps.pop(phase, None)

    return Monitor()
