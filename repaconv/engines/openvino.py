"""OpenVINO on the CPU: bfloat16 where the processor multiplies it, and a compiled model that loads without compiling.

On such processors OpenVINO takes bfloat16 by itself, for float32 graphs too, and again when a compiled model is loaded:
so the precision is always said.
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
from repaconv.engines.session_settings import own_settings
from repaconv.graph.onnx_files import read_graph, require_inside

DEVICE = "CPU"
HINTS = {"fp32": "f32", "bf16": "bf16", "int8": "f32"}
"""What OpenVINO calls them; int8 is in the graph."""
HINT = "INFERENCE_PRECISION_HINT"
REST = (f"{HINT}=bf16",)
TYPES = {"f32": "FLOAT", "bf16": "BF16", "f16": "HALF", "i8": "INT8", "u8": "INT8"}
DTYPES = {"f16": "float16", "f32": "float32", "f64": "float64", "bf16": "bfloat16", "boolean": "bool"}
DTYPES |= {f"{kind}{bits}": f"{name}{bits}" for kind, name in (("i", "int"), ("u", "uint")) for bits in (8, 16, 32, 64)}
# OpenVINO makes one kernel of products in a row that are this small and have two axes (TokenizeMLPSeqSnippets of
# transformation_pipeline.cpp; 2026.4).
SNIPPETS = "SNIPPETS_MODE"
KERNEL_ROWS, KERNEL_WIDTH = 8, 256
# What computes, as OpenVINO calls it after fusing; a MatMul without weights is what stays one.
COMPUTING = ("FullyConnected", "MatMul", "Convolution", "ScaledDotProductAttention")


class OpenVinoSession:
    """A compiled model. ``options`` says what was set."""

    def __init__(self, compiled: Any, options: Mapping[str, str]) -> None:
        """See `OpenVino.open`."""
        self._compiled, self.options = compiled, dict(options)
        self._own = local()
        self.inputs = tuple(map(_port, compiled.inputs))
        self.outputs = tuple(map(_port, compiled.outputs))

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """See `repaconv.engines.contract.Session`; copied out of the runtime's buffers, which are each thread's own."""
        if not hasattr(self._own, "request"):
            self._own.request = self._compiled.create_infer_request()
        found = self._own.request.infer(dict(feeds))
        return {output.name: np.array(found[place]) for place, output in enumerate(self.outputs)}

    def synchronise(self) -> None:
        """A processor has nothing left to do when `run` returns."""

    def placement(self, feeds: Feeds) -> dict[str, str]:
        """All on the processor, by the nodes of the compiled model."""
        return {node.get_friendly_name(): DEVICE for node in self._compiled.get_runtime_model().get_ordered_ops()}

    def profile(self, feeds: Feeds, *, runs: int, warmup_runs: int) -> Profiled:
        """Not read.

        Raises:
            EnvironmentProblem: Always.
        """
        raise cannot("OpenVINO", "profile")


class OpenVino:
    """The runtime as the registry knows it."""

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
        """Compile an ONNX model, from its file or its bytes, or load one that was compiled (.blob).

        Raises:
            EnvironmentProblem: If OpenVINO is not installed, or the processor does not multiply in that precision.
            Refused: If OpenVINO does not take the model.
        """
        require_device("OpenVINO", spec, "cpu")
        return OpenVinoSession(*self._compiled(deployable, spec))

    def build(self, order: Order) -> Built:
        """Compile for this processor.

        Raises:
            EnvironmentProblem: If OpenVINO is not installed, or the processor does not multiply in that precision.
            Refused: If OpenVINO does not take the model.
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
        """See `repaconv.engines.session_settings.Tunable`: bfloat16 for what an int8 graph leaves in float.

        CPU_DENORMALS_OPTIMIZATION is not among them: which of its threads, and whose, then flush is left to chance.
        """
        multiplies = "BF16" in self._package().Core().get_property(DEVICE, "OPTIMIZATION_CAPABILITIES")
        return (REST,) if precision == "int8" and multiplies else ()

    def _compiled(self, model: Deployable, spec: SessionSpec) -> tuple[Any, dict[str, str]]:
        """A model compiled, or loaded if it is a compiled one; and the options that were set."""
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
        except Exception as error:  # OpenVINO raises RuntimeError with the text of several
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
            "ENABLE_CPU_PINNING": False,  # whoever measures has pinned already
            **own_settings("OpenVINO", spec.settings, self.tries(precision)),
        }


def _sized(read: Any, model: Deployable, sizes: Mapping[str, int]) -> Any:
    """A model whose free dimensions have these sizes: it runs faster where they are known when it is compiled."""
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
    """Whether compiling it may end the process, with a segmentation fault (seen with OpenVINO 2026.4.1).

    Measured, not read in its code: graphs with two or more small products in a row crash where a sum, or any other
    operator of two values, joins what they give with another value, as around the MLP of a transformer that is left
    with one token. With the kernels for such products turned off they compile and run.
    """
    products: dict[str, int] = {}  # at most, on a way of small values to a node

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
    """Types of what computes in the compiled model."""
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
