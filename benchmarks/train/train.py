"""Small models of the five methods, each trained on the digits in minutes, with its training-time architecture.

    python benchmarks/train/train.py [--method repavit] [--seed 0] [-o repaconv/models]

Writes <method>.pth, as that method's trainer would, and <method>.json: the training settings, and the accuracy on the
500 held-out images. It uses one thread. The last epoch is kept; the held-out images select nothing.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import digits
import numpy as np
import torch
from torch import nn
from training_loop import accuracy

import repaconv
from repaconv.core.files import canonical_json
from repaconv.models import FOLDER, METHODS


def require_read_alike(path: Path, net: nn.Module, held: digits.Digits) -> None:
    """What repaconv reads in the checkpoint must compute what was trained."""
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        pair, run = Path(name) / "pair.npz", Path(name) / "run"
        images = held.images[:50]
        np.savez(pair, input=images.numpy(), output=net(images).numpy())
        repaconv.fold(path, out=run)
        if repaconv.verify(run, inputs=pair, require=["recorded"]).verdict != "passed":
            raise SystemExit(f"{path}: repaconv reads another net in it than was trained")


def halved(saved: Any) -> Any:
    """A checkpoint with its weights in float16, which keeps it below 400 kB and costs these nets no image."""
    if isinstance(saved, torch.Tensor):
        return saved.half() if saved.dtype == torch.float32 else saved
    return {name: halved(value) for name, value in saved.items()} if isinstance(saved, dict) else saved


def main() -> None:
    """Train, save, say how it went."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--method", choices=METHODS, action="append")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("-o", "--out", type=Path, default=FOLDER)
    given = options.parse_args()
    torch.set_num_threads(1)
    given.out.mkdir(parents=True, exist_ok=True)
    data, held = digits.load()
    for name in given.method or METHODS:
        method, begin = import_module(name), time.process_time()
        net, checkpoint = method.train(data, given.seed)
        seconds = time.process_time() - begin
        torch.save(halved(checkpoint), given.out / f"{name}.pth")
        net.half().float()  # as it is saved
        require_read_alike(given.out / f"{name}.pth", net, held)
        record = {
            "method": name,
            "accuracy": accuracy(net, held),
            "held_out": len(held.labels),
            "epochs": method.EPOCHS,
            "epochs_before": getattr(method, "EPOCHS_BEFORE", 0),
            "seed": given.seed,
            "torch": torch.__version__,
        }
        (given.out / f"{name}.json").write_text(canonical_json(record))
        print(
            f"{name:9} {record['accuracy']:.1%} of {record['held_out']} right, {seconds:.0f} s of one core", flush=True
        )


if __name__ == "__main__":
    main()
