"""What competing tools make of a graph, each with its defaults: of a manual baseline, or of an original."""

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


class Contender(NamedTuple):
    """Who takes part: opened when asked, which may fail, and whether its numbers are lower than float32."""

    name: str
    open: Callable[[], Run]
    lossy: bool = False


class Hand(NamedTuple):
    """The form that competing tools get: its module if there is one, its graph, the images that calibrate
    [n, B, C, H, W], and how it is called.

    What was quantised of it once is in ``made``, for those who open it again. ``kind`` precedes each tool's name.
    """

    module: nn.Module | None
    graph: Path
    calls: Images
    threads: int
    made: set[Path]
    kind: str = "hand-made"


def exact(hand: Hand) -> Iterator[Contender]:
    """In float32; the first is what all are compared with."""
    yield Contender(f"{hand.kind}, ONNX Runtime", partial(export_and_session.runner, hand.graph, hand.threads))
    yield Contender(f"{hand.kind}, OpenVINO", partial(_openvino, hand.graph, hand.threads, "f32"))
    yield Contender(f"{hand.kind}, torch.compile", partial(_compiled, hand))


def lower(hand: Hand) -> Iterator[Contender]:
    """In lower precision."""
    yield Contender(f"{hand.kind}, OpenVINO bf16", partial(_openvino_bf16, hand), lossy=True)
    for kind in (_static, _dynamic):
        yield Contender(f"{hand.kind}, ONNX Runtime int8,{kind.__name__.replace('_', ' ')}", partial(kind, hand), True)
    yield Contender(f"{hand.kind}, NNCF int8", partial(_nncf, hand), lossy=True)


def _openvino(path: Path, threads: int, precision: str | None) -> Run:
    """Images to logits; without a precision the processor's own default, which is bf16 where it multiplies that."""
    import openvino

    options: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY"}
    options |= {"ENABLE_CPU_PINNING": False, **({"INFERENCE_PRECISION_HINT": precision} if precision else {})}
    request = openvino.Core().compile_model(str(path), "CPU", options).create_infer_request()
    return lambda images: np.array(request.infer([images])[0])


def _openvino_bf16(hand: Hand) -> Run:
    import openvino

    if "BF16" not in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        raise RuntimeError("this processor has no bf16")
    return _openvino(hand.graph, hand.threads, "bf16")


def _compiled(hand: Hand) -> Run:
    if hand.module is None:
        raise RuntimeError("torch.compile took no part: it takes modules")
    torch.set_num_threads(hand.threads)
    call = torch.compile(hand.module, dynamic=False)

    def run(images: Images) -> Images:
        with torch.inference_mode():
            found: Images = call(torch.from_numpy(images)).numpy()
        return found

    run(hand.calls[0])  # compiles
    return run


def _static(hand: Hand) -> Run:
    from onnxruntime.quantization import CalibrationDataReader, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Calls(CalibrationDataReader):
        """Each once."""

        def __init__(self) -> None:
            self.left = list(hand.calls)

        def get_next(self) -> dict[str, Images] | None:
            return {name: self.left.pop(0)} if self.left else None

    import onnx

    name = onnx.load(hand.graph, load_external_data=False).graph.input[0].name
    ready, typed = hand.graph.with_suffix(".ready.onnx"), hand.graph.with_suffix(".static.onnx")
    if typed not in hand.made:
        quant_pre_process(str(hand.graph), str(ready), skip_symbolic_shape=True)
        quantize_static(str(ready), str(typed), Calls())
        hand.made.add(typed)
    return export_and_session.runner(typed, hand.threads)


def _dynamic(hand: Hand) -> Run:
    from onnxruntime.quantization import quantize_dynamic

    typed = hand.graph.with_suffix(".dynamic.onnx")
    if typed not in hand.made:
        quantize_dynamic(str(hand.graph), str(typed))
        hand.made.add(typed)
    return export_and_session.runner(typed, hand.threads)


def _nncf(hand: Hand) -> Run:
    typed = hand.graph.with_suffix(".nncf.xml")
    if typed not in hand.made:
        _by_nncf(hand, typed)
        hand.made.add(typed)
    return _openvino(typed, hand.threads, None)


def _by_nncf(hand: Hand, typed: Path) -> None:
    require_nncf()
    calls = hand.graph.with_suffix(".calls.npz")
    np.savez(calls, calls=hand.calls)
    script = Path(__file__).with_name("nncf_process.py")
    done = subprocess.run(
        [sys.executable, script, hand.graph, calls, typed], capture_output=True, text=True, check=False, timeout=1800
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "NNCF failed")
