"""Time and memory of exporting a network above 2 GiB: ViT-Huge with its weights in a separate file.

    python benchmarks/export_huge.py [-o result.json]

The network is RePaViT of ViT-Huge with an idle ratio of 0.25 and seeded random weights: 2.3 GB after folding. Each
stage is a process of its own, imports included. GNU time gives its wall time and its largest resident set, which
includes the pages of mapped files.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

import torch
from fold_large import timed

from repaconv.benchmark.machine_fingerprint import fingerprint
from repaconv.core.files import canonical_json
from repaconv.methods.repavit import METHOD

ARGS = Namespace(idle_ratio=0.25, heuristic="static", feature_norm="BatchNorm", channel_idle=True, input_size=224)
STAGES = {
    "fold": ["fold", "{checkpoint}", "-o", "{run}"],
    "export": ["export", "{run}", "--onnx"],
    "verify": ["verify", "{run}", "--count", "2"],
    "export for jetson-nano": ["export", "{run}", "--onnx", "--target", "jetson-nano"],
}


def main() -> None:
    """Run the stages and print; write the result where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path)
    chosen = parser.parse_args()
    stages = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        places = {"checkpoint": str(folder / "checkpoint.pth"), "run": str(folder / "run")}
        weights = METHOD.example("vit-huge/0.25", 1)
        torch.save({"model": weights, "args": ARGS}, places["checkpoint"])
        del weights
        for stage, words in STAGES.items():
            command = [sys.executable, "-m", "repaconv", *(word.format(**places) for word in words), "--quiet"]
            milliseconds, peak = timed(command)
            stages[stage] = {"wall_s": round(milliseconds / 1000, 1), "peak_resident_bytes": peak}
            print(f"{stage}: {milliseconds / 1000:.0f} s, {peak / 1024**3:.1f} GiB")
        sizes = {path.name: path.stat().st_size for path in sorted((folder / "run").iterdir()) if path.is_file()}
        links = json.loads((folder / "run" / "verify.json").read_text())["links"]
        worst = {link["name"]: [link["verdict"], link["metrics"]["max_rel_error"]] for link in links}
    print(sizes, worst)
    if chosen.out:
        whole = {"machine": fingerprint(()), "stages": stages, "bytes": sizes, "links": worst}
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(canonical_json(whole))


if __name__ == "__main__":
    main()
