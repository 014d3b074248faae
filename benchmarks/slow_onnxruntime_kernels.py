"""Speedup of the rewrites of operators with slow kernels: six layers with an activation, with and without the rewrite.

    python benchmarks/slow_onnxruntime_kernels.py [--rounds 60] [-o benchmarks/results/slow_onnxruntime_kernels.json]

ONNX Runtime, FP32, one thread, batch size 1, interleaved: 3x3 convolutions over all channels, or 1x1 convolutions with
depthwise ones between them. A cubic Resize doubles height and width after each of two 3x3 convolutions. Results of CPUs
of other ISA levels stay in the result file.
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
from repaconv.graph.models_in_onnx_ir import rewritten
from repaconv.rewrites.speed.cubic_resize import RESIZE_AS_MATMUL
from repaconv.rewrites.speed.slow_onnxruntime_kernels import (
    LRN_AS_CONV,
    MISH_AS_QUOTIENT,
    PRELU_AS_SUM,
    SOFTMAX_AS_QUOTIENT,
)

LAYERS, RESIZED_LAYERS = 6, 2
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
    "Softmax over channels": (lambda width: nn.Softmax(1), SOFTMAX_AS_QUOTIENT),
    "LogSoftmax over channels": (lambda width: nn.LogSoftmax(1), SOFTMAX_AS_QUOTIENT),
    "LRN": (lambda width: nn.Sigmoid(), LRN_AS_CONV),
}
"""torch's exporter writes an LRN by other operators: it is put into the graph for a Sigmoid."""
RESIZES: dict[str, tuple[Activation, Any]] = {
    "cubic Resize": (lambda width: nn.Upsample(scale_factor=2, mode="bicubic"), RESIZE_AS_MATMUL)
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


def decoder(width: int, resize: Activation) -> nn.Module:
    """3x3 convolutions of all channels, each of an image of twice the height and width of the one before."""
    layers = [layer for _ in range(RESIZED_LAYERS) for layer in (nn.Conv2d(width, width, 3, 1, 1), resize(width))]
    return nn.Sequential(nn.Conv2d(8, width, 1), *layers)


def measured(module: nn.Module, rewrite: Any, places: int, rounds: int) -> dict[str, Any]:
    """The speedup of the rewrite, with its interval and verdict."""
    with tempfile.TemporaryDirectory() as folder:
        plain, other = (Path(folder, f"{name}.onnx") for name in ("plain", "rewritten"))
        image = torch.zeros(1, 8, places, places)
        torch.onnx.export(module.eval(), (image,), plain, dynamo=True, external_data=False, verbose=False)
        if rewrite is LRN_AS_CONV:
            onnx.save(_with_lrn(onnx.load(plain)), plain)
        graph, changes = rewritten(onnx.load(plain), [rewrite])
        assert len(changes) == (RESIZED_LAYERS if rewrite is RESIZE_AS_MATMUL else LAYERS)
        onnx.save(graph, other)
        found = repaconv.bench(other, against=plain, rounds=rounds, threads=1, batch=1)
        assert found.ratio is not None
        ratio = [round(getattr(found.ratio, end), 3) for end in ("median", "low", "high")]
        return {"ratio": ratio, "measurement": found.quality.verdict}


def _with_lrn(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph with a local response normalization, as AlexNet's, for each Sigmoid."""
    for node in model.graph.node:
        if node.op_type == "Sigmoid":
            lrn = onnx.helper.make_node("LRN", node.input, node.output, node.name, size=5, alpha=1e-4, beta=0.75)
            node.CopyFrom(lrn)
    return model


def main() -> None:
    """Measure all; print a line each."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=60)
    options.add_argument("--only", nargs="*", choices=(*ACTIVATIONS, *RESIZES), help="rows of others are kept")
    options.add_argument("-o", "--out", type=Path)
    given = options.parse_args()
    torch.manual_seed(0)
    rows = []
    networks = (*product((dense, depthwise), ACTIVATIONS.items()), *product((decoder,), RESIZES.items()))
    for (layers, (name, (activation, rewrite))), width, places in product(networks, WIDTHS, PLACES):
        if given.only and name not in given.only:
            continue
        found = measured(layers(width, activation), rewrite, places, given.rounds)
        rows.append({"layers": layers.__name__, "activation": name, "width": width, "places": places, **found})
        print(rows[-1], flush=True)
    if given.out:
        known = json.loads(given.out.read_text()) if given.out.is_file() else {}
        level = isa_level("x86_64")
        measured_before = known.get(level, {}).get("rows", ())
        kept = [row for row in measured_before if given.only and row["activation"] not in given.only]
        new = {"machine": fingerprint(()), "rows": kept + rows}
        given.out.write_text(canonical_json({**known, level: new}))


if __name__ == "__main__":
    main()
