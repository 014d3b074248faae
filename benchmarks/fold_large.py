"""Time and memory of folding a large checkpoint, compared with reading and writing the file.

    python benchmarks/fold_large.py [--rounds 5] [-o result.json]

RePaViT of ViT-Large and ViT-Huge, idle ratio 0.75, with seeded random weights whose statistics are those of trained
ones, in the official container. Whole processes are interleaved, imports included:

- copy: torch.load of the checkpoint, safetensors' save_file of its weights, fsync;
- fold: `repaconv fold`, with verification and hashes.

GNU time measures the wall time and the largest resident set of both, which includes the pages of the mapped file.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

import numpy as np
import torch

from repaconv.benchmark.latency_statistics import ratio
from repaconv.benchmark.machine_fingerprint import fingerprint
from repaconv.core.files import canonical_json
from repaconv.methods.repavit import METHOD

ARCHS = ("vit-large/0.75", "vit-huge/0.75")
ARGS = Namespace(idle_ratio=0.75, heuristic="static", feature_norm="BatchNorm", channel_idle=True, input_size=224)
COPY = """
import os, sys, torch
from safetensors.torch import save_file
save_file(torch.load(sys.argv[1], weights_only=False)["model"], sys.argv[2])
handle = os.open(sys.argv[2], os.O_RDWR)
os.fsync(handle)
"""


def timed(command: list[str]) -> tuple[float, int]:
    """Wall milliseconds and largest resident set in bytes, by GNU time."""
    done = subprocess.run(["/usr/bin/time", "-v", *command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    wall = re.search(r"Elapsed.*?: (?:(\d+):)?(\d+):([\d.]+)\n", done.stderr)
    resident = re.search(r"Maximum resident set size \(kbytes\): (\d+)", done.stderr)
    assert wall is not None
    assert resident is not None
    seconds = int(wall[1] or 0) * 3600 + int(wall[2]) * 60 + float(wall[3])
    return 1000 * seconds, 1024 * int(resident[1])


def measure(arch: str, folder: Path, rounds: int) -> dict[str, object]:
    """Both jobs in turn."""
    checkpoint, run = folder / "checkpoint.pth", folder / "run"
    torch.save({"model": METHOD.example(arch, 1), "args": ARGS}, checkpoint)
    fold = [sys.executable, "-m", "repaconv", "fold", str(checkpoint), "-o", str(run), "--force", "--quiet"]
    jobs = {"copy": [sys.executable, "-c", COPY, str(checkpoint), str(folder / "copy.safetensors")], "fold": fold}
    wall: dict[str, list[float]] = {name: [] for name in jobs}
    resident: dict[str, list[int]] = {name: [] for name in jobs}
    for turn in range(rounds):
        for name in list(jobs) if turn % 2 else list(jobs)[::-1]:
            milliseconds, peak = timed(jobs[name])
            wall[name].append(milliseconds)
            resident[name].append(peak)
    found = ratio("copy", np.asarray(wall["copy"]), "fold", np.asarray(wall["fold"]), seed=0)
    size = checkpoint.stat().st_size
    return {
        "arch": arch,
        "file_bytes": size,
        "fold_time_over_copy": {"median": found.median, "low": found.low, "high": found.high},
        "fold_peak_memory_over_file": max(resident["fold"]) / size,
        "copy_peak_memory_over_file": max(resident["copy"]) / size,
        "wall_ms": wall,
        "resident_bytes": resident,
    }


def main() -> None:
    """Measure and print; write the result where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-o", "--out", type=Path)
    chosen = parser.parse_args()
    results = []
    for arch in ARCHS:
        with tempfile.TemporaryDirectory() as folder:
            results.append(measure(arch, Path(folder), chosen.rounds))
        last = results[-1]
        print(arch, last["fold_time_over_copy"], f"memory {last['fold_peak_memory_over_file']:.2f} x file")
    if chosen.out:
        whole = {"rounds": chosen.rounds, "machine": fingerprint(()), "results": results}
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(canonical_json(whole))


if __name__ == "__main__":
    main()
