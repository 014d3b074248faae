"""Networks of every task but classification: three ways to fold, `verify` on five seeds each, exports, and speed.

    python benchmarks/task_zoo.py [--seconds N] [--pairs | --speed] [NAME ...]

The networks are those of `task_networks.py`. Each is folded by `fold model.onnx`, by `fold --arch` and by
`repaconv.fold(module)`, each in a process of its own. The first two are verified on five seeds and exported; the third
is compared with the module on five seeds and exported by PyTorch. Rows go to `benchmarks/results/task_networks.jsonl`;
networks that have one are skipped, so that an interrupted run resumes.

``--speed`` measures instead (`benchmarks/results/task_speed.jsonl`), at an image size that users have: the exported
graph against the original simplified by onnxsim, both on ONNX Runtime, and against the original, both on OpenVINO;
interleaved, one thread. ``--pairs`` makes these graphs beforehand.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import zoo

HERE = Path(__file__).resolve()
RESULTS = HERE.parent / "results"
FOLDED, MEASURED = RESULTS / "task_networks.jsonl", RESULTS / "task_speed.jsonl"
SEEDS, LIMIT_S, HALF_ULP = range(5), 3600, 2.0**-24
OPENVINO = "x86-64-openvino"
ROUNDS = 120
"""More than the usual 50 of a target also buy more session loads: 12 seconds of them."""


def main() -> None:
    named = "e.g. yolo11n, or graph:yolo11n for one door; all if left out"
    given = zoo.arguments(__doc__, named, Path("build/task-zoo"), speed, paired)
    if given.one:
        sys.stdout.write("\n" + json.dumps(_one(given)) + "\n")
        return
    given.into.mkdir(parents=True, exist_ok=True)
    path = {speed: MEASURED, paired: given.into / "pairs.jsonl"}.get(given.what, FOLDED)
    here = zoo.processor() if given.what is speed else {}
    zoo.written(path, _asked(given), partial(_row, given), given.seconds, here)


def _asked(given: argparse.Namespace) -> list[str]:
    """The rows that are asked for: of each network, or of each by each door."""
    from task_networks import NETWORKS

    names = given.names or [*NETWORKS]
    if given.what:
        return names
    return [each for door in DOORS for name in names for each in _by(door, name)]


def _by(door: str, name: str) -> list[str]:
    """The row of a network by a door, if it is asked for; a file of ONNX has one door."""
    from task_networks import NETWORKS

    asked, _, called = name.rpartition(":")
    return [f"{door}:{called}"] if asked in ("", door) and (door == "graph" or not NETWORKS[called].file) else []


def _one(given: argparse.Namespace) -> dict[str, Any]:
    """What the process of one row prints."""
    if given.what:
        row: dict[str, Any] = given.what(given.names[0], given.into)
        return row
    door, _, name = given.names[0].partition(":")
    return DOORS[door](name, given.into)


def _row(given: argparse.Namespace, name: str) -> dict[str, Any]:
    """The row, from a process and a folder of its own; first what the network is."""
    from task_networks import NETWORKS

    made = NETWORKS[name.rpartition(":")[2]]
    size = (made.timed or made.size) if given.what else made.size
    about = {"task": made.task, "title": made.title, "package": made.package, "size": size}
    command = [sys.executable, str(HERE), name, "--into", str(given.into.resolve()), "--one"]
    if given.what:
        command.append("--speed" if given.what is speed else "--pairs")
    with tempfile.TemporaryDirectory() as folder:
        return {**about, **zoo.in_its_own(command, LIMIT_S, cwd=folder)}


# --- doors ----------------------------------------------------------------------------------------------------------


def by_arch(name: str, _: Path) -> dict[str, Any]:
    """``fold weights.pth --arch task_networks.py:NAME``."""
    import torch
    from task_networks import NETWORKS, network

    torch.save(network(name).state_dict(), "weights.pth")
    height, width = NETWORKS[name].size
    arch = f"{HERE.with_name('task_networks.py')}:{name}"
    return _run(Path("weights.pth"), Path("run"), arch=arch, settings={"image_size": f"{height}x{width}"})


def by_graph(name: str, into: Path) -> dict[str, Any]:
    """``fold model.onnx``, as torch's exporter writes it in float32, or as the package brings it.

    If it is of the size at which the network is timed, its run is kept for that.
    """
    from task_networks import NETWORKS, file_of

    made = NETWORKS[name]
    if made.file:
        return _run(file_of(name), Path("run"))
    if made.timed is None:
        graph = graph_of(name, into)
        return _run(graph, graph.with_suffix(".run"))
    exported(name, made.size, Path("model.onnx"))
    return _run(Path("model.onnx"), Path("run"))


def exported(name: str, size: tuple[int, int], path: Path) -> None:
    """Write the graph of one image of that size, as torch's exporter does in float32."""
    import torch
    from task_networks import NETWORKS, network

    images = (torch.rand(1, 3, *size, generator=torch.Generator().manual_seed(0)),)  # of a plain one, no boxes are left
    if NETWORKS[name].dynamo:
        more = {"dynamo": True, "external_data": False, "verbose": False}
        torch.onnx.export(network(name), images, path, opset_version=20, **more)
    else:
        torch.onnx.export(network(name), images, path, opset_version=17, dynamo=False)


