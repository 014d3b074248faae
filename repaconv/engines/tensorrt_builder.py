"""Building with TensorRT's own Python API, which TensorRT 8.6 to 11 and TensorRT-RTX share but for what is named here.

Versions differ in what they lack, so what is there is asked for, not which version it is: TensorRT 10 brought networks
typed as their graph is, 11 took the flags for precision away, 8 has only those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from repaconv.core.errors import Refused
from repaconv.engines.contract import Order
from repaconv.graph.onnx_files import require_inside

# Layers whose type is what people mean by an engine's precision.
COMPUTING = ("CONVOLUTION", "MATRIX_MULTIPLY")


class Building:
    """One build: parsed when made, so that the network can be looked at before the plan is."""

    def __init__(self, trt: Any, order: Order, hint: str) -> None:
        """Parse.

        Raises:
            Refused: If the parser does not take the graph; ``hint`` says what to do then.
        """
        require_inside(order.model)
        self.trt, self.order = trt, order
        self.log = logger(trt)
        self.builder = trt.Builder(self.log)
        self.typed = hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED")
        self.network = self.builder.create_network(self._network_flags())
        parser = trt.OnnxParser(self.network, self.log)
        if not parser.parse_from_file(str(order.model)):
            raise Refused(f"{trt.__name__} does not support {_error(parser)}.", hint=hint, code="build.parser")
        self.config = self.builder.create_builder_config()
        self._configure()

    def plan(self) -> bytes:
        """Build.

        Raises:
            Refused: With the builder's last error.
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
        order, trt, config = self.order, self.trt, self.config
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        if order.workspace is not None:
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, order.workspace)
        if order.shapes:
            profile = self.builder.create_optimization_profile()
            for name, (least, usual, largest) in order.shapes.items():
                profile.set_shape(name, least, usual, largest)
            config.add_optimization_profile(profile)
        if order.precision == "fp32" and hasattr(trt.BuilderFlag, "TF32"):
            config.clear_flag(trt.BuilderFlag.TF32)  # on by default, and of ten bits; trtexec has --noTF32
        if not self.typed:
            self._ask_for_precision()
        if hasattr(trt, "IProgressMonitor"):
            self.monitor = _monitor(trt, order.tick)
            config.progress_monitor = self.monitor

    def _ask_for_precision(self) -> None:
        """TensorRT 8: a flag lets the builder choose; the islands are held by name."""
        flags = self.trt.BuilderFlag
        for name in {"fp16": ("FP16",), "int8": ("INT8", "FP16"), "bf16": ("BF16",)}.get(self.order.precision, ()):
            self.config.set_flag(getattr(flags, name))
        if self.order.islands:
            self.config.set_flag(flags.OBEY_PRECISION_CONSTRAINTS)
            for layer in self.layers:
                if layer.name in self.order.islands:
                    layer.precision = self.trt.float32

    @property
    def tf32(self) -> bool:
        """Whether float32 may be multiplied in TF32."""
        flag = getattr(self.trt.BuilderFlag, "TF32", None)
        return flag is not None and bool(self.config.get_flag(flag))

    def exchange_timings(self) -> None:
        """Give the builder what earlier builds measured, and have it collect what this one does."""
        cache = self.config.create_timing_cache(self.order.timing_cache or b"")
        if not self.config.set_timing_cache(cache, ignore_mismatch=False):
            raise Refused(
                "the timing cache was written by another TensorRT version or for another GPU.",
                hint="Give another --timing-cache, or leave it out.",
                code="build.timing-cache",
            )
        if self.order.replay:
            self.config.set_flag(self.trt.BuilderFlag.ERROR_ON_TIMING_CACHE_MISS)

    @property
    def timings(self) -> bytes:
        """What is known of kernels after the build, serialised."""
        return bytes(self.config.get_timing_cache().serialize())

    @property
    def layers(self) -> list[Any]:
        """Of the parsed network."""
        return [self.network.get_layer(index) for index in range(self.network.num_layers)]

    def types(self) -> dict[str, int]:
        """Types of what computes in the parsed network; INT8 where all that is multiplied was int8."""
        layers = self.layers
        made_by = {layer.get_output(place).name: layer for layer in layers for place in range(layer.num_outputs)}

        def dequantized(tensor: Any) -> bool:
            layer = made_by.get(tensor.name)
            while layer is not None and _kind(layer) == "SHUFFLE":  # the parser's own, to bring ranks together
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
    """One that keeps what was said, and the last error."""

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
