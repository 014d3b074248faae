"""Accuracy after `repaconv convert` without training: each block of a ViT trained on digits is replaced, by every kind.

    python benchmarks/convert_digits.py [-o result.json] [--page docs/convert.md]
    python benchmarks/convert_digits.py --of result.json --page docs/convert.md     # only writes the page

The model has width 48, 6 blocks of 4 heads, 8 x 8 patches and no class token. Model and split are those of the shared
checkpoints. The 1,297 training images are split by content, as `repaconv convert` does: half calibrate, a quarter
validates. All rows are evaluated on the 500 images that the model was not trained on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from repaconv.checkpoints import read_checkpoint
from repaconv.conversion.block_selection import SelectionData, best_conversion, single_block_errors
from repaconv.conversion.conversion_evaluation import Budget, Evaluation
from repaconv.conversion.head_scores import score
from repaconv.conversion.image_splits import ImageSplits, Split, split_images
from repaconv.conversion.kernel_fitting import ConversionSettings
from repaconv.conversion.plain_vit import BATCH_SIZE, PlainViT, read_plain
from repaconv.core.files import canonical_json
from repaconv.core.progress import silent
from repaconv.verification.input_batches import Batch, Inputs

MODEL = Path(__file__).resolve().parents[2] / "shared/checkpoints/dwconv/digits_vit.pth"
HALF, ALL = 3, 6
MARK = "<!-- figures of benchmarks/convert_digits.py -->\n"


class Row(NamedTuple):
    """What is converted: how, by which order, how many blocks."""

    name: str
    how: ConversionSettings
    order: str = "error"
    counts: tuple[int, ...] = (HALF, ALL)


ROWS = (
    Row("depthwise 3x3", ConversionSettings(), counts=(1, 2, 3, 6)),
    Row("depthwise 3x3, the paper's order", ConversionSettings(), order="sigma", counts=(1, 2, 3)),
    Row("ensembled 3x3", ConversionSettings("ensembled")),
    Row("static", ConversionSettings("static")),
    Row("control: 1x1, no neighbors", ConversionSettings(kernel=1)),
    Row("baseline: Gaussian kernel", ConversionSettings(fit="gaussian")),
    Row("baseline: mean attention as kernel", ConversionSettings(fit="mean")),
)


def digits() -> tuple[Split, Split]:
    """To calibrate on, and held out, as the model was trained: 8 x 8 pixels enlarged to 32 x 32."""
    from sklearn.datasets import load_digits

    found = load_digits()
    grey = torch.tensor(found.images / 16, dtype=torch.float32)[:, None]
    large = nn.functional.interpolate(grey, size=(32, 32), mode="bilinear", align_corners=False)
    images = ((large - 0.5) / 0.5).repeat(1, 3, 1, 1)
    order = np.random.RandomState(0).permutation(len(images))
    return tuple(Split(images[some], found.target[some]) for some in (order[:1297], order[1297:]))  # type: ignore[return-value]


def calibration(training: Split) -> ImageSplits:
    """Parted as `repaconv convert` parts images."""

    def piece(start: int, stop: int) -> Batch:
        return Batch({"input": training.images[start:stop].numpy()}, labels=training.labels[start:stop])

    return split_images(Inputs("digits", tuple(training.images.shape), piece), len(training.images))


def measured() -> dict[str, Any]:
    """All rows."""
    plain = PlainViT.of(read_plain(read_checkpoint(MODEL), {"num_heads": "4"}))
    training, held_out = digits()
    parted = calibration(training)
    rig, held = SelectionData.of(plain, parted), Evaluation(plain.net, held_out, logits=True)
    errors = single_block_errors(rig, ConversionSettings(), silent)
    scores = score(plain, torch.split(parted.calibration.images, BATCH_SIZE), 3).with_errors(errors)
    orders = {"error": scores.by_error, "sigma": scores.by_sigma}
    return {
        "base_accuracy": float((held.right.argmax(1).numpy() == held_out.labels).mean()),
        "images": {**parted.share.model_dump(), "held_out": len(held_out.labels)},
        "orders": orders,
        "scores": [block.model_dump(exclude={"heads"}) for block in scores.blocks],
        "rows": [figures for row in ROWS for figures in evaluated(row, orders[row.order], rig, held)],
    }


def evaluated(row: Row, order: tuple[int, ...], rig: SelectionData, held: Evaluation) -> Iterator[dict[str, Any]]:
    """A row for each number of blocks."""
    for count in row.counts:
        found = best_conversion(rig, row.how, order[:count], Budget()).made
        link = held.link(found.net, Budget())
        error = held.tried(found.net, order[:count], Budget()).error
        figures = {"name": row.name, "order": row.order, "blocks": sorted(order[:count]), "error": error}
        figures |= {"accuracy": link.accuracy.candidate, "kl": link.metrics.kl_divergence}
        print(*figures.values(), flush=True)
        yield {**figures, "low": link.accuracy.low, "high": link.accuracy.high, "refitted": list(found.refitted)}


def table(result: dict[str, Any]) -> str:
    """The figures as a page has them."""
    images, rows = result["images"], result["rows"]
    names = list(dict.fromkeys(row["name"] for row in rows))
    lines = [
        f"Accuracy on {images['held_out']} held-out images, {result['base_accuracy']:.1%} before conversion; "
        f"{images['fitting']} images fitted, {images['choosing']} chose, then",
        f"fitted too. By measured error the blocks are replaced in the order {_listed(result['orders']['error'])}, by",
        f"the paper's Sigma in the order {_listed(result['orders']['sigma'])}.",
        "",
        "| blocks replaced, of 6 | " + " | ".join(map(str, range(1, ALL + 1))) + " |",
        "|---|" + "---|" * ALL,
    ]
    for name in names:
        found = {len(row["blocks"]): f"{row['accuracy']:.1%}" for row in rows if row["name"] == name}
        lines.append(f"| {name} | " + " | ".join(found.get(count, "") for count in range(1, ALL + 1)) + " |")
    half = next(row for row in rows if row["name"] == names[0] and len(row["blocks"]) == HALF)
    lines += [
        "",
        f"Half of the blocks as 3x3 convolutions: {half['low']:+.1%} to {half['high']:+.1%} of accuracy (95%),",
        f"KL {half['kl']:.3f}.",
    ]
    return "\n".join(lines) + "\n"


def _listed(blocks: list[int]) -> str:
    return ", ".join(map(str, blocks))


def main() -> None:
    """Measure or read, write the result, and the table into the page between its marks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", type=Path, help="a result, instead of measuring")
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--page", type=Path)
    given = parser.parse_args()
    found = json.loads(given.of.read_text()) if given.of else measured()
    if given.out:
        given.out.write_text(canonical_json(found))
    if given.page:
        before, _, after = given.page.read_text().split(MARK)
        given.page.write_text(f"{before}{MARK}{table(found)}{MARK}{after}")


if __name__ == "__main__":
    main()
