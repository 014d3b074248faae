"""CPU time of `verify` on 256 images, compared with the forward passes that it needs.

    python benchmarks/verify_command_cost.py [--rounds 5] [-o result.json]

RePaViT-Tiny 0.75 at 224 pixels, the whole chain: training-time network and fold in float64, stored in FP32, ONNX, and
the training-time network in FP32 on the first batch. The reference runs the same model runners on the same images, read
beforehand, and ignores their outputs. Both are interleaved in one process, with session and weights loaded. Then memory
is measured: the largest resident set of whole processes on 64 and on 512 images.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import repaconv
from repaconv.benchmark.latency_statistics import ratio
from repaconv.benchmark.machine_fingerprint import fingerprint
from repaconv.core.files import canonical_json
from repaconv.core.run_folder import Run
from repaconv.methods.repavit import METHOD
from repaconv.sources.source_of_run import source_model_of
from repaconv.stages.shared.input_selection import choose_inputs
from repaconv.verification.model_runners import load_onnx

ARGS = Namespace(idle_ratio=0.75, heuristic="static", feature_norm="BatchNorm", channel_idle=True, input_size=224)
IMAGES = 256


def prepare(folder: Path) -> Path:
    """A run with its ONNX model, and a folder of JPEG images as large as ImageNet's usually are."""
    torch.save({"model": METHOD.example("deit-tiny/0.75", 1), "args": ARGS}, folder / "c.pth")
    repaconv.fold(folder / "c.pth", out=folder / "run")
    repaconv.export(folder / "run")
    random = np.random.default_rng(0)
    (folder / "images").mkdir()
    for number in range(IMAGES):
        coarse = random.integers(0, 256, (25, 34, 3), dtype=np.uint8)
        picture = Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC)
        picture.save(folder / "images" / f"{number:04}.jpg", quality=90)
    return folder / "run"


def yardstick(run: Path, images: Path) -> float:
    """Milliseconds of the forward passes alone, on the batches that verify makes."""
    subject = source_model_of(Run(run))
    given = choose_inputs(subject, images=images)
    batches = list(given.batches())
    runners: list[Any] = [subject.reference, subject.exact, subject.stored, load_onnx(run / "model.onnx")]
    start = time.perf_counter()
    for batch in batches:
        for runner in runners:
            runner.run(batch.feeds(subject.inputs))
    return 1000 * (time.perf_counter() - start)


def verify(run: Path, images: Path) -> float:
    """Milliseconds from the first batch to the last verdict."""
    marks: list[float] = []

    def progress(_what: str, _done: int, total: int) -> None:
        if total:  # of images
            marks.append(time.perf_counter())

    done = repaconv.verify(run, images=images, progress=progress)
    assert done.verdict == "passed"
    return 1000 * (time.perf_counter() - marks[0])


def resident(run: Path, count: int) -> int:
    """Bytes of the largest resident set of a process that verifies so many random images."""
    code = "import sys, repaconv; repaconv.verify(sys.argv[1], count=int(sys.argv[2]))"
    done = subprocess.run(
        ["/usr/bin/time", "-f", "%M", sys.executable, "-c", code, str(run), str(count)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return 1024 * int(done.stderr.split()[-1])


def main() -> None:
    """Measure and print; write the result where asked."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("-o", "--out", type=Path)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = prepare(folder)
        samples: dict[str, list[float]] = {"forward passes": [], "verify": []}
        jobs = {"forward passes": yardstick, "verify": verify}
        for turn in range(given.rounds):
            for job in list(jobs) if turn % 2 else list(jobs)[::-1]:
                samples[job].append(jobs[job](run, folder / "images"))
        found = ratio(
            "forward passes", np.asarray(samples["forward passes"]), "verify", np.asarray(samples["verify"]), 0
        )
        memory = {str(count): resident(run, count) for count in (64, 512)}
    print(f"verify takes {found.median:.3f} times its forward passes ({found.low:.3f} to {found.high:.3f})")
    print(f"largest resident set: {memory}")
    if given.out:
        result = {"ratio": found.model_dump(), "samples_ms": samples, "resident_bytes": memory}
        given.out.write_text(canonical_json({**result, "images": IMAGES, "machine": fingerprint(())}))


if __name__ == "__main__":
    main()
