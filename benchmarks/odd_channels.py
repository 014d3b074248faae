"""What filling channels up to whole blocks gains: six layers of so many channels, the form `whole-blocks` or not.

    python benchmarks/odd_channels.py [--rounds 60] [-o benchmarks/results/odd_channels.json]

ONNX Runtime, float32, one thread, batch 1, interleaved; layers of all channels, and those with a convolution between
that takes each channel by itself.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import nn

import repaconv
from repaconv.files import canonical_json
from repaconv.forms.padding import WHOLE_BLOCKS
from repaconv.graphs.graph import rewritten
from repaconv.measure.fingerprint import fingerprint
from repaconv.measure.processors import family

WIDTHS = (9, 11, 13, 18, 22, 26, 30, 42, 58, 90)
PLACES = (28, 112)
LAYERS = 6


def dense(width: int) -> nn.Module:
    """3 x 3 convolutions of all channels."""
    layers = [layer for _ in range(LAYERS) for layer in (nn.Conv2d(width, width, 3, 1, 1), nn.ReLU())]
    return nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), nn.ReLU(), *layers, nn.Conv2d(width, 8, 1))


def depthwise(width: int) -> nn.Module:
    """3 x 3 convolutions of each channel between two of all."""
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        each = nn.Conv2d(width, width, 3, 1, 1, groups=width)
        layers += [nn.Conv2d(8, width, 1), nn.ReLU(), each, nn.ReLU(), nn.Conv2d(width, 8, 1)]
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), *layers)


def measured(module: nn.Module, places: int, rounds: int) -> dict[str, Any] | None:
    """How many times as fast it is; None where the form leaves it alone."""
    with tempfile.TemporaryDirectory() as folder:
        plain, filled = (Path(folder, f"{name}.onnx") for name in ("plain", "filled"))
        image = torch.zeros(1, 3, 2 * places, 2 * places)
        torch.onnx.export(module.eval(), (image,), plain, dynamo=True, external_data=False, verbose=False)
        graph, changes = rewritten(onnx.load(plain), [WHOLE_BLOCKS])
        if not changes:
            return None
        onnx.save(graph, filled)
        found = repaconv.bench(filled, against=plain, rounds=rounds, threads=1, batch=1)
        assert found.ratio is not None
        return {"ratio": [round(getattr(found.ratio, end), 3) for end in ("median", "low", "high")]}


def main() -> None:
    """Measure all; print a line each."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=60)
    options.add_argument("-o", "--out", type=Path)
    given = options.parse_args()
    torch.manual_seed(0)
    rows = []
    for kind in (dense, depthwise):
        for width in WIDTHS:
            for places in PLACES:
                found = measured(kind(width), places, given.rounds)
                rows.append({"layers": kind.__name__, "width": width, "places": places, **(found or {"ratio": None})})
                print(rows[-1], flush=True)
    if given.out:
        result = {"family": family("x86_64"), "machine": fingerprint(()), "rows": rows}
        given.out.write_text(canonical_json(result))


if __name__ == "__main__":
    main()
