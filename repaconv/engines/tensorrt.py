"""Any Polygraphy runner as one of ours, and ours for Polygraphy's comparators."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from repaconv.engines.contract import Built, Order
from repaconv.engines.trt import Building
from repaconv.engines.trtexec import layer_types
from repaconv.errors import Refused, require_module

THERE = "Build and verify on the machine that the engine is for, with its own TensorRT."


def require_polygraphy() -> None:
    """Import it.

    Raises:
        EnvironmentProblem: If it is not installed.
    """
    require_module("polygraphy", "Polygraphy", "pip install 'repaconv[polygraphy]'")


class FromPolygraphy:
    """A Polygraphy runner of one input, activated for as long as this object lives.

    Raises:
        Refused: If it has more inputs than one.
    """

    def __init__(self, runner: Any) -> None:
        """``runner`` is any ``polygraphy.backend.base.BaseRunner``, not yet activated."""
        self._runner = runner
        runner.activate()
        inputs = runner.get_input_metadata(use_numpy_dtypes=False)
        if len(inputs) != 1:
            runner.deactivate()
            raise Refused(
                f"the engine takes {len(inputs)} inputs: {', '.join(inputs)}.",
                hint="repaconv runs image models, which take one.",
                code="engine.inputs",
            )
        self._input = next(iter(inputs))

    def run(self, images: NDArray[Any]) -> NDArray[np.floating]:
        """Images [n, C, H, W] to the first output [n, ...], copied out of the runner's buffers."""
        outputs = self._runner.infer({self._input: images})
        return np.array(next(iter(outputs.values())))

    def close(self) -> None:
        """Free what the runner holds."""
        self._runner.deactivate()


class TensorRt:
    """TensorRT engines: built by its own API, run by Polygraphy's runner.

    Not verified here: no machine of ours has had the device. What builds is held by tests on TensorRT-RTX, whose API is
    the same (`repaconv.engines.trt`).
    """

    name = "tensorrt"
    suffix = ".engine"
    runs = True
    takes = ("workspace", "timing_cache", "replay")

    def version(self) -> str:
        """Of the installed package.

        Raises:
            EnvironmentProblem: If it cannot be imported.
        """
        return str(require_module("tensorrt", "TensorRT", THERE).__version__)

    def session(self, model: Path | bytes, *, threads: int = 1, dims: Any = None) -> FromPolygraphy:
        """Load an engine. That runs code in it, so give none of unknown origin.

        Args:
            model: A serialised engine for this TensorRT and this device, or its path.
            threads: For other runtimes.
            dims: For other runtimes.

        Raises:
            EnvironmentProblem: If TensorRT or the device is not here.
            Refused: If the engine does not load.
        """
        self.version()
        require_polygraphy()
        from polygraphy.backend.trt import EngineFromBytes, TrtRunner

        content = model if isinstance(model, bytes) else model.read_bytes()
        try:
            return FromPolygraphy(TrtRunner(EngineFromBytes(content)))
        except Refused:
            raise
        except Exception as error:  # Polygraphy and TensorRT raise whatever the driver gives them
            raise Refused(
                f"TensorRT does not load the engine: {str(error).splitlines()[0]}.",
                hint="An engine runs only on the TensorRT version and the kind of GPU that it was built for.",
                code="engine.unloadable",
            ) from error

    def build(self, order: Order) -> Built:
        """Build for the GPU of this machine, and read back what was built.

        Raises:
            EnvironmentProblem: If TensorRT is not here.
            Refused: If it does not take the graph.
        """
        self.version()
        import tensorrt as trt

        building = Building(trt, order, hint="Export for this target: repaconv export --onnx --target NAME.")
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
                "workspace": str(order.workspace or "TensorRT's own limit"),
                "strongly_typed": str(building.typed),
            },
            proved="the types are those that the engine's layers have"
            if found
            else "the engine tells no types of its layers; these are of the parsed network",
            runs_here=True,
            timing_cache=building.timings,
        )


ENGINE = TensorRt()
