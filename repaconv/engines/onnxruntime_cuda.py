"""Run models with ONNX Runtime on an NVIDIA GPU, by its CUDA provider or its TensorRT provider.

It loads cuBLAS and cuDNN from torch's packages. A node without a GPU kernel runs on the CPU without notice;
`nodes_on_cpu` returns those. The CUDA provider was measured on an H200 (docs/gpu.md); the TensorRT provider is
untested on hardware.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

from repaconv.core.errors import EnvironmentProblem, require_module
from repaconv.core.temporary_folders import scratch_folder
from repaconv.engines.contract import Ability, Array, Deployable, Feeds, Profiled, SessionSpec, cannot
from repaconv.engines.nvidia_gpu import batch_of, require_gpu, within_memory
from repaconv.engines.onnxruntime_cpu import PROVIDER, OnnxRuntime, OrtSession, session_of, settings_for
from repaconv.graph.onnx_files import metadata_of

LARGEST_SHAPE_TENSOR = 8
"""Maximum number of entries of a tensor that counts as a shape."""
CUDA, TENSORRT = "CUDAExecutionProvider", "TensorrtExecutionProvider"


class OrtCudaSession(OrtSession):
    """A model on a GPU. When timed, its inputs and outputs stay in GPU memory."""

    def __init__(self, model: Deployable, spec: SessionSpec, providers: list[Any]) -> None:
        """See `OnnxRuntimeCuda`.

        Raises:
            EnvironmentProblem: If the provider did not load; ONNX Runtime itself ignores that.
        """
        super().__init__(model, spec, providers)
        self._providers, wanted = providers, _name(providers[0])
        if wanted not in (there := self._session.get_providers()):
            raise EnvironmentProblem(
                f"ONNX Runtime's {wanted} cannot be loaded here; it fell back to {', '.join(there)}.",
                hint="It requires the CUDA and cuDNN versions that it was built for; torch's packages contain them.",
                code="runtime.provider",
            )
        self.options |= {"tf32": str(spec.precision == "tf32")}

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """See `repaconv.engines.contract.Session`."""
        with within_memory(batch_of(feeds)):
            return super().run(feeds)

    def gpu_timed_call(self, feeds: Feeds) -> Callable[[], float]:
        """See `repaconv.engines.contract.GpuSession`; the CPU clock measures a run that waits for the GPU."""
        import onnxruntime

        binding, images = self._session.io_binding(), batch_of(feeds)
        for name, array in feeds.items():
            binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(array, "cuda", 0))
        for port in self.outputs:
            binding.bind_output(port.name, "cuda", 0)

        def call() -> float:
            with within_memory(images):
                begin = time.perf_counter_ns()
                self._session.run_with_iobinding(binding)
                binding.synchronize_outputs()
                return (time.perf_counter_ns() - begin) / 1e6

        return call

    def placement(self, feeds: Feeds) -> dict[str, str]:
        """Return the execution provider of each node in one inference."""
        return provider_by_node(self._events(feeds))

    def nodes_on_cpu(self, feeds: Feeds) -> tuple[str, ...]:
        """See `repaconv.engines.contract.GpuSession`."""
        return nodes_on_cpu(self._events(feeds))

    def _events(self, feeds: Feeds) -> list[dict[str, Any]]:
        """Return the profiler events of one inference."""
        with scratch_folder() as folder:
            settings = settings_for(self._spec)
            settings.enable_profiling, settings.profile_file_prefix = True, str(folder / "profile")
            source = self._model if isinstance(self._model, bytes) else str(self._model)
            session = session_of(source, settings, self._providers)
            session.run(None, dict(feeds))
            events: list[dict[str, Any]] = json.loads(Path(session.end_profiling()).read_text("utf-8"))
        return events

    def profile(self, feeds: Feeds, *, runs: int, warmup_runs: int) -> Profiled:
        """Raise: profiling on CUDA is not supported.

        Raises:
            EnvironmentProblem: Always.
        """
        raise cannot("ONNX Runtime on CUDA", "profile")


def provider_by_node(events: list[dict[str, Any]]) -> dict[str, str]:
    """Return the execution provider of each node from profiler events."""
    return {
        str(event["name"]).removesuffix("_kernel_time"): event["args"]["provider"]
        for event in events
        if event.get("cat") == "Node" and str(event.get("name")).endswith("_kernel_time")
    }


def nodes_on_cpu(events: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return the nodes that ran on the CPU, except shape arithmetic, which always runs there."""
    others = provider_by_node([event for event in events if not _is_size(event)])
    return tuple(name for name, provider in others.items() if provider == PROVIDER)


