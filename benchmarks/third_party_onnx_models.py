"""Trained ONNX models of other projects: speed and outputs of each original against what `repaconv fold` makes of it.

    python benchmarks/third_party_onnx_models.py FILE.onnx[@HxW] ... [-o rows.jsonl]

Models are text detectors and recognizers, classifiers, and what other packages install. `@HxW` is the image size where
it is dynamic. A row is printed for each and, with -o, appended to a file; for the documentation that is
`benchmarks/results/third_party_onnx_models.jsonl`. Rows are identified by the hash of the model file. Run it on a quiet
machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import repaconv
from repaconv.benchmark.cpu_isa_level import isa_level
from repaconv.benchmark.machine_fingerprint import cpu_model
from repaconv.core.files import sha256_of


def row_of(given: Path, size: tuple[int, int] | None) -> dict[str, Any]:
    """What the fold says, and how fast it is beside the graph as given."""
    with tempfile.TemporaryDirectory() as folder:
        best = Path(folder) / "folded.onnx"
        fold = repaconv.fold(given, out=best, force=True)
        row = {"name": given.stem, "sha256": sha256_of(given), "opset": fold.opset, "verdict": fold.verdict}
        row |= {"changes": len(fold.changes), "nodes": list(fold.nodes)}
        if not fold.changes:
            return row
        found = repaconv.bench(best, against=given, batch=1, image_size=size)
    ratio, agreement = found.ratio, found.agreement
    assert ratio is not None
    assert agreement is not None
    measured = {"ratio": ratio.median, "low": ratio.low, "high": ratio.high}
    row |= {name: round(value, 4) for name, value in measured.items()}
    return row | {"openings": found.session_loads, "agreement": agreement.verdict}


def main() -> None:
    """One after the other."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("graphs", nargs="+", metavar="FILE.onnx[@HxW]")
    options.add_argument("-o", "--out", type=Path)
    given = options.parse_args()
    for word in given.graphs:
        name, _, size = word.partition("@")
        height, _, width = size.partition("x")
        sizes = (int(height), int(width or height)) if size else None
        row = {**row_of(Path(name), sizes), "cpu": cpu_model(), "family": isa_level("x86_64")}
        sys.stdout.write(json.dumps(row) + "\n")
        if given.out:
            with given.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
