"""What the links are run on, batch by batch: random images, a recorded input with its official output, a folder.

Polygraphy's DataLoader feeds shapes, not images: it has no preprocessing, no labels and no recorded outputs.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from repaconv.artefacts import Preprocessing
from repaconv.engines.contract import Feeds, Port
from repaconv.errors import Refused
from repaconv.proof.images import Labels, image_files, prepared, read_image, told_of

# Names under which an official output stands in an .npz, the most exact first.
RECORDED = ("output_train_fp64", "output_fp64", "output_train", "output", "logits", "features")
IMAGES_AT_ONCE = 8
RANDOM_IMAGES = 4


@dataclass(frozen=True)
class Batch:
    """Images [n, C, H, W] in float32, as the network takes them, and what is known of them.

    Attributes:
        images: Normalised.
        recorded: The official output [n, ...].
        labels: Their classes [n], -1 where unknown.
        pixels: The same images before normalisation, [n, H, W, C] in uint8.
    """

    images: NDArray[np.float32]
    recorded: NDArray[np.floating] | None = None
    labels: NDArray[np.int64] | None = None
    pixels: NDArray[np.uint8] | None = None

    def feeds(self, inputs: Sequence[Port]) -> Feeds:
        """As a model of these inputs takes them: pixels where those are bytes."""
        found: dict[str, NDArray[Any]] = {}
        for port in inputs:
            found[port.name] = self.images
            if port.dtype == "uint8":
                assert self.pixels is not None
                found[port.name] = self.pixels
        return found


@dataclass(frozen=True)
class Inputs:
    """Images under a name, in batches; nothing is held between two of them.

    Attributes:
        name: For people.
        shape: [N, C, H, W].
        piece: The batch of images [start, stop).
        recorded: Name of the official output, if there is one.
        labels: Where the classes come from, or why there are none.
        preprocessing: What was done to image files, and where that is from.
    """

    name: str
    shape: tuple[int, int, int, int]
    piece: Callable[[int, int], Batch]
    recorded: str = ""
    labels: str = ""
    preprocessing: str = ""

    def batches(self, at_once: int = IMAGES_AT_ONCE) -> Iterator[Batch]:
        """All images in order; the next batch is read while one is worked on."""
        ends = [(start, min(start + at_once, self.shape[0])) for start in range(0, self.shape[0], at_once)]
        with ThreadPoolExecutor(1) as pool:
            following = pool.submit(self.piece, *ends[0])
            for end in ends[1:]:
                batch, following = following.result(), pool.submit(self.piece, *end)
                yield batch
            yield following.result()

    @property
    def images(self) -> NDArray[np.float32]:
        """All of them at once [N, C, H, W]."""
        return self.piece(0, self.shape[0]).images


def random_inputs(shape: tuple[int, int, int], *, count: int, seed: int) -> Inputs:
    """``count`` standard normal images [C, H, W]: what normalised pixels look like, to first order."""

    def piece(start: int, stop: int) -> Batch:
        each = [np.random.default_rng([seed, n]).standard_normal(shape, dtype=np.float32) for n in range(start, stop)]
        return Batch(np.stack(each))

    return Inputs(f"{count} random images, seed {seed}", (count, *shape), piece)


def random_pixels(shape: tuple[int, int, int], wanted: Preprocessing, *, count: int, seed: int) -> Inputs:
    """``count`` images [C, H, W] of uniform random pixels, normalised."""
    channels, height, width = shape

    def piece(start: int, stop: int) -> Batch:
        draws = [
            np.random.default_rng([seed, n]).integers(0, 256, (height, width, channels), dtype=np.uint8)
            for n in range(start, stop)
        ]
        pixels = np.stack(draws)
        return Batch(prepared(pixels, wanted), pixels=pixels)

    return Inputs(f"{count} images of random pixels, seed {seed}", (count, *shape), piece)


def npz_inputs(path: Path, channels: int | None = None, classes: int | None = None) -> Inputs:
    """``input`` (or the only array of four dimensions) of an .npz, an official output and ``labels`` if they are there.

    Args:
        path: The file; what of it is not used stands in the result's name.
        channels: Of the network, where it is known.
        classes: Of the network, where it is known; 0 without a head.

    Raises:
        Refused: If the file is no .npz of numbers, holds no normalised images with so many channels, an output that is
            not one for each of them, or labels that are not of these classes (-1 is unknown).
    """
    arrays = _arrays(path)
    name = _images_in(path, arrays, channels)
    given = arrays[name]
    outputs = [key for key in RECORDED if key in arrays]
    for key in outputs:
        of_each = arrays[key].shape[:1] == given.shape[:1] and arrays[key].dtype.kind == "f"
        what = f"{path}: {key} {list(arrays[key].shape)} is not an output for each of the {len(given)} images."
        _require(of_each, what, f"Give {key} of shape [{len(given)}, ...], in floats, or leave it out.")
    recorded = outputs[0] if outputs else ""
    labels = arrays.get("labels")
    if labels is not None:
        _require_labels(path, labels, len(given), classes)
    unused = ", ".join(sorted(arrays.keys() - {name, recorded, "labels"}))

    def piece(start: int, stop: int) -> Batch:
        return Batch(
            np.ascontiguousarray(given[start:stop], dtype=np.float32),
            arrays[recorded][start:stop] if recorded else None,
            None if labels is None else labels[start:stop].astype(np.int64),
        )

    return Inputs(
        f"{path.name} ({len(given)} images{'; not used: ' if unused else ''}{unused})",
        given.shape,
        piece,
        recorded,
        "" if labels is None else f"labels of {path.name}",
    )


def _arrays(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, TypeError, BadZipFile, zlib.error) as error:  # TypeError: a lone .npy
        raise Refused(
            f"{path} is not a readable .npz: {error}.",
            hint="Save it with numpy.savez(path, input=images [N, C, H, W]).",
            code="inputs.unreadable",
        ) from error


def _images_in(path: Path, arrays: dict[str, NDArray[Any]], channels: int | None) -> str:
    """The name of the array that holds images for the network."""
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
    _require(
        arrays[name].dtype.kind == "f",
        f"{path}: {name} holds {arrays[name].dtype}, not normalised images.",
        "Give them as the network takes them, in floats: less the mean, over std.",
    )
    return name


def _require(fits: bool, what: str, hint: str) -> None:
    if not fits:
        raise Refused(what, hint=hint, code="inputs.shape")


def _require_labels(path: Path, labels: NDArray[Any], images: int, classes: int | None) -> None:
    hint = "Give 'labels' of shape [N], the numbers of the classes, or leave them out."
    whole = labels.shape == (images,) and labels.dtype.kind in "iu"
    _require(whole, f"{path}: labels {list(labels.shape)} are not one whole number for each of {images} images.", hint)
    _require(classes != 0, f"{path} has labels, and the network has no classes.", hint)
    known = labels.min() >= -1 and (classes is None or labels.max() < classes)
    _require(bool(known), f"{path}: labels {labels.min()} to {labels.max()} are not of {classes} classes.", hint)


def image_inputs(
    folder: Path,
    wanted: Preprocessing,
    *,
    size: tuple[int, int],
    channels: int,
    classes: int,
    class_names: Path | None = None,
    limit: int | None = None,
) -> Inputs:
    """The images of a folder, as the network was given them: resized, cropped, normalised.

    Args:
        folder: Images, or folders of them named by class.
        wanted: The checkpoint's preprocessing.
        size: (height, width) of the crop.
        channels: 3, or 1 for grey.
        classes: Of the network; 0 without a head.
        class_names: A file with one name a line, in the order of the classes.
        limit: Take so many, evenly spread.

    Raises:
        Refused: If there are none, or one cannot be read.
    """
    files = image_files(folder, limit)
    labels = Labels.of(folder, files, classes, class_names)

    def piece(start: int, stop: int) -> Batch:
        pixels = np.stack([read_image(path, wanted, size, channels) for path in files[start:stop]])
        known = None if labels.of_images is None else labels.of_images[start:stop]
        return Batch(prepared(pixels, wanted), None, known, pixels)

    name = f"{len(files)} images of {folder.name}"
    return Inputs(name, (len(files), channels, *size), piece, "", labels.source, told_of(wanted, size))
