"""Run models with ONNX Runtime on the CPU, and build its optimized graphs, which load faster."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from repaconv.core import changed_input_files
from repaconv.core.errors import Refused, RepaconvError, first_line, require_module
from repaconv.core.files import is_utf8
from repaconv.core.temporary_folders import scratch_folder
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
    require_device,
)
from repaconv.engines.tunable_session_settings import parse_settings, require_one_stream
from repaconv.graph.onnx_files import (
    all_graphs,
    attributes_of,
    opset_of,
    read_graph,
    require_external_files,
    restore_names,
)
from repaconv.graph.operator_facts import PRODUCTS
from repaconv.graph.operator_schemas import output_types

if TYPE_CHECKING:
    import onnx


# Denormals flushed to zero. This is a mode of a thread, and ONNX Runtime turns it on without restoring it. Everything
# that the thread computes later would then be flushed too: other sessions in the same benchmark, and verifications.

SMALLEST, HALF = np.finfo(np.float32).tiny, np.float32(0.5)


def flushes_denormals() -> bool:
    """Return whether this thread flushes denormals to zero."""
    return not SMALLEST * HALF


@contextmanager
def denormal_mode_restored() -> Iterator[None]:
    """Restore this thread's flush mode after the block."""
    before = flushes_denormals()
    try:
        yield
    finally:
        if flushes_denormals() != before:
            _set_flush_denormals(before)


@contextmanager
def flushing_denormals() -> Iterator[None]:
    """Flush denormals to zero within the block."""
    with denormal_mode_restored():
        _set_flush_denormals(True)
        yield


def _set_flush_denormals(wanted: bool) -> None:
    import torch

    torch.set_flush_denormal(wanted)


# Engine and session.

PROVIDER = "CPUExecutionProvider"
LEVEL = "graph_optimization_level"
# ONNX Runtime fuses an Add and the LayerNormalization that reads it to SkipLayerNormalization, which takes 8 times as
# long as both (1.31).
DISABLED_OPTIMIZERS = "optimization.disable_specified_optimizers"
NO_SKIP_LAYERNORM = f"{DISABLED_OPTIMIZERS}=SkipLayerNormFusion"
# With a known batch size this optimizer fuses MatMul and Add to a Gemm before int8 is matched; it then runs in float32.
NOT_IN_INT8 = "MatMulAddFusion"
DENORMALS = "session.set_denormal_as_zero=1"
# By default 1x1 convolutions sum 128 input channels at a time, and load and store their outputs once for each.
POINTWISE = "mlas.nchwc_pointwise_conv_max_input_channel_batch"
AT_ONCE = f"{POINTWISE}=4096"
TRIES = ((DENORMALS,), (f"{LEVEL}=extended",), (NO_SKIP_LAYERNORM,), (AT_ONCE,))
# ONNX Runtime uses the names of C++ types.
DTYPES = {"float": "float32", "double": "float64"}


