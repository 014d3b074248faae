"""What the links are run on: seeded random images, or a recorded input with its official output."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from repaconv.errors import Refused

# Names under which an official output stands in an .npz, the most exact first.
RECORDED = ("output_train_fp64", "output_fp64", "output_train", "output", "logits", "features")


@dataclass(frozen=True)
class Inputs:
    """Images [N, C, H, W] in float32, the official output [N, K] where one was recorded, and their name."""

    name: str
    images: NDArray[np.float32]
    recorded: NDArray[np.floating] | None = None
    recorded_name: str = ""


def random_inputs(shape: tuple[int, int, int], *, count: int, seed: int) -> Inputs:
    """``count`` standard normal images [C, H, W]: what normalised pixels look like, to first order."""
    images = np.random.default_rng(seed).standard_normal((count, *shape), dtype=np.float32)
    return Inputs(f"{count} random images, seed {seed}", images)


def npz_inputs(path: Path, channels: int | None = None) -> Inputs:
    """``input`` (or the only array of four dimensions) of an .npz, and an official output if there is one.

    Raises:
        Refused: If the file is no .npz of numbers or holds no images with ``channels`` channels, where that is given.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError) as error:
        raise Refused(
            f"{path} is not a readable .npz: {error}.",
            hint="Save it with numpy.savez(path, input=images [N, C, H, W]).",
            code="inputs.unreadable",
        ) from error
    images = [name for name, array in arrays.items() if array.ndim == 4]
    name = "input" if "input" in arrays else (images[0] if len(images) == 1 else "")
    wrong = not name or arrays[name].ndim != 4 or not len(arrays[name])
    if wrong or channels not in (None, arrays[name].shape[1]):
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
        raise Refused(
            f"{path} holds no images for this network ({shapes or 'nothing'}).",
            hint=f"It needs an array 'input' of shape [N, {channels or 'C'}, H, W].",
            code="inputs.shape",
        )
    recorded = next((key for key in RECORDED if key in arrays), "")
    return Inputs(
        f"{path.name} ({len(arrays[name])} images)",
        np.ascontiguousarray(arrays[name], dtype=np.float32),
        arrays[recorded] if recorded else None,
        recorded,
    )
