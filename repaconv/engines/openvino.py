"""Run models with OpenVINO on the CPU, and build compiled models, which load without compiling.

On CPUs with BF16 instructions OpenVINO uses BF16 by default, also for float32 graphs and when it loads a compiled
model. The precision is therefore always set explicitly.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from threading import local
from typing import Any

import numpy as np

from repaconv.core.errors import EnvironmentProblem, Refused, require_module
from repaconv.engines.contract import (
    Ability,
    Array,
    Built,
    Deployable,
    Feeds,
    Order,
    Port,
    Profiled,
    SessionSpec,
    as_text,
    cannot,
    require_device,
)
from repaconv.engines.tunable_session_settings import parse_settings
from repaconv.graph.onnx_files import read_graph, require_inside

DEVICE = "CPU"
HINTS = {"fp32": "f32", "bf16": "bf16", "int8": "f32"}
"""OpenVINO's names of the precisions; int8 is in the graph itself."""
HINT = "INFERENCE_PRECISION_HINT"
REST = (f"{HINT}=bf16",)
TYPES = {"f32": "FLOAT", "bf16": "BF16", "f16": "HALF", "i8": "INT8", "u8": "INT8"}
DTYPES = {"f16": "float16", "f32": "float32", "f64": "float64", "bf16": "bfloat16", "boolean": "bool"}
DTYPES |= {f"{kind}{bits}": f"{name}{bits}" for kind, name in (("i", "int"), ("u", "uint")) for bits in (8, 16, 32, 64)}
# OpenVINO fuses consecutive two-dimensional products up to this size into one kernel (TokenizeMLPSeqSnippets in
# transformation_pipeline.cpp; 2026.4).
SNIPPETS = "SNIPPETS_MODE"
KERNEL_ROWS, KERNEL_WIDTH = 8, 256
# OpenVINO's names of products after fusing; a MatMul that remains one has no weights.
COMPUTING = ("FullyConnected", "MatMul", "Convolution", "ScaledDotProductAttention")


class OpenVinoSession:
    """A compiled model. ``options`` lists the settings in effect."""

    def __init__(self, compiled: Any, options: Mapping[str, str]) -> None:
        """See `OpenVino.open`."""
        self._compiled, self.options = compiled, dict(options)
        self._own = local()
        self.inputs = tuple(map(_port, compiled.inputs))
        self.outputs = tuple(map(_port, compiled.outputs))

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """See `repaconv.engines.contract.Session`; outputs are copied from buffers, which each thread has its own."""
        if not hasattr(self._own, "request"):
            self._own.request = self._compiled.create_infer_request()
        found = self._own.request.infer(dict(feeds))
        return {output.name: np.array(found[place]) for place, output in enumerate(self.outputs)}

    def synchronise(self) -> None:
        """Do nothing: on the CPU `run` returns when the outputs are complete."""

    def placement(self, feeds: Feeds) -> dict[str, str]:
        """Return the CPU for every node of the compiled model."""
        return {node.get_friendly_name(): DEVICE for node in self._compiled.get_runtime_model().get_ordered_ops()}

    def profile(self, feeds: Feeds, *, runs: int, warmup_runs: int) -> Profiled:
        """Raise: profiling is not supported.

        Raises:
            EnvironmentProblem: Always.
        """
        raise cannot("OpenVINO", "profile")


