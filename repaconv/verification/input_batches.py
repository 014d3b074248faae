"""The inputs of comparisons, in batches: random images, an .npz file with recorded outputs, or a folder of images.

Polygraphy's DataLoader generates arrays from shapes only: it has no preprocessing, labels or recorded outputs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from keyword import iskeyword
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import numpy as np
from numpy.typing import NDArray

from repaconv.core.errors import Refused, UsageProblem, describe_exception
from repaconv.core.thread_pool import thread_pool
from repaconv.engines.contract import Feeds, Port, shapes_text
from repaconv.results import Preprocessing
from repaconv.verification.image_files import NO_SCORES, Labels, image_files, prepared, preprocessing_text, read_image
from repaconv.verification.model_runners import named

# Names of a recorded official output in an .npz, the most precise first.
RECORDED = ("output_train_fp64", "output_fp64", "output_train", "output", "logits", "features")
IMAGES_AT_ONCE = 8
IMAGE_INPUT = "input"
"""Name under which images are passed; a network with one input takes them under any name."""
FLOATS = ("float16", "float32", "float64")
TEXT = ("object", "string")
"""Dtypes of text in NumPy and in ONNX Runtime."""
RANDOM_IMAGES = 4
MOST_UNPACKED_BYTES = 1 << 30
"""Bytes that an .npz may unpack to beyond four times its file size: single-color images compress to a few bytes."""


@dataclass(frozen=True)
class Batch:
    """The inputs of one inference, with recorded outputs and labels if there are some.

    Attributes:
        given: Inputs by name, as the network takes them; images are normalized [n, C, H, W].
        recorded: Official outputs by name.
        labels: Classes of the images [n], -1 where unknown.
        pixels: The images before normalization, [n, H, W, C] in uint8.
        whole: Whether the outputs are compared as a whole, not image by image.
        truths: What is right in each image by labels of the network's task, e.g. its objects; None where unknown.
    """

    given: Feeds
    recorded: Mapping[str, NDArray[Any]] | None = None
    labels: NDArray[np.int64] | None = None
    pixels: NDArray[np.uint8] | None = None
    whole: bool = False
    truths: tuple[Any, ...] | None = None

    @property
    def images(self) -> NDArray[Any]:
        """The first input."""
        return next(iter(self.given.values()))

    @property
    def count(self) -> int:
        """The number of images; 1 if the outputs are compared as a whole."""
        return 1 if self.whole else len(self.images)

    @classmethod
    def joined(cls, parts: Sequence[Batch]) -> Batch:
        """Concatenate batches; a single one is returned as it is."""
        if len(parts) == 1:
            return parts[0]

        def every(values: Sequence[NDArray[Any] | None]) -> NDArray[Any] | None:
            known = [value for value in values if value is not None]
            return np.concatenate(known) if known else None

        first = parts[0]
        given = {name: np.concatenate([part.given[name] for part in parts]) for name in first.given}
        official = [part.recorded or {} for part in parts]
        recorded = {name: np.concatenate([part[name] for part in official]) for name in official[0]}
        labels, pixels = every([part.labels for part in parts]), every([part.pixels for part in parts])
        truths = tuple(truth for part in parts for truth in part.truths or ()) or None
        return cls(given, recorded or None, labels, pixels, first.whole, truths)

    def feeds(self, inputs: Sequence[Port]) -> Feeds:
        """Return the inputs for a model: pixels for uint8 inputs, floating-point arrays in the model's own dtypes.

        Raises:
            UsageProblem: The model takes pixels, but only normalized images are known.
        """
        found = named([port.name for port in inputs], self.given)
        for port in inputs:
            if port.dtype == "uint8" and found[port.name].dtype.kind == "f":
                if self.pixels is None:
                    raise UsageProblem(
                        f"the model takes pixels as its input {port.name}, and these images are normalized already.",
                        hint="Give image files with --images, or neither --images nor --inputs.",
                        code="inputs.pixels",
                    )
                found[port.name] = self.pixels
            elif found[port.name].dtype.kind == "f" and port.dtype in FLOATS:
                found[port.name] = found[port.name].astype(port.dtype)
        return found


@dataclass(frozen=True)
class Inputs:
    """A named set of images, or of calls with arbitrary inputs, that is read batch by batch.

    Attributes:
        name: A description for the user.
        shape: [N, C, H, W] of images; [N] of calls.
        piece: Returns the batch of the images [start, stop), or the call at start.
        recorded: Name of the official output, if there is one.
        labels: Where the labels come from, or why there are none.
        labeled: Whether there are labels.
        preprocessing: A description of the preprocessing of image files and its source.
        whole: Whether outputs are compared as a whole; batches then have one item.
    """

    name: str
    shape: tuple[int, ...]
    piece: Callable[[int, int], Batch]
    recorded: str = ""
    labels: str = ""
    preprocessing: str = ""
    whole: bool = False
    labeled: bool = False

    @property
    def size(self) -> tuple[int, int] | None:
        """(height, width) of the images; None if there are none."""
        return (self.shape[2], self.shape[3]) if len(self.shape) == 4 else None

    def batches(self, at_once: int = IMAGES_AT_ONCE) -> Iterator[Batch]:
        """Yield all batches in order; the next one is read in the background."""
        step = 1 if self.whole else at_once
        ends = [(start, min(start + step, self.shape[0])) for start in range(0, self.shape[0], step)]
        with thread_pool(1) as pool:
            following = pool.submit(self.piece, *ends[0])
            for end in ends[1:]:
                batch, following = following.result(), pool.submit(self.piece, *end)
                yield batch
            yield following.result()

    def only(self, places: Sequence[int], name: str) -> Inputs:
        """Return a subset: the items at these indices, in this order, under a new name."""

        def piece(start: int, stop: int) -> Batch:
            return Batch.joined([self.piece(place, place + 1) for place in places[start:stop]])

        return replace(self, name=name, shape=(len(places), *self.shape[1:]), piece=piece)

    def together(self, batch: int | None) -> Inputs:
        """Inferences of so many images, for a network whose outputs are compared as a whole; others are returned alike.

        The last inference repeats its images. Such outputs have no row per image, so there are no labels.
        """
        if not self.whole or self.size is None or batch in (None, 1):
            return self
        count = self.shape[0]

        def piece(start: int, _stop: int) -> Batch:
            places = np.resize(np.arange(count)[start * batch : (start + 1) * batch], batch)
            joined = Batch.joined([self.piece(place, place + 1) for place in places.tolist()])
            return replace(joined, labels=None, recorded=None, whole=True)

        shape = (-(-count // batch), *self.shape[1:])
        return replace(self, shape=shape, piece=piece, recorded="", labels="", labeled=False)

    @property
    def images(self) -> NDArray[Any]:
        """All images as one array [N, C, H, W]."""
        return self.piece(0, self.shape[0]).images


def random_inputs(shape: tuple[int, int, int], *, count: int, seed: int) -> Inputs:
    """Make ``count`` standard normal images [C, H, W], which approximate normalized pixels."""

    def piece(start: int, stop: int) -> Batch:
        each = [np.random.default_rng([seed, n]).standard_normal(shape, dtype=np.float32) for n in range(start, stop)]
        return Batch({IMAGE_INPUT: np.stack(each)})

    return Inputs(f"{count} random images, seed {seed}", (count, *shape), piece)


def random_pixels(shape: tuple[int, int, int], wanted: Preprocessing, *, count: int, seed: int) -> Inputs:
    """Make ``count`` images [C, H, W] of uniform random pixels, normalized."""
    channels, height, width = shape

    def piece(start: int, stop: int) -> Batch:
        pixels = np.empty((stop - start, height, width, channels), dtype=np.uint8)  # too large a batch fails at once
        for n in range(start, stop):
            pixels[n - start] = np.random.default_rng([seed, n]).integers(0, 256, pixels.shape[1:], dtype=np.uint8)
        return Batch({IMAGE_INPUT: prepared(pixels, wanted)}, pixels=pixels)

    return Inputs(f"{count} images of random pixels, seed {seed}", (count, *shape), piece)


def npz_inputs(path: Path, channels: int | None = None, classes: int | None = None) -> Inputs:
    """Read images from an .npz: ``input`` or its only 4D array, and an official output and ``labels`` if present.

    Args:
        path: The file; the name of the result lists arrays that are not used.
        channels: Channels of the network's images, if known.
        classes: Number of classes of the network, if known; 0 if it has none.

    Raises:
        Refused: The file is not an .npz of numbers, has no normalized images with these channels, a recorded output
            without one row per image, or labels outside the classes (-1 means unknown).
    """
    arrays = _read_npz(path, "input=images [N, C, H, W]")
    name = _image_array_name(path, arrays, channels)
    given = arrays[name]
    outputs = [key for key in RECORDED if key in arrays]
    for key in outputs:
        of_each = arrays[key].shape[:1] == given.shape[:1] and arrays[key].dtype.kind == "f"
        what = f"{path}: {key} {list(arrays[key].shape)} is not an output for each of the {len(given)} images."
        _require(of_each, what, f"Give {key} of shape [{len(given)}, ...], in floats, or leave it out.")
    recorded = outputs[0] if outputs else ""
    labels = arrays.get("labels")
    if labels is not None:
        require_labels(path, labels, len(given), classes)
    unused = ", ".join(sorted(arrays.keys() - {name, recorded, "labels"}))

    def piece(start: int, stop: int) -> Batch:
        return Batch(
            {IMAGE_INPUT: np.ascontiguousarray(given[start:stop], dtype=np.float32)},
            {recorded: arrays[recorded][start:stop]} if recorded else None,
            None if labels is None else labels[start:stop].astype(np.int64),
        )

    return Inputs(
        f"{path.name} ({len(given)} images{'; not used: ' if unused else ''}{unused})",
        given.shape,
        piece,
        recorded,
        "" if labels is None else f"labels of {path.name}",
        labeled=labels is not None,
    )


def arrays_to_save(names: Iterable[str]) -> str:
    """Return the arguments of numpy.savez for arrays of these names, e.g. ``ids=..., **{"input:0": ...}``."""

    def is_keyword(name: str) -> bool:
        return name.isidentifier() and not iskeyword(name) and name != "file"

    known = list(names)
    words = [f"{name}=..." for name in known if is_keyword(name)]
    others = ", ".join(f"{json.dumps(name, ensure_ascii=False)}: ..." for name in known if not is_keyword(name))
    return ", ".join([*words, *([f"**{{{others}}}"] if others else [])])


def _read_npz(path: Path, wanted: str) -> dict[str, NDArray[Any]]:
    """Read an .npz; ``wanted`` is what numpy.savez would be called with, for the hint of an error."""
    if path.is_dir():
        raise Refused(
            f"{path} is a folder, not an .npz.",
            hint=f"A folder of image files is given with --images. An .npz is written by numpy.savez(path, {wanted}).",
            code="inputs.unreadable",
        )
    try:
        if path.is_fifo():  # opening it would wait for another program
            raise ValueError("it is a pipe, and an .npz is read in any order")
        if path.exists() and not is_zipfile(path):  # NumPy takes it for a pickle, and advises to load that
            raise ValueError("it is not a zip archive")
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            claimed = sum(entry.file_size for entry in archive.zip.infolist())
            if claimed > 4 * path.stat().st_size + MOST_UNPACKED_BYTES:
                raise ValueError(f"it claims to unpack to {claimed:,} bytes")
            found = {name: archive[name] for name in archive.files}
            if others := [name for name, value in found.items() if not isinstance(value, np.ndarray)]:
                raise ValueError(f"{others[0]!r} is no array")
            return found
    except Exception as error:  # numpy, zipfile and zlib raise many classes; a single .npy gives a TypeError
        there = os.path.lexists(path)
        why = str(error) if type(error) is ValueError else describe_exception(error)  # those above are sentences
        raise Refused(
            f"{path} is not a readable .npz: {why.rstrip('.')}." if there else f"there is no file {path}.",
            hint=f"{'' if there else 'Check the path. '}Save it with numpy.savez(path, {wanted}).",
            code="inputs.unreadable",
        ) from error


def _image_array_name(path: Path, arrays: dict[str, NDArray[Any]], channels: int | None) -> str:
    """Return the name of the array with the images, after checking its shape and values."""
    images = [name for name, array in arrays.items() if array.ndim == 4]
    name = "input" if "input" in arrays else (images[0] if len(images) == 1 else "")
    wrong = not name or arrays[name].ndim != 4 or not len(arrays[name])
    if wrong or channels not in (None, arrays[name].shape[1]):
        raise Refused(
            f"{path} holds no images for this network ({shapes_text(arrays) or 'nothing'}).",
            hint=f"It needs an array 'input' of shape [N, {channels or 'C'}, H, W].",
            code="inputs.shape",
        )
    _require(
        arrays[name].dtype.kind == "f",
        f"{path}: {name} holds {arrays[name].dtype}, not normalized images.",
        "Give them as the network takes them, in floats: less the mean, over std.",
    )
    for each in {name, *RECORDED} & arrays.keys():
        if arrays[each].dtype.kind == "f" and not np.isfinite(arrays[each]).all():
            raise Refused(
                f"{path}: {each} holds NaN or infinity, so nothing can be evaluated with it.",
                hint="Check how it was made, and write it again.",
                code="inputs.not-finite",
            )
    return name


def _require(fits: bool, what: str, hint: str) -> None:
    if not fits:
        raise Refused(what, hint=hint, code="inputs.shape")


def require_labels(path: Path, labels: NDArray[Any], images: int, classes: int | None) -> None:
    """Refuse labels that are not one integer per image, or exceed the number of classes.

    Args:
        path: The file, for messages.
        labels: The labels.
        images: Number of images.
        classes: Number of classes of the network; 0 if it has none, None if unknown.

    Raises:
        Refused: The labels do not fit.
    """
    hint = "Give 'labels' of shape [N], the numbers of the classes, or leave them out."
    _require(images > 0, f"{path} has labels of no images.", "Give at least one row, or leave the labels out.")
    whole = labels.shape == (images,) and labels.dtype.kind in "iu"
    _require(whole, f"{path}: labels {list(labels.shape)} are not one whole number for each of {images} images.", hint)
    _require(classes != 0, f"{path} has labels, and {NO_SCORES}.", hint)
    known = labels.min() >= -1 and (classes is None or labels.max() < classes)
    _require(bool(known), f"{path}: labels {labels.min()} to {labels.max()} are not of {classes} classes.", hint)


def image_inputs(
    folder: Path,
    wanted: Preprocessing,
    *,
    size: tuple[int, int],
    channels: int,
    classes: int | None,
    class_names: Path | None = None,
    limit: int | None = None,
) -> Inputs:
    """Read the images of a folder with the network's preprocessing: resized, cropped, normalized.

    Args:
        folder: A folder of images, or of subfolders of images named by class.
        wanted: The network's preprocessing.
        size: (height, width) of the crop.
        channels: 3, or 1 for gray.
        classes: Number of classes of the network; 0 if it has none, None if unknown.
        class_names: A file with one class name per line, in the order of the classes.
        limit: Maximum number of images, evenly spread over the folder.

    Raises:
        Refused: There are no images, or one cannot be read.
    """
    files = image_files(folder, limit)
    labels = Labels.of(folder, files, classes or 0, class_names)

    def piece(start: int, stop: int) -> Batch:
        pixels = np.stack([read_image(path, wanted, size, channels) for path in files[start:stop]])
        known = None if labels.of_images is None else labels.of_images[start:stop]
        return Batch({IMAGE_INPUT: prepared(pixels, wanted)}, None, known, pixels)

    name, labeled = f"{len(files)} images of {folder.name}", labels.of_images is not None
    return Inputs(
        name,
        (len(files), channels, *size),
        piece,
        "",
        labels.source,
        preprocessing_text(wanted, size, channels),
        labeled=labeled,
    )


def npz_calls(
    path: Path, inputs: Sequence[Port], outputs: Sequence[str], *, labels: bool = False, by_row: bool = False
) -> Inputs:
    """Read one call with arbitrary inputs from an .npz: arrays named as the inputs, and official outputs if present.

    Args:
        path: The file.
        inputs: Inputs of the network.
        outputs: Names of the network's outputs.
        labels: Whether to read ``labels``, one per row of the first input, unless an input has that name.
        by_row: Whether each row is a call of its own, where the first axes of all inputs are one dynamic batch.

    Raises:
        Refused: The file is not an .npz, lacks an input, or an input has the wrong kind of values.
    """
    wanted = arrays_to_save(port.name for port in inputs)
    arrays = _read_npz(path, wanted)
    lacking = [port.name for port in inputs if port.name not in arrays]
    if lacking:
        raise Refused(
            f"{path} holds {', '.join(sorted(arrays)) or 'nothing'}, and not the input {lacking[0]}.",
            hint=f"Save all of them: numpy.savez(path, {wanted}).",
            code="inputs.shape",
        )
    given = {port.name: _converted(path, port, arrays[port.name]) for port in inputs}
    recorded = {name: arrays[name] for name in outputs} if set(outputs) <= arrays.keys() else {}
    classes = arrays["labels"] if labels and "labels" in arrays.keys() - given.keys() else None
    if classes is not None:
        require_labels(path, classes, next((len(array) for array in given.values() if array.ndim), 1), None)
        classes = classes.astype(np.int64)
    rows = _row_count(inputs, [*given.values(), *recorded.values()]) if by_row else 1

    def piece(start: int, _stop: int) -> Batch:
        row = slice(start, start + 1) if rows > 1 else ...
        official = {name: array[row] for name, array in recorded.items()}
        known = None if classes is None else classes[row]
        return Batch({name: array[row] for name, array in given.items()}, official or None, known, whole=True)

    unused = ", ".join(
        sorted(arrays.keys() - given.keys() - recorded.keys() - ({"labels"} if classes is not None else set()))
    )
    calls = f"{rows} inferences of one row" if rows > 1 else "one inference"
    name = f"{path.name} ({calls}{'; not used: ' if unused else ''}{unused})"
    text = "" if classes is None else f"labels of {path.name}"
    return Inputs(name, (rows,), piece, ", ".join(recorded), text, whole=True, labeled=classes is not None)


def _converted(path: Path, port: Port, array: NDArray[Any]) -> NDArray[Any]:
    """The array in the type of an input. Floats may be rounded; values that the type does not have are refused."""
    text, wanted, hint = array.dtype.kind in "US", port.dtype in TEXT, f"Give {port.name} in {port.dtype}."
    holds = "text" if text else "numbers" if array.dtype.kind in "biuf" else str(array.dtype)
    fits = text if wanted else holds == "numbers"
    _require(fits, f"{path}: {port.name} holds {holds}, and the network takes {port.dtype}.", hint)
    if wanted:
        return array.astype("O")
    with np.errstate(over="ignore", invalid="ignore"):
        found = array.astype(port.dtype)
    lost = found != array if found.dtype.kind in "biu" else np.isfinite(array) & ~np.isfinite(found)
    if lost.any():
        value = array[lost].flat[0]
        _require(False, f"{path}: {port.name} holds {value}, which {port.dtype} does not have.", hint)
    return found


def _row_count(inputs: Sequence[Port], arrays: Sequence[NDArray[Any]]) -> int:
    """The length of the first axes of all arrays, if those of the inputs are one dynamic dimension; else 1.

    One input must have four axes, as images with channels last have: the first axis of [tokens, channels] is no batch.
    """
    if not any(port.shape and len(port.shape) == 4 for port in inputs):
        return 1
    first = {port.shape[0] if port.shape else 1 for port in inputs}
    lengths = {len(array) if array.ndim else 0 for array in arrays}
    dynamic = len(first - {None}) <= 1 and not any(isinstance(dim, int) for dim in first)
    return max(lengths.pop(), 1) if dynamic and len(lengths) == 1 else 1
