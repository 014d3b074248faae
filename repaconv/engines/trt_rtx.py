"""TensorRT-RTX: engines for NVIDIA RTX cards, built ahead of time on any x86-64 machine, with no GPU in it.

What it builds is typed as the ONNX graph is. A plan cannot be opened without a GPU, so what is proved of its precision
is proved of the network that was parsed, before it was built.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repaconv.errors import EnvironmentProblem, Refused

# Layers whose type is what people mean by an engine's precision.
COMPUTING = ("CONVOLUTION", "MATRIX_MULTIPLY")


@dataclass(frozen=True)
class Built:
    """An engine, the types of the parsed network's computing layers (``MATRIX_MULTIPLY.HALF``), and the log."""

    engine: bytes
    types: Mapping[str, int]
    log: str


class TensorRtRtx:
    """The runtime as the registry knows it."""

    name = "tensorrt-rtx"
    suffix = ".engine"

    def version(self) -> str:
        """Of the installed package.

        Raises:
            EnvironmentProblem: If it cannot be imported.
        """
        try:
            import tensorrt_rtx
        except ImportError as error:
            raise EnvironmentProblem(
                f"TensorRT-RTX cannot be imported: {error}.",
                hint="pip install --no-deps tensorrt-rtx-cu13 tensorrt-rtx-cu13-bindings tensorrt-rtx-cu13-libs",
                code="runtime.missing",
            ) from error
        return str(tensorrt_rtx.__version__)

    def session(self, model: Path | bytes, *, threads: int = 1, dims: Any = None) -> Any:
        """Running one needs the card; only building is done here.

        Raises:
            EnvironmentProblem: Always.
        """
        raise EnvironmentProblem(
            "TensorRT-RTX engines run on NVIDIA RTX cards alone, and repaconv runs them nowhere yet.",
            hint="Measure on that machine, with its own tools.",
            code="runtime.missing",
        )

    def build(self, model: bytes, capabilities: tuple[str, ...], shapes: Mapping[str, tuple[Any, Any, Any]]) -> Built:
        """Compile.

        Args:
            model: ONNX.
            capabilities: Of the cards, e.g. ``8.6`` and ``8.9``.
            shapes: Least, usual and largest shape of each input that is free.

        Raises:
            EnvironmentProblem: If TensorRT-RTX is not installed or does not know such a card.
            Refused: If it does not take the graph.
        """
        self.version()
        import tensorrt_rtx as trt

        log = _log(trt)
        builder = trt.Builder(log)
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = trt.OnnxParser(network, log)
        if not parser.parse(model):
            first = parser.get_error(0)
            where = f"{first.node_name() or first.node_operator()} ({first.node_operator()})"
            raise Refused(
                f"TensorRT-RTX does not take {where}: {first.desc()}.",
                hint="Export for this target: repaconv export --onnx --target rtx-40.",
                code="build.parser",
            )
        config = builder.create_builder_config()
        config.num_compute_capabilities = len(capabilities)
        for number, capability in enumerate(capabilities):
            config.set_compute_capability(_capability(trt, capability), number)
        if shapes:
            profile = builder.create_optimization_profile()
            for name, (least, usual, largest) in shapes.items():
                profile.set_shape(name, least, usual, largest)
            config.add_optimization_profile(profile)
        types = _types(network)
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise Refused(
                f"TensorRT-RTX does not build the graph: {log.last or 'it does not say why'}.",
                hint="The build's log has more.",
                code="build.failed",
            )
        return Built(bytes(plan), types, "\n".join(log.lines))


def _log(trt: Any) -> Any:
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


def _capability(trt: Any, text: str) -> Any:
    name = f"SM{text.replace('.', '')}"
    if not hasattr(trt.ComputeCapability, name):
        known = ", ".join(sorted(each for each in dir(trt.ComputeCapability) if each.startswith("SM")))
        raise EnvironmentProblem(
            f"this TensorRT-RTX builds nothing for compute capability {text}.",
            hint=f"It knows {known}.",
            code="build.capability",
        )
    return getattr(trt.ComputeCapability, name)


def _types(network: Any) -> dict[str, int]:
    """Types of what computes; INT8 where all that is multiplied comes out of DequantizeLinear."""
    layers = [network.get_layer(index) for index in range(network.num_layers)]
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


ENGINE = TensorRtRtx()
