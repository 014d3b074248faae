"""The tuner against an exhaustive search: how near its winner comes to the best form, and in what share of the time.

    python benchmarks/tuner.py [--rounds 40] [-o result.json]

Two published sizes with seeded weights, float32, batch 1, one thread. Both searches measure the same compositions of
the same rewrites in the same way; the winner is judged by the exhaustive search's own figures.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from argparse import Namespace
from pathlib import Path

import torch

import repaconv
from repaconv import registry
from repaconv.artefacts import TuneArtefact
from repaconv.files import canonical_json
from repaconv.measure.fingerprint import fingerprint
from repaconv.methods.nondeep.published import example_meta

REPAVIT = Namespace(idle_ratio=0.75, heuristic="static", feature_norm="BatchNorm", channel_idle=True, input_size=224)
MODELS = (
    ("repavit", "deit-tiny/0.75", {"args": REPAVIT}),
    ("nondeep", "6x2", {"meta": example_meta(img_size=224, num_heads=12, num_branches=2)}),
)
REWRITES = (
    "read-tokens", "scores-as-matrix", "patch-gemm", "attention-op", "linear-each", "rms-norm", "concat-linear",
    "linear-as-gemm",
)  # fmt: skip
"""Eight, of which nondeep has seven: all 256 and 128 compositions can be measured in minutes."""


def gain(rewrites: tuple[str, ...], searched: TuneArtefact) -> float:
    """Of a form over the default one, by the exhaustive search; equal graphs were measured once."""
    plain = [row for row in searched.candidates if not row.deployment.settings]
    rows = {row.deployment.rewrites: row.ratio.median for row in plain if row.ratio is not None}
    return rows.get(rewrites, 1.0)


def compare(method: str, size: str, beside: dict[str, object], rounds: int) -> dict[str, object]:
    """Both searches of one model."""
    torch.save({"model": registry.load(registry.METHODS, method).example(size, seed=1), **beside}, "c.pth")
    folded = Path(f"run-{method}")
    repaconv.fold("c.pth", out=folded)
    asked = {"rounds": rounds, "rewrites": REWRITES, "again": True, "budget_s": 1e6, "runtimes": ["onnxruntime"]}
    tuned = repaconv.tune(folded, **asked)
    patient = repaconv.tune(folded, exhaustive=True, **asked)
    best = gain(patient.deployment.rewrites, patient)
    row = {
        "model": f"{method} {size}",
        "compositions": len(patient.candidates),
        "winner": " + ".join(tuned.deployment.rewrites),
        "best": " + ".join(patient.deployment.rewrites),
        "winner_over_best": round(gain(tuned.deployment.rewrites, patient) / best, 4),
        "seconds": tuned.seconds,
        "exhaustive_seconds": patient.seconds,
        "share_of_time": round(tuned.seconds / patient.seconds, 4),
    }
    print(row, flush=True)
    return row


def main() -> None:
    """Compare, print, write the result where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("-o", "--out", type=Path)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        os.chdir(folder)
        rows = [compare(method, size, beside, chosen.rounds) for method, size, beside in MODELS]
        machine = fingerprint(())
    if chosen.out:
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(canonical_json({"machine": machine, "rounds": chosen.rounds, "models": rows}))


if __name__ == "__main__":
    main()
