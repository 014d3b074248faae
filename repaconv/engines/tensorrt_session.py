"""Run an engine of TensorRT or TensorRT-RTX, with inputs and outputs in torch tensors.

Untested (no hardware available); `make gpu-kit` verifies it on a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from repaconv.core.errors import Refused
from repaconv.engines.contract import Array, Feeds, Port, Profiled, cannot
from repaconv.engines.nvidia_gpu import batch_of, within_memory
from repaconv.engines.trtexec_logs import layer_types

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT64": "int64", "INT32": "int32"}


class TrtSession:
    """An engine with its own execution context and CUDA stream. ``options`` has the types of its layers."""

    def __init__(self, trt: Any, plan: bytes, log: Any) -> None:
        """Deserialize the engine, which runs code in it.

        Raises:
            Refused: If the engine is for another TensorRT version or another GPU.
        """
        runtime = trt.Runtime(log)
        engine = runtime.deserialize_cuda_engine(plan)
        if engine is None:
            raise Refused(
                f"{trt.__name__} cannot load the engine: {log.last or 'it gave no reason'}.",
                hint="An engine runs only on the version and the kinds of GPU that it was built for.",
                code="engine.unloadable",
            )
        self._trt, self._kept, self._engine = trt, (runtime, log), engine
        self._context, self._stream = engine.create_execution_context(), _cuda().Stream()
        names = [engine.get_tensor_name(place) for place in range(engine.num_io_tensors)]
        given = [name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
        self.inputs = tuple(self._port(name) for name in given)
        self.outputs = tuple(self._port(name) for name in names if name not in given)
        self.options = {"types": json.dumps(layer_types(self._layers()))}

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """See `repaconv.engines.contract.Session`; floating outputs are returned in float32."""
        with within_memory(batch_of(feeds)):
            outputs, call = self._bound(feeds)
            call()
        _cuda().synchronize()
        return {
            name: (value.float() if value.is_floating_point() else value).cpu().numpy()
            for name, value in outputs.items()
        }

    def gpu_timed_call(self, feeds: Feeds) -> Callable[[], float]:
        """See `repaconv.engines.contract.GpuSession`; timed by CUDA events on the engine's stream."""
        begin, end = (_cuda().Event(enable_timing=True) for _ in range(2))
        with within_memory(batch_of(feeds)):
            _, call = self._bound(feeds)

        def timed() -> float:
            _cuda().synchronize()
            begin.record(self._stream)
            call()
            end.record(self._stream)
            end.synchronize()
            return float(begin.elapsed_time(end))

        return timed

    def nodes_on_cpu(self, feeds: Feeds) -> tuple[str, ...]:
        """Return no nodes: an engine has GPU kernels only."""
        return ()

    def placement(self, feeds: Feeds) -> dict[str, str]:
        """Return the GPU for every layer of the engine."""
        layers = self._layers()["Layers"]
        return {str(layer.get("Name") if isinstance(layer, Mapping) else layer): "cuda" for layer in layers}

    def profile(self, feeds: Feeds, *, runs: int, warmup_runs: int) -> Profiled:
        """Raise: profiling is not supported.

        Raises:
            EnvironmentProblem: Always.
        """
        raise cannot(self._trt.__name__, "profile")

    def _layers(self) -> Mapping[str, Any]:
        """Return the layer information of the engine inspector."""
        inspector = self._engine.create_engine_inspector()
        information = json.loads(inspector.get_engine_information(self._trt.LayerInformationFormat.JSON) or "{}")
        return {"Layers": [], **(information if isinstance(information, dict) else {})}

    def _port(self, name: str) -> Port:
        kind = str(self._engine.get_tensor_dtype(name)).rpartition(".")[2]
        return Port(name, _shape(self._engine.get_tensor_shape(name)), DTYPES.get(kind, kind.lower()))

    def _bound(self, feeds: Feeds) -> tuple[dict[str, Tensor], Callable[[], None]]:
        """Copy inputs to the GPU and allocate outputs; return the outputs and a function that runs the engine."""
        import torch

        held = {name: torch.from_numpy(np.asarray(array, order="C")).cuda() for name, array in feeds.items()}
        for name, tensor in held.items():
            self._context.set_input_shape(name, tuple(tensor.shape))
        outputs = {
            port.name: torch.empty(
                tuple(self._context.get_tensor_shape(port.name)), dtype=getattr(torch, port.dtype), device="cuda"
            )
            for port in self.outputs
        }
        _cuda().synchronize()

        def call() -> None:
            for name, tensor in held.items():  # the context may have run other inputs since
                self._context.set_input_shape(name, tuple(tensor.shape))
            for name, tensor in {**held, **outputs}.items():
                self._context.set_tensor_address(name, tensor.data_ptr())
            if not self._context.execute_async_v3(self._stream.cuda_stream):
                raise RuntimeError(f"the engine does not run: {self._kept[1].last or 'it does not say why'}")

        return outputs, call


def _cuda() -> Any:
    """Return ``torch.cuda`` without types: torch types it only in part."""
    import torch

    return torch.cuda


def _shape(dims: Iterable[int]) -> tuple[int | str | None, ...]:
    """Return a shape with None for dynamic dimensions, which TensorRT writes as -1."""
    return tuple(None if size < 0 else int(size) for size in dims)
