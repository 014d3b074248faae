"""Networks of eight tasks through all three doors, and `verify` on five seeds each.

    python benchmarks/task_networks.py [--seconds N] [NAME ...]

Detection of two generations, segmentation of two, super-resolution of two, text recognition, keypoints: of Ultralytics,
torchvision, docTR and spandrel, which are installed beside repaconv; weights are random, BatchNorm statistics are those
of noise, varied. Each door is a process of its own: `fold --arch`, `fold model.onnx`, `repaconv.fold(module)`, which is
compared with the module on five seeds. A line for each is appended to `benchmarks/results/task_networks.jsonl`, and
those that have one are left out, so that an interrupted run resumes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

RESULTS = Path(__file__).parent / "results" / "task_networks.jsonl"
SEEDS, LIMIT_S, HALF_ULP = range(5), 600, 2.0**-24


class Tensors(nn.Module):
    """What a network gives, as tensors alone."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(leaf for leaf in tree_leaves(self.network(images)) if isinstance(leaf, torch.Tensor))


def _ultralytics(kind: str, config: str) -> nn.Module:
    from ultralytics.nn import tasks

    network: nn.Module = getattr(tasks, kind)(config, verbose=False)
    for part in network.modules():
        if hasattr(part, "export"):
            part.export, part.format = True, "onnx"
    return Tensors(network)


def yolov8n() -> nn.Module:
    return _ultralytics("DetectionModel", "yolov8n.yaml")


def yolo26n() -> nn.Module:
    return _ultralytics("DetectionModel", "yolo26n.yaml")


def yolo11n_seg() -> nn.Module:
    return _ultralytics("SegmentationModel", "yolo11n-seg.yaml")


def yolo11n_pose() -> nn.Module:
    return _ultralytics("PoseModel", "yolo11n-pose.yaml")


def lraspp() -> nn.Module:
    from zoo_networks import load_torchvision

    load_torchvision()
    from torchvision.models import segmentation

    return Tensors(segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=5))


def esrgan() -> nn.Module:
    from spandrel.architectures.ESRGAN import ESRGAN

    return Tensors(ESRGAN(num_filters=16, num_blocks=2))


def safmn() -> nn.Module:
    from spandrel.architectures.SAFMN import SAFMN

    return Tensors(SAFMN(dim=16, n_blocks=2))


def crnn() -> nn.Module:
    from doctr.models import recognition

    return Tensors(recognition.crnn_mobilenet_v3_small(pretrained=False, pretrained_backbone=False, exportable=True))


