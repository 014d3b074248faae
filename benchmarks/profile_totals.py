"""Accuracy of profiles: the sum over a profile's nodes against the latency measured without a profiler.

    python benchmarks/profile_totals.py [-o result.json]

Published sizes of the five methods with seeded weights, FP32, batch size 1, one thread.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from argparse import Namespace
from pathlib import Path

import torch

import repaconv
from repaconv.benchmark.machine_fingerprint import fingerprint
from repaconv.core import plugins
from repaconv.core.files import canonical_json
from repaconv.methods.nondeep.published_models import example_meta

REPAVIT = Namespace(idle_ratio=0.75, heuristic="static", feature_norm="BatchNorm", channel_idle=True, input_size=224)
MODELS = (
    ("repavit", "deit-tiny/0.75", {"args": REPAVIT}),
    ("repavit", "deit-base/0.75", {"args": REPAVIT}),
    ("riformer", "s12", {}),
    ("nondeep", "6x2", {"meta": example_meta(img_size=224, num_heads=12, num_branches=2)}),
    ("pyra", "vit-base/high", {}),
    ("dwconv", "vit-large/12", {}),
)
"""Method, published size, and what its trainer writes next to the weights."""


def main() -> None:
    """Profile each, print, write the result where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path)
    chosen = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name, size, metadata in MODELS:
            method = plugins.load(plugins.METHODS, name)
            torch.save({"model": method.example(size, seed=1), **metadata}, "c.pth")
            repaconv.fold("c.pth", force=True)
            repaconv.export()
            done = repaconv.bench(rounds=40, profile=True)
            found = done.profile
            assert found is not None
            rows.append(
                {
                    "model": f"{name} {size}",
                    "total_ms": found.total_ms,
                    "end_to_end_ms": found.end_to_end_ms,
                    "total_over_end_to_end": round(found.total_ms / found.end_to_end_ms, 4),
                    "share_of_peak": found.share_of_peak,
                    "peak_gflops": found.peak_gflops,
                    "measurement": done.quality.verdict,
                }
            )
            print(rows[-1], flush=True)
        machine = fingerprint(())
    if chosen.out:
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(canonical_json({"machine": machine, "models": rows}))


if __name__ == "__main__":
    main()
