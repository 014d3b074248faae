"""What `mish-as-quotient` and `prelu-as-sum` gain: six layers with the activation, the rewrite or not.

    python benchmarks/slow_activations.py [--rounds 60] [-o benchmarks/results/slow_activations.json]

ONNX Runtime, float32, one thread, batch 1, interleaved: 3x3 convolutions of all channels, or 1x1 convolutions with
depthwise ones between them. A file keeps what it has of processors of other families.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import nn

import repaconv
from repaconv.benchmark.cpu_isa_level import isa_level
from repaconv.benchmark.machine_fingerprint import fingerprint
from repaconv.core.files import canonical_json
from repaconv.graph.model_rewriting import rewritten
from repaconv.rewrites.speed.slow_activations import MISH_AS_QUOTIENT, PRELU_AS_SUM

LAYERS = 6
WIDTHS, PLACES = (12, 64, 256), (14, 56)
Activation = Callable[[int], nn.Module]


def prelu(slopes: int) -> nn.Module:
    """One slope for each channel, as after training."""
    made = nn.PReLU(slopes)
    nn.init.uniform_(made.weight, 0.05, 0.5)
    return made


ACTIVATIONS: dict[str, tuple[Activation, Any]] = {
    "PReLU": (prelu, PRELU_AS_SUM),
    "PReLU, one slope": (lambda width: nn.PReLU(), PRELU_AS_SUM),
    "Mish": (lambda width: nn.Mish(), MISH_AS_QUOTIENT),
}


def dense(width: int, activation: Activation) -> nn.Module:
    """3x3 convolutions of all channels."""
    layers = [layer for _ in range(LAYERS) for layer in (nn.Conv2d(width, width, 3, 1, 1), activation(width))]
    return nn.Sequential(nn.Conv2d(8, width, 1), *layers)


def depthwise(width: int, activation: Activation) -> nn.Module:
    """Depthwise 3x3 convolutions and 1x1 convolutions of all channels, in turn."""
    layers: list[nn.Module] = [nn.Conv2d(8, width, 1)]
    for _ in range(LAYERS // 2):
        layers += [nn.Conv2d(width, width, 3, 1, 1, groups=width), activation(width)]
        layers += [nn.Conv2d(width, width, 1), activation(width)]
    return nn.Sequential(*layers)


def measured(module: nn.Module, rewrite: Any, places: int, rounds: int) -> dict[str, Any]:
    """The speedup of the rewrite, with its interval and verdict."""
    with tempfile.TemporaryDirectory() as folder:
        plain, other = (Path(folder, f"{name}.onnx") for name in ("plain", "rewritten"))
        image = torch.zeros(1, 8, places, places)
        torch.onnx.export(module.eval(), (image,), plain, dynamo=True, external_data=False, verbose=False)
        graph, changes = rewritten(onnx.load(plain), [rewrite])
        assert len(changes) == LAYERS
        onnx.save(graph, other)
        found = repaconv.bench(other, against=plain, rounds=rounds, threads=1, batch=1)
        assert found.ratio is not None
        ratio = [round(getattr(found.ratio, end), 3) for end in ("median", "low", "high")]
        return {"ratio": ratio, "measurement": found.quality.verdict}


def main() -> None:
    """Measure all; print a line each."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=60)
    options.add_argument("-o", "--out", type=Path)
    given = options.parse_args()
    torch.manual_seed(0)
    rows = []
    for layers, name, width, places in product((dense, depthwise), ACTIVATIONS, WIDTHS, PLACES):
        activation, rewrite = ACTIVATIONS[name]
        found = measured(layers(width, activation), rewrite, places, given.rounds)
        rows.append({"layers": layers.__name__, "activation": name, "width": width, "places": places, **found})
        print(rows[-1], flush=True)
    if given.out:
        known = json.loads(given.out.read_text()) if given.out.is_file() else {}
        new = {"machine": fingerprint(()), "rows": rows}
        given.out.write_text(canonical_json({**known, isa_level("x86_64"): new}))


if __name__ == "__main__":
    main()