TASKS: dict[str, tuple[Callable[[], nn.Module], str, tuple[int, int]]] = {
    "lraspp": (lraspp, "segmentation", (64, 64)),
    "crnn": (crnn, "text recognition", (32, 128)),
    "esrgan": (esrgan, "super-resolution", (24, 24)),
    "safmn": (safmn, "super-resolution", (32, 32)),
    "yolo11n_seg": (yolo11n_seg, "segmentation", (64, 64)),
    "yolo26n": (yolo26n, "detection", (64, 64)),
    "yolov8n": (yolov8n, "detection", (64, 64)),
    "yolo11n_pose": (yolo11n_pose, "keypoints", (64, 64)),
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", help=f"of {', '.join(TASKS)}; all if left out")
    options.add_argument("--seconds", type=float, default=float("inf"), help="start no row after so many")
    options.add_argument("--door", choices=DOORS, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.door:
        sys.stdout.write(json.dumps(DOORS[given.door](given.names[0])) + "\n")
        return
    known = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.is_file() else []
    done, end = {(row["name"], row["door"]) for row in known}, time.monotonic() + given.seconds
    for name in given.names or TASKS:
        for door in DOORS:
            if (name, door) not in done and time.monotonic() < end:
                row = {"name": name, "task": TASKS[name][1], "door": door, **_in_its_own(name, door)}
                with RESULTS.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                sys.stdout.write(f"{row}\n")
                sys.stdout.flush()


def _in_its_own(name: str, door: str) -> dict[str, Any]:
    """The row of one door, in a process and a folder of its own; of one that dies, how it did."""
    command = [sys.executable, str(Path(__file__).resolve()), name, "--door", door]
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=folder)
        except subprocess.TimeoutExpired:
            return {"problem": f"took longer than {LIMIT_S} s"}
    if done.returncode:
        return {"problem": f"exit {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1]}"[:300]}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def network(name: str) -> nn.Module:
    """It in eval mode with random weights, and statistics that noise of its size has, varied."""
    from zoo_networks import _move, drawn, measured

    torch.manual_seed(0)
    build, _, size = TASKS[name]
    module = build().eval().requires_grad_(False)
    _move(module)
    measured(module, (3, *size))
    drawn(module)
    return module


def by_arch(name: str) -> dict[str, Any]:
    """``fold weights.pth --arch task_networks.py:NAME``."""
    torch.save(network(name).state_dict(), "weights.pth")
    height, width = TASKS[name][2]
    arch = f"{Path(__file__).resolve()}:{name}"
    return _run("weights.pth", arch=arch, settings={"image_size": f"{height}x{width}"})


def by_graph(name: str) -> dict[str, Any]:
    """``fold model.onnx``, as torch's exporter writes it in float32."""
    module, size = network(name), TASKS[name][2]
    torch.onnx.export(module, (torch.zeros(1, 3, *size),), "model.onnx", dynamo=True, opset_version=20, verbose=False)
    return _run("model.onnx")


def _run(path: str, **how: Any) -> dict[str, Any]:
    import repaconv
    from repaconv.core.errors import RepaconvError

    try:
        fold = repaconv.fold(path, measure=False, **how)
        verdicts = {seed: _verdicts(repaconv.verify(seed=seed)) for seed in SEEDS}
    except RepaconvError as error:
        return {"refused": f"{error.code}: {error.message}"}
    return {"fold": fold.verdict, "nodes": fold.nodes, "parameters": fold.parameters, "verify": verdicts}


def _verdicts(done: Any) -> dict[str, Any]:
    """Of one seed: the whole, and the links that did not pass, with their reasons."""
    left = [f"{link.candidate}: {link.verdict}: {link.note}" for link in done.links if link.verdict != "passed"]
    return {"verdict": done.verdict, **({"links": left} if left else {})}


def by_module(name: str) -> dict[str, Any]:
    """``repaconv.fold(module)``, against the module on other images, all evaluated in float64.

    Folded in float32, weights are rounded to that. Next to it stands what as much does to the module itself: every
    weight of it moved by half a unit in the last place of float32. Folded in float64, only the fold is left.
    """
    import repaconv
    from repaconv.core.errors import RepaconvError

    module, size = network(name), TASKS[name][2]
    example = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
    try:
        single = repaconv.fold(module, example=example)
        double = repaconv.fold(deepcopy(module).double(), example=example.double())
    except RepaconvError as error:
        return {"refused": f"{error.code}: {error.message}"}
    moved = deepcopy(module).double()
    random = torch.Generator().manual_seed(0)
    for weight in moved.parameters():
        weight.mul_(1 + HALF_ULP * (2 * torch.randint(0, 2, weight.shape, generator=random) - 1))
    count = [sum(weight.numel() for weight in each.parameters()) for each in (module, single)]
    ends = {"float32": single, "moved": moved, "float64": double}
    return {**{end: _apart(module, other, size) for end, other in ends.items()}, "parameters": count}


def _apart(module: nn.Module, other: nn.Module, size: tuple[int, int]) -> float:
    """The largest difference of two networks in float64 on all seeds, relative to the largest number of its output."""
    module, other, worst = module.double(), other.double(), 0.0
    for seed in SEEDS:
        images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(seed)).double()
        with torch.inference_mode():
            ends = (module(images), other(images))
        for right, found in zip(*map(tree_leaves, ends), strict=True):
            worst = max(worst, float((found.double() - right.double()).abs().max() / right.double().abs().max()))
    return worst


DOORS: dict[str, Callable[[str], dict[str, Any]]] = {"arch": by_arch, "graph": by_graph, "module": by_module}


if __name__ == "__main__":
    main()