class OrtSession:
    """A model loaded by ONNX Runtime. ``options`` lists the settings in effect."""

    def __init__(self, model: Deployable, spec: SessionSpec, providers: Sequence[Any] = (PROVIDER,)) -> None:
        """See `OnnxRuntime.open`. Nodes that the first provider does not support go to the next one."""
        import onnxruntime

        changed_input_files.install_sigbus_handler()  # external weights are memory-mapped
        lean = spec.lean or isinstance(spec.weights, Mapping)  # then the session holds its own copy
        self._model, self._spec = (b"", replace(spec, weights=None)) if lean else (model, spec)
        settings = settings_for(spec)
        if isinstance(spec.weights, Path):
            settings.add_session_config_entry("session.model_external_initializers_file_folder_path", str(spec.weights))
        elif spec.weights:
            arrays = map(onnxruntime.OrtValue.ortvalue_from_numpy, spec.weights.values())
            settings.add_external_initializers(list(spec.weights), list(arrays))
        source = model if isinstance(model, bytes) else str(model)
        # with one thread an inference runs in the calling thread, so that one session serves all streams
        count = spec.streams if spec.threads > 1 else 1
        sessions = [session_of(source, settings, providers) for _ in range(count)]
        self._session, self._free = sessions[0], SimpleQueue[Any]()
        for stream in range(spec.streams):
            run = sessions[stream % count].run
            self._free.put(flushing_denormals()(run) if DENORMALS in spec.settings else run)
        self.inputs = tuple(map(_port, self._session.get_inputs()))
        self.outputs = tuple(map(_port, self._session.get_outputs()))
        self._names = [output.name for output in self.outputs]
        self.options = {
            "intra_op_num_threads": str(spec.threads),
            "inter_op_num_threads": "1",
            "execution_provider": self._session.get_providers()[0],
            **({"streams": str(spec.streams)} if spec.streams > 1 else {}),
            **dict(word.split("=", 1) for word in spec.settings),
            **{f"free_dimension_override.{name}": str(size) for name, size in spec.sizes.items()},
        }

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """See `repaconv.engines.contract.Session`."""
        run = self._free.get()
        try:
            return dict(zip(self._names, run(self._names, feeds), strict=True))
        finally:
            self._free.put(run)

    def placement(self, feeds: Feeds) -> dict[str, str]:
        """Return the execution provider of each node of the optimized graph."""

        kernels, _ = profiled(self._model, self._spec, feeds, runs=1, warmup_runs=0)
        return {str(event["name"]).removesuffix("_kernel_time"): event["args"]["provider"] for event in kernels}

    def profile(self, feeds: Feeds, *, runs: int, warmup_runs: int) -> Profiled:
        """Profile with ONNX Runtime's profiler.

        Raises:
            Refused: If ONNX Runtime rejects the model.
        """

        return Profiled(*profiled(self._model, self._spec, feeds, runs=runs, warmup_runs=warmup_runs))


class OnnxRuntime:
    """ONNX Runtime on the CPU."""

    name = "onnxruntime"
    suffix = ".onnx"
    opens: tuple[str, ...] = (".onnx", ".ort")
    can: frozenset[Ability] = frozenset({"run", "profile", "placement", "streams"})
    takes: tuple[str, ...] = ()
    device = "cpu"

    def version(self) -> str:
        """See `repaconv.engines.contract.Engine`."""
        return str(require_module("onnxruntime", "ONNX Runtime", "pip install onnxruntime").__version__)

    def tries(self, precision: str) -> tuple[tuple[str, ...], ...]:
        """Return the settings to try: see `repaconv.engines.tunable_session_settings.Tunable`.

        They flush denormals, do not lay out weights for this CPU, do not fuse normalizations, and sum all input
        channels of a 1x1 convolution at once.
        """
        return TRIES

    def open(self, deployable: Deployable, spec: SessionSpec) -> OrtSession:
        """Load an ONNX file or its bytes.

        Raises:
            EnvironmentProblem: If ONNX Runtime is not installed, or not for this device or precision.
            Refused: If ONNX Runtime rejects the model, or if it refers to files outside its folder.
        """
        require_device("ONNX Runtime", spec, self.device)
        self.version()
        if "streams" not in self.can:
            require_one_stream(self.name, spec)
        providers = self.providers(spec.precision)
        if isinstance(deployable, Path):
            require_external_files(deployable)
        try:
            return self._session(deployable, spec, providers)
        except RepaconvError:
            raise
        except Exception as error:
            raise unloadable(deployable, error) from error

    def providers(self, precision: str) -> list[Any]:
        """Return the execution providers with their options, in order of preference."""
        return [PROVIDER]

    def _session(self, model: Deployable, spec: SessionSpec, providers: list[Any]) -> OrtSession:
        return OrtSession(model, spec, providers)

    def build(self, spec: BuildSpec) -> Built:
        """Save the optimized graph, optimized for this machine or for any machine of the target.

        Raises:
            EnvironmentProblem: If ONNX Runtime is not installed, or not for its device.
            Refused: If ONNX Runtime rejects the model.
        """
        self.version()
        providers = self.providers(spec.precision)
        require_external_files(spec.model)
        import onnx
        import onnxruntime

        levels = onnxruntime.GraphOptimizationLevel
        level = levels.ORT_ENABLE_ALL if spec.here else levels.ORT_ENABLE_EXTENDED  # ALL depends on this CPU
        settings = settings_for(SessionSpec(threads=spec.threads, precision=spec.precision))
        settings.graph_optimization_level = level
        with scratch_folder() as folder:
            path = folder / "optimized.onnx"
            settings.optimized_model_filepath = str(path)
            try:
                session_of(str(spec.model), settings, providers)
            except Exception as error:
                raise unloadable(spec.model, error) from error
            content = path.read_bytes()
            types = _types(onnx.load(path))
        options = {
            "graph_optimization_level": str(level).rpartition(".")[2],
            "intra_op_num_threads": spec.threads,
            "inter_op_num_threads": 1,
            "execution_provider": providers[0] if isinstance(providers[0], str) else providers[0][0],
        }
        return Built(
            engine=content,
            types=types,
            log="",
            options=as_text(options),
            types_source="the types are those of the optimized graph, which is what runs"
            + ("" if spec.here else "; on its device, ONNX Runtime also applies optimizations for that CPU"),
            runs_here=True,
        )


