"""What a stage runs on: the user's .npz or folder, else seeded random images."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from repaconv.artefact import FoldArtefact, ImageSize
from repaconv.errors import UsageProblem
from repaconv.pipeline.common import at_least_one

if TYPE_CHECKING:
    from repaconv.proof.data import Inputs


def choose_inputs(
    folded: FoldArtefact,
    config: Any,
    *,
    inputs: str | Path | None = None,
    images: str | Path | None = None,
    classes: str | Path | None = None,
    count: int | None = None,
    seed: int = 0,
    size: ImageSize | None = None,
    pixels: bool = False,
) -> Inputs:
    """The images for a folded network.

    Args:
        folded: Whose preprocessing is used.
        config: Of its backbone.
        inputs: An .npz.
        images: A folder.
        classes: A file with one class name a line, for a folder.
        count: Of random images; of a folder's, all when None.
        seed: Of random images.
        size: (height, width); that of the fold when None.
        pixels: Make random images as pixels, so that a graph with preprocessing can take them too.

    Raises:
        UsageProblem: If both are given, fewer images than one, or the preprocessing is for another number of channels.
    """
    from repaconv.proof import data

    if inputs and images:
        raise UsageProblem("both --inputs and --images were given.", hint="Give one of them.", code="usage.inputs")
    size = folded.image_size if size is None else size
    number = at_least_one("count", count, data.RANDOM_IMAGES)
    wanted = folded.preprocessing
    if inputs:
        return data.npz_inputs(Path(inputs), config.in_channels, config.classes)
    fits = config.in_channels in (1, 3) and len(wanted.mean) in (1, config.in_channels)
    if (images or pixels) and not fits:
        raise UsageProblem(
            f"the network takes {config.in_channels} channels, and its preprocessing has {len(wanted.mean)} means.",
            hint="Fold with --set mean=... --set std=..., one number for each channel.",
            code="preprocessing.channels",
        )
    if images:
        return data.image_inputs(
            Path(images),
            wanted,
            size=size,
            channels=config.in_channels,
            classes=config.classes,
            class_names=Path(classes) if classes else None,
            limit=count,
        )
    shape = (config.in_channels, *size)
    if pixels:
        return data.random_pixels(shape, wanted, count=number, seed=seed)
    return data.random_inputs(shape, count=number, seed=seed)
