"""Where the time of a model goes under ONNX Runtime, by its own profiler."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from repaconv.engines.contract import Deployable, Feeds, SessionSpec
from repaconv.engines.ort import PROVIDER, OrtSession, session_of, settings_for, unloadable
from repaconv.onnxfile import read_graph, restore_names
from repaconv.scratch import scratch_folder

if TYPE_CHECKING:
    import onnx


def profiled(
    model: Deployable, spec: SessionSpec, feeds: Feeds, *, runs: int, warmup_runs: int
) -> tuple[list[dict[str, Any]], dict[str, tuple[tuple[int, ...], ...]]]:
    """Events of ONNX Runtime's own profiler, and the optimised graph's nodes in order with their weights' shapes.

    What is profiled is the graph as ONNX Runtime optimised it, as it stands.

    Raises:
        Refused: If ONNX Runtime does not take the model.
    """
    with scratch_folder() as folder:
        path = folder / "optimised.onnx"
        settings = settings_for(SessionSpec(threads=spec.threads, as_written=True))
        settings.enable_profiling = True
        settings.profile_file_prefix = str(folder / "profile")
        try:
            optimised = _optimised(model, spec, path)
            session = session_of(str(path), settings, [PROVIDER])
        except Exception as error:
            raise unloadable(model, error) from error
        for _ in range(warmup_runs + runs):
            session.run(None, feeds)
        events = json.loads(Path(session.end_profiling()).read_text())
    kernels = [event for event in events if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")]
    kept = len(kernels) // (warmup_runs + runs) * runs
    shapes = {weight.name: tuple(weight.dims) for weight in optimised.graph.initializer}
    nodes = {n.name: tuple(shapes[name] for name in n.input if name in shapes) for n in optimised.graph.node}
    return kernels[-kept:], nodes


def _optimised(model: Deployable, spec: SessionSpec, path: Path) -> onnx.ModelProto:
    """The graph as ONNX Runtime optimises it, written there, with the names of its modules, which fusing takes."""
    import onnx

    settings = settings_for(spec)
    settings.optimized_model_filepath = str(path)
    source = model if isinstance(model, bytes) else str(model)
    session_of(source, settings, [PROVIDER])
    optimised = onnx.load(path)
    restore_names(optimised, onnx.load_from_string(model) if isinstance(model, bytes) else read_graph(model))
    onnx.save(optimised, path)
    return optimised


def peak_gflops(threads: int) -> float:
    """What one large matrix product in float32 reaches here: [512, 1024] x [1024, 1024], the best of several."""
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
    session = OrtSession(model.SerializeToString(), SessionSpec(threads=threads))
    feeds = {"x": np.ones((512, 1024), dtype=np.float32)}
    best = float("inf")
    for _ in range(25):
        begin = time.perf_counter()
        session.run(feeds)
        best = min(best, time.perf_counter() - begin)
    return 2 * 512 * 1024 * 1024 / best / 1e9
