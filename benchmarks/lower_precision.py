"""Accuracy of INT8 and BF16 on trained networks, and their speedup on large ones.

    python benchmarks/lower_precision.py [--rounds 40] [--only agreement|speed] [-o result.json]

Agreement: the five models trained by benchmarks/train, folded. INT8 on ONNX Runtime is calibrated on images of the
training split. INT8, and BF16 on OpenVINO, are compared with the float64 training-time network on 500 held-out images.
Speed: folded networks of ViT-B's size with seeded weights, 224 pixels, batch size 1, one thread, each pair interleaved
by `bench`: INT8 against FP32 on ONNX Runtime, and BF16 on OpenVINO against FP32 on both runtimes. BF16 is measured on
CPUs that compute in it (AVX512-BF16, AMX).
"""

from __future__ import annotations

import argparse
import os
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

import repaconv
from repaconv import models
from repaconv.benchmark.cpu_isa_level import isa_level
from repaconv.benchmark.machine_fingerprint import fingerprint
from repaconv.core import plugins
from repaconv.core.files import canonical_json

TRAINED = models.FOLDER
REPAVIT = Namespace(idle_ratio=0.75, heuristic="static", feature_norm="BatchNorm", channel_idle=True, input_size=224)
SIZES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("repavit", "deit-base/0.75", {"args": REPAVIT}),
    ("pyra", "vit-base/low", {}),
    ("pyra", "vit-base/high", {}),
)
"""Method, published size, and what its trainer writes next to the weights."""
SKIPPED = {
    "nondeep": "all its published sizes are 192 wide",
    "dwconv": "vit-base/6 has 576 patches",
    "riformer": "no vision transformer",
}
OPENVINO = "x86-64-openvino"
HAS_BF16 = isa_level("x86_64") in ("avx512-bf16", "amx")


def agreement(method: str) -> dict[str, Any]:
    """One trained net: first classes and accuracy of every precision, as verify says them."""
    run = Path(method)
    repaconv.fold(TRAINED / f"{method}.pth", out=run)
    repaconv.export(run)
    low = repaconv.export(run, precision="int8", inputs=TRAINED / "calibration.npz")
    compared, engine = {"fp32": "onnx", "int8": "int8"}, None
    if HAS_BF16:
        repaconv.export(run, target=OPENVINO)
        repaconv.build(run, target=OPENVINO, precision="bf16")
        compared, engine = compared | {"bf16": "engine"}, run / "build" / f"{OPENVINO}.bf16.blob"
    verified = repaconv.verify(run, inputs=TRAINED / "digits.npz", engine=engine)
    links = {link.name: link for link in verified.links if not link.variant.startswith(OPENVINO)}
    row: dict[str, Any] = {"method": method, "verdict": verified.verdict}
    row["int8_in_float32"] = len(low.unquantized_layers)
    for name, link in ((name, links[link]) for name, link in compared.items()):
        assert link.metrics is not None
        assert link.accuracy is not None
        row["accuracy_trained"] = link.accuracy.reference
        row[name] = {
            "top1_agreement": link.metrics.top1_agreement,
            "accuracy": link.accuracy.candidate,
            "cosine": link.metrics.cosine,
        }
    return row


def speed(method: str, size: str, metadata: dict[str, Any], rounds: int) -> dict[str, Any]:
    """One large net: pairs of engines, each measured by bench."""
    torch.save({"model": plugins.load(plugins.METHODS, method).example(size, seed=1), **metadata}, "c.pth")
    run = Path("large")
    repaconv.fold("c.pth", out=run, force=True)
    repaconv.export(run, batch=1)
    low = repaconv.export(run, batch=1, precision="int8")
    row: dict[str, Any] = {"model": f"{method} {size}", "int8_in_float32": len(low.unquantized_layers)}
    plain, blob = run / "model.b1.onnx", run / "build" / f"{OPENVINO}.b1.blob"
    bf16 = blob.with_name(f"{OPENVINO}.bf16.b1.blob")
    pairs = {"int8 to fp32, ONNX Runtime": (run / "model.int8.b1.onnx", plain)}
    if HAS_BF16:
        repaconv.export(run, batch=1, target=OPENVINO)  # in the form that is fastest there
        for precision in ("fp32", "bf16"):
            repaconv.build(run, target=OPENVINO, precision=precision)
        pairs |= {"bf16 to fp32, OpenVINO": (bf16, blob), "bf16, OpenVINO, to fp32, ONNX Runtime": (bf16, plain)}
    for name, (subject, against) in pairs.items():
        done = repaconv.bench(subject, against=against, rounds=rounds)
        assert done.ratio is not None
        row[name] = {
            "p50_ms": [found.p50_ms for found in done.latencies],
            "times_as_fast": [done.ratio.median, done.ratio.low, done.ratio.high],
            "measurement": done.quality.verdict,
            "reasons": list(done.quality.reasons),
        }
    return row


def main() -> None:
    """Measure and print; write the result where asked."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=40)
    options.add_argument("--only", choices=("agreement", "speed"))
    options.add_argument("-o", "--out", type=Path)
    given = options.parse_args()
    out = given.out.resolve() if given.out else None
    torch.set_num_threads(1)
    result: dict[str, Any] = {"rounds": given.rounds, "skipped": SKIPPED, "agreement": [], "speed": []}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for method in () if given.only == "speed" else sorted(path.stem for path in TRAINED.glob("*.pth")):
            result["agreement"].append(row := agreement(method))
            print(row, flush=True)
        for each in () if given.only == "agreement" else SIZES:
            result["speed"].append(row := speed(*each, given.rounds))
            print(row, flush=True)
    result["machine"] = {**fingerprint(()), "openvino": plugins.load(plugins.ENGINES, "openvino").version()}
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(canonical_json(result))


if __name__ == "__main__":
    main()
