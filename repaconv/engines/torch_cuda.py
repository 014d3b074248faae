"""Run torch modules on an NVIDIA GPU: eager, compiled, or captured as a CUDA graph (fastest for batch size 1).

fp32 is true float32: TF32, which torch uses for convolutions by default, is a precision of its own. It ran
on an H200 (docs/gpu.md): five methods eager, one captured. Compiled it is untested on hardware.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from repaconv.engines.contract import Array, Feeds, Network, SessionSpec
from repaconv.engines.nvidia_gpu import batch_of, require_gpu, within_memory
from repaconv.engines.torch_cpu import PRECISIONS, Torch, TorchSession

if TYPE_CHECKING:
    from torch import Tensor

WARMUP = 3
"""Inferences before a capture, in which torch selects and loads kernels."""


class CudaSession(TorchSession):
    """A module on a GPU. ``options`` lists the settings in effect."""

    def __init__(self, network: Network, spec: SessionSpec, device: str, *, compiled: bool, captured: bool) -> None:
        """See `TorchCuda`."""
        super().__init__(network, spec, device, compiled=compiled)
        self._captured = captured
        self.options |= {"mode": "CUDA graph"} if captured else {}
        self.options["tf32"] = str(spec.precision == "tf32")

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """See `repaconv.engines.contract.Session`; captured as a CUDA graph if requested, as when timed."""
        import torch

        with torch.inference_mode(), self._within(feeds):
            ready = self._ready(self._tensors(feeds))  # keeps a CUDA graph alive, which owns the memory of its outputs
            found = ready()
        outputs = (found,) if isinstance(found, torch.Tensor) else tuple(found)
        return {
            port.name: (value.float() if value.is_floating_point() else value).cpu().numpy()
            for port, value in zip(self.outputs, outputs, strict=True)
        }

    def gpu_timed_call(self, feeds: Feeds) -> Callable[[], float]:
        """See `repaconv.engines.contract.GpuSession`; timed by CUDA events."""
        import torch

        cuda: Any = torch.cuda  # torch types it only in part
        with torch.inference_mode(), self._within(feeds):
            ready = self._ready(self._tensors(feeds))
        begin, end = (cuda.Event(enable_timing=True) for _ in range(2))

        def call() -> float:
            with torch.inference_mode(), self._within(feeds):
                cuda.synchronize(self._device)
                begin.record()
                ready()
                end.record()
                end.synchronize()
            return float(begin.elapsed_time(end))

        return call

    def nodes_on_cpu(self, feeds: Feeds) -> tuple[str, ...]:
        """Return no nodes: torch raises an error for an operator without a kernel."""
        return ()

    def _within(self, feeds: Feeds) -> Any:
        return within_memory(batch_of(feeds))

    def _ready(self, tensors: list[Tensor]) -> Callable[[], Any]:
        """Return a function that runs these inputs with the requested TF32 mode, captured if requested."""
        import torch

        cuda: Any = torch.cuda  # torch types it only in part

        def call() -> Any:
            # a setting of the whole process
            torch.set_float32_matmul_precision("high" if self._spec.precision == "tf32" else "highest")
            torch.backends.cudnn.allow_tf32 = self._spec.precision == "tf32"
            return self._call(*tensors)

        if not self._captured:
            return call
        aside = cuda.Stream(self._device)
        aside.wait_stream(cuda.current_stream())
        with cuda.stream(aside):
            for _ in range(WARMUP):
                call()
        cuda.current_stream().wait_stream(aside)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            found = call()

        def replay() -> Any:
            graph.replay()
            return found

        return replay


class TorchCuda(Torch):
    """torch on an NVIDIA GPU: eager, compiled, or as a CUDA graph."""

    precisions = (*PRECISIONS, "tf32")
    device = "cuda"

    def __init__(self, name: str, *, compiled: bool = False, captured: bool = False) -> None:
        """``compiled`` selects `torch.compile`, ``captured`` a CUDA graph; eager otherwise."""
        super().__init__(name, compiled=compiled)
        self.captured = captured

    def version(self) -> str:
        """Return the version of torch.

        Raises:
            EnvironmentProblem: If torch detects no GPU.
        """
        require_gpu("torch on CUDA")
        return super().version()

    def _session(self, network: Network, spec: SessionSpec, device: str) -> TorchSession:
        self.version()
        return CudaSession(network, spec, device, compiled=self.compiled, captured=self.captured)


EAGER = TorchCuda("torch-cuda")
COMPILED = TorchCuda("torch-cuda-compiled", compiled=True)
GRAPHS = TorchCuda("torch-cuda-graphs", captured=True)
