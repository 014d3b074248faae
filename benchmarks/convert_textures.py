"""Accuracy and speed after `repaconv convert` on a harder dataset, with and without a short training.

    PYTHONPATH=benchmarks/train python benchmarks/convert_textures.py [--work build/curve] [--only NAME ...]
    PYTHONPATH=benchmarks/train python benchmarks/convert_textures.py --quick   # a short run of every step

`make bench-convert-textures` runs the first command and writes the page. An interrupted run resumes.

The network is a ViT on the images of `train/textures.py`, trained here if its checkpoint is missing
(`train/vit_textures.py`). The commands are those of a user: `convert`, `finetune`, `export`. Each network is
interleaved with the unconverted one, which runs exactly folded, in FP32 and in the lower precisions of this CPU. The
timed sessions also classify 2,000 images of another seed, which no other step has used. Each network has a row in
`benchmarks/results/convert_textures.jsonl`; `convert_textures_page.py` writes docs/convert.md from them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import textures
from vit_textures import EPOCHS, HEADS

import repaconv
from repaconv.benchmark.cpu_isa_level import isa_level
from repaconv.benchmark.interleaved_protocol import Entrant, Protocol, measure
from repaconv.benchmark.machine_fingerprint import fingerprint
from repaconv.checkpoints import read_checkpoint
from repaconv.conversion.attention_to_convolution import metadata
from repaconv.conversion.plain_vit import read_plain
from repaconv.core.files import sha256_of
from repaconv.engines.contract import Session
from repaconv.results import Link, Tolerance
from repaconv.stages.shared.model_opening import OpenedModel, open_model
from repaconv.stages.shared.safetensors_weights import write_checkpoint
from repaconv.stages.shared.target_lookup import load_target
from repaconv.verification.comparison import link_between
from repaconv.verification.input_batches import Batch
from repaconv.verification.model_runners import ImageSession, call_of

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks/results/convert_textures.jsonl"
SETTINGS = {"num_heads": str(HEADS)}
ORIGINAL, UNCONVERTED = "original", "unconverted"
ORT, OPENVINO = "x86-64", "x86-64-openvino"
BF16 = ("avx512-bf16", "amx")


class Sizes(NamedTuple):
    """How much of everything."""

    epochs: int = EPOCHS
    trained: int = 20_000
    finetuned: int = 10_000
    fitted: int = 2_000
    ranges: int = 500
    held_out: int = textures.HELD_OUT
    rounds: int = 200
    after: int = 3


QUICK = Sizes(epochs=1, trained=352, finetuned=120, fitted=120, ranges=48, held_out=48, rounds=20, after=1)


class Way(NamedTuple):
    """A conversion, and how long it is trained."""

    name: str
    kind: str
    asked: dict[str, Any]
    epochs: int = 0


def ways(after: int) -> tuple[Way, ...]:
    """All of the curve."""
    counts = {"depthwise": (1, 2, 3, 4, 5, 6), "static": (2, 4, 6), "ensembled": (3, 6)}
    replaced = [
        Way(f"{kind}, {count} of 6", kind, {"kind": kind, "blocks": str(count)})
        for kind, several in counts.items()
        for count in several
    ]
    merging = ("4,4,4,4,4,0", "8,8,8,8,8,0", "11,11,11,11,10,0", "16,12,9,0,0,0", "24,16,8,0,0,0", "32,16,8,0,0,0")
    merged = [Way(f"ToMe, {text}", "ToMe", {"method": "pyra", "schedule": text}) for text in merging]
    behind = {1: "0,24,16,8,0,0", 2: "0,0,32,16,0,0", 3: "0,0,0,32,0,0"}
    replaced += [
        Way(f"both, {count} of 6; {text}", "both", {"blocks": str(count), "schedule": text})
        for count, text in behind.items()
    ]
    converted = [*merged, *replaced]
    return (Way(UNCONVERTED, UNCONVERTED, {}), *converted, *(way._replace(epochs=after) for way in converted))


class Curve:
    """The network, its images and runs, in a folder of their own."""

    def __init__(self, work: Path, sizes: Sizes) -> None:
        """Train and make what is not there."""
        self.work, self.sizes = work, sizes
        self.source = work / "vit_textures.pth"
        self.images, self.ranges = work / "images.npz", work / "ranges.npz"
        if not self.source.is_file():
            asked = ["--epochs", str(sizes.epochs), "--count", str(sizes.trained), "-o", str(work)]
            subprocess.run([sys.executable, str(ROOT / "benchmarks/train/vit_textures.py"), *asked], check=True)
        self.sha256 = sha256_of(self.source)
        if not self.images.is_file():
            known = textures.made(sizes.finetuned, 0)
            np.savez(self.images, input=known.images, labels=known.labels)
            np.savez(self.ranges, input=known.images[: sizes.ranges], labels=known.labels[: sizes.ranges])
        self.held = textures.made(sizes.held_out, 1)
        self.exact = _graph(self.unconverted())

    def unconverted(self) -> Path:
        """The run of the network as it is, folded exactly: a conversion of no block."""
        folder, written = self.work / "runs" / UNCONVERTED, self.work / f"{UNCONVERTED}.safetensors"
        if not (folder / "fold.json").is_file():
            found = read_checkpoint(self.source)
            reading = read_plain(found, SETTINGS)
            write_checkpoint(written, reading.tensors, metadata(reading, found.origin, found.record))
            repaconv.fold(written, method="dwconv", out=folder)
        return folder

    def run(self, way: Way) -> Path:
        """Its run, made as a user makes it."""
        if way.name == UNCONVERTED:
            return self.unconverted()
        given = {"inputs": self.images, "samples": self.sizes.fitted, "settings": SETTINGS}
        folder = self.work / "runs" / way.name.replace(", ", "-").replace("; ", "-").replace(" ", "-").replace(",", ".")
        if not (folder / "fold.json").is_file():
            repaconv.convert(self.source, **given, **way.asked, out=folder)
        if not way.epochs:
            return folder
        trained = folder.with_name(f"{folder.name}-finetuned")
        if not (trained / "fold.json").is_file():
            repaconv.finetune(folder, inputs=self.images, epochs=way.epochs, out=trained)
        return trained

    def models(self, way: Way) -> dict[str, Callable[[], OpenedModel]]:
        """The exact form of the unconverted network, and this one in every precision; one image, one thread."""
        run, ort, openvino = self.run(way), load_target(ORT), load_target(OPENVINO)
        one = partial(partial, open_model, threads=1, dims={"batch": 1})
        found = {ORIGINAL: one(self.exact, ort)}
        if way.name != UNCONVERTED:  # of which float32 is what everything is held to
            found["float32"] = one(_graph(run), ort)
        found["int8"] = one(_graph(run, precision="int8", inputs=self.ranges), ort)
        if isa_level(openvino.architecture) in BF16:
            found["bfloat16"] = one(_graph(run, target=OPENVINO), openvino, "bf16")
        return found

    def row(self, way: Way) -> dict[str, Any]:
        """Measured: how many times as fast, and what of the held-out images it tells right."""
        begun = time.monotonic()
        models = self.models(way)
        image = Batch({"input": self.held.images[:1]})

        def call(model: OpenedModel, _inputs: None) -> Callable[[], Any]:
            return call_of(model.session, image.feeds(model.session.inputs))

        timed = measure(
            {name: Entrant(load, call) for name, load in models.items()}, Protocol(self.sizes.rounds, cores=1)
        )
        others = [name for name in models if name != ORIGINAL]
        speeds = {name: timed.ratio(name, ORIGINAL) for name in others}
        believed = timed.quality(speeds[others[0]])
        links = self.parity_links({name: load().session for name, load in models.items()})
        return {
            "name": way.name,
            "kind": way.kind,
            "epochs": way.epochs,
            "network": self.sha256,
            "held_out": len(self.held.labels),
            "accuracy": links[others[0]].accuracy.reference,
            "points": {name: _figures(speeds[name], links[name]) for name in others},
            "openings": timed.session_loads,
            "measurement": believed.verdict,
            "reasons": list(believed.reasons),
            "machine": str(fingerprint(())["cpu"]),
            "seconds": round(time.monotonic() - begun),
        }

    def parity_links(self, sessions: dict[str, Session]) -> dict[str, Link]:
        """What each makes of the held-out images, against the unconverted network."""
        outputs = {name: np.concatenate(list(self._classified(session))) for name, session in sessions.items()}
        links = {}
        for name in [name for name in outputs if name != ORIGINAL]:
            ends, allowed = ((each, outputs[each]) for each in (ORIGINAL, name)), Tolerance(kind="lossy")
            links[name] = link_between(name, *ends, logits=True, tolerance=allowed, labels=self.held.labels)
        return links

    def _classified(self, session: Session) -> Iterator[Any]:
        network = ImageSession(session)
        for n in range(len(self.held.labels)):
            yield network.run(self.held.images[n : n + 1])


def _graph(run: Path, **asked: Any) -> Path:
    return Path(repaconv.export(run, **asked).output_files[0])


def _figures(speed: Any, link: Link) -> dict[str, Any]:
    found = link.accuracy
    return {
        "speed": [speed.median, speed.low, speed.high],
        "accuracy": found.candidate,
        "difference": [found.difference, found.low, found.high],
    }


def rows(path: Path) -> list[dict[str, Any]]:
    """All that was measured."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def main() -> None:
    """Measure what is not measured of this network yet, row by row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=ROOT / "build/curve", help="the network, its images and runs")
    parser.add_argument("--quick", action="store_true", help="too little of everything, into a folder WORK-quick alone")
    parser.add_argument("--only", nargs="*", help="ways whose names begin so")
    given = parser.parse_args()
    work = given.work.with_name(f"{given.work.name}-quick") if given.quick else given.work
    result, sizes = (work / RESULT.name, QUICK) if given.quick else (RESULT, Sizes())
    work.mkdir(parents=True, exist_ok=True)
    curve = Curve(work.resolve(), sizes)
    done = {(row["name"], row["epochs"]) for row in rows(result) if row["network"] == curve.sha256}
    for way in ways(sizes.after):
        if (way.name, way.epochs) in done or not way.name.startswith(tuple(given.only or [""])):
            continue
        row = curve.row(way)
        with result.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