def _is_size(event: dict[str, Any]) -> bool:
    """Return whether a node outputs only small integer tensors."""
    described = event.get("args", {}).get("output_type_shape") or ()
    outputs = [(kind, shape) for output in described for kind, shape in output.items()]
    return bool(outputs) and all(
        kind.startswith("int") and prod(shape) <= LARGEST_SHAPE_TENSOR for kind, shape in outputs
    )


class OnnxRuntimeCuda(OnnxRuntime):
    """ONNX Runtime on an NVIDIA GPU."""

    opens = ()
    can: frozenset[Ability] = frozenset({"run", "placement"})

    def tries(self, precision: str) -> tuple[tuple[str, ...], ...]:
        """Return no settings: those of ONNX Runtime are for CPUs."""
        return ()

    device = "cuda"

    def __init__(self, name: str, first: str) -> None:
        """``first`` is the preferred execution provider."""
        self.name, self.first = name, first

    def version(self) -> str:
        """Return the version of ONNX Runtime.

        Raises:
            EnvironmentProblem: If it lacks the provider, or there is no GPU.
        """
        version = super().version()
        require_gpu(f"ONNX Runtime's {self.first}")
        import onnxruntime

        if self.first not in (there := onnxruntime.get_available_providers()):
            raise EnvironmentProblem(
                f"the installed ONNX Runtime has no {self.first}, only {', '.join(there)}.",
                hint="Replace onnxruntime: pip install 'repaconv[onnxruntime-gpu]'.",
                code="runtime.provider",
            )
        if self.first == TENSORRT:  # the provider is listed even without TensorRT
            require_module("tensorrt", "TensorRT", "pip install 'repaconv[tensorrt]'")
        return version

    def open(self, deployable: Deployable, spec: SessionSpec) -> OrtSession:
        """Load a model as `repaconv.engines.onnxruntime_cpu.OnnxRuntime` does.

        For fp32, the precision recorded in the metadata of a repaconv export is used.
        """
        said = "fp32" if isinstance(deployable, bytes) else metadata_of(deployable).get("repaconv.precision", "fp32")
        return super().open(deployable, replace(spec, precision=said) if spec.precision == "fp32" else spec)

    def providers(self, precision: str) -> list[Any]:
        """Return the providers; TF32 is enabled only if requested.

        Raises:
            EnvironmentProblem: If TensorRT would use TF32 although it is not requested.
        """
        if self.first == TENSORRT:
            require_float32(precision)
        _load_cuda()
        cuda = (CUDA, {"use_tf32": "1" if precision == "tf32" else "0"})
        return [*([(TENSORRT, lowered(precision))] if self.first == TENSORRT else []), cuda, PROVIDER]

    def _session(self, model: Deployable, spec: SessionSpec, providers: list[Any]) -> OrtSession:
        with redirect_stdout(sys.stderr):  # ONNX Runtime prints fallbacks to stdout
            return OrtCudaSession(model, spec, providers)


def require_float32(precision: str) -> None:
    """Refuse fp32 with the TensorRT provider unless TF32 is disabled; only an environment variable does that.

    Raises:
        EnvironmentProblem: If NVIDIA_TF32_OVERRIDE is not 0.
    """
    if precision == "fp32" and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0":
        raise EnvironmentProblem(
            "ONNX Runtime's TensorRT provider computes float32 products in TF32 here.",
            hint="Set NVIDIA_TF32_OVERRIDE=0 before repaconv starts, or ask for --precision tf32.",
            code="precision",
        )


def lowered(precision: str) -> dict[str, str]:
    """Return the provider options for computing in the graph's type, which TensorRT up to 10 requires."""
    named = {"fp16": "trt_fp16_enable", "bf16": "trt_bf16_enable"}
    return {named[precision]: "1"} if precision in named else {}


def _load_cuda() -> None:
    """Load CUDA and cuDNN from torch's packages, which may be installed elsewhere than ONNX Runtime."""
    import onnxruntime
    import torch  # noqa: F401  loads its own

    if not hasattr(onnxruntime, "preload_dlls"):
        return
    nvidia = find_spec("nvidia")
    roots = (nvidia.submodule_search_locations if nvidia else None) or ()
    folders = [Path(root) / part / "lib" for root in roots for part in ("cu13", "cudnn")]
    with redirect_stdout(sys.stderr):  # ONNX Runtime prints missing libraries to stdout
        for folder in filter(Path.is_dir, folders):
            onnxruntime.preload_dlls(directory=str(folder))
        onnxruntime.preload_dlls()


def _name(provider: Any) -> str:
    return str(provider if isinstance(provider, str) else provider[0])


ON_CUDA = OnnxRuntimeCuda("onnxruntime-cuda", CUDA)
ON_TENSORRT = OnnxRuntimeCuda("onnxruntime-tensorrt", TENSORRT)
