"""Speedup of padding channels to whole blocks of 16: stacks of six layers, with and without the rewrite.

    python benchmarks/channel_padding.py [--rounds 60] [-o benchmarks/results/channel_padding.json]

ONNX Runtime, FP32, one thread, batch size 1, interleaved. The stacks are convolutions over all channels, the same with
depthwise convolutions between them, and the same with grouped convolutions between them. Results of CPUs of other ISA
levels stay in the result file.
"""

from __future__ import annotations

import argparse
import json
import tempfile
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
from repaconv.graph.models_in_onnx_ir import rewritten
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.rewrites.speed.channel_padding import WHOLE_BLOCKS, WHOLE_BLOCKS_16, WHOLE_GROUPS, WHOLE_GROUPS_16

FORMS = {"avx2": (WHOLE_BLOCKS, WHOLE_GROUPS)}
"""What fills blocks up, and what joins groups, by family; with AVX-512 else, whose blocks are of 16 channels."""
WIDTHS, GROUPED = (9, 11, 13, 18, 22, 26, 30, 42, 58, 90), (2, 4, 8)
PLACES = (28, 112)
LAYERS = 6


def dense(width: int) -> nn.Module:
    """3 x 3 convolutions of all channels."""
    layers = [layer for _ in range(LAYERS) for layer in (nn.Conv2d(width, width, 3, 1, 1), nn.ReLU())]
    return nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), nn.ReLU(), *layers, nn.Conv2d(width, 8, 1))


def depthwise(width: int) -> nn.Module:
    """3 x 3 convolutions of each channel between two of all."""
    return between(8, width, width)


def grouped(width: int) -> nn.Module:
    """3 x 3 convolutions of 128 channels, so many at once, between two of all."""
    return between(32, 128, 128 // width)


def between(few: int, many: int, groups: int) -> nn.Module:
    """3 x 3 convolutions in groups, of many channels that are made of few."""
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        inner = nn.Conv2d(many, many, 3, 1, 1, groups=groups)
        layers += [nn.Conv2d(few, many, 1), nn.ReLU(), inner, nn.ReLU(), nn.Conv2d(many, few, 1)]
    return nn.Sequential(nn.Conv2d(3, few, 3, 2, 1), nn.ReLU(), *layers)


def measured(module: nn.Module, form: Rewrite, places: int, rounds: int) -> dict[str, Any] | None:
    """How many times as fast it is; None where the form leaves it alone."""
    with tempfile.TemporaryDirectory() as folder:
        plain, filled = (Path(folder, f"{name}.onnx") for name in ("plain", "filled"))
        image = torch.zeros(1, 3, 2 * places, 2 * places)
        torch.onnx.export(module.eval(), (image,), plain, dynamo=True, external_data=False, verbose=False)
        graph, changes = rewritten(onnx.load(plain), [form])
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
    here = isa_level("x86_64")
    blocks, groups = FORMS.get(here, (WHOLE_BLOCKS_16, WHOLE_GROUPS_16))
    rows = []
    for kind, form, widths in ((dense, blocks, WIDTHS), (depthwise, blocks, WIDTHS), (grouped, groups, GROUPED)):
        for width, places in product(widths, PLACES):
            found = measured(kind(width), form, places, given.rounds)
            rows.append({"layers": kind.__name__, "width": width, "places": places, **(found or {"ratio": None})})
            print(rows[-1], flush=True)
    if given.out:
        known = json.loads(given.out.read_text()) if given.out.is_file() else {}
        given.out.write_text(canonical_json({**known, here: {"machine": fingerprint(()), "rows": rows}}))


if __name__ == "__main__":
    main()
