"""Checkpoints of Ultralytics and other pickled modules: compare what `fold` reads and exports with the package's own.

    python benchmarks/ultralytics_files.py [--versions FOLDER] [--seconds N] [NAME ...]

The package writes the files as its trainer does: half precision, random weights, varied BatchNorm statistics. Other
versions of the package write some, too, each installed into a FOLDER (``pip install --no-deps --target``). Each file is
read in a process of its own that records what runs: while `inspect` reads it, nothing of the package may be imported,
and nothing in the file may run. The names and values of all weights are compared with those that the package loads, and
the outputs of the built network in float64 with those of the package's network (once with its own float32 attributes
such as eps, as ONNX has them). The outputs of `export` and of `yolo export` on ONNX Runtime are compared with it, too.
Rows go to `benchmarks/results/ultralytics_files.jsonl`; files that have one are skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
RESULTS = HERE.parent / "results" / "ultralytics_files.jsonl"
SIZE, LIMIT_S, SEEDS = 96, 900, (0, 1)
NETWORKS = {
    "yolov5n": "detect",
    "yolov8n": "detect",
    "yolov9t": "detect",
    "yolov10n": "detect",
    "yolo11n": "detect",
    "yolo26n": "detect",
    "yolov8n-seg": "segment",
    "yolo11n-seg": "segment",
    "yolov8n-pose": "pose",
    "yolo11n-pose": "pose",
    "yolov8n-cls": "classify",
    "yolo11n-cls": "classify",
    "yolo11n-obb": "obb",
}
BY_EMA = ("yolov8n", "yolo11n-seg")
"""Saved as a trainer saves them before the end: the moving average, with other weights under the key model."""
OTHERS = {"torchvision": "resnet18", "timm": "repvgg_a0", "own": "blocks"}
"""Modules of others, pickled whole: by the library that builds them, or by a function in a file."""
OWN = """
from torch import nn


class Block(nn.Module):
    def __init__(self, width, slope):
        super().__init__()
        self.slope, self.norm = slope, nn.BatchNorm2d(width)
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)

    def forward(self, x):
        return x + nn.functional.leaky_relu(self.norm(self.conv(x)), self.slope)


