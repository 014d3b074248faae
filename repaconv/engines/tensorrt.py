"""Build and run TensorRT engines.

The builder and the session are shared with TensorRT-RTX. If torch does not detect the GPU, engines run with
Polygraphy's runner, whose times include data transfers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from repaconv.core.errors import Refused, first_line, require_module
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
    cannot,
    require_device,
)
from repaconv.engines.nvidia_gpu import first_gpu
from repaconv.engines.tensorrt_builder import EngineBuild, logger
from repaconv.engines.tensorrt_session import TrtSession
from repaconv.engines.trtexec_logs import layer_types

THERE = "Build and verify on the machine that the engine is for, with its own TensorRT."


class PolygraphySession:
    """A Polygraphy runner, active as long as this object exists."""

    def __init__(self, runner: Any, outputs: tuple[Port, ...]) -> None:
        """``runner`` is an inactive ``polygraphy.backend.base.BaseRunner``, which does not list its outputs."""
        self._runner = runner
        runner.activate()
        taken = runner.get_input_metadata(use_numpy_dtypes=False)
        self.inputs = tuple(Port(name, _shape(port.shape), port.dtype.name) for name, port in taken.items())
        self.outputs, self.options = outputs, dict[str, str]()

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """See `repaconv.engines.contract.Session`; outputs are copied from the runner's buffers."""
        return {name: np.array(value) for name, value in self._runner.infer(dict(feeds)).items()}

    def placement(self, feeds: Feeds) -> dict[str, str]:
        """Raise: placement is not supported.

        Raises:
            EnvironmentProblem: Always.
        """
        raise cannot("TensorRT", "placement")

    def profile(self, feeds: Feeds, *, runs: int, warmup_runs: int) -> Profiled:
        """Raise: profiling is not supported.

        Raises:
            EnvironmentProblem: Always.
        """
        raise cannot("TensorRT", "profile")

    def close(self) -> None:
        """Release the runner."""
        self._runner.deactivate()


def _shape(dims: Iterable[Any]) -> tuple[int | str | None, ...]:
    """Return a shape with None for dynamic dimensions, which TensorRT writes as -1."""
    return tuple(None if isinstance(size, int) and size < 0 else size for size in dims)


def _outputs(trt: Any, engine: Any) -> tuple[Port, ...]:
    names = [engine.get_tensor_name(place) for place in range(engine.num_io_tensors)]
    return tuple(
        Port(name, _shape(engine.get_tensor_shape(name)), np.dtype(trt.nptype(engine.get_tensor_dtype(name))).name)
        for name in names
        if engine.get_tensor_mode(name) == trt.TensorIOMode.OUTPUT
    )


def load_with_polygraphy(trt: Any, plan: bytes) -> PolygraphySession:
    """Load an engine with Polygraphy, e.g. on a board whose torch is built without CUDA.

    Raises:
        EnvironmentProblem: If Polygraphy is not installed.
        Refused: If the engine does not load.
    """
    require_module("polygraphy", "Polygraphy", "pip install 'repaconv[polygraphy]'")
    from polygraphy.backend.trt import EngineFromBytes, TrtRunner

    try:
        engine = EngineFromBytes(plan)()
        return PolygraphySession(TrtRunner(engine), _outputs(trt, engine))
    except Exception as error:  # Polygraphy and TensorRT raise errors of many classes
        raise Refused(
            f"TensorRT cannot load the engine: {first_line(error)}.",
            hint="An engine runs only on the TensorRT version and the kind of GPU that it was built for.",
            code="engine.unloadable",
        ) from error


class TensorRt:
    """TensorRT on an NVIDIA GPU.

    Untested (no hardware available). The builder and session are tested with TensorRT-RTX, whose API is the same
    (`repaconv.engines.tensorrt_builder`, `repaconv.engines.tensorrt_session`).
    """

    name = "tensorrt"
    suffix = ".engine"
    opens: tuple[str, ...] = (".engine", ".plan")
    device = "cuda"
    can: frozenset[Ability] = frozenset({"run", "engines"})
    takes: tuple[str, ...] = ("workspace", "timing_cache", "replay")

    def version(self) -> str:
        """Return the version of the installed package.

        Raises:
            EnvironmentProblem: If it cannot be imported.
        """
        return str(require_module("tensorrt", "TensorRT", THERE).__version__)

    def open(self, deployable: Deployable, spec: SessionSpec) -> TrtSession | PolygraphySession:
        """Load an engine. Loading runs code in the file, so only load engines from a trusted source.

        Raises:
            EnvironmentProblem: If TensorRT or the device is not available.
            Refused: If the engine does not load.
        """
        require_device("TensorRT", spec, "cuda")
        self.version()
        import tensorrt as trt

        content = deployable if isinstance(deployable, bytes) else deployable.read_bytes()
        return TrtSession(trt, content, logger(trt)) if first_gpu() else load_with_polygraphy(trt, content)

    def build(self, spec: BuildSpec) -> Built:
        """Build an engine for the GPU of this machine, and read the types of its layers.

        Raises:
            EnvironmentProblem: If TensorRT is not installed.
            Refused: If TensorRT rejects the graph.
        """
        self.version()
        import tensorrt as trt

        building = EngineBuild(trt, spec, hint="Export for this target: repaconv export --target NAME.")
        building.exchange_timings()
        plan = building.plan()
        engine = trt.Runtime(building.log).deserialize_cuda_engine(plan)
        inspected = engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON)
        found = layer_types(json.loads(inspected))
        return Built(
            engine=plan,
            types=found or building.types(),
            log="\n".join(building.log.lines),
            options={
                "workspace": str(spec.workspace or "TensorRT's own limit"),
                "strongly_typed": str(building.typed),
                "tf32": str(building.tf32),
            },
            types_source="the types are those that the engine's layers have"
            if found
            else "the engine tells no types of its layers; these are of the parsed network",
            runs_here=True,
            timing_cache=building.timings,
        )


ENGINE = TensorRt()