def _run(path: Path, run: Path, **how: Any) -> dict[str, Any]:
    """Fold it, verify it on all seeds, export it; or the refusal."""
    import repaconv
    from repaconv.core.errors import RepaconvError

    try:
        fold = repaconv.fold(path, measure=False, out=run, force=True, **how)
        verdicts = {seed: _verdicts(repaconv.verify(run, seed=seed)) for seed in SEEDS}
        export = repaconv.export(run, onnx="ours.onnx", allow_unverified=True)
    except RepaconvError as error:
        return {"refused": f"{error.code}: {error.message}"}
    row: dict[str, Any] = {"fold": fold.verdict, "nodes": fold.nodes, "parameters": fold.parameters}
    return {**row, "applied": len(fold.applied), "verify": verdicts, "export": export.verdict}


def _verdicts(done: Any) -> dict[str, Any]:
    """Of one seed: the whole, and the links that did not pass, with their reasons."""
    left = [f"{link.candidate}: {link.verdict}: {link.note}" for link in done.links if link.verdict != "passed"]
    return {"verdict": done.verdict, **({"links": left} if left else {})}


def by_module(name: str, _: Path) -> dict[str, Any]:
    """``repaconv.fold(module)``, against the module on other images, all evaluated in float64; then PyTorch's export.

    Folded in float32, weights are rounded to that. Next to it stands what as much does to the module itself: every
    weight of it moved by half a unit in the last place of float32. Folded in float64, only the fold is left.
    """
    import torch
    from task_networks import NETWORKS, network

    import repaconv
    from repaconv.core.errors import RepaconvError

    module, made = network(name), NETWORKS[name]
    example = torch.randn(2, 3, *made.size, generator=torch.Generator().manual_seed(0))
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
    nodes = _export_of_module(deepcopy(single), made.size, made.dynamo)
    ends = {"float32": single, "moved": moved, "float64": double}
    row = {end: _apart(module, other, made.size) for end, other in ends.items()}
    return {**row, "parameters": count, "exported_nodes": nodes}


def _export_of_module(module: Any, size: tuple[int, int], dynamo: bool) -> int:
    """Nodes of what PyTorch's exporter writes of it."""
    import onnx
    import torch

    images = (torch.zeros(1, 3, *size),)
    more: dict[str, Any] = {"dynamo": True, "external_data": False, "verbose": False} if dynamo else {"dynamo": False}
    torch.onnx.export(module, images, "module.onnx", opset_version=20 if dynamo else 17, **more)
    return sum(node.op_type != "Constant" for node in onnx.load("module.onnx").graph.node)


def _apart(module: Any, other: Any, size: tuple[int, int]) -> float:
    """The largest difference of two networks in float64 on all seeds, relative to the largest number of its output."""
    import torch
    from torch.utils._pytree import tree_leaves

    module, other, worst = module.double(), other.double(), 0.0
    for seed in SEEDS:
        images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(seed)).double()
        with torch.inference_mode():
            ends = (module(images), other(images))
        for right, found in zip(*map(tree_leaves, ends), strict=True):
            scale = float(right.double().abs().max()) or 1.0
            worst = max(worst, float((found.double() - right.double()).abs().max()) / scale)
    return worst


DOORS: dict[str, Callable[[str, Path], dict[str, Any]]] = {"graph": by_graph, "arch": by_arch, "module": by_module}


# --- speed ----------------------------------------------------------------------------------------------------------


def graph_of(name: str, into: Path) -> Path:
    """Its graph at the size at which it is timed, written once."""
    from task_networks import NETWORKS, file_of

    path, made = into / f"{name}.onnx", NETWORKS[name]
    if path.is_file():
        return path
    part = path.with_suffix(".part")
    if made.file:
        _of_one_size(file_of(name), made.size, part)
    else:
        exported(name, made.timed or made.size, part)
    part.replace(path)
    return path


def _of_one_size(source: Path, size: tuple[int, int], path: Path) -> None:
    """The same graph for one image of one size."""
    import onnx
    from onnxruntime.tools.onnx_model_utils import fix_output_shapes, make_input_shape_fixed

    model = onnx.load(source)
    make_input_shape_fixed(model.graph, model.graph.input[0].name, (1, 3, *size))
    fix_output_shapes(model)
    onnx.save(model, path)


def pairs_of(name: str, into: Path, *, measure: bool = False) -> tuple[Path, Path, Path, Path]:
    """The exported graph for ONNX Runtime, the original graph through onnxsim, the exported graph for OpenVINO, and the
    original graph; made once, but anew where the fold measures."""
    import repaconv

    graph = graph_of(name, into)
    run, simple = graph.with_suffix(".run"), graph.with_suffix(".simple.onnx")
    best, compiled = graph.with_suffix(".best.onnx"), graph.with_suffix(".openvino.onnx")
    if measure or not simple.is_file():
        if measure or not (run / "fold.json").is_file():
            repaconv.fold(graph, out=run, force=True, measure=measure)
        for path, target in ((best, "x86-64"), (compiled, OPENVINO)):
            path.unlink(missing_ok=True)
            repaconv.export(run, onnx=path, target=target)
        zoo.simplified(graph)
    return best, simple, compiled, graph


def speed(name: str, into: Path) -> dict[str, Any]:
    """The row of one network that is measured."""
    return {
        "onnxsim": zoo.compared(lambda **how: pairs_of(name, into, **how)[:2], ROUNDS),
        "openvino": zoo.compared(lambda **how: pairs_of(name, into, **how)[2:], ROUNDS, target=OPENVINO),
    }


def paired(name: str, into: Path) -> dict[str, Any]:
    """All are made."""
    return {"bytes": [path.stat().st_size for path in pairs_of(name, into)]}


if __name__ == "__main__":
    main()
