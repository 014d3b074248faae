"""Speedup of a fixed batch size over a dynamic one, in a session that the runtime's own API loads.

    python benchmarks/fixed_batch_size.py [--rounds 60] [-o benchmarks/results/fixed_batch_size.json]

OpenVINO and ONNX Runtime, FP32, one thread, batch size 1, interleaved. Networks of timm have seeded weights, as torch
exports them and as `repaconv export` writes them. timm and OpenVINO must be installed. Sessions get no sizes but those
in the file; `repaconv bench` would set the batch size for both. Results of CPUs of other ISA levels stay in the file.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import torch
from zoo_networks import drawn, load_torchvision

import repaconv
from repaconv.benchmark.cpu_isa_level import isa_level
from repaconv.benchmark.interleaved_protocol import Entrant, Measurement, Protocol, measure
from repaconv.core.files import canonical_json
from repaconv.engines.contract import Engine, SessionSpec
from repaconv.engines.onnxruntime_cpu import ENGINE as ONNX_RUNTIME
from repaconv.engines.openvino import ENGINE as OPENVINO
from repaconv.graph.models_in_onnx_ir import rewritten
from repaconv.rewrites.speed.silu_as_quotient import SILU_AS_QUOTIENT

NETWORKS = (
    "efficientnet_b0",
    "mobilenetv3_large_100",
    "mobilevit_xxs",
    "resnet50",
    "swin_tiny_patch4_window7_224",
    "vit_tiny_patch16_224",
)
RUNTIMES: dict[str, tuple[Engine, str]] = {
    "openvino": (OPENVINO, "x86-64-openvino"),
    "onnxruntime": (ONNX_RUNTIME, "x86-64"),
}


def written(name: str, folder: Path) -> tuple[dict[str, tuple[Path, str]], torch.Tensor]:
    """The graphs of a network and their runtimes, and an image."""
    import timm

    torch.manual_seed(0)
    module = timm.create_model(name).eval().requires_grad_(False)
    drawn(module)  # as timm makes them, blocks of a ResNet add zero, and their layers fold away
    images = torch.randn(2, *module.default_cfg["input_size"])
    original, run, graphs = folder / "original.onnx", folder / "run", {}
    sizes = ({0: torch.export.Dim("batch")},)
    torch.onnx.export(module, (images,), original, dynamo=True, dynamic_shapes=sizes, verbose=False)
    repaconv.fold(original, out=run)
    for runtime, (_, target) in RUNTIMES.items():
        graphs[f"{runtime}, original"] = (original, runtime)
        for kind, batch in (("dynamic", "dynamic"), ("fixed", 1)):
            graphs[f"{runtime}, {kind}"] = (folder / f"{runtime}.{kind}.onnx", runtime)
            repaconv.export(run, onnx=graphs[f"{runtime}, {kind}"][0], target=target, batch=batch)
    quotient = folder / "quotient.onnx"
    graph, changes = rewritten(onnx.load(graphs["openvino, dynamic"][0]), [SILU_AS_QUOTIENT])
    if changes:
        onnx.save(graph, quotient)
        graphs["openvino, dynamic, silu-as-quotient"] = (quotient, "openvino")
    return graphs, images[:1]


def timed(graphs: dict[str, tuple[Path, str]], image: torch.Tensor, rounds: int) -> Measurement:
    """All graphs, each in its runtime, in the same rounds."""

    def entrant(graph: Path, runtime: str) -> Entrant:
        load = partial(RUNTIMES[runtime][0].open, graph, SessionSpec(threads=1))
        return Entrant(load, lambda session, _: partial(session.run, {session.inputs[0].name: image.numpy()}))

    return measure({name: entrant(*each) for name, each in graphs.items()}, Protocol(rounds, cores=1))


def row_of(name: str, rounds: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a fixed batch size gains on each runtime, what the quotient costs without it; and the machine."""
    with tempfile.TemporaryDirectory() as folder:
        graphs, image = written(name, Path(folder))
        measured = timed(graphs, image, rounds)
    pairs = {f"{runtime}, fixed over dynamic": (f"{runtime}, fixed", f"{runtime}, dynamic") for runtime in RUNTIMES}
    for runtime in RUNTIMES:
        pairs[f"{runtime}, dynamic over original"] = (f"{runtime}, dynamic", f"{runtime}, original")
    quotient = "openvino, dynamic, silu-as-quotient"
    if quotient in graphs:
        pairs["openvino, silu-as-quotient over dynamic"] = (quotient, "openvino, dynamic")
    ratios = {about: measured.ratio(*pair) for about, pair in pairs.items()}
    row: dict[str, Any] = {"network": name, "image": list(image.shape)}
    for about, found in ratios.items():
        row[about] = [round(each, 3) for each in (found.median, found.low, found.high)]
    quality = measured.quality(ratios["openvino, fixed over dynamic"])
    return row | {"measurement": quality.verdict, "reasons": list(quality.reasons)}, measured.machine


def main() -> None:
    """Measure all; print a line each."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=60)
    options.add_argument("--only", nargs="*", choices=NETWORKS, default=NETWORKS)
    options.add_argument("-o", "--out", type=Path)
    given = options.parse_args()
    load_torchvision()
    rows, machine = [], {}
    for name in given.only:
        row, machine = row_of(name, given.rounds)
        rows.append(row)
        print(row, flush=True)
    if given.out:
        known = json.loads(given.out.read_text()) if given.out.is_file() else {}
        given.out.write_text(canonical_json({**known, isa_level("x86_64"): {"machine": machine, "rows": rows}}))


if __name__ == "__main__":
    main()
