"""Error of `bench --estimate` against `bench` of the same graph on this CPU, for all five methods.

    python benchmarks/estimate_error.py [--batch 1 8] [--rounds 12] [--times 3] [-o result.json] [--page PAGE]
    python benchmarks/estimate_error.py --of result.json --page docs/estimate-accuracy.md     # only writes the page

Networks have published sizes and seeded weights, as `repaconv.export` writes them: FP32, one thread of ONNX Runtime.
Measurement and estimate alternate, so that both run on the machine in the same state. The estimate is based on what one
large matrix product, one read of memory and the smallest nodes reach then. A row has the median, minimum and maximum.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

import repaconv
from repaconv.benchmark.machine_fingerprint import fingerprint
from repaconv.core import plugins
from repaconv.core.files import canonical_json
from repaconv.methods.nondeep.published_models import example_meta

REPAVIT = Namespace(idle_ratio=0.75, heuristic="static", feature_norm="BatchNorm", channel_idle=True, input_size=224)
MODELS = (
    ("repavit", "deit-tiny/0.75", {"args": REPAVIT}),
    ("nondeep", "6x2", {"meta": example_meta(img_size=224, num_heads=12, num_branches=2)}),
    ("riformer", "s12", {}),
    ("pyra", "vit-base/high", {}),
    ("dwconv", "vit-base/6", {}),
)
"""Method, published size, and what its trainer writes next to the weights."""
LARGE = ("pyra", "dwconv")
"""Measured at the first of the batches alone."""


def rows_of(method: str, size: str, metadata: dict[str, Any], given: Namespace) -> Iterator[dict[str, Any]]:
    """All rows of one model, in this folder."""
    torch.save({"model": plugins.load(plugins.METHODS, method).example(size, seed=1), **metadata}, "c.pth")
    folded = repaconv.fold("c.pth", method=method, force=True)
    repaconv.export(onnx="model.onnx")
    for batch in given.batch[:1] if method in LARGE else given.batch:
        turns = [turn(batch, folded.image_size, given.rounds) for _ in range(given.times)]
        row = {"method": method, "size": size, "batch": batch, "turns": turns}
        for name in ("low", "high"):
            ratios = [each[f"{name}_ms"] / each["p50_ms"] for each in turns]
            row[name] = [round(value, 3) for value in (median(ratios), min(ratios), max(ratios))]
        print(method, size, "batch", batch, "low", row["low"], "high", row["high"], flush=True)
        yield row


def turn(batch: int, size: tuple[int, int], rounds: int) -> dict[str, Any]:
    """One measurement, and the estimate behind it."""
    done = repaconv.bench("model.onnx", batch=batch, image_size=size, rounds=rounds)
    estimated = repaconv.estimate("model.onnx", batch=batch, image_size=size)
    return {
        "p50_ms": done.latencies[0].p50_ms,
        "measurement": done.quality.verdict,
        "low_ms": round(estimated.low_ms, 4),
        "high_ms": round(estimated.high_ms, 4),
        "peak_gflops": round(1e3 * estimated.limits.peak_tflops["fp32"], 1),
        "bandwidth_gb_s": estimated.limits.bandwidth_gb_s,
        "node_us": estimated.limits.launch_us,
    }


def page(result: dict[str, Any]) -> str:
    """The result as a page of docs/."""
    rows = result["rows"]
    inside = sum(row["low"][0] <= 1 <= row["high"][0] for row in rows)
    trusted = [each["measurement"] for row in rows for each in row["turns"]].count("trusted")
    lines = [
        "# How accurate estimates are",
        "",
        "An estimate of `bench --estimate` is a range. This page compares it with measurements on a CPU. *low* and",
        "*high* are the ends of the range relative to the measured latency, median of the turns (smallest to largest).",
        "The measured latency lies inside the range if low is at most 1 and high at least 1:",
        f"in {inside} of {len(rows)} rows. `make bench-estimate` writes this page.",
        "",
        f"{result['machine']['cpu']}, ONNX Runtime {result['machine']['onnxruntime']}, one thread, FP32, seeded",
        f"weights; {trusted} of the {sum(len(row['turns']) for row in rows)} measurements were trusted.",
        "",
        "| method | size | batch | p50 ms | low / measured | high / measured |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        ends = (f"{row[name][0]:.2f} ({row[name][1]:.2f} to {row[name][2]:.2f})" for name in ("low", "high"))
        taken = median(each["p50_ms"] for each in row["turns"])
        lines.append(f"| {row['method']} | {row['size']} | {row['batch']} | {taken:.2f} | {' | '.join(ends)} |")
    return "\n".join(
        [
            *lines,
            "",
            "The limits of the CPU were measured together with the estimates. The limits of boards and GPUs come from",
            "data sheets; estimates for them are untested.",
            "",
        ]
    )


def measured(given: Namespace) -> dict[str, Any]:
    """Every model in a folder of its own that goes with it."""
    rows, before = [], Path.cwd()
    for method, size, metadata in MODELS:
        if given.only and method not in given.only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            try:
                rows += list(rows_of(method, size, metadata, given))
            finally:
                os.chdir(before)
    return {"machine": fingerprint(()), "rounds": given.rounds, "rows": rows}


def main() -> None:
    """Measure or read, write the result and the page where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--times", type=int, default=3, help="turns of measurement and estimate")
    parser.add_argument("--only", nargs="+", help="methods")
    parser.add_argument("--of", type=Path, help="a result, instead of measuring")
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--page", type=Path)
    given = parser.parse_args()
    found = json.loads(given.of.read_text()) if given.of else measured(given)
    if given.out:
        given.out.write_text(canonical_json(found))
    if given.page:
        given.page.write_text(page(found))


if __name__ == "__main__":
    main()