def session_of(source: bytes | str, settings: Any, providers: Sequence[Any]) -> Any:
    """Load a model with these providers.

    With a single provider the fallback is disabled: there is none, and ONNX Runtime would print the attempt to
    stdout.
    """
    import onnxruntime

    several = len(providers) > 1
    with denormal_mode_restored():
        return onnxruntime.InferenceSession(source, settings, providers=list(providers), enable_fallback=several)


def settings_for(spec: SessionSpec) -> Any:
    """Return ONNX Runtime's session options for a `SessionSpec`."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = spec.threads
    settings.inter_op_num_threads = 1
    settings.log_severity_level = 4  # errors are also raised
    if spec.lean:
        # threads that wait for work would compute as long as the one that works
        settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # ONNX Runtime's own pool of memory grows in powers of two, and is not shared with other sessions
        settings.enable_cpu_mem_arena = settings.enable_mem_pattern = False
    if spec.no_prepacking:
        settings.add_session_config_entry("session.disable_prepacking", "1")
    if spec.as_written:
        settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    off = [NOT_IN_INT8] if spec.precision == "int8" else []
    for name, value in parse_settings("ONNX Runtime", spec.settings, TRIES).items():
        if name == DISABLED_OPTIMIZERS:
            off.append(value)
        elif name == LEVEL:
            settings.graph_optimization_level = getattr(
                onnxruntime.GraphOptimizationLevel, f"ORT_ENABLE_{value.upper()}"
            )
        else:
            settings.add_session_config_entry(name, value)
    if off:
        settings.add_session_config_entry(DISABLED_OPTIMIZERS, ";".join(off))
    for name, size in spec.sizes.items():
        settings.add_free_dimension_override_by_name(name, size)
    return settings


def _port(given: Any) -> Port:
    kind = given.type.removeprefix("tensor(").removesuffix(")") if given.type.startswith("tensor(") else given.type
    return Port(given.name, tuple(given.shape), DTYPES.get(kind, kind))


def unloadable(model: Deployable, error: Exception) -> Refused:
    """Return the error for a model that ONNX Runtime cannot load."""
    if isinstance(model, Path) and not is_utf8(model):
        return Refused(
            f"ONNX Runtime opens no file whose name is not UTF-8, as that of {model}.",
            hint="Rename the file.",
            code="file.name",
        )
    where = "the model" if isinstance(model, bytes) else str(model)
    return Refused(
        f"ONNX Runtime cannot load {where}: {first_line(error)}.",
        hint="Check that it is an ONNX file and that this version of ONNX Runtime supports its opset.",
        code="onnx.unloadable",
    )


def _types(model: Any) -> dict[str, int]:
    """Count the types of products in an optimized graph, whose custom operators ONNX cannot infer types for."""
    from onnx import TensorProto

    names = {TensorProto.FLOAT: "FLOAT", TensorProto.FLOAT16: "HALF", TensorProto.BFLOAT16: "BF16"}
    low = (TensorProto.INT8, TensorProto.UINT8)
    kinds: dict[str, int] = {weight.name: weight.data_type for weight in model.graph.initializer}
    kinds |= {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
    opset = opset_of(model)
    found: Counter[str] = Counter()
    for node in model.graph.node:
        attributes = attributes_of(node)
        inputs = [kinds[name] for name in node.input if kinds.get(name)]
        if any(name in node.op_type for name in PRODUCTS):
            computed = "INT8" if any(kind in low for kind in inputs) else names.get(next(iter(inputs), 0), "UNKNOWN")
            found[f"{node.op_type}.{computed}"] += 1
        kind = next(iter(inputs), TensorProto.UNDEFINED)
        if node.op_type == "Cast":
            kind = attributes["to"]
        elif node.op_type == "ConstantOfShape":
            kind = attributes["value"].data_type if "value" in attributes else TensorProto.FLOAT
        elif node.op_type == "DequantizeLinear":
            kind = kinds.get(node.input[1], TensorProto.FLOAT)
        elif node.op_type == "QuantizeLinear":
            kind = kinds.get(node.input[2], TensorProto.UINT8) if len(node.input) > 2 else TensorProto.UINT8
        kinds |= dict.fromkeys(node.output, kind) | output_types(node, kinds, opset)
    return dict(sorted(found.items()))


ENGINE = OnnxRuntime()


# Profiling.


def profiled(
    model: Deployable, spec: SessionSpec, feeds: Feeds, *, runs: int, warmup_runs: int
) -> tuple[list[dict[str, Any]], dict[str, tuple[tuple[int, ...], ...]]]:
    """Return profiler events, and the optimized graph's nodes in order with the shapes of their weights.

    The profiled graph is the optimized one, loaded without further optimization.

    Raises:
        Refused: If ONNX Runtime rejects the model.
    """
    with scratch_folder() as folder:
        path = folder / "optimized.onnx"
        settings = settings_for(SessionSpec(threads=spec.threads, as_written=True))
        settings.enable_profiling = True
        settings.profile_file_prefix = str(folder / "profile")
        try:
            optimized = _optimized(model, spec, path)
            session = session_of(str(path), settings, [PROVIDER])
        except Exception as error:
            raise unloadable(model, error) from error
        for _ in range(warmup_runs + runs):
            session.run(None, feeds)
        events = json.loads(Path(session.end_profiling()).read_text("utf-8"))
    kernels = [event for event in events if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")]
    kept = len(kernels) // (warmup_runs + runs) * runs
    graphs = [*all_graphs(optimized.graph)][::-1]  # branches and bodies after the graph itself
    fused = {
        node.name: f"+{entry.s.decode()}"
        for graph in graphs
        for node in graph.node
        for entry in node.attribute
        if entry.name == "activation"
    }
    for event in kernels:
        event["args"]["op_name"] += fused.get(str(event["name"]).removesuffix("_kernel_time"), "")
    shapes = {weight.name: tuple(weight.dims) for graph in graphs for weight in graph.initializer}
    every = (node for graph in graphs for node in graph.node)
    nodes = {node.name: tuple(shapes[name] for name in node.input if name in shapes) for node in every}
    return _without_inner_time(kernels[-kept:]), nodes


def _without_inner_time(kernels: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The events in order of time, without the time of those inside them: nodes of a branch or loop have their own."""
    found: list[dict[str, Any]] = []
    outer: list[tuple[int, dict[str, Any]]] = []  # with the time at which it ends
    for event in sorted(kernels, key=lambda each: (each["ts"], -each["dur"])):
        while outer and outer[-1][0] <= event["ts"]:
            outer.pop()
        if outer:
            outer[-1][1]["dur"] -= event["dur"]
        found.append(dict(event))
        outer.append((event["ts"] + event["dur"], found[-1]))
    return found


def _optimized(model: Deployable, spec: SessionSpec, path: Path) -> onnx.ModelProto:
    """Save the graph as ONNX Runtime optimizes it, and restore the module names that fusing drops."""
    import onnx

    settings = settings_for(spec)
    settings.optimized_model_filepath = str(path)
    source = model if isinstance(model, bytes) else str(model)
    session_of(source, settings, [PROVIDER])
    optimized = onnx.load(path)
    restore_names(optimized, onnx.load_from_string(model) if isinstance(model, bytes) else read_graph(model))
    onnx.save(optimized, path)
    return optimized
