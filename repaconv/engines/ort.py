"""ONNX Runtime on the CPU. What it builds is its own optimised graph, which then loads without that work."""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from repaconv.engines.contract import Built, Order, as_text
from repaconv.errors import Refused, require_module
from repaconv.onnxfile import read_graph, require_inside, restore_names

# What computes, as ONNX Runtime calls it after fusing.
COMPUTING = ("MatMul", "Gemm", "Conv", "Attention")


class OrtSession:
    """A loaded model. ``options`` says what was set, everything else is ONNX Runtime's default."""

    def __init__(self, model: Path | bytes, threads: int, dims: Mapping[str, int], folder: Path | None) -> None:
        """See `OnnxRuntime.session`."""
        import onnxruntime

        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = threads
        settings.inter_op_num_threads = 1
        settings.log_severity_level = 3
        if folder is not None:
            settings.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
        for name, size in dims.items():
            settings.add_free_dimension_override_by_name(name, size)
        source = model if isinstance(model, bytes) else str(model)
        self._session = onnxruntime.InferenceSession(source, settings, providers=["CPUExecutionProvider"])
        self.input = self._session.get_inputs()[0]
        self.options = {
            "intra_op_num_threads": str(threads),
            "inter_op_num_threads": "1",
            "execution_provider": "CPUExecutionProvider",
            **{f"free_dimension_override.{name}": str(size) for name, size in dims.items()},
        }

    def run(self, images: NDArray[np.float32]) -> NDArray[np.floating]:
        """Images [N, C, H, W] to the first output [N, K]."""
        output: NDArray[np.floating] = self._session.run(None, {self.input.name: images})[0]
        return output

    def values(self, images: NDArray[np.float32]) -> dict[str, NDArray[np.floating]]:
        """Images [N, C, H, W] to all outputs by name."""
        return self.outputs({self.input.name: images})

    def outputs(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """All inputs by name to all outputs by name."""
        names = [output.name for output in self._session.get_outputs()]
        return dict(zip(names, self._session.run(names, dict(feeds)), strict=True))

    @property
    def inputs(self) -> dict[str, str]:
        """Types of all inputs by name, in NumPy's words where it has one."""
        kinds = {"float": "float32", "double": "float64"}
        found = {given.name: given.type[len("tensor(") : -1] for given in self._session.get_inputs()}
        return {name: kinds.get(kind, kind) for name, kind in found.items()}

    @property
    def input_shape(self) -> tuple[int | str | None, ...]:
        """Of the first input, [B, C, H, W]; names stand for dimensions that are free."""
        shape = tuple(self.input.shape)
        return (shape[0], shape[3], *shape[1:3]) if self.takes_pixels and len(shape) == 4 else shape

    @property
    def takes_pixels(self) -> bool:
        """Whether the input is pixels, [B, H, W, C] in uint8."""
        return bool(self.input.type == "tensor(uint8)")


class OnnxRuntime:
    """The runtime as the registry knows it."""

    name = "onnxruntime"
    suffix = ".onnx"
    runs = True

    def version(self) -> str:
        """Of the installed package.

        Raises:
            EnvironmentProblem: If it cannot be imported.
        """
        return str(require_module("onnxruntime", "ONNX Runtime", "pip install onnxruntime").__version__)

    def build(self, order: Order) -> Built:
        """Optimise the graph as far as it may be: for this machine, or for any other of its target.

        Raises:
            Refused: If ONNX Runtime does not take the model.
        """
        self.version()
        require_inside(order.model)
        import onnx
        import onnxruntime

        levels = onnxruntime.GraphOptimizationLevel
        level = levels.ORT_ENABLE_ALL if order.here else levels.ORT_ENABLE_EXTENDED  # ALL lays weights out for this CPU
        settings = onnxruntime.SessionOptions()
        settings.graph_optimization_level = level
        settings.intra_op_num_threads = order.threads
        settings.log_severity_level = 3
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "optimised.onnx"
            settings.optimized_model_filepath = str(path)
            try:
                onnxruntime.InferenceSession(str(order.model), settings, providers=["CPUExecutionProvider"])
            except Exception as error:
                raise _unloadable(order.model, error) from error
            content = path.read_bytes()
            types = _types(onnx.load(path))
        options = {
            "graph_optimization_level": str(level).rpartition(".")[2],
            "intra_op_num_threads": order.threads,
            "inter_op_num_threads": 1,
            "execution_provider": "CPUExecutionProvider",
        }
        return Built(
            engine=content,
            types=types,
            log="",
            options=as_text(options),
            proved="the types are those of the optimised graph, which is what runs"
            + ("" if order.here else "; on its device ONNX Runtime adds what it does for that processor alone"),
            runs_here=True,
        )

    def profile(
        self, model: Path, images: NDArray[Any], *, threads: int, dims: Mapping[str, int], runs: int, warmup_runs: int
    ) -> tuple[list[dict[str, Any]], dict[str, tuple[tuple[int, ...], ...]]]:
        """Events of ONNX Runtime's own profiler, and the optimised graph's nodes in order with their weights' shapes.

        The graph is optimised first and given the names of its modules back, which fusing takes; what is profiled is
        that graph, as it stands.

        Raises:
            Refused: If ONNX Runtime does not take the model.
        """
        import onnx
        import onnxruntime

        levels = onnxruntime.GraphOptimizationLevel
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "optimised.onnx"
            for level, source in ((levels.ORT_ENABLE_ALL, model), (levels.ORT_DISABLE_ALL, path)):
                settings = onnxruntime.SessionOptions()
                settings.graph_optimization_level = level
                settings.intra_op_num_threads = threads
                settings.inter_op_num_threads = 1
                settings.log_severity_level = 3
                if source is model:
                    settings.optimized_model_filepath = str(path)
                    for name, size in dims.items():
                        settings.add_free_dimension_override_by_name(name, size)
                else:
                    settings.enable_profiling = True
                    settings.profile_file_prefix = str(Path(folder) / "profile")
                try:
                    session = onnxruntime.InferenceSession(str(source), settings, providers=["CPUExecutionProvider"])
                except Exception as error:
                    raise _unloadable(model, error) from error
                if source is model:
                    optimised = onnx.load(path)
                    restore_names(optimised, read_graph(model))
                    onnx.save(optimised, path)
            feeds = {session.get_inputs()[0].name: images}
            for _ in range(warmup_runs + runs):
                session.run(None, feeds)
            events = json.loads(Path(session.end_profiling()).read_text())
        kernels = [event for event in events if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")]
        kept = len(kernels) // (warmup_runs + runs) * runs
        shapes = {weight.name: tuple(weight.dims) for weight in optimised.graph.initializer}
        nodes = {n.name: tuple(shapes[name] for name in n.input if name in shapes) for n in optimised.graph.node}
        return kernels[-kept:], nodes

    def peak_gflops(self, threads: int) -> float:
        """What one large matrix product in float32 reaches here: [512, 1024] x [1024, 1024], the best of several."""
        import onnx
        from onnx import TensorProto, helper, numpy_helper

        weight = numpy_helper.from_array(np.ones((1024, 1024), dtype=np.float32), "w")
        made = helper.make_graph(
            [helper.make_node("MatMul", ["x", "w"], ["y"], "peak")],
            "peak",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, (512, 1024))],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, (512, 1024))],
            [weight],
        )
        opset = [helper.make_opsetid("", 17)]
        model: onnx.ModelProto = helper.make_model(made, opset_imports=opset, ir_version=8)
        session = self.session(model.SerializeToString(), threads=threads)
        x = np.ones((512, 1024), dtype=np.float32)
        best = float("inf")
        for _ in range(25):
            begin = time.perf_counter()
            session.run(x)
            best = min(best, time.perf_counter() - begin)
        return 2 * 512 * 1024 * 1024 / best / 1e9

    def session(
        self,
        model: Path | bytes,
        *,
        threads: int,
        dims: Mapping[str, int] | None = None,
        folder: Path | None = None,
    ) -> OrtSession:
        """Load a model.

        Args:
            model: An .onnx file or its bytes.
            threads: Of one inference, the calling thread included.
            dims: Sizes for free dimensions by name, so that shapes are known when the graph is optimised.
            folder: Where the external weights of a graph in bytes lie.

        Raises:
            Refused: If ONNX Runtime does not take the model, or it wants files from outside its folder.
        """
        self.version()
        if isinstance(model, Path):
            require_inside(model)
        try:
            return OrtSession(model, threads, dims or {}, folder)
        except Exception as error:
            raise _unloadable(model, error) from error


