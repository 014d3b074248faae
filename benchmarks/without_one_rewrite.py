"""Speedup of one rewrite of a target's default preset, on networks of timm and of `competing_toolchains`.

    PYTHONPATH=benchmarks python benchmarks/without_one_rewrite.py REWRITE [--target x86-64-openvino] [--nets NAME ...]
        [--rounds 60] [-o benchmarks/results/without_one_rewrite.json]

The folded network in the default preset of this CPU, and in the same preset without the rewrite, interleaved in one
run in each precision: one thread, batch size 1, seeded weights. A network that the rewrite does not change is skipped.
With ``ONEDNN_MAX_CPU_ISA=AVX2`` OpenVINO uses its kernels for AVX2, and the result records it. Results of other
rewrites, networks and ISA levels stay in the result file.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import torch
from competing_toolchains import arbitrary_networks
from zoo_networks import drawn, load_torchvision

import repaconv
from repaconv.benchmark.cpu_isa_level import isa_level
from repaconv.benchmark.interleaved_protocol import Entrant, Measurement, Protocol, measure
from repaconv.core import plugins
from repaconv.core.files import canonical_json
from repaconv.engines.contract import SessionSpec
from repaconv.graph.models_in_onnx_ir import rewritten
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.rewrites.presets import chosen
from repaconv.stages.shared.target_lookup import default_rewrites, load_target

NETWORKS = (
    *("convnext_tiny", "convnextv2_nano", "mambaout_femto", "caformer_s18", "focalnet_tiny_srf", "edgenext_small"),
    *("tiny_vit_11m_224", "fastvit_sa12", "maxvit_pico_rw_256", "swin_tiny_patch4_window7_224"),
    *("unet_resnet18", "deeplabv3plus_mobilenet_v2"),
)


def network(name: str) -> tuple[torch.nn.Module, tuple[int, ...]]:
    """A network of `competing_toolchains`, else of timm, and the shape of an image."""
    import timm

    for each in arbitrary_networks.NETWORKS:
        if each.name == name and each.build is not None:
            return each.build().eval().requires_grad_(False), each.shape
    module = timm.create_model(name).eval().requires_grad_(False)
    drawn(module)
    return module, module.default_cfg["input_size"]


def default_preset(target: str) -> Sequence[Rewrite]:
    """The rewrites of a target's default preset on this CPU."""
    device = load_target(target)
    return chosen(default_rewrites(device, "graph"), device.newest).rewrites


def written(name: str, rewrite: str, target: str, folder: Path) -> tuple[dict[str, Path], torch.Tensor] | None:
    """The graphs of a network with and without the rewrite, and an image; None if the rewrite changes nothing."""
    torch.manual_seed(0)
    module, shape = network(name)
    image, original = torch.randn(1, *shape), folder / "original.onnx"
    torch.onnx.export(module, (image,), original, dynamo=True, verbose=False)
    run = repaconv.fold(original, out=folder / "run")
    folded, preset = onnx.load(folder / "run" / run.payload.path), default_preset(target)
    graphs = {}
    for kind, rewrites in (("without", [each for each in preset if each.name != rewrite]), ("with", preset)):
        model, changes = rewritten(folded, rewrites)
        graphs[kind] = folder / f"{kind}.onnx"
        onnx.save(model, graphs[kind])
    return (graphs, image) if any(change.rewrite == rewrite for change in changes) else None


def timed(graphs: dict[str, Path], image: torch.Tensor, target: str, precision: str, rounds: int) -> Measurement:
    """Both graphs in the same rounds."""
    device = load_target(target)
    engine, spec = plugins.load(plugins.ENGINES, device.runtime), SessionSpec(threads=1, precision=precision)

    def call(session: Any, _: Any) -> Any:
        return partial(session.run, {session.inputs[0].name: image.numpy()})

    entrants = {kind: Entrant(partial(engine.open, path, spec), call) for kind, path in graphs.items()}
    return measure(entrants, Protocol(rounds, cores=1))


def row(name: str, given: argparse.Namespace, precisions: list[str]) -> dict[str, Any] | None:
    """What is measured of a network; None if the rewrite does not change it."""
    with tempfile.TemporaryDirectory() as folder:
        made = written(name, given.rewrite, given.target, Path(folder))
        if made is None:
            return None
        found = {precision: timed(*made, given.target, precision, given.rounds) for precision in precisions}
    machine = next(iter(found.values())).machine
    return {
        "network": name,
        "rewrite": given.rewrite,
        "target": given.target,
        "cpu": f"{machine['cpu']} {machine['cpu_number']}",
        "kernels": os.environ.get("ONEDNN_MAX_CPU_ISA", isa_level(load_target(given.target).architecture)),
        "speedup": {
            precision: [round(value, 3) for value in (of.median, of.low, of.high)]
            for precision, of in ((precision, each.ratio("with", "without")) for precision, each in found.items())
        },
        "session_loads": {precision: each.session_loads for precision, each in found.items()},
    }


def key(measured: dict[str, Any]) -> tuple[str, ...]:
    """What a later measurement of the same replaces."""
    return tuple(measured[name] for name in ("rewrite", "target", "network", "cpu", "kernels"))


def main() -> None:
    """Measure each network, and write each result as it comes."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("rewrite")
    options.add_argument("--target", default="x86-64-openvino")
    options.add_argument("--nets", nargs="+", default=NETWORKS)
    options.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    options.add_argument("--rounds", type=int, default=60)
    options.add_argument("-o", "--out", type=Path)
    given = options.parse_args()
    names = [each.name for each in default_preset(given.target)]
    if given.rewrite not in names:
        options.error(f"the default preset of {given.target} on this CPU has {', '.join(names)}")
    load_torchvision()
    for name in given.nets:
        found = row(name, given, given.precisions)
        print(name, "not changed" if found is None else found["speedup"], flush=True)
        if found is None or not given.out:
            continue
        known = json.loads(given.out.read_text()) if given.out.is_file() else []
        rows = {key(each): each for each in known}
        before = rows.get(key(found), found)
        rows[key(found)] = {
            **found,
            **{field: before[field] | found[field] for field in ("speedup", "session_loads")},  # other precisions stay
        }
        given.out.write_text(canonical_json([rows[each] for each in sorted(rows)]))


if __name__ == "__main__":
    main()
