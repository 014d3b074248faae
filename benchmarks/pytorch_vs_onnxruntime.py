"""Latency of `bench --target cpu-torch` against ONNX Runtime: one network per method, both in the same rounds.

    python benchmarks/pytorch_vs_onnxruntime.py [--kinds digits published] [-o result.json] [--page docs/benchmarks.md]
    python benchmarks/pytorch_vs_onnxruntime.py --of result.json --page docs/benchmarks.md     # only writes the table

Networks are the trained ones that are installed with repaconv (digits), and published sizes with seeded weights: FP32,
batch size 1, one thread. One side is the folded module, run by torch in eager mode; the other is the graph of the same
fold as `repaconv.export` writes it for this CPU. Their outputs are compared first.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from estimate_error import MODELS

import repaconv
from repaconv.benchmark.machine_fingerprint import fingerprint
from repaconv.core import plugins
from repaconv.core.files import canonical_json
from repaconv.models import METHODS, checkpoint

DIGITS = "digits"
KINDS = (DIGITS, "published")
START, END = (
    "<!-- PyTorch and ONNX Runtime: make bench-pytorch writes this -->",
    "<!-- end of PyTorch and ONNX Runtime -->",
)


def row_of(method: str, size: str, checkpoint: Path, rounds: int) -> dict[str, Any]:
    """One network, its run in this folder."""
    repaconv.fold(checkpoint, method=method, out="run")
    repaconv.export("run")
    done = repaconv.bench("run", target="cpu-torch", against="run/model.onnx", rounds=rounds)
    assert done.ratio is not None
    assert done.agreement is not None
    ours, graph = done.latencies
    found = {
        "method": method,
        "size": size,
        "torch_ms": round(ours.p50_ms, 3),
        "onnxruntime_ms": round(graph.p50_ms, 3),
        "onnxruntime_as_fast": [round(1 / value, 3) for value in (done.ratio.median, done.ratio.high, done.ratio.low)],
        "agreement": done.agreement.verdict,
        "measurement": done.quality.verdict,
        "reasons": list(done.quality.reasons),
    }
    print(found, flush=True)
    return found


def networks(kinds: list[str]) -> Iterator[tuple[str, str, Path]]:
    """Method, size and checkpoint of each: the trained ones that come along, and published sizes, written here."""
    for method in METHODS if DIGITS in kinds else ():
        yield method, DIGITS, checkpoint(method)
    for method, size, beside in MODELS if "published" in kinds else ():
        torch.save({"model": plugins.load(plugins.METHODS, method).example(size, seed=1), **beside}, "c.pth")
        yield method, size, Path("c.pth")


def measured(given: Namespace) -> dict[str, Any]:
    """Every network, its run in a folder that goes with it."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            rows = []
            for network in networks(given.kinds):
                rows.append(row_of(*network, given.rounds))
                shutil.rmtree("run")
        finally:
            os.chdir(before)
    return {"machine": {**fingerprint(()), "torch": torch.__version__}, "rounds": given.rounds, "rows": rows}


def table(result: dict[str, Any]) -> str:
    """The result as the page has it."""
    machine, rows = result["machine"], result["rows"]
    versions = f"torch {machine['torch']}, ONNX Runtime {machine['onnxruntime']}"
    lines = [
        f"{machine['cpu']}, {versions}, {result['rounds']} rounds;",
        f"{[row['measurement'] for row in rows].count('trusted')} of the {len(rows)} measurements were trusted.",
        "",
        "| Method | Size | torch | ONNX Runtime | Speedup over torch | Same outputs | Measurement |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        median, low, high = row["onnxruntime_as_fast"]
        cells = [row["method"], row["size"], f"{row['torch_ms']:.2f} ms", f"{row['onnxruntime_ms']:.2f} ms"]
        cells += [f"{median:.2f} ({low:.2f} to {high:.2f})", row["agreement"], row["measurement"]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def put(result: dict[str, Any], page: Path) -> None:
    """Write the table in place of what the page had."""
    before, _, rest = page.read_text().partition(START)
    page.write_text(f"{before}{START}\n\n{table(result)}\n\n{END}{rest.partition(END)[2]}")


def main() -> None:
    """Measure or read, write the result and the table where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--of", type=Path, help="a result, instead of measuring")
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--page", type=Path)
    given = parser.parse_args()
    found = json.loads(given.of.read_text()) if given.of else measured(given)
    if given.out:
        given.out.write_text(canonical_json(found))
    if given.page:
        put(found, given.page)


if __name__ == "__main__":
    main()
