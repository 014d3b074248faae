"""scikit-learn's digits in the size of the networks: 1,797 gray images of 8 x 8 pixels, 500 of them held out.

    python benchmarks/train/digits.py    # -> repaconv/models: digits.npz (held out), calibration.npz (to train on, 64)

The 17 gray levels are scaled to 0..255, Pillow resizes the images to 24 x 24, and they are normalized: what `repaconv
verify --images` does to an 8 x 8 picture with the preprocessing of the checkpoints.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from repaconv.models import CALIBRATION as FEW
from repaconv.models import HELD_OUT as HELD
from repaconv.results import Preprocessing
from repaconv.verification.image_files import prepared

SIDE, CLASSES, HELD_OUT, CALIBRATION, SPLIT_SEED = 24, 10, 500, 64, 0
# Of the training split, on the scale 0..1.
MEAN, STD = 0.305, 0.33
SHIFT, TURN, GROW = 0.1, 0.15, 0.1
"""How far training moves (of a half side), turns (radians) and scales an image."""


class Digits(NamedTuple):
    """Images [N, 1, 24, 24] and their classes [N]."""

    images: Tensor
    labels: Tensor

    def batches(self, size: int, random: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Every image once, moved a little, in an order drawn anew."""
        for chosen in torch.randperm(len(self.labels), generator=random).split(size):
            yield moved(self.images[chosen], random), self.labels[chosen]


def load() -> tuple[Digits, Digits]:
    """To train on, and held out."""
    from sklearn.datasets import load_digits

    found = load_digits()
    shades = np.round(found.images * 255 / 16).astype(np.uint8)
    pictures = [Image.fromarray(each).resize((SIDE, SIDE), Image.Resampling.BILINEAR) for each in shades]
    scale = Preprocessing(mean=(255 * MEAN,), std=(255 * STD,), image_size=(SIDE, SIDE), source="benchmarks/train")
    images, labels = torch.from_numpy(prepared(np.stack(pictures)[..., None], scale)), torch.from_numpy(found.target)
    order = torch.from_numpy(np.random.default_rng(SPLIT_SEED).permutation(len(labels)))
    trained, held = order[:-HELD_OUT], order[-HELD_OUT:]
    return Digits(images[trained], labels[trained]), Digits(images[held], labels[held])


def moved(images: Tensor, random: torch.Generator) -> Tensor:
    """Each image turned, scaled and shifted a little."""
    turn, grow, right, down = (2 * torch.rand(4, len(images), generator=random) - 1) * torch.tensor(
        [[TURN], [GROW], [SHIFT], [SHIFT]]
    )
    cosine, sine = (1 + grow) * turn.cos(), (1 + grow) * turn.sin()
    maps = torch.stack([torch.stack([cosine, -sine, right], 1), torch.stack([sine, cosine, down], 1)], 1)
    grid = functional.affine_grid(maps, list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, padding_mode="border", align_corners=False)


def facts() -> dict[str, object]:
    """What a trainer's args say of the preprocessing, by timm's names."""
    return {
        "input_size": SIDE,
        "nb_classes": CLASSES,
        "mean": (MEAN,),
        "std": (STD,),
        "crop_pct": 1.0,
        "interpolation": "bilinear",
    }


def main() -> None:
    """Write what is verified on, and what int8 ranges are measured on."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    train, held = load()
    few = Digits(train.images[:CALIBRATION], train.labels[:CALIBRATION])
    for path, (images, labels) in ((HELD, held), (FEW, few)):
        np.savez_compressed(path, input=images.numpy(), labels=labels.numpy())
    print(f"training images have mean {float(train.images.mean()):.3f} and deviation {float(train.images.std()):.3f}")


if __name__ == "__main__":
    main()
