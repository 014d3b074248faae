"""Accuracy after a short training: networks trained on digits, converted or given training branches, then finetuned.

    python benchmarks/finetune_digits.py [--only NAME ...] [-o result.json] [--page docs/finetune.md]
    python benchmarks/finetune_digits.py --of result.json --page docs/finetune.md     # only writes the page

The vision transformer and its split are those of `convert_digits.py`. The PoolFormer is trained here, like the teacher
in `benchmarks/train/riformer.py`. The commands are those of a user: `convert`, `finetune`, `fold`, `verify`. All get
the training images, and the loss uses no labels. Accuracy is on 500 other images, which no command before `verify` saw.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from convert_digits import MODEL
from convert_digits import digits as vit_digits

import repaconv
from repaconv.core.files import canonical_json

MARK = "<!-- figures of benchmarks/finetune_digits.py -->\n"
VIT = {"num_heads": "4"}
SEED, BATCH = 0, 8


class Row(NamedTuple):
    """What is made of which network, and how long it is trained."""

    name: str
    asked: dict[str, Any]
    epochs: int = 3
    network: str = "vit"
    more: dict[str, Any] = {}  # noqa: RUF012


FORM = {"to": "training-form"}
ROWS = (
    Row("dwconv: half of the blocks", {"blocks": "3"}),
    Row("dwconv: all six", {"blocks": "6"}),
    Row("dwconv: all six, static", {"blocks": "6", "kind": "static"}),
    Row("dwconv: gates choose half", {"blocks": "3", **FORM}, epochs=10),
    Row("repavit: 75% of the channels idle", {"method": "repavit", **FORM}),
    Row("nondeep: 3 layers of 2 branches", {"method": "nondeep", **FORM}, epochs=20),
    Row("riformer", {"method": "riformer", **FORM}, epochs=10, network="pool"),
)


def networks(wanted: set[str]) -> dict[str, tuple[Path, dict[str, str]]]:
    """The ordinary ones, and beside each its images: to train on, and held out."""
    found = {"vit": (MODEL, VIT)}
    for name, part in zip(("vit.npz", "vit.held.npz"), vit_digits(), strict=True):
        np.savez(name, input=part.images.numpy(), labels=np.asarray(part.labels))
    if "pool" in wanted:
        found["pool"] = (_poolformer(), {"pool_size": "3", "stem_stride": "2"})
    return found


def _poolformer() -> Path:
    sys.path.append(str(Path(__file__).parent / "train"))
    import digits
    import riformer
    from training_loop import fit

    torch.manual_seed(SEED)
    data, held = digits.load()
    net = riformer.teacher_of(riformer.build())
    fit(net, data, epochs=riformer.EPOCHS_BEFORE, seed=SEED)
    torch.save(net.state_dict(), "pool.pth")
    for name, part in (("pool.npz", data), ("pool.held.npz", held)):
        np.savez(name, input=part.images.numpy(), labels=part.labels.numpy())
    return Path("pool.pth")


def measured(rows: tuple[Row, ...]) -> Iterator[dict[str, Any]]:
    """Each row by the commands that a user types."""
    sources = networks({row.network for row in rows})
    for number, row in enumerate(rows):
        source, settings = sources[row.network]
        images, held = f"{row.network}.npz", f"{row.network}.held.npz"
        started, out = f"started-{number}", f"trained-{number}"
        converted = repaconv.convert(source, inputs=images, samples=2000, settings=settings, out=started, **row.asked)
        done = repaconv.finetune(started, inputs=images, epochs=row.epochs, batch=BATCH, out=out, **row.more)
        alone = repaconv.fold(f"{out}/finetuned.safetensors", out=f"folded-{number}", settings=converted.settings)
        links = {link.name: link for link in repaconv.verify(f"folded-{number}", inputs=held).links}
        evaluated = _of_held_out(source, settings, f"{started}/converted.safetensors", converted, held)
        figures = {"name": row.name, "epochs": row.epochs, "kept": done.best_epoch, "network": evaluated["network"]}
        figures |= {"start": evaluated["start"], "trained": links["fold"].accuracy.reference}
        figures |= {"folded": links["stored"].accuracy.candidate, "images": done.images.model_dump()}
        figures |= {
            "fold_error": links["fold"].metrics.max_rel_error,
            "parameters": _parameters(Path(alone.output_files[0])),
        }
        figures |= {"before": _parameters(source), "costs": [epoch.cost for epoch in done.epochs]}
        print(json.dumps(figures), flush=True)
        yield figures


def _of_held_out(source: Path, settings: dict[str, str], started: str, converted: Any, held: str) -> dict[str, float]:
    """Accuracy of the ordinary network, and of the start as it would fold."""
    from repaconv.checkpoints import read_checkpoint
    from repaconv.conversion.finetuning.original_networks import read_original
    from repaconv.conversion.finetuning.training_architectures import training_plan_of

    course = training_plan_of(converted.method, read_checkpoint(Path(started)), converted.settings)
    course.at(course.net, 1.0)
    nets = {"network": read_original(read_checkpoint(source), settings).net, "start": course.net.eval()}
    with np.load(held) as arrays, torch.inference_mode():
        images, labels = torch.from_numpy(arrays["input"]), arrays["labels"]
        return {name: float((net(images).argmax(1).numpy() == labels).mean()) for name, net in nets.items()}


def _parameters(source: Path) -> int:
    from repaconv.checkpoints import read_checkpoint

    return sum(tensor.numel() for tensor in read_checkpoint(source).tensors.values())


def table(rows: list[dict[str, Any]]) -> str:
    """The figures as a page has them."""
    lines = [
        "| | network | before training | epochs | trained | folded | parameters |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        shares = [f"{row[name]:.1%}" for name in ("network", "start", "trained", "folded")]
        epochs = f"{row['epochs']}" + ("" if row["kept"] else ", the start kept")
        size = f"{row['before'] / 1000:.0f} -> {row['parameters'] / 1000:.0f} thousand"
        lines.append(f"| {row['name']} | {shares[0]} | {shares[1]} | {epochs} | {shares[2]} | {shares[3]} | {size} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure or read, write the result, and the table into the page between its marks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="rows whose names begin so; others stay as the file of -o has them")
    parser.add_argument("--of", type=Path, help="a result, instead of measuring")
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--page", type=Path)
    given = parser.parse_args()
    out, page = (path.resolve() if path else None for path in (given.out, given.page))
    found = json.loads(given.of.read_text())["rows"] if given.of else []
    if not given.of:
        known = {row["name"]: row for row in json.loads(out.read_text())["rows"]} if out and out.is_file() else {}
        rows = tuple(row for row in ROWS if not given.only or row.name.startswith(tuple(given.only)))
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            for row in measured(rows):
                known[row["name"]] = row
            os.chdir("/")
        found = [known[row.name] for row in ROWS if row.name in known]
    if out:
        out.write_text(canonical_json({"rows": found, "batch": BATCH}))
    if page:
        above, _, after = page.read_text().split(MARK)
        page.write_text(f"{above}{MARK}{table(found)}{MARK}{after}")


if __name__ == "__main__":
    main()