def build():
    stem = nn.Conv2d(3, 16, 3, stride=2, padding=1)
    return nn.Sequential(stem, Block(16, 0.1), Block(16, 0.1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
"""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", help=f"of {', '.join([*NETWORKS, *OTHERS])}; all if left out")
    options.add_argument("--versions", action="append", default=[], help="a folder of another version of ultralytics")
    options.add_argument("--seconds", type=float, default=float("inf"), help="start no row after so many")
    options.add_argument("--step", nargs=2, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.step:
        sys.stdout.write("\n" + json.dumps(STEPS[given.step[0]](given.step[1])) + "\n")
        return
    known = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.is_file() else []
    done, end = {(row["name"], row.get("written_by")) for row in known}, time.monotonic() + given.seconds
    for name in given.names or [*NETWORKS, *OTHERS]:
        for folder in ["", *(str(Path(each).resolve()) for each in given.versions)] if name in NETWORKS else [""]:
            if time.monotonic() < end and (name, version_in(folder, name)) not in done:
                row = {"name": name, "task": NETWORKS.get(name, "classify"), **_row(name, folder)}
                with RESULTS.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                sys.stdout.write(f"{row}\n")
                sys.stdout.flush()


def version_in(folder: str, name: str) -> str:
    """The package that writes the file, and its version."""
    from importlib.metadata import distributions, version

    package = "ultralytics" if name in NETWORKS else {"own": "torch"}.get(name, name)
    found = [each.version for each in distributions(path=[folder]) if each.name == package] if folder else []
    return f"{package} {found[0] if found else version(package)}"


def _row(name: str, folder: str) -> dict[str, Any]:
    """What the steps give, each in a process of its own; of one that dies, how it did."""
    row: dict[str, Any] = {"written_by": version_in(folder, name)}
    with tempfile.TemporaryDirectory() as place:
        for step in STEPS:
            paths = [*([folder] if step == "write" else []), os.environ.get("PYTHONPATH", "")]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
            command = [sys.executable, str(HERE), "--step", step, name]
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=place, env=environment
                )
            except subprocess.TimeoutExpired:
                return {**row, "problem": f"{step} took longer than {LIMIT_S} s"}
            if done.returncode:
                return {**row, "problem": f"{step}: {(done.stderr.strip().splitlines() or [''])[-1]}"[:300]}
            row |= json.loads(done.stdout.splitlines()[-1])
    return row


def _randomized(module: Any) -> Any:
    import torch
    from zoo_networks import _move, drawn, measured

    torch.manual_seed(0)
    module.eval().requires_grad_(False)
    fixed = {key: value.clone() for key, value in module.state_dict().items() if "dfl" in key}
    _move(module)
    measured(module, (3, SIZE, SIZE))
    drawn(module)
    module.load_state_dict(fixed, strict=False)
    return module.eval()


def write(name: str) -> dict[str, Any]:
    """Write the file as the package's trainer does."""
    import torch

    if name not in NETWORKS:
        torch.save(_randomized(_other(name)), "model.pt")
        return {}
    from ultralytics import YOLO, __version__
    from ultralytics.utils import DEFAULT_CFG_DICT

    module = _randomized(YOLO(f"{name}.yaml", task=NETWORKS[name]).model)
    module.names = {number: f"thing {number}" for number in range(len(module.names))}
    module.args = args = {**DEFAULT_CFG_DICT, "imgsz": SIZE, "task": NETWORKS[name]}
    half = deepcopy(module).half()
    other = deepcopy(half)
    for weight in other.parameters():
        weight.mul_(1.5)
    kept = {"model": other, "ema": half} if name in BY_EMA else {"model": half, "ema": None}
    about = {"epoch": -1, "best_fitness": None, "updates": None, "optimizer": None, "train_args": args}
    torch.save({**about, **kept, "date": "2026-11-25T10:00:00", "version": __version__}, "model.pt")
    return {"written_by": f"ultralytics {__version__}"}


def _other(name: str) -> Any:
    if name == "torchvision":
        from torchvision.models import resnet18

        return resnet18(num_classes=10)
    if name == "timm":
        import timm

        return timm.create_model(OTHERS["timm"], num_classes=10)
    Path("own_net.py").write_text(OWN)
    sys.path.insert(0, str(Path.cwd()))
    import own_net

    return own_net.build()


def inspect(name: str) -> dict[str, Any]:
    """Read the file as data, where its package must not be imported; record what ran."""
    import torch  # noqa: F401 - its import opens processes of its own

    import repaconv
    from repaconv.core import changed_input_files

    sys.path.insert(0, str(HERE.parents[1] / "tests"))
    from torture.sandbox import FORBIDDEN

    changed_input_files.install_sigbus_handler()  # it asks for the C library, once
    tempfile.gettempdir()  # it tries the folder with a file that it removes, once

    heard: list[str] = []
    listening = [True]

    def hear(event: str, arguments: tuple[object, ...]) -> None:
        if listening[0] and event in FORBIDDEN:
            heard.append(f"{event} {str(arguments)[:100]}")

    sys.addaudithook(hear)
    seen = repaconv.inspect("model.pt")
    listening[0] = False
    packages = ("ultralytics", "torchvision", "timm", "own_net")
    imported = sorted({each.partition(".")[0] for each in sys.modules} & set(packages))
    facts = {fact.name: fact.value for fact in seen.facts}
    return {"ran": heard, "imported": imported, "inspect": facts, "weights": seen.origin.weights_reason}


def fold(name: str) -> dict[str, Any]:
    """Fold, verify and export it."""
    import repaconv

    arch = {"torchvision": "torchvision:resnet18", "timm": f"timm:{OTHERS['timm']}", "own": "own_net.py:build"}.get(
        name
    )
    done = repaconv.fold("model.pt", arch=arch, settings={"image_size": str(SIZE)}, measure=False, out="run")
    verified = {seed: repaconv.verify("run", seed=seed).verdict for seed in SEEDS}
    exported = repaconv.export("run", onnx="ours.onnx")
    row: dict[str, Any] = {"arch": done.arch, "fold": done.verdict, "verify": verified, "export": exported.verdict}
    return {**row, "nodes": done.nodes, "parameters": done.parameters, "facts": _facts(done)}


def _facts(done: Any) -> dict[str, Any]:
    return {fact.name: [fact.value, fact.source] for fact in done.facts if fact.name != "image_size"}


def compare(name: str) -> dict[str, Any]:
    """The weights, and the outputs of the built network and of both exports, with those of the package's network."""
    import numpy as np
    import onnxruntime
    import torch

    from repaconv.checkpoints import read_checkpoint
    from repaconv.core.run_folder import Run
    from repaconv.sources.named_architecture_source import NetworkRunner
    from repaconv.sources.named_architectures import ROUNDED
    from repaconv.sources.source_of_run import source_model_of

    found = read_checkpoint("model.pt")
    own = _own(name)
    weights = {found.names[short]: tensor for short, tensor in found.tensors.items()}
    same = list(weights) == list(own.state_dict()) and all(
        torch.equal(tensor.float() if tensor.is_floating_point() else tensor, weights_own)
        for tensor, weights_own in zip(weights.values(), own.state_dict().values(), strict=True)
    )
    rounded = deepcopy(own)
    for part in rounded.modules():
        for attribute in ROUNDED:
            if isinstance(value := getattr(part, attribute, None), float):
                setattr(part, attribute, float(np.float32(value)))
    own = own.double()
    reference: Any = source_model_of(Run(Path("run"))).reference
    names = [*reference.inputs], [*reference.outputs]
    as_onnx = NetworkRunner(rounded, rounded.state_dict(), double=True, inputs=names[0], outputs=names[1])
    ours, theirs = onnxruntime.InferenceSession("ours.onnx"), None
    if name in NETWORKS:
        theirs = onnxruntime.InferenceSession(_exported_by_package())
    worst = {"network": 0.0, "network_as_onnx": 0.0, "export": 0.0, "package_export": 0.0}
    shapes: dict[str, Any] = {}
    for seed in range(3):
        images = np.random.default_rng(seed).random((1, 3, SIZE, SIZE), np.float32)
        with torch.inference_mode():
            gives = own(torch.from_numpy(images).double())
        right = [leaf.numpy() for leaf in torch.utils._pytree.tree_leaves(gives) if isinstance(leaf, torch.Tensor)]
        built = reference.run({reference.inputs[0]: images})
        worst["network"] = max(worst["network"], _apart(list(built.values()), right))
        same_attributes = list(as_onnx.run({reference.inputs[0]: images}).values())
        worst["network_as_onnx"] = max(worst["network_as_onnx"], _apart(list(built.values()), same_attributes))
        for called, session in (("export", ours), ("package_export", theirs)):
            if session:
                outputs = session.run(None, {session.get_inputs()[0].name: images})
                worst[called] = max(worst[called], _apart(outputs, right))
                ports = [each.name for each in (*session.get_inputs(), *session.get_outputs())]
                sizes = [list(images.shape), *(list(each.shape) for each in outputs)]
                shapes[called] = dict(zip(ports, sizes, strict=True))
    row: dict[str, Any] = {"weights_equal": same, "max_rel_error": worst, "outputs": shapes["export"]}
    return {**row, "outputs_of_package": shapes.get("package_export")}


def _own(name: str) -> Any:
    """The network as its package loads it, with the outputs of an export."""
    import torch

    if name not in NETWORKS:
        sys.path.insert(0, str(Path.cwd()))
        return torch.load("model.pt", weights_only=False).eval()
    from ultralytics.nn.tasks import load_checkpoint

    own, _ = load_checkpoint("model.pt")
    if getattr(own, "end2end", False):
        own.end2end = False
    for part in own.modules():
        if hasattr(part, "export"):
            part.export, part.format = True, "onnx"
    return own


def _exported_by_package() -> str:
    from ultralytics import YOLO

    return str(YOLO("model.pt").export(format="onnx", imgsz=SIZE, simplify=False, opset=17, verbose=False))


def _apart(found: list[Any], right: list[Any]) -> float:
    """The largest difference of any output, relative to its largest number."""
    import numpy as np

    assert [each.shape for each in found] == [each.shape for each in right], [each.shape for each in (*found, *right)]
    pairs = zip(found, right, strict=True)
    return max(float(np.abs(each - other).max() / np.abs(other).max()) for each, other in pairs)


STEPS = {"write": write, "inspect": inspect, "fold": fold, "compare": compare}


if __name__ == "__main__":
    main()