def _unloadable(model: Path | bytes, error: Exception) -> Refused:
    where = "the model" if isinstance(model, bytes) else str(model)
    return Refused(
        f"ONNX Runtime does not load {where}: {str(error).splitlines()[0]}.",
        hint="Check that it is an ONNX file, and that its opset is not newer than this runtime.",
        code="onnx.unloadable",
    )


def _types(model: Any) -> dict[str, int]:
    """Types of what computes in a graph with ONNX Runtime's own operators, of which ONNX knows no types."""
    from onnx import TensorProto, helper

    names = {TensorProto.FLOAT: "FLOAT", TensorProto.FLOAT16: "HALF", TensorProto.BFLOAT16: "BF16"}
    low = (TensorProto.INT8, TensorProto.UINT8)
    kinds: dict[str, int] = {weight.name: weight.data_type for weight in model.graph.initializer}
    kinds |= {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
    found: Counter[str] = Counter()
    for node in model.graph.node:
        attributes = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
        inputs = [kinds[name] for name in node.input if kinds.get(name)]
        if any(name in node.op_type for name in COMPUTING):
            computed = "INT8" if any(kind in low for kind in inputs) else names.get(next(iter(inputs), 0), "UNKNOWN")
            found[f"{node.op_type}.{computed}"] += 1
        kind = next(iter(inputs), TensorProto.UNDEFINED)
        if node.op_type == "Cast":
            kind = attributes["to"]
        elif node.op_type == "DequantizeLinear":
            kind = kinds.get(node.input[1], TensorProto.FLOAT)
        elif node.op_type == "QuantizeLinear":
            kind = kinds.get(node.input[2], TensorProto.UINT8) if len(node.input) > 2 else TensorProto.UINT8
        elif node.op_type in ("Shape", "ArgMax", "Size"):
            kind = TensorProto.INT64
        kinds |= dict.fromkeys(node.output, kind)
    return dict(sorted(found.items()))


ENGINE = OnnxRuntime()
