"""Run models with OpenVINO on the CPU, and build compiled models, which load without compiling.

On CPUs with BF16 instructions OpenVINO uses BF16 by default, also for float32 graphs and when it loads a compiled
model. The precision is therefore always set explicitly.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path
from threading import local
from typing import Any, NamedTuple

import numpy as np

from repaconv.core.errors import EnvironmentProblem, Refused, require_module
from repaconv.engines.contract import (
    Ability,
    Array,
    BuildSpec,
    Built,
    Deployable,
    Feeds,
    Port,
    Profiled,
    SessionSpec,
    as_text,
    cannot,
    require_device,
)
from repaconv.engines.tunable_session_settings import parse_settings
from repaconv.graph.onnx_files import read_graph, require_external_files

DEVICE = "CPU"
HINTS = {"fp32": "f32", "bf16": "bf16", "int8": "f32"}
"""OpenVINO's names of the precisions; int8 is in the graph itself."""
HINT = "INFERENCE_PRECISION_HINT"
BF16_HINT = (f"{HINT}=bf16",)
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

    def __init__(self, compiled: Any, options: Mapping[str, str], counting: Callable[[], Counted] | None) -> None:
        """See `OpenVino.open`. ``counting`` compiles the model again, with a clock in every layer."""
        self._compiled, self.options, self._counting = compiled, dict(options), counting
        self._own = local()
        self.inputs = tuple(map(_port, compiled.inputs))
        self.outputs = tuple(map(_port, compiled.outputs))

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """See `repaconv.engines.contract.Session`; outputs are copied from buffers, which each thread has its own."""
        if not hasattr(self._own, "request"):
            self._own.request = self._compiled.create_infer_request()
        found = self._own.request.infer(dict(feeds))
        return {output.name: np.array(found[place]) for place, output in enumerate(self.outputs)}

    def placement(self, feeds: Feeds) -> dict[str, str]:
        """Return the CPU for every node of the compiled model."""
        return {node.get_friendly_name(): DEVICE for node in self._compiled.get_runtime_model().get_ordered_ops()}

    def profile(self, feeds: Feeds, *, runs: int, warmup_runs: int) -> Profiled:
        """Profile with OpenVINO's performance counters.

        Raises:
            EnvironmentProblem: If the model was loaded compiled, and therefore without the original layers.
        """
        if self._counting is None:
            raise cannot("a compiled OpenVINO model", "profile")
        model, flops, kinds = self._counting()
        request = model.create_infer_request()
        spent: list[Counter[str]] = []
        for count in (warmup_runs, warmup_runs + runs):
            for _ in range(runs if spent else warmup_runs):
                request.infer(dict(feeds))
            spent.append(Counter({name: us * count for name, us in _mean_us(model)}))
        layers = _executed(model, flops, kinds, spent[1], spent[0], runs)
        return Profiled(layers * runs, {str(layer["name"]).removesuffix("_kernel_time"): () for layer in layers})


class Counted(NamedTuple):
    """A model compiled with performance counters, and the original layers by name: their FLOPs and their operator."""

    model: Any
    flops: dict[str, int]
    kinds: dict[str, str]


