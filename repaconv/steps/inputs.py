"""What a stage runs on: the user's .npz or folder, else seeded random images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from repaconv.artefacts import FoldArtefact, ImageSize, Preprocessing
from repaconv.errors import UsageProblem
from repaconv.steps.common import at_least_one

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from repaconv.proof.data import Inputs

CALIBRATION_IMAGES = 32


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
    number, size = at_least_one("count", count, data.RANDOM_IMAGES), size or folded.image_size
    if inputs:
        return data.npz_inputs(Path(inputs), config.in_channels, config.classes)
    if images or pixels:
        _require_channels(folded.preprocessing, config.in_channels)
    if images:
        return data.image_inputs(
            Path(images),
            folded.preprocessing,
            size=size,
            channels=config.in_channels,
            classes=config.classes,
            class_names=Path(classes) if classes else None,
            limit=count,
        )
    shape, drawn = (config.in_channels, *size), {"count": number, "seed": seed}
    return data.random_pixels(shape, folded.preprocessing, **drawn) if pixels else data.random_inputs(shape, **drawn)


def _require_channels(wanted: Preprocessing, channels: int) -> None:
    """Refuse pixels for which there is no preprocessing."""
    if channels not in (1, 3) or len(wanted.mean) not in (1, channels):
        raise UsageProblem(
            f"the network takes {channels} channels, and its preprocessing has {len(wanted.mean)} means.",
            hint="Fold with --set mean=... --set std=..., one number for each channel.",
            code="preprocessing.channels",
        )


class Split(NamedTuple):
    """Images of which some calibrate a lower precision, evenly spread, and the others judge it.

    Attributes:
        given: All of them.
        fitting: Places of those that calibrate.
        judging: Places of the others.
        batch: Of a call where it is fixed, else None.
    """

    given: Inputs
    fitting: list[int]
    judging: list[int]
    batch: int | None

    @classmethod
    def of(cls, given: Inputs, *, batch: int | None = None, ranges: bool = True) -> Split:
        """Half of them calibrate, `CALIBRATION_IMAGES` at most; none where a precision needs no ranges.

        Raises:
            UsageProblem: If there are too few.
        """
        count = given.shape[0]
        wanted = min(CALIBRATION_IMAGES, count // 2) if ranges else 0
        if ranges and not wanted:
            raise UsageProblem(
                f"{given.name}: one image cannot both calibrate a lower precision and judge it.",
                hint="Give two at least with --inputs or --images, better some hundreds.",
                code="inputs.too-few",
            )
        fitting = [place * count // wanted for place in range(wanted)]
        return cls(given, fitting, sorted(set(range(count)) - set(fitting)), batch)

    @property
    def told(self) -> str:
        """Which they are, in words."""
        if not self.fitting:
            return f"{self.given.name}: {len(self.judging)} judge"
        return f"{self.given.name}: {len(self.fitting)} calibrate, the other {len(self.judging)} judge"

    def calibrating(self) -> list[NDArray[np.float32]]:
        """Batches of [n, C, H, W]; where the batch is fixed, the last is filled up with images of its own."""
        return [filled(piece, self.batch) for piece in self._pieces(self.fitting)]

    def judges(self) -> Iterator[NDArray[np.float32]]:
        """Batches of [n, C, H, W]; the last may have fewer."""
        return self._pieces(self.judging)

    def _pieces(self, places: list[int]) -> Iterator[NDArray[np.float32]]:
        step = self.batch or 8
        for start in range(0, len(places), step):
            chosen = places[start : start + step]
            yield np.concatenate([self.given.piece(place, place + 1).images for place in chosen])


def require_same_size(given: Inputs, size: ImageSize) -> None:
    """Refuse images of another size than a graph takes.

    Raises:
        UsageProblem: Naming both.
    """
    if tuple(given.shape[2:]) != tuple(size):
        raise UsageProblem(
            f"{given.name} are of {' x '.join(map(str, given.shape[2:]))} pixels, the graph takes "
            f"{' x '.join(map(str, size))}.",
            hint="Give images of that size, or --image-size.",
            code="inputs.shape",
        )


def filled(images: NDArray[Any], batch: int | None) -> NDArray[Any]:
    """A batch [n, ...] of so many images: these, again and again."""
    return images if batch is None else np.resize(images, (batch, *images.shape[1:]))
