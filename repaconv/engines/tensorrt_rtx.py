"""Build TensorRT-RTX engines for NVIDIA RTX GPUs, on any x86-64 machine without a GPU, and run them.

Engines are typed as the ONNX graph is. An engine can be loaded only on a supported GPU, so without one its precision is
verified on the parsed network; a loaded engine reports its layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from repaconv.core.errors import EnvironmentProblem, require_module
from repaconv.engines.contract import Ability, BuildSpec, Built, Deployable, SessionSpec, require_device
from repaconv.engines.nvidia_gpu import require_gpu
from repaconv.engines.tensorrt_builder import EngineBuild, logger
from repaconv.engines.tensorrt_session import TrtSession

INSTALL = "pip install --no-deps tensorrt-rtx-cu13 tensorrt-rtx-cu13-bindings tensorrt-rtx-cu13-libs"


class TensorRtRtx:
    """TensorRT-RTX on an NVIDIA RTX GPU."""

    name = "tensorrt-rtx"
    suffix = ".engine"
    opens: tuple[str, ...] = ()
    device = "cuda"
    can: frozenset[Ability] = frozenset({"run", "engines", "placement", "elsewhere"})
    takes: tuple[str, ...] = ("workspace",)

    def version(self) -> str:
        """Return the version of the installed package.

        Raises:
            EnvironmentProblem: If it cannot be imported.
        """
        return str(require_module("tensorrt_rtx", "TensorRT-RTX", INSTALL).__version__)

    def open(self, deployable: Deployable, spec: SessionSpec) -> TrtSession:
        """Load an engine. Loading runs code in the file, so only load engines from a trusted source.

        Raises:
            EnvironmentProblem: If TensorRT-RTX is not installed or does not support the GPU.
            Refused: If the engine does not load.
        """
        require_device("TensorRT-RTX", spec, "cuda")
        self.version()
        gpu = require_gpu("TensorRT-RTX")
        import tensorrt_rtx as trt

        _capability(trt, gpu.capability, gpu.name)
        content = deployable if isinstance(deployable, bytes) else Path(deployable).read_bytes()
        return TrtSession(trt, content, logger(trt))

    def build(self, spec: BuildSpec) -> Built:
        """Build an engine for GPUs of these compute capabilities.

        Raises:
            EnvironmentProblem: If TensorRT-RTX is not installed or does not support such a GPU.
            Refused: If TensorRT-RTX rejects the graph.
        """
        self.version()
        import tensorrt_rtx as trt

        building = EngineBuild(trt, spec, hint="Export for this target: repaconv export --target rtx-40.")
        building.config.num_compute_capabilities = len(spec.capabilities)
        for number, capability in enumerate(spec.capabilities):
            building.config.set_compute_capability(_capability(trt, capability), number)
        types = building.types()
        plan = building.plan()
        return Built(
            engine=plan,
            types=types,
            log="\n".join(building.log.lines),
            options={"compute_capability": ", ".join(spec.capabilities), "tf32": str(building.tf32)},
            types_source="the types are those of the parsed network; the engine itself opens on its device alone",
            runs_here=_has_gpu(spec.capabilities),
        )


def _has_gpu(capabilities: tuple[str, ...]) -> bool:
    """Return whether this machine has a GPU of one of these compute capabilities."""
    try:
        return require_gpu("TensorRT-RTX").capability in capabilities
    except EnvironmentProblem:
        return False


def _capability(trt: Any, text: str, gpu: str = "") -> Any:
    name = f"SM{text.replace('.', '')}"
    if not hasattr(trt.ComputeCapability, name):
        known = ", ".join(sorted(each for each in dir(trt.ComputeCapability) if each.startswith("SM")))
        raise EnvironmentProblem(
            f"this TensorRT-RTX does not support compute capability {text}{f', that of the {gpu}' if gpu else ''}.",
            hint=f"It supports {known}.",
            code="build.capability",
        )
    return getattr(trt.ComputeCapability, name)


ENGINE = TensorRtRtx()
