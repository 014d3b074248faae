"""CPU time of `repaconv score` compared with forward passes of the same images: ViT-B/16 at 224, random weights.

    python benchmarks/score_command_cost.py [--images 256] [--rounds 3] [--threads 2] [-o result.json]

Both alternate on the same images, in batches of 8. The peak of memory is read before the run, after a quarter of the
images, and at the end: it must not grow with the number of images.
"""

from __future__ import annotations

import argparse
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch
from torch import Tensor

from repaconv.backbones.blockwise_vit import deploy_config, example_weights, published_net
from repaconv.backbones.vit_training_blocks import BlockTraits
from repaconv.backbones.vit_training_norms import NormTraits
from repaconv.benchmark.machine_fingerprint import fingerprint
from repaconv.conversion.head_scores import score
from repaconv.conversion.plain_vit import PlainViT, Reading
from repaconv.core.files import canonical_json
from repaconv.methods.dwconv.paper_equations import ConvBlock
from repaconv.methods.dwconv.token_mixer_reading import Mixer

BATCH = 8


def vit_base() -> PlainViT:
    """The network, every block attending."""
    norm = NormTraits("layer", 1e-6)
    mixer = Mixer("attention", (False,) * 12, 3 * 768, True)
    blocks = (ConvBlock(mixer, BlockTraits(norm, norm, scale1=False, scale2=False), 3072, swiglu=False),) * 12
    config = deploy_config({"image_size": (224, 224), "patch": 16, "width": 768, "classes": 1000}, blocks)
    weights = example_weights(published_net(config, blocks), 0, {"bias": 0.1, "pos_embed": 0.3, "token": 0.3})
    return PlainViT.of(replace(Reading(config=config, blocks=blocks), tensors=weights))


def images(count: int) -> Iterator[Tensor]:
    """Seeded, in batches."""
    for batch in range(count // BATCH):
        yield torch.randn(BATCH, 3, 224, 224, generator=torch.Generator().manual_seed(batch))


def forward(plain: PlainViT, count: int) -> float:
    """Seconds of processor time."""
    start = process_time()
    with torch.inference_mode():
        for batch in images(count):
            plain.net(batch)
    return process_time() - start


def scored(plain: PlainViT, count: int) -> float:
    """Likewise."""
    start = process_time()
    score(plain, images(count), 3)
    return process_time() - start


def peak_mib() -> int:
    """Of this process up to now."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def measured(count: int, rounds: int, threads: int) -> dict[str, Any]:
    """All rounds."""
    torch.set_num_threads(threads)
    plain = vit_base()
    forward(plain, BATCH)
    memory = [peak_mib()]
    scored(plain, max(BATCH, count // 4))
    memory.append(peak_mib())
    rows = []
    for _ in range(rounds):
        rows.append((forward(plain, count), scored(plain, count)))
        print(f"forward {rows[-1][0]:.1f} s, score {rows[-1][1]:.1f} s: {rows[-1][1] / rows[-1][0]:.3f}", flush=True)
    memory.append(peak_mib())
    ratios = [scoring / passing for passing, scoring in rows]
    return {
        "machine": fingerprint(()),
        "threads": threads,
        "images": count,
        "forward_s": [row[0] for row in rows],
        "score_s": [row[1] for row in rows],
        "ratio": [median(ratios), min(ratios), max(ratios)],
        "peak_mib": dict(zip(("before", "a quarter", "all"), memory, strict=True)),
    }


def main() -> None:
    """Measure, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("-o", "--out", type=Path)
    given = parser.parse_args()
    found = measured(given.images, given.rounds, given.threads)
    print(found["ratio"], found["peak_mib"])
    if given.out:
        given.out.write_text(canonical_json(found))


if __name__ == "__main__":
    main()
