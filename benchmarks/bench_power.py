"""What `bench` sees: a planted slow-down of 5%, nothing at all, and somebody else's load.

    python benchmarks/bench_power.py [--runs 20] [-o result.json]

Two ONNX models of one kind: 40 matrix products, and 42, which is 5% more work. Each run is a whole `bench`, one thread,
and under a minute:

- planted: 42 against 40; called if bench says *faster*;
- same: 40 against a copy; called if bench says *faster* or *slower*;
- load: the same with a process that spins on every core during it; its verdict must not be *trusted*.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import repaconv
from repaconv.benchmark.machine_fingerprint import fingerprint
from repaconv.core.files import canonical_json

LAYERS, MORE, WIDTH, TOKENS = 40, 42, 192, 256


def model(layers: int, path: Path) -> Path:
    """[B, 3, 8, TOKENS] to [B, 3, 8, WIDTH]: products with one orthogonal matrix, so that numbers stay as large."""
    random = np.random.default_rng(0)
    square = np.linalg.qr(random.standard_normal((WIDTH, WIDTH)))[0].astype(np.float32)
    first = (random.standard_normal((TOKENS, WIDTH)) / TOKENS**0.5).astype(np.float32)
    nodes = [helper.make_node("MatMul", ["input", "first"], ["v0"], "first/MatMul")]
    # A node in between, so that no runtime composes the products.
    for number in range(layers):
        nodes.append(helper.make_node("MatMul", [f"v{number}", "w"], [f"p{number}"], f"layer.{number}/MatMul"))
        nodes.append(helper.make_node("Relu", [f"p{number}"], [f"v{number + 1}"], f"layer.{number}/Relu"))
    made = helper.make_graph(
        nodes,
        "products",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, (1, 3, 96, TOKENS))],
        [helper.make_tensor_value_info(f"v{layers}", TensorProto.FLOAT, (1, 3, 96, WIDTH))],
        [numpy_helper.from_array(square, "w"), numpy_helper.from_array(first, "first")],
    )
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def one(subject: Path, other: Path, seed: int) -> dict[str, object]:
    """A run of bench, and how long it took."""
    begin = time.perf_counter()
    found = repaconv.bench(subject, against=other, seed=seed)
    assert found.ratio is not None
    return {
        "called": found.ratio.verdict,
        "ratio": [found.ratio.median, found.ratio.low, found.ratio.high],
        "openings": found.openings,
        "verdict": found.quality.verdict,
        "reasons": list(found.quality.reasons),
        "seconds": round(time.perf_counter() - begin, 2),
    }


def main() -> None:
    """Run, count, print; write the result where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("-o", "--out", type=Path)
    chosen = parser.parse_args()
    results: dict[str, list[dict[str, object]]] = {"planted": [], "same": [], "load": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain, slower = model(LAYERS, folder / "plain.onnx"), model(MORE, folder / "slower.onnx")
        copy = Path(shutil.copy(plain, folder / "copy.onnx"))
        for seed in range(chosen.runs):
            results["planted"].append(one(plain, slower, seed))
            results["same"].append(one(plain, copy, seed))
            print(seed, results["planted"][-1], results["same"][-1], flush=True)
        hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
        try:
            results["load"].append(one(plain, slower, 0))
        finally:
            for hog in hogs:
                hog.kill()
                hog.wait()
    counts = {kind: dict(Counter(str(run["called"]) for run in runs)) for kind, runs in results.items()}
    verdicts = {kind: dict(Counter(str(run["verdict"]) for run in runs)) for kind, runs in results.items()}
    longest = max(float(str(run["seconds"])) for runs in results.values() for run in runs)
    print(counts, verdicts, f"longest {longest} s")
    if chosen.out:
        whole = {"machine": fingerprint(()), "called": counts, "verdicts": verdicts, "runs": results}
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(canonical_json(whole))


if __name__ == "__main__":
    main()
