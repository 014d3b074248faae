"""Benchmark subjects of the competing tools, each with its defaults, from a manual baseline or an original graph."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from manual_baselines import export_and_session
from numpy.typing import NDArray
from torch import nn

from repaconv.onnx_export.nncf_quantization import require_nncf

Images = NDArray[np.float32]
Run = Callable[[Images], Images]


class BenchmarkSubject(NamedTuple):
    """One tool in one configuration: a function that loads it, which may fail, and whether it is below FP32."""

    name: str
    open: Callable[[], Run]
    lossy: bool = False


class CompetitorModel(NamedTuple):
    """The model that competing tools get: a manual baseline or an original graph.

    Attributes:
        module: Its module, if there is one.
        graph: Its ONNX file.
        calls: Images for calibration [n, B, C, H, W].
        threads: Threads per inference.
        quantized_files: Files that a quantizer has already written; they are reused when a subject is loaded again.
        kind: Precedes each tool's name.
    """

    module: nn.Module | None
    graph: Path
    calls: Images
    threads: int
    quantized_files: set[Path]
    kind: str = "hand-made"


def exact(model: CompetitorModel) -> Iterator[BenchmarkSubject]:
    """Subjects in FP32; the first is the reference of all ratios."""
    yield BenchmarkSubject(
        f"{model.kind}, ONNX Runtime", partial(export_and_session.runner, model.graph, model.threads)
    )
    yield BenchmarkSubject(f"{model.kind}, OpenVINO", partial(_openvino, model.graph, model.threads, "f32"))
    yield BenchmarkSubject(f"{model.kind}, torch.compile", partial(_compiled, model))


def lower(model: CompetitorModel) -> Iterator[BenchmarkSubject]:
    """Subjects in lower precision."""
    yield BenchmarkSubject(f"{model.kind}, OpenVINO bf16", partial(_openvino_bf16, model), lossy=True)
    for kind in (_static, _dynamic):
        yield BenchmarkSubject(
            f"{model.kind}, ONNX Runtime int8,{kind.__name__.replace('_', ' ')}", partial(kind, model), True
        )
    yield BenchmarkSubject(f"{model.kind}, NNCF int8", partial(_nncf, model), lossy=True)


def _openvino(path: Path, threads: int, precision: str | None) -> Run:
    """A function from images to logits; without a precision OpenVINO's default, BF16 on CPUs that multiply BF16."""
    import openvino

    options: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY"}
    options |= {"ENABLE_CPU_PINNING": False, **({"INFERENCE_PRECISION_HINT": precision} if precision else {})}
    request = openvino.Core().compile_model(str(path), "CPU", options).create_infer_request()
    return lambda images: np.array(request.infer([images])[0])


def _openvino_bf16(model: CompetitorModel) -> Run:
    import openvino

    if "BF16" not in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        raise RuntimeError("this processor has no bf16")
    return _openvino(model.graph, model.threads, "bf16")


def _compiled(model: CompetitorModel) -> Run:
    if model.module is None:
        raise RuntimeError("torch.compile took no part: it takes modules")
    torch.set_num_threads(model.threads)
    call = torch.compile(model.module, dynamic=False)

    def run(images: Images) -> Images:
        with torch.inference_mode():
            found: Images = call(torch.from_numpy(images)).numpy()
        return found

    run(model.calls[0])  # compiles
    return run


def _static(model: CompetitorModel) -> Run:
    from onnxruntime.quantization import CalibrationDataReader, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Calls(CalibrationDataReader):
        """Each calibration batch once."""

        def __init__(self) -> None:
            self.left = list(model.calls)

        def get_next(self) -> dict[str, Images] | None:
            return {name: self.left.pop(0)} if self.left else None

    import onnx

    name = onnx.load(model.graph, load_external_data=False).graph.input[0].name
    ready, quantized = model.graph.with_suffix(".ready.onnx"), model.graph.with_suffix(".static.onnx")
    if quantized not in model.quantized_files:
        quant_pre_process(str(model.graph), str(ready), skip_symbolic_shape=True)
        quantize_static(str(ready), str(quantized), Calls())
        model.quantized_files.add(quantized)
    return export_and_session.runner(quantized, model.threads)


def _dynamic(model: CompetitorModel) -> Run:
    from onnxruntime.quantization import quantize_dynamic

    quantized = model.graph.with_suffix(".dynamic.onnx")
    if quantized not in model.quantized_files:
        quantize_dynamic(str(model.graph), str(quantized))
        model.quantized_files.add(quantized)
    return export_and_session.runner(quantized, model.threads)


def _nncf(model: CompetitorModel) -> Run:
    quantized = model.graph.with_suffix(".nncf.xml")
    if quantized not in model.quantized_files:
        _quantize_with_nncf(model, quantized)
        model.quantized_files.add(quantized)
    return _openvino(quantized, model.threads, None)


def _quantize_with_nncf(model: CompetitorModel, quantized: Path) -> None:
    require_nncf()
    calls = model.graph.with_suffix(".calls.npz")
    np.savez(calls, calls=model.calls)
    script = Path(__file__).with_name("nncf_process.py")
    done = subprocess.run(
        [sys.executable, script, model.graph, calls, quantized],
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "NNCF failed")
