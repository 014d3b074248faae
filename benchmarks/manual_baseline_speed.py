"""Speedup of repaconv over a manual baseline of the same network: all five methods, published sizes.

    python benchmarks/manual_baseline_speed.py [--batch 1 8 32] [--threads 1 2] [--rounds 40] [--preset NAME]
        [-o result.json]
    python benchmarks/manual_baseline_speed.py --markdown result.json    # only prints the tables of docs/benchmarks.md

The manual baseline (`benchmarks/manual_baselines`) is the official inference-time network, torch.onnx.export, onnxsim,
and a session of ONNX Runtime with its defaults. repaconv is `repaconv.fold` and `repaconv.export` with theirs. Both
start from one seeded training-time checkpoint: FP32, graphs of fixed sizes, each pair interleaved in one process. Their
outputs are compared first.

The required speedups are for the first batch size and thread count; the others get fewer rounds.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxsim
import torch
from manual_baseline_models import MODELS, Model
from manual_baseline_tables import markdown, summary, summary_line
from manual_baselines import export_and_session
from numpy.typing import NDArray

import repaconv
from repaconv.benchmark.interleaved_protocol import Entrant, Protocol, measure, pinned_to_cores
from repaconv.benchmark.machine_fingerprint import fingerprint
from repaconv.benchmark.measurement_quality import FEWEST_ROUNDS
from repaconv.benchmark.roofline import measured_limits
from repaconv.core.files import canonical_json
from repaconv.engines.contract import SessionSpec
from repaconv.engines.onnxruntime_cpu import ENGINE
from repaconv.graph.compute_costs import known_macs_of_file
from repaconv.verification.input_batches import random_inputs
from repaconv.verification.model_runners import ImageSession

MANUAL_BASELINE, REPACONV = "hand-made", "repaconv"
IMAGES, SAME = 4, 1e-4
"""Number of images whose outputs are compared, and the maximum difference relative to the largest output."""


def built(model: Model, batches: list[int], preset: str) -> tuple[int, int]:
    """Write both graphs for every batch size into this folder, ``<name>.<batch>.onnx``; returns the image size."""
    checkpoint = model.checkpoint()
    torch.save(checkpoint, "c.pth")
    manual_baseline = model.deployed(checkpoint)
    del checkpoint
    folded = repaconv.fold("c.pth", force=True, preset=preset)
    Path("c.pth").unlink()
    for batch in batches:
        exported = repaconv.export(batch=batch, image_size=folded.image_size, onnx=f"{REPACONV}.{batch}.onnx")
        assert exported.verdict == "passed"
        export_and_session.export(
            manual_baseline, (batch, 3, *folded.image_size), Path(f"{MANUAL_BASELINE}.{batch}.onnx")
        )
        gc.collect()  # the exporter's graphs refer to themselves, and hold the weights
    return folded.image_size


def agreement(sessions: dict[str, Any], size: tuple[int, int], batch: int) -> dict[str, Any]:
    """On how many random images the outputs are equal, and their maximum relative error."""
    images = random_inputs((3, *size), count=batch * -(-IMAGES // batch), seed=0).images
    starts = range(0, len(images), batch)
    found = {name: np.concatenate([run(images[n : n + batch]) for n in starts]) for name, run in sessions.items()}
    errors = abs(found[REPACONV] - found[MANUAL_BASELINE]).max(1) / abs(found[MANUAL_BASELINE]).max(1)
    return {"images": len(images), "agreeing": int((errors <= SAME).sum()), "max_rel_error": float(errors.max())}


def compared(
    model: Model, size: tuple[int, int], batch: int, threads: int, rounds: int, *, has_required_speedup: bool
) -> dict[str, Any]:
    """One row: the pair measured in one interleaved run."""
    paths = {name: Path(f"{name}.{batch}.onnx") for name in (MANUAL_BASELINE, REPACONV)}
    opened = {
        MANUAL_BASELINE: lambda: export_and_session.runner(paths[MANUAL_BASELINE], threads),
        REPACONV: lambda: ImageSession(ENGINE.open(paths[REPACONV], SessionSpec(threads=threads))).run,
    }
    with pinned_to_cores(threads):
        same = agreement({name: load() for name, load in opened.items()}, size, batch)
        # FP32 rounding error may decide a merge of tokens: there only most images must agree
        assert same["agreeing"] > same["images"] // 2 if model.merges else same["agreeing"] == same["images"], same
        peak = measured_limits(ENGINE, (), threads, lambda: None).product_gflops()
    images = random_inputs((3, *size), count=batch, seed=1).images
    entrants = {name: Entrant(load, lambda run, _: partial(run, images)) for name, load in opened.items()}
    measured = measure(entrants, Protocol(rounds, warmup_rounds=10 if has_required_speedup else 3, cores=threads))
    faster = measured.ratio(REPACONV, MANUAL_BASELINE)
    believed = measured.quality(faster)
    return {
        "method": model.method,
        "model": model.name,
        "bar": model.bar if has_required_speedup else None,
        "batch": batch,
        "threads": threads,
        "rounds": rounds,
        "ratio": faster.model_dump(),
        "agreement": same,
        **_shares(measured.samples_ms, paths, peak),
        "measurement": believed.verdict,
        "reasons": list(believed.reasons),
    }


def _shares(samples_ms: Mapping[str, NDArray[np.float64]], paths: dict[str, Path], peak: float) -> dict[str, Any]:
    """Median latencies, and their share of the CPU's GEMM peak."""
    p50 = {name: float(np.median(samples)) for name, samples in samples_ms.items()}
    computed = {name: 2 * known_macs_of_file(onnx.load(path)) for name, path in paths.items()}
    return {
        "p50_ms": {name: round(value, 3) for name, value in p50.items()},
        "macs": {name: count // 2 for name, count in computed.items()},
        "peak_gflops": round(peak, 1),
        "share_of_peak": {name: round(computed[name] / p50[name] / 1e6 / peak, 3) for name in paths},
    }


def rows_of(model: Model, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All rows of one model, measured in a temporary folder."""
    batches = [batch for batch in given.batch if batch <= (given.vit_large_batch if model.large else batch)]
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            size = built(model, batches, given.preset)
            for batch in batches:
                for threads in given.threads:
                    has_required_speedup = (batch, threads) == (given.batch[0], given.threads[0])
                    rounds = given.rounds if has_required_speedup else given.other_rounds
                    yield compared(model, size, batch, threads, rounds, has_required_speedup=has_required_speedup)
                    gc.collect()
        finally:
            os.chdir(before)


def main() -> None:
    """Measure, print the rows, and write the result to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument(
        "--other-rounds", type=int, default=FEWEST_ROUNDS, help="rounds of rows without a required speedup"
    )
    parser.add_argument("--preset", default="default", help="rewrite preset for repaconv.fold")
    parser.add_argument(
        "--only", nargs="+", choices=sorted({model.method for model in MODELS}), help="measure only these methods"
    )
    parser.add_argument(
        "--vit-large-batch", type=int, default=8, help="largest batch size of ViT-L: at 32, one inference takes minutes"
    )
    parser.add_argument("--markdown", type=Path, metavar="RESULT", help="only print the tables of this result")
    parser.add_argument("-o", "--out", type=Path)
    given = parser.parse_args()
    if given.markdown:
        print(markdown(json.loads(given.markdown.read_text())))
        return
    models = [model for model in MODELS if given.only is None or model.method in given.only]
    skipped = [b for b in given.batch if b > given.vit_large_batch and any(model.large for model in models)]
    with pinned_to_cores(given.threads[0]) as cores:
        result: dict[str, Any] = {
            "machine": fingerprint(tuple(cores)),
            "onnxsim": onnxsim.__version__,
            "form": given.preset,
            "skipped": [f"the ViT-L at batch {batch}: a call takes too long" for batch in skipped],
            "rows": [],
        }
    for row in (row for model in models for row in rows_of(model, given)):
        print(summary_line(row), flush=True)
        result["rows"].append(row)
        result["summary"] = summary(result["rows"])
        if given.out:  # after every row, as a run takes most of an hour
            given.out.write_text(canonical_json(result))
    print("\n".join(result["summary"]["told"]))


if __name__ == "__main__":
    main()
