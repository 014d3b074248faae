"""Errors and changed top-1 predictions in lower precision, of sound graphs and of broken ones.

    python benchmarks/lower_precision_tolerances.py [-o result.json]

The tolerances in repaconv/verification/tolerances.py are based on these results. Networks are the five trained by
benchmarks/train, on held-out images, and networks with seeded random weights, on random images, whose top-1 margins are
all small. Each is exported in every precision (INT8 with both kinds of quantizer) and compared with its FP32 graph, as
`export` does. INT8 for another architecture runs as it is; on a CPU without VNNI, INT8 for x86-64 has 7-bit weights.
INT8 is also broken on purpose: half of the weights' bits are removed, or one layer's scale is doubled.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import torch
from onnx import numpy_helper

import repaconv
from repaconv import models
from repaconv.benchmark.machine_fingerprint import fingerprint
from repaconv.core import plugins
from repaconv.core.files import canonical_json
from repaconv.methods.nondeep.published_models import example_meta
from repaconv.onnx_export.fp16_and_int8 import QUANTIZED
from repaconv.results import MethodFold
from repaconv.sources.verified_onnx_export import runnable
from repaconv.stages.shared.lower_precision import loader_for, to_precision
from repaconv.stages.shared.target_lookup import load_target
from repaconv.verification.comparison import Comparison
from repaconv.verification.input_batches import Inputs, npz_inputs, random_inputs
from repaconv.verification.model_runners import ImageSession, load_onnx
from repaconv.verification.tolerances import POLICY_VERSION, tolerance

TRAINED = models.FOLDER
TARGETS = {"int8": "x86-64", "int8, symmetric": "orin-nano"}
HEADS = {"num_heads": "3"}
RANDOM: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("repavit", "tiny", HEADS),
    ("repavit", "tiny-swin", {}),
    ("repavit", "tiny-mixer", {}),
    ("nondeep", "tiny", {}),
    ("dwconv", "tiny", HEADS),
    ("pyra", "tiny", HEADS),
)
SEEDS = (1, 2, 3)
BATCH = 8


class Net(NamedTuple):
    """A float32 graph, the inputs by name that calibrate it and the images that judge it, in batches."""

    name: str
    model: onnx.ModelProto
    calibration: list[dict[str, Any]]
    test: list[Any]


def nets() -> Iterator[Net]:
    """Those that are trained, then those that are not."""
    for path in sorted(TRAINED.glob("*.pth")):
        calibration, test = (npz_inputs(TRAINED / name) for name in ("calibration.npz", "digits.npz"))
        yield _net(f"{path.stem}, trained", path, {}, calibration, test)
    for method, arch, settings in RANDOM:
        for seed in SEEDS:
            weights = plugins.load(plugins.METHODS, method).example(arch, seed)
            meta = example_meta() if method == "nondeep" else {}
            torch.save({"state_dict": weights, "meta": meta}, path := Path("c.pth"))
            yield _net(f"{method} {arch}, random weights {seed}", path, settings, None, None)


def _net(name: str, path: Path, settings: dict[str, str], calibration: Inputs | None, test: Inputs | None) -> Net:
    folded = repaconv.fold(path, settings=settings, preset="official", out="run", force=True)
    assert isinstance(folded, MethodFold)
    made = repaconv.export("run", batch=BATCH)
    model = onnx.load(Path("run") / made.payload.path)
    shape = (model.graph.input[0].type.tensor_type.shape.dim[1].dim_value, *folded.image_size)
    given = [calibration or random_inputs(shape, count=32, seed=1), test or random_inputs(shape, count=256, seed=2)]
    ranges, images_to_evaluate = (
        [part.images for part in each.batches(BATCH) if len(part.images) == BATCH] for each in given
    )
    return Net(name, model, [{model.graph.input[0].name: images} for images in ranges], images_to_evaluate)


def half_the_bits(model: onnx.ModelProto) -> onnx.ModelProto:
    """The weights of an int8 graph, of 4 bits."""
    for weight in model.graph.initializer:
        values = numpy_helper.to_array(weight)
        if values.dtype == np.int8 and values.ndim >= 2:
            low = (16 * np.round(values / 16).clip(-8, 7)).astype(np.int8)
            weight.CopyFrom(numpy_helper.from_array(low, weight.name))
    return model


def scale_off_by_2(model: onnx.ModelProto) -> onnx.ModelProto:
    """The input of the middle layer, read back by twice the scale that it was written by."""
    made = {name: node for node in model.graph.node for name in node.output}
    layers = [made.get(node.input[0]) for node in model.graph.node if node.op_type in QUANTIZED]
    backs = [node for node in layers if node is not None and node.op_type == "DequantizeLinear"]
    back = backs[len(backs) // 2]
    scale = next(weight for weight in model.graph.initializer if weight.name == back.input[1])
    doubled = numpy_helper.from_array(2 * numpy_helper.to_array(scale), f"{scale.name}_doubled")
    model.graph.initializer.append(doubled)
    back.input[1] = doubled.name
    return model


def rows_of(net: Net) -> Iterator[dict[str, Any]]:
    """One row a precision, and a way of being broken."""
    reference = ImageSession(load_onnx(net.model.SerializeToString()))
    expected = [reference.run(images) for images in net.test]
    for precision in ("fp16", "bf16", "int8", "int8, symmetric"):
        kind = precision.partition(",")[0]
        target = load_target(TARGETS.get(precision, "x86-64"))
        typed, _ = to_precision(net.model, kind, net.calibration, target)
        ways = {"sound": typed}
        if kind == "int8":
            for break_it in (half_the_bits, scale_off_by_2):
                (broken := onnx.ModelProto()).CopyFrom(typed)
                ways[break_it.__name__.replace("_", " ")] = break_it(broken)
        for way, model in ways.items():
            session = ImageSession(loader_for(target.architecture, kind)(runnable(model, kind).SerializeToString()))
            compared = Comparison(precision, tolerance(kind, decides="pyra" in net.name))
            for images, right in zip(net.test, expected, strict=True):
                compared.add({"logits": session.run(images)}, {"logits": right})
            (link,), found = compared.links(kind, "float32"), compared.metrics("logits")
            yield {
                "net": net.name,
                "precision": precision,
                "way": way,
                "images": found.images,
                "max_rel_error": found.max_rel_error,
                "norm_error": found.norm_error,
                "cosine": found.cosine,
                "flips_beyond_noise": found.top1_flips_that_matter,
                "flips_within_noise": found.top1_flips_within_noise,
                "leads_within_noise": found.top1_close,
                "verdict": link.verdict,
            }


def main() -> None:
    """Measure and print; write the result where asked."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("-o", "--out", type=Path)
    given = options.parse_args()
    out = given.out.resolve() if given.out else None
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for net in nets():
            for row in rows_of(net):
                rows.append(row)
                print(row, flush=True)
        os.chdir("/")
    if out:
        out.write_text(canonical_json({"policy": POLICY_VERSION, "machine": fingerprint(()), "rows": rows}))


if __name__ == "__main__":
    main()
