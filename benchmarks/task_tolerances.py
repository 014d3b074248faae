"""Effect of harmless changes, of lower precision and of planted faults on the results of a network of each task.

    python benchmarks/task_tolerances.py DIR [--kinds detector ...] [--seeds 1 2] [--steps 300] [-o result.jsonl]

The tolerances in repaconv/tasks/ are based on these results. DIR has the networks and images that
benchmarks/train/shapes.py and shape_networks.py write; for each seed one more network of each kind is trained with
fewer steps. Each is computed in FP32 in another order (ONNX Runtime without fusions, OpenVINO), exported in every
precision, and compared with its FP32 graph as `export` does. INT8 is also broken on purpose: half of the weights' bits
are removed, one layer's scale is doubled, or the scale of one head's weights is multiplied.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import torch
from onnx import numpy_helper

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "train")]

import shape_networks  # noqa: E402 - from benchmarks/train
import shapes  # noqa: E402
from lower_precision_tolerances import half_the_bits, scale_off_by_2  # noqa: E402

from repaconv.core import plugins  # noqa: E402
from repaconv.engines.contract import SessionSpec  # noqa: E402
from repaconv.engines.session_loading import load_session  # noqa: E402
from repaconv.onnx_export.fp16_and_int8 import QUANTIZED  # noqa: E402
from repaconv.onnx_export.torch_exporter import to_onnx  # noqa: E402
from repaconv.sources.verified_onnx_export import runnable  # noqa: E402
from repaconv.stages.shared.lower_precision import to_precision  # noqa: E402
from repaconv.stages.shared.target_lookup import load_target  # noqa: E402
from repaconv.tasks.contract import NetworkFacts  # noqa: E402
from repaconv.tasks.evaluation import Evaluation  # noqa: E402
from repaconv.tasks.task_of_network import Choice  # noqa: E402
from repaconv.verification.comparison import Comparison  # noqa: E402
from repaconv.verification.model_runners import load_onnx  # noqa: E402
from repaconv.verification.tolerances import tolerance, verdict_by  # noqa: E402


class Kind(NamedTuple):
    """The task of a network, and its last layers, of which faults are planted."""

    task: Any
    heads: tuple[str, ...]


KINDS = {
    "detector": Kind("detect", ("box.1/", "score.1/")),
    "segmenter": Kind("segment", ("head/",)),
    "upscaler": Kind("restore", ("tail/",)),
    "depth": Kind("depth", ("head/",)),
    "heatmaps": Kind("keypoints", ("head/",)),
    "poser": Kind("keypoints", ("box.1/", "points.1/")),
    "embedder": Kind("embed", ("body.3.wide.1/", "body.4.wide.1/")),
    "recognizer": Kind("recognize", ("head/", "body.2.wide.1/")),
}
CALIBRATION, HELD_OUT = 32, 200
FACTORS = (0.5, 0.8, 1.1, 1.25, 1.5, 2.0)
TARGETS = {"int8": "x86-64", "int8, symmetric": "orin-nano"}
BATCH = 8


def head_scaled(layer: str, factor: float) -> Callable[[onnx.ModelProto], onnx.ModelProto]:
    """Multiply the scale of the weights of a layer."""

    def broken(model: onnx.ModelProto) -> onnx.ModelProto:
        made = {name: node for node in model.graph.node for name in node.output}
        stored = {weight.name: weight for weight in model.graph.initializer}
        for node in model.graph.node:
            if node.op_type in QUANTIZED and layer in node.name:
                scale = stored[made[node.input[1]].input[1]]
                scale.CopyFrom(numpy_helper.from_array(factor * numpy_helper.to_array(scale), scale.name))
                return model
        raise ValueError(f"there is no layer {layer}")

    return broken


def rows_of(name: str, kind: str, net: torch.nn.Module, calibration: Any, images: Any) -> Iterator[dict[str, Any]]:
    """One row for each order of FP32, each precision, and each way of being broken."""
    size = images.shape[2:]
    model = to_onnx(net, images.shape[1:], output="output", opset=20, batch=None, dynamic_size=False)
    calls = [{"input": calibration[start : start + BATCH]} for start in range(0, len(calibration), BATCH)]
    reference = load_onnx(model)
    right = [reference.run({"input": images[start : start + BATCH]}) for start in range(0, len(images), BATCH)]

    def compared(candidate: Any, precision: str, way: str) -> dict[str, Any]:
        low = precision.partition(",")[0]
        limits = "fp16" if low == "fp32" else low
        choice, allowed = Choice(KINDS[kind].task, "", True, NetworkFacts(size=size)), tolerance(limits, logits=False)
        found = Comparison(precision, allowed, "", evaluation=Evaluation(choice, limits))
        for place, expected in enumerate(right):
            found.add(candidate.run({"input": images[place * BATCH : (place + 1) * BATCH]}), expected)
        numbers, task = found.links(limits, "float32")
        assert task.task is not None
        assert numbers.metrics is not None
        return {
            "net": name,
            "type": precision,
            "way": way,
            "cosine": numbers.metrics.cosine,
            "norm_error": numbers.metrics.norm_error,
            "by numbers": verdict_by(numbers.metrics, allowed, None),
            "by task": task.verdict,
            "disagreement": task.task.disagreement,
            **{metric.name: metric.value for metric in task.task.metrics},
        }

    yield compared(load_onnx(model, as_written=True), "fp32", "without fusions")
    openvino = plugins.load(plugins.ENGINES, "openvino")
    yield compared(load_session(openvino, model.SerializeToString(), SessionSpec(threads=1)), "fp32", "OpenVINO")
    for precision in ("fp16", "bf16", "int8", "int8, symmetric"):
        low = precision.partition(",")[0]
        typed, _ = to_precision(model, low, calls, load_target(TARGETS.get(precision, "x86-64")))
        ways: dict[str, Callable[[onnx.ModelProto], onnx.ModelProto]] = {"sound": lambda graph: graph}
        if precision == "int8":
            ways |= {"half the bits": half_the_bits, "scale off by 2": scale_off_by_2}
            for layer in KINDS[kind].heads:
                ways |= {f"{layer[:-1]} scale times {factor:g}": head_scaled(layer, factor) for factor in FACTORS}
        for way, change in ways.items():
            (graph := onnx.ModelProto()).CopyFrom(typed)
            yield compared(load_onnx(runnable(change(graph), low)), precision, way)


def networks(kind: str, folder: Path, seeds: list[int], steps: int) -> Iterator[tuple[str, torch.nn.Module]]:
    """The network of the folder, if it is there, and one for each seed."""
    theirs: Any = shapes if hasattr(shapes, kind) else shape_networks
    if (path := folder / f"{kind}.pth").is_file():
        net = getattr(shapes, kind)() if theirs is shapes else shape_networks.NETWORKS[kind]()
        net.load_state_dict(torch.load(path)["state_dict"])
        yield f"{kind}, trained", net.eval()
    for seed in seeds:
        data = shapes.made(800, seed) if theirs is shapes else shape_networks.made(kind, 800, seed)
        yield f"{kind}, {steps} steps, seed {seed}", theirs.trained(kind, data, steps=steps, seed=seed)


def main() -> None:
    """All networks; each row is printed when it is known."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=Path)
    options.add_argument("--kinds", nargs="*", default=list(KINDS))
    options.add_argument("--seeds", type=int, nargs="*", default=[1, 2])
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("-o", dest="out", type=Path)
    given = options.parse_args()
    rows = []
    for kind in given.kinds:
        if hasattr(shapes, kind):
            calibration, images = (np.load(given.folder / f"shapes{end}.npz")["input"] for end in (".calibration", ""))
        else:
            calibration, images = (
                shape_networks.made(kind, count, seed).inputs for count, seed in ((CALIBRATION, 1), (HELD_OUT, 2))
            )
        for name, net in networks(kind, given.folder, given.seeds, given.steps):
            for row in rows_of(name, kind, net, calibration[:CALIBRATION], images):
                rows.append(row)
                print(json.dumps(row), flush=True)
    if given.out:
        given.out.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


if __name__ == "__main__":
    main()