class OpenVino:
    """OpenVINO on the CPU."""

    name = "openvino"
    suffix = ".blob"
    opens: tuple[str, ...] = (".blob",)
    device = "cpu"
    can: frozenset[Ability] = frozenset({"run", "placement", "streams"})
    takes: tuple[str, ...] = ()

    def version(self) -> str:
        """See `repaconv.engines.contract.Engine`."""
        return str(self._package().__version__).partition("-")[0]

    def open(self, deployable: Deployable, spec: SessionSpec) -> OpenVinoSession:
        """Compile an ONNX model from a file or bytes, or load a compiled model (.blob).

        Raises:
            EnvironmentProblem: If OpenVINO is not installed, or the CPU does not support the precision.
            Refused: If OpenVINO rejects the model.
        """
        require_device("OpenVINO", spec, "cpu")
        return OpenVinoSession(*self._compiled(deployable, spec))

    def build(self, order: Order) -> Built:
        """Compile a model for this CPU.

        Raises:
            EnvironmentProblem: If OpenVINO is not installed, or the CPU does not support the precision.
            Refused: If OpenVINO rejects the model.
        """
        spec = SessionSpec(threads=order.threads, precision=order.precision, settings=order.settings)
        compiled, options = self._compiled(order.model, spec)
        return Built(
            engine=bytes(compiled.export_model().getvalue()),
            types=_types(compiled.get_runtime_model()),
            log="",
            options=options,
            proved="the types are those of the compiled model, which is what runs",
            runs_here=True,
            may_stay=(f"MatMul.{TYPES[options[HINT]]}",),
        )

    def _package(self) -> Any:
        return require_module("openvino", "OpenVINO", "pip install 'repaconv[openvino]'")

    def tries(self, precision: str) -> tuple[tuple[str, ...], ...]:
        """Return the settings to try: BF16 for the unquantized layers of an int8 graph.

        See `repaconv.engines.tunable_session_settings.Tunable`. CPU_DENORMALS_OPTIMIZATION is not included: it is
        undefined which threads it affects.
        """
        multiplies = "BF16" in self._package().Core().get_property(DEVICE, "OPTIMIZATION_CAPABILITIES")
        return (REST,) if precision == "int8" and multiplies else ()

    def _compiled(self, model: Deployable, spec: SessionSpec) -> tuple[Any, dict[str, str]]:
        """Compile or load a model; return it with the options in effect."""
        core = self._package().Core()
        options = self._options(core, spec)
        ready = model if isinstance(model, Path) and model.suffix == self.suffix else None
        if isinstance(model, Path) and ready is None:
            require_inside(model)
        try:
            if ready is not None:
                compiled = core.import_model(io.BytesIO(ready.read_bytes()), DEVICE, options)
            else:
                source = io.BytesIO(model) if isinstance(model, bytes) else str(model)
                read = _sized(core.read_model(source), model, spec.sizes)
                if _crashes(read):
                    options[SNIPPETS] = "DISABLE"
                compiled = core.compile_model(read, DEVICE, options)
        except Exception as error:  # a RuntimeError with the text of several errors
            raise _refused(model, error) from error
        return compiled, as_text(options)

    def _options(self, core: Any, spec: SessionSpec) -> dict[str, Any]:
        precision, several = spec.precision, spec.streams > 1
        can = core.get_property(DEVICE, "OPTIMIZATION_CAPABILITIES")
        if precision not in HINTS or (precision == "bf16" and "BF16" not in can):
            raise EnvironmentProblem(
                f"OpenVINO does not compute in {precision} on this CPU, which supports {', '.join(can)}.",
                hint="bf16 requires AVX512-BF16 or AMX; fp32 and int8 run on every CPU.",
                code="build.precision",
            )
        return {
            HINT: HINTS[precision],
            "INFERENCE_NUM_THREADS": spec.threads * spec.streams,
            "NUM_STREAMS": spec.streams,
            "PERFORMANCE_HINT": "THROUGHPUT" if several else "LATENCY",
            "ENABLE_CPU_PINNING": False,  # the benchmark sets the CPU affinity itself
            **parse_settings("OpenVINO", spec.settings, self.tries(precision)),
        }


def _sized(read: Any, model: Deployable, sizes: Mapping[str, int]) -> Any:
    """Set the dynamic dimensions of a model; known shapes make the compiled model faster."""
    if not sizes:
        return read
    import onnx

    graph = onnx.load_from_string(model) if isinstance(model, bytes) else read_graph(model)
    free = {entry.name: entry.type.tensor_type.shape.dim for entry in graph.graph.input}
    shapes = {
        place: [sizes.get(dim.dim_param, dim.dim_value or -1) for dim in free[place.get_any_name()]]
        for place in read.inputs
    }
    read.reshape(shapes)
    return read


def _crashes(model: Any) -> bool:
    """Return whether compiling a model may end in a segmentation fault (seen with OpenVINO 2026.4.1).

    The condition was found by experiment. A graph with two or more small products in a row crashes if an Add, or
    another operator of two values, combines their result with another value, as the residual around the MLP of a
    transformer with a single token does. Without the kernels for such products the graph compiles and runs.
    """
    products: dict[str, int] = {}  # maximum number of products on a path of small values to a node

    for node in model.get_ordered_ops():
        if not _is_small(node):
            continue
        before = [value.get_node() for value in node.input_values()]
        products[node.get_name()] = max((products.get(each.get_name(), 0) for each in before), default=0)
        products[node.get_name()] += node.get_type_name() == "MatMul"
        joined = len(before) == 2 and all(map(_is_small, before)) and node.get_type_name() != "MatMul"
        if joined and before[0].get_output_shape(0) == before[1].get_output_shape(0) and products[node.get_name()] > 1:
            return True
    return False


def _is_small(node: Any) -> bool:
    if node.get_type_name() == "Constant" or node.get_output_size() != 1:
        return False
    if (shape := node.get_output_partial_shape(0)).is_dynamic or len(shape) != 2:
        return False
    rows, width = (dim.get_length() for dim in shape)
    return bool(rows <= KERNEL_ROWS and width <= KERNEL_WIDTH)


def _port(given: Any) -> Port:
    kind = given.get_element_type().get_type_name()
    shape = tuple(dim.get_length() if dim.is_static else None for dim in given.get_partial_shape())
    return Port(given.get_any_name(), shape, DTYPES.get(kind, kind))


def _types(model: Any) -> dict[str, int]:
    """Count the types of products in the compiled model."""
    found: Counter[str] = Counter()
    for operation in model.get_ordered_ops():
        info = operation.get_rt_info()
        kind, precision = (str(info[name].value) for name in ("layerType", "runtimePrecision"))
        if kind in COMPUTING:
            found[f"{kind}.{TYPES.get(precision, precision.upper())}"] += 1
    return dict(sorted(found.items()))


def _refused(model: Deployable, error: Exception) -> Refused:
    where = "the model" if isinstance(model, bytes) else str(model)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return Refused(
        f"OpenVINO cannot load {where}: {lines[-1] if lines else 'it gave no reason'}.",
        hint="A compiled model runs only on the OpenVINO version and CPU that it was compiled for.",
        code="engine.unloadable",
    )


ENGINE = OpenVino()
