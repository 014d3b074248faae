"""Split images into calibration, validation and test by their content, so that no split depends on folders or order."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from repaconv.core.errors import Refused
from repaconv.results import Share
from repaconv.verification.input_batches import Inputs

Role = Literal["calibration", "validation", "test"]
ROLES: tuple[Role, ...] = ("calibration", "calibration", "validation", "test")


def role_of(image: NDArray[np.float32]) -> Role:
    """Return the split of an image [C, H, W]: half are calibration, a quarter validation, a quarter test."""
    return ROLES[_digest(image)[0] % len(ROLES)]


def role_in_training(image: NDArray[np.float32]) -> Role:
    """Return the split for a training that starts from a conversion: images of its calibration or validation are
    training
    images here (calibration), images of its test split are new.

    Three quarters are calibration, an eighth validation, an eighth test.
    """
    if role_of(image) != "test":
        return "calibration"
    return "test" if _digest(image)[1] % 2 else "validation"


def _digest(image: NDArray[np.float32]) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(image, dtype="<f4").tobytes()).digest()


class Split(NamedTuple):
    """The images [N, C, H, W] of one split and their classes [N], -1 if unknown."""

    images: Tensor
    labels: NDArray[np.int64]


class ImageSplits(NamedTuple):
    """The three splits."""

    calibration: Split
    validation: Split
    test: Split

    @property
    def share(self) -> Share:
        """The number of images in each split."""
        return Share(**{name: len(split.images) for name, split in self._asdict().items()})


def split_images(given: Inputs, samples: int, role_of: Callable[[NDArray[np.float32]], Role] = role_of) -> ImageSplits:
    """Read at most ``samples`` images, evenly spaced, and split them by ``role_of``.

    Raises:
        Refused: If an image contains NaN or infinity, or a split is empty.
    """
    found: dict[Role, list[tuple[NDArray[np.float32], int]]] = {role: [] for role in ROLES}
    for place in evenly_spaced(given.shape[0], samples):
        batch = given.piece(place, place + 1)
        image = batch.images[0]
        require_finite(image, place, given)
        found[role_of(image)].append((image, -1 if batch.labels is None else int(batch.labels[0])))
    if empty := [role for role, images in found.items() if not images]:
        raise Refused(
            f"{given.name}: of {min(samples, given.shape[0])} images none is left for {' and '.join(empty)}; "
            "images are split by their content, most for calibration, some for validation, some for the test.",
            hint="Give a few hundred images with --images or --inputs.",
            code="convert.too-few",
        )
    return ImageSplits(*(_stacked(found[role]) for role in dict.fromkeys(ROLES)))


def evenly_spaced(count: int, samples: int) -> list[int]:
    """Return the indices of that many images, evenly spaced."""
    return list(range(count)) if samples >= count else [place * count // samples for place in range(samples)]


def require_finite(images: NDArray[np.float32], place: int, given: Inputs) -> None:
    """Refuse images with NaN or infinity.

    Raises:
        Refused: If an image contains one; names its index.
    """
    if not np.isfinite(images).all():
        raise Refused(
            f"{given.name}: image {place} contains NaN or infinity.",
            hint="Remove that image.",
            code="inputs.not-finite",
        )


def _stacked(rows: list[tuple[NDArray[np.float32], int]]) -> Split:
    images, labels = zip(*rows, strict=True)
    return Split(torch.from_numpy(np.stack(images)), np.asarray(labels))