class OpenVino:
    """OpenVINO on the CPU."""

    name = "openvino"
    suffix = ".blob"
    opens: tuple[str, ...] = (".blob",)
    device = "cpu"
    can: frozenset[Ability] = frozenset({"run", "profile", "placement", "streams"})
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
        compiled, options = self._compiled(deployable, spec)
        ready = isinstance(deployable, Path) and deployable.suffix == self.suffix
        counting = None if spec.lean or ready else partial(self._counted, deployable, spec)
        return OpenVinoSession(compiled, options, counting)

    def _counted(self, model: Deployable, spec: SessionSpec) -> Counted:
        read = self._read(self._package().Core(), model, spec)
        kinds = {node.get_friendly_name(): node.get_type_name() for node in read.get_ordered_ops()}
        flops = {node.get_friendly_name(): _flops(node) for node in read.get_ordered_ops()}
        return Counted(self._compiled(model, spec, counters=True)[0], flops, kinds)

    def _read(self, core: Any, model: Deployable, spec: SessionSpec) -> Any:
        source = io.BytesIO(model) if isinstance(model, bytes) else str(model)
        return _sized(core.read_model(source), model, spec.sizes)

    def build(self, spec: BuildSpec) -> Built:
        """Compile a model for this CPU.

        Raises:
            EnvironmentProblem: If OpenVINO is not installed, or the CPU does not support the precision.
            Refused: If OpenVINO rejects the model.
        """
        session = SessionSpec(threads=spec.threads, precision=spec.precision, settings=spec.settings)
        compiled, options = self._compiled(spec.model, session)
        return Built(
            engine=bytes(compiled.export_model().getvalue()),
            types=_types(compiled.get_runtime_model()),
            log="",
            options=options,
            types_source="the types are those of the compiled model, which is what runs",
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
        return (BF16_HINT,) if precision == "int8" and multiplies else ()

    def _compiled(self, model: Deployable, spec: SessionSpec, *, counters: bool = False) -> tuple[Any, dict[str, str]]:
        """Compile or load a model; return it with the options in effect."""
        core = self._package().Core()
        options = {**self._options(core, spec), **({"PERF_COUNT": True} if counters else {})}
        ready = model if isinstance(model, Path) and model.suffix == self.suffix else None
        if isinstance(model, Path) and ready is None:
            require_external_files(model)
        try:
            if ready is not None:
                compiled = core.import_model(io.BytesIO(ready.read_bytes()), DEVICE, options)
            else:
                read = self._read(core, model, spec)
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


# Profiling.

UNSEEN = ("Constant", "Const", "Input", "Output", "Parameter", "Result")
WITHOUT_BIAS = "/WithoutBiases"
"""What OpenVINO adds to the name of a Conv or Gemm before its bias is added."""


def _mean_us(model: Any) -> Iterator[tuple[str, int]]:
    """Yield the layers that were executed, with their mean time over all inferences so far in whole microseconds."""
    for layer in model.get_runtime_model().get_ordered_ops():
        text = str(layer.get_rt_info()["execTimeMcs"].value) if "execTimeMcs" in layer.get_rt_info() else ""
        if text.isdigit():
            yield layer.get_friendly_name(), int(text)


def _executed(
    model: Any,
    flops: Mapping[str, int],
    kinds: Mapping[str, str],
    after: Mapping[str, int],
    before: Mapping[str, int],
    runs: int,
) -> list[dict[str, Any]]:
    """Describe the layers that were executed, in order, as `Profiled` says.

    Args:
        model: The compiled model, with counters.
        flops: The operations of the original layers.
        kinds: The operators of the original layers.
        after: Microseconds of each layer in all inferences.
        before: Microseconds of each layer in the warm-up.
        runs: Number of inferences after the warm-up.
    """
    found, modules = [], dict[str, str]()
    for place, layer in enumerate(model.get_runtime_model().get_ordered_ops()):
        info, name = layer.get_rt_info(), layer.get_friendly_name()
        kind = str(info["layerType"].value) if "layerType" in info else layer.get_type_name()
        names = str(info["originalLayersNames"].value).split(",") if "originalLayersNames" in info else []
        known = [each for each in names if each in kinds]
        sources = [port.get_source_output().get_node().get_friendly_name() for port in layer.inputs()]
        # the product names a fused layer, and a layer of OpenVINO's own belongs to the module before it
        own = max(known, key=lambda each: (flops.get(each, 0), "/" in each), default="").removesuffix(WITHOUT_BIAS)
        before_it = next((modules[source] for source in sources if modules.get(source)), "")
        modules[name] = own.rpartition("/")[0] or before_it
        multiplied = sum(flops.get(each, 0) for each in names)
        # OpenVINO counts whole microseconds, and reports layers that take less as not executed
        product = multiplied or kind in COMPUTING
        if kind in UNSEEN or (name not in after and not product):
            continue
        found.append(
            {
                "name": f"{own or f'{before_it}/{kind}_{place}'.lstrip('/')}_kernel_time",
                "dur": max(0, after.get(name, 0) - before.get(name, 0)) / runs,
                "args": {
                    "op_name": _operator(kind, multiplied, dict.fromkeys(kinds[each] for each in known)),
                    "input_type_shape": [_typed(port) for port in layer.inputs()],
                    "output_type_shape": [_typed(port) for port in layer.outputs()],
                    "precision": PRECISIONS.get(str(info["runtimePrecision"].value), "fp32"),
                    **({"flops": multiplied} if multiplied or not product else {}),
                },
            }
        )
    return found


PRECISIONS = {"u8": "int8", "i8": "int8", "bf16": "bf16", "f16": "fp16"}
QUANTIZES = ("FakeQuantize", "Convert", "Multiply", "Subtract", "Add", "Reshape")
"""What OpenVINO writes QuantizeLinear and DequantizeLinear as."""
SILENT = (*QUANTIZES, "MatMul", "Convolution", "GroupConvolution", "MVN")
"""Operators that the name of a layer need not mention: its own, a bias, scales and zero points."""


def _operator(kind: str, flops: int, originals: Iterable[str]) -> str:
    """Name a layer by its kind and what was fused into it; a Subgraph is named after its purpose."""
    kept = [each for each in originals if each not in SILENT]
    if kind == "Subgraph":
        quantizes = not kept and "Add" not in originals and any(each in QUANTIZES[:2] for each in originals)
        kind = "MHA" if flops else "FakeQuantize" if quantizes else kind
    return "+".join([kind, *kept])


def _typed(port: Any) -> dict[str, list[int]]:
    return {port.get_element_type().get_type_name(): list(port.get_shape())}


def _flops(node: Any) -> int:
    """Return two FLOPs per multiply-accumulate of an original layer; 0 if a shape is dynamic or nothing multiplies."""
    kind = node.get_type_name()
    if kind not in MULTIPLIES or any(port.get_partial_shape().is_dynamic for port in (*node.inputs(), *node.outputs())):
        return 0
    given, made = ([tuple(map(int, port.get_shape())) for port in side] for side in (node.inputs(), node.outputs()))
    if kind == "MatMul":
        turned = bool(node.get_attributes().get("transpose_a")) and len(given[0]) > 1
        return 2 * prod(made[0]) * given[0][-2 if turned else -1]
    if kind == "ScaledDotProductAttention":
        return 2 * given[1][-2] * (prod(given[0]) + prod(made[0]))
    weights = given[1][2 if kind.startswith("Group") else 1 :]
    return 2 * prod(given[0] if kind.endswith("BackpropData") else made[0]) * prod(weights)


MULTIPLIES = (
    *("MatMul", "Convolution", "GroupConvolution", "ScaledDotProductAttention"),
    *("ConvolutionBackpropData", "GroupConvolutionBackpropData"),
)
"""OpenVINO's operators that multiply matrices, before it fuses them."""


def _refused(model: Deployable, error: Exception) -> Refused:
    where = "the model" if isinstance(model, bytes) else str(model)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return Refused(
        f"OpenVINO cannot load {where}: {lines[-1] if lines else 'it gave no reason'}.",
        hint="A compiled model runs only on the OpenVINO version and CPU that it was compiled for.",
        code="engine.unloadable",
    )


ENGINE = OpenVino()
